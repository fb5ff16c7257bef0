"""Triton form; see the contract. One launch, in which a row's programs look at a tile each.

They tell one another through a word in memory, which counts those that have come to their end and,
above, those that found something; the last of them has the row's answer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import require_that
from kernels.linear.kernel import counters
from kernels.overlap import OVERLAPPED, enter

_TILE = 8192
_FOUND = tl.constexpr(1 << 16)


@triton.jit
def _rows_finite_kernel(
    counts,
    values,
    strides,
    widths,
    finite,
    words,
    TILES: tl.constexpr,
    LINES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Row program_id(0); of all parts' tiles the one that program_id(1) counts to.

    A part has TILES of them, of its first LINES positions and BLOCKS values each.
    """
    enter()
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    found = tl.full([], 0, tl.int32)
    for part in tl.static_range(len(TILES)):
        if (tile >= 0) & (tile < TILES[part]):
            line = tl.arange(0, LINES[part])
            at = tile * BLOCKS[part] + tl.arange(0, BLOCKS[part])
            live = line < tl.load(counts[part] + row)
            place = values[part] + row * strides[part][0] + at[None, :]
            place += line.to(tl.int64)[:, None] * strides[part][1]
            inside = live[:, None] & (at < widths[part])[None, :]
            value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            # not a number is below nothing
            worst = tl.max(tl.where(tl.abs(value) < float("inf"), 0, 1), axis=1)
            found = tl.max(worst, axis=0)
        tile -= TILES[part]
    word = words + row
    before = tl.atomic_add(word, 1 + found * _FOUND, sem="acq_rel")
    if before % _FOUND == tl.num_programs(1) - 1:
        tl.store(finite + row, before // _FOUND + found == 0)
        tl.atomic_xchg(word, 0)


def rows_finite(*parts: tuple[Tensor, Tensor]) -> Tensor:
    """See the contract."""
    first = parts[0][1]
    B = first.shape[0]
    finite = torch.empty(B, dtype=torch.bool, device=first.device)
    if B == 0:
        return finite
    words = counters(first.device)
    require_that(words.numel() >= B, "values", f"at most {words.numel()} rows", B)
    values = [v if v.stride(2) == 1 else v.contiguous() for _, v in parts]
    lines = tuple(triton.next_power_of_2(max(v.shape[1], 1)) for v in values)
    blocks = tuple(
        min(triton.next_power_of_2(max(v.shape[2], 1)), max(_TILE // n, 16))
        for v, n in zip(values, lines, strict=True)
    )
    tiles = tuple(triton.cdiv(v.shape[2], b) for v, b in zip(values, blocks, strict=True))
    _rows_finite_kernel[(B, max(sum(tiles), 1))](
        tuple(counts for counts, _ in parts),
        tuple(values),
        tuple(v.stride()[:2] for v in values),
        tuple(v.shape[2] for v in values),
        finite,
        words,
        TILES=tiles,
        LINES=lines,
        BLOCKS=blocks,
        num_warps=8,
        **OVERLAPPED,
    )
    return finite
