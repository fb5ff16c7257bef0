"""Triton form; see the contract. One launch, a program for each tile of each pair."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kernels.overlap import OVERLAPPED, enter

_BLOCK = 1024


@triton.jit
def _cast_kernel(sources, destinations, counts, TILES: tl.constexpr, BLOCK: tl.constexpr):
    """Of all pairs' tiles the one that program_id(0) counts to; a pair has TILES of them."""
    enter()
    tile = tl.program_id(0)
    for pair in tl.static_range(len(TILES)):
        if (tile >= 0) & (tile < TILES[pair]):
            at = tile * BLOCK + tl.arange(0, BLOCK)
            inside = at < counts[pair]
            value = tl.load(sources[pair] + at, mask=inside, other=0)
            place = destinations[pair]
            tl.store(place + at, value.to(place.dtype.element_ty), mask=inside)
        tile -= TILES[pair]


def cast_together(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """See the contract."""
    counts = tuple(source.numel() for source in sources)
    tiles = tuple(triton.cdiv(count, _BLOCK) for count in counts)
    if not sum(tiles):
        return
    _cast_kernel[(sum(tiles),)](
        tuple(source.contiguous() for source in sources),
        tuple(destinations),
        counts,
        TILES=tiles,
        BLOCK=_BLOCK,
        num_warps=4,
        **OVERLAPPED,
    )
