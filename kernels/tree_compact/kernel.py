"""Triton form; see the contract. A program moves one part of an entry, place by place."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.overlap import OVERLAPPED, enter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_BLOCK = 2048


@triton.jit
def columns_kernel(
    plane,
    columns,
    width,
    size,
    plane_layer,
    plane_row,
    plane_column,
    BLOCK: tl.constexpr,
):
    """Part program_id(0) of every entry of layer program_id(1), row program_id(2)."""
    enter()
    row = tl.program_id(2).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = plane + tl.program_id(1).to(tl.int64) * plane_layer + row * plane_row + at
    for place in range(width):
        source = tl.load(columns + row * width + place)
        if source != place:
            entry = tl.load(start + source * plane_column, mask=at < size)
            tl.store(start + place * plane_column, entry, mask=at < size)


@triton.jit
def pages_kernel(
    key_pages,
    value_pages,
    page_tables,
    frontiers,
    columns,
    width,
    table_width,
    page,
    size,
    layer,
    BLOCK: tl.constexpr,
):
    """Part program_id(0) of every key and value of layer program_id(1), row program_id(2)."""
    enter()
    row = tl.program_id(2).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1).to(tl.int64) * layer + at
    table = page_tables + row * table_width
    frontier = tl.load(frontiers + row)
    for place in range(width):
        source = tl.load(columns + row * width + place)
        if source != place:
            old, new = frontier + source, frontier + place
            old = first + (tl.load(table + old // page) * page + old % page) * size
            new = first + (tl.load(table + new // page) * page + new % page) * size
            tl.store(key_pages + new, tl.load(key_pages + old, mask=at < size), mask=at < size)
            tl.store(value_pages + new, tl.load(value_pages + old, mask=at < size), mask=at < size)


def compact_columns(planes: Sequence[Tensor], columns: Tensor) -> None:
    """See the contract."""
    columns = columns.contiguous()
    B, W = columns.shape
    for plane in planes:
        size = prod(plane.shape[3:])
        if plane.numel() == 0:
            continue
        block = min(_BLOCK, triton.next_power_of_2(size))
        columns_kernel[(triton.cdiv(size, block), plane.shape[0], B)](
            plane, columns, W, size, *plane.stride()[:3], BLOCK=block, num_warps=4, **OVERLAPPED
        )


def compact_pages(
    key_pages: Tensor, value_pages: Tensor, page_tables: Tensor, frontiers: Tensor, columns: Tensor
) -> None:
    """See the contract."""
    B, W = columns.shape
    L, pages, page, heads, D = key_pages.shape
    if key_pages.numel() == 0 or B == 0:
        return
    size = heads * D
    block = min(_BLOCK, triton.next_power_of_2(size))
    pages_kernel[(triton.cdiv(size, block), L, B)](
        key_pages,
        value_pages,
        page_tables.contiguous(),
        frontiers.contiguous(),
        columns.contiguous(),
        W,
        page_tables.shape[1],
        page,
        size,
        pages * page * size,
        BLOCK=block,
        num_warps=4,
        **OVERLAPPED,
    )
