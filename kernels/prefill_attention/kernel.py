"""Triton form; see the contract. Keys and values are stored first; then all are read from pages.

A program takes a tile of columns of one query head through the positions before them, in order.
Tiles with the longest past start first, heads that share keys next to one another. Where a page
holds whole tiles of keys, a tile is one run of memory; otherwise its cells are looked up one by
one.
"""

import torch
import triton
import triton.language as tl

COLUMNS, KEYS = 128, 64  # of a tile; half as many where elements have 32 bits


@triton.jit
def store_kernel(
    key,
    value,
    key_pages,
    value_pages,
    page_table,
    frontier,
    page,
    key_column,
    key_head,
    value_column,
    value_head,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Column program_id(0), SIZE elements of its keys and of its values."""
    column = tl.program_id(0).to(tl.int64)
    place = tl.load(frontier) + column
    cell = (tl.load(page_table + place // page) * page + place % page) * SIZE
    at = tl.arange(0, BLOCK)
    head, within = at // D, at % D
    mask = at < SIZE
    x = tl.load(key + column * key_column + head * key_head + within, mask=mask)
    tl.store(key_pages + cell + at, x.to(key_pages.dtype.element_ty), mask=mask)
    x = tl.load(value + column * value_column + head * value_head + within, mask=mask)
    tl.store(value_pages + cell + at, x.to(value_pages.dtype.element_ty), mask=mask)


@triton.jit
def cells(page_table, page, start, end, KEYS: tl.constexpr, RUNS: tl.constexpr):
    """Cells [KEYS] of the positions from start on; those from end on may be any of the pages."""
    place = start + tl.arange(0, KEYS)
    if RUNS:
        return tl.load(page_table + start // page) * page + start % page + tl.arange(0, KEYS)
    return tl.load(page_table + place // page, mask=place < end, other=0) * page + place % page


@triton.jit
def extend(scores, values, greatest, total, attended):
    """Takes a running softmax, in powers of two, over a tile of further positions."""
    higher = tl.maximum(greatest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - higher[:, None])
    kept = tl.exp2(greatest - higher)
    total = total * kept + tl.sum(weights, axis=1)
    attended = attended * kept[:, None]
    attended = tl.dot(weights.to(values.dtype), values, attended, input_precision="ieee")
    return higher, total, attended


@triton.jit(do_not_specialize=["T"])
def attend_kernel(
    query,
    gate,
    key_pages,
    value_pages,
    page_table,
    frontier,
    out,
    scale,
    T,
    page,
    query_column,
    query_head,
    gate_column,
    gate_head,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Query head program_id(0), tile program_id(1) of columns, from the last; RUNS as in cells."""
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    shared = head // (HQ // HKV) * D
    F = tl.load(frontier).to(tl.int32)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, BLOCK)
    inside = at < D
    own = (column < T)[:, None] & inside[None, :]
    wide = column.to(tl.int64)[:, None]
    asked = tl.load(
        query + wide * query_column + head * query_head + at[None, :], mask=own, other=0
    )
    greatest = tl.full((COLUMNS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    attended = tl.zeros((COLUMNS, BLOCK), dtype=tl.float32)
    end = F + tl.minimum(T, tile * COLUMNS + COLUMNS)
    seen_by_all = (F + tile * COLUMNS) // KEYS * KEYS
    for start in range(0, seen_by_all, KEYS):
        cell = cells(page_table, page, start, end, KEYS, RUNS) * (HKV * D) + shared
        keys = tl.load(key_pages + cell[None, :] + at[:, None], mask=inside[:, None], other=0.0)
        scores = tl.dot(asked, keys.to(asked.dtype), input_precision="ieee") * scale
        values = tl.load(value_pages + cell[:, None] + at[None, :], mask=inside[None, :], other=0.0)
        greatest, total, attended = extend(scores, values, greatest, total, attended)
    for start in tl.range(seen_by_all, end, KEYS, num_stages=1):
        cell = cells(page_table, page, start, end, KEYS, RUNS) * (HKV * D) + shared
        place = start + tl.arange(0, KEYS)
        stored = place < end  # beyond it a value may be anything, and nothing times it too
        mask = stored[None, :] & inside[:, None]
        keys = tl.load(key_pages + cell[None, :] + at[:, None], mask=mask, other=0.0)
        scores = tl.dot(asked, keys.to(asked.dtype), input_precision="ieee") * scale
        scores = tl.where(place[None, :] <= F + column[:, None], scores, float("-inf"))
        mask = stored[:, None] & inside[None, :]
        values = tl.load(value_pages + cell[:, None] + at[None, :], mask=mask, other=0.0)
        greatest, total, attended = extend(scores, values, greatest, total, attended)
    opening = gate + wide * gate_column + head * gate_head + at[None, :]
    opening = tl.load(opening, mask=own, other=0.0).to(tl.float32)
    attended = attended / total[:, None] / (1.0 + tl.exp(-opening))
    cell = out + (wide * HQ + head) * D + at[None, :]
    tl.store(cell, attended.to(out.dtype.element_ty), mask=own)


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    frontier: torch.Tensor,
) -> torch.Tensor:
    """Stores the columns' keys and values, then attends causally."""
    T, HQ, D = query.shape
    page, HKV = key_pages.shape[1:3]
    query, key, value, gate = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, gate)
    )
    page_table = page_table.contiguous()
    store_kernel[(T,)](
        key,
        value,
        key_pages,
        value_pages,
        page_table,
        frontier,
        page,
        *key.stride()[:2],
        *value.stride()[:2],
        D=D,
        SIZE=HKV * D,
        BLOCK=triton.next_power_of_2(HKV * D),
    )
    out = query.new_empty(T, HQ * D)
    halves = 1 if key_pages.element_size() <= 2 else 2
    keys = KEYS // halves
    attend_kernel[(HQ, triton.cdiv(T, COLUMNS // halves))](
        query,
        gate,
        key_pages,
        value_pages,
        page_table,
        frontier,
        out,
        D**-0.5 * 1.4426950408889634,  # log2(e): the exponentials are powers of two
        T,
        page,
        *query.stride()[:2],
        *gate.stride()[:2],
        HQ=HQ,
        HKV=HKV,
        D=D,
        COLUMNS=COLUMNS // halves,
        KEYS=keys,
        BLOCK=max(triton.next_power_of_2(D), 16),
        RUNS=page % keys == 0,
        num_warps=8,
        num_stages=2,
    )
    return out
