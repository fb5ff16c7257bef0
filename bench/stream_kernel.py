"""A kernel that does nothing but read. Needs triton, so it is imported only where it runs."""

import triton
import triton.language as tl

TILE = 16384  # 32-bit words a program


@triton.jit
def read_tiles(source, sums, tile: tl.constexpr = TILE):
    """Sums one tile of `source` into one element of `sums`."""
    first = tl.program_id(0).to(tl.int64) * tile
    words = tl.load(source + first + tl.arange(0, tile))
    tl.store(sums + tl.program_id(0), tl.sum(words))
