"""Triton form; see the contract.

Context is cut into splits of 256 consecutive absolute positions, so that a row's sums do not depend
on what shares its launch; the block is one more split. Each split leaves a running softmax, and a
second kernel joins them, sixteen at a time. Sixteen query heads of one KV head are a tile whatever
the width. `attend` serves paged context too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import require_that
from kernels.overlap import OVERLAPPED, enter

_SPLIT = 256
_BLOCK_N = 64
_TILE = 16
_JOIN = 16


@triton.jit
def _step(
    query,
    key_at,
    value_at,
    inside,
    visible,
    scale,
    best,
    mass,
    acc,
    at_d,
    D,
    PRECISION: tl.constexpr,
):
    """One step of the running softmax over BLOCK_N keys, of which only those inside are read."""
    mask = inside[:, None] & (at_d < D)[None, :]
    key = tl.load(key_at[:, None] + at_d[None, :], mask=mask, other=0.0).to(tl.float32)
    value = tl.load(value_at[:, None] + at_d[None, :], mask=mask, other=0.0).to(tl.float32)
    # 16-bit inputs are exact in TF32: only the weights of the values are rounded, to 11 bits
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, axis=1))
    # rows that see nothing so far stay at zero weight
    level = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp(best - level)
    weights = tl.exp(scores - level[:, None])
    mass = mass * fade + tl.sum(weights, axis=1)
    acc = acc * fade[:, None] + tl.dot(weights, value, input_precision=PRECISION)
    return higher, mass, acc


@triton.jit
def _split_kernel(  # noqa: PLR0915
    query,
    block_key,
    block_value,
    keys,
    values,
    places,
    coverage_first,
    frontiers,
    counts,
    partial,
    extremes,
    query_row,
    query_column,
    query_head,
    key_row,
    key_column,
    key_head,
    value_row,
    value_column,
    value_head,
    places_row,
    span,
    window,
    scale,
    D,
    group,
    heads,
    tiles,
    PAGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    enter()
    split, context_splits = tl.program_id(0), tl.num_programs(0) - 1
    tile, head = tl.program_id(1) % tiles, tl.program_id(1) // tiles
    row = tl.program_id(2).to(tl.int64)
    count = tl.load(counts + row)
    frontier = tl.load(frontiers + row)
    at_q = tile * TILE + tl.arange(0, TILE)
    column = at_q // group
    at_d = tl.arange(0, BLOCK_D)
    # the keys read by some query of the row; a ring holds span >= window positions
    first = tl.load(coverage_first + row)
    if not PAGED:
        first = tl.maximum(first, frontier - window + 1)
    begin = (first // SPLIT + split) * SPLIT
    end = tl.minimum(begin + SPLIT, frontier)
    begin = tl.maximum(begin, first // BLOCK_N * BLOCK_N)
    in_block = split == context_splits
    if (tile * TILE // group < count) & (in_block | (begin < end)):
        query_at = query + row * query_row + column.to(tl.int64)[:, None] * query_column
        query_at += (head * group + at_q % group)[:, None] * query_head + at_d[None, :]
        live = (column < count)[:, None] & (at_d < D)[None, :]
        q = tl.load(query_at, mask=live, other=0.0).to(tl.float32)
        best = tl.full([TILE], float("-inf"), tl.float32)
        mass = tl.zeros([TILE], tl.float32)
        acc = tl.zeros([TILE, BLOCK_D], tl.float32)
        at_n = tl.arange(0, BLOCK_N)
        if in_block:
            first_key = block_key + row * key_row + head * key_head
            first_value = block_value + row * value_row + head * value_head
            for near in range(0, count, BLOCK_N):
                other = near + at_n
                inside = other < count
                visible = inside[None, :] & (tl.abs(other[None, :] - column[:, None]) < window)
                if CAUSAL:
                    visible = visible & (other[None, :] <= column[:, None])
                best, mass, acc = _step(
                    q,
                    first_key + other.to(tl.int64) * key_column,
                    first_value + other.to(tl.int64) * value_column,
                    inside,
                    visible,
                    scale,
                    best,
                    mass,
                    acc,
                    at_d,
                    D,
                    PRECISION,
                )
        else:
            for place in range(begin, end, BLOCK_N):
                position = place + at_n
                inside = (position >= first) & (position < frontier)
                if PAGED:
                    page = position // span
                    number = tl.load(places + row * places_row + page, mask=inside, other=0)
                    cell = number * span + position % span
                    visible = inside[None, :] & (column >= 0)[:, None]
                else:
                    cell = tl.load(places + row) * span + position % span
                    visible = inside[None, :] & (
                        position[None, :] > frontier + column[:, None] - window
                    )
                best, mass, acc = _step(
                    q,
                    keys + (cell * heads + head) * D,
                    values + (cell * heads + head) * D,
                    inside,
                    visible,
                    scale,
                    best,
                    mass,
                    acc,
                    at_d,
                    D,
                    PRECISION,
                )
        at = ((row * heads + head) * tiles + tile) * (context_splits + 1) + split
        at = at * TILE + tl.arange(0, TILE)
        tl.store(partial + at[:, None] * BLOCK_D + at_d[None, :], acc)
        tl.store(extremes + at * 2, best)
        tl.store(extremes + at * 2 + 1, mass)


@triton.jit
def _join_kernel(
    partial,
    extremes,
    coverage_first,
    frontiers,
    counts,
    out,
    width,
    window,
    D,
    group,
    heads,
    tiles,
    splits,
    PAGED: tl.constexpr,
    SPLIT: tl.constexpr,
    JOIN: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    enter()
    column, query_head = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    at_d = tl.arange(0, BLOCK_D)
    frontier = tl.load(frontiers + row)
    first = tl.load(coverage_first + row)
    if not PAGED:
        first = tl.maximum(first, frontier - window + 1)
    head = query_head // group
    at_q = column * group + query_head % group
    at = ((row * heads + head) * tiles + at_q // TILE) * splits * TILE + at_q % TILE
    result = tl.zeros([BLOCK_D], tl.float32)
    if column < tl.load(counts + row):
        # the block's split is the last, and is there whatever the context
        block = at + (splits - 1) * TILE
        best, mass = tl.load(extremes + block * 2), tl.load(extremes + block * 2 + 1)
        result = tl.load(partial + block * BLOCK_D + at_d)
        count = tl.where(first < frontier, (frontier - 1) // SPLIT - first // SPLIT + 1, 0)
        for near in range(0, count, JOIN):
            split = near + tl.arange(0, JOIN)
            inside = split < count
            place = at + split * TILE
            more = tl.load(extremes + place * 2, mask=inside, other=float("-inf"))
            amount = tl.load(extremes + place * 2 + 1, mask=inside, other=0.0)
            part_at = partial + place[:, None] * BLOCK_D + at_d[None, :]
            part = tl.load(part_at, mask=inside[:, None], other=0.0)
            higher = tl.maximum(best, tl.max(more, axis=0))
            fade, share = tl.exp(best - higher), tl.exp(more - higher)
            mass = mass * fade + tl.sum(amount * share, axis=0)
            result = result * fade + tl.sum(part * share[:, None], axis=0)
            best = higher
        result = result / mass
    out_at = out + ((row * width + column) * heads * group + query_head) * D + at_d
    tl.store(out_at, result.to(out.dtype.element_ty), mask=at_d < D)


def attend(
    query: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    coverage_first: Tensor,
    frontiers: Tensor,
    counts: Tensor,
    *,
    window: int,
    causal: bool,
    context: int,
) -> Tensor:
    """Attends a block to its context and to itself.

    Args:
        query: [B, W, Hq, D].
        block_key: [B, W, Hkv, D].
        block_value: [B, W, Hkv, D].
        keys: [*, span, Hkv, D] rings or pages.
        values: like `keys`.
        places: [B] each row's ring, or [B, N] each row's pages.
        coverage_first: [B] int64.
        frontiers: [B] int64.
        counts: [B] int64.
        window: distances below it are visible.
        causal: whether block columns see only themselves and earlier ones.
        context: the most context positions that a row may have.

    Returns:
        [B, W, Hq*D] like `query`.
    """
    B, W, query_heads, D = query.shape
    span, heads = keys.shape[1:3]
    out = torch.empty(B, W, query_heads * D, dtype=query.dtype, device=query.device)
    if out.numel() == 0:
        return out
    require_that(keys.is_contiguous(), "keys", "contiguous cells", tuple(keys.stride()))
    require_that(values.is_contiguous(), "values", "contiguous cells", tuple(values.stride()))
    query, block_key, block_value = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query, block_key, block_value)
    )
    group = query_heads // heads
    tiles = triton.cdiv(W * group, _TILE)
    # positions that are not a split's first may begin a context
    splits = triton.cdiv(context, _SPLIT) + 2
    block_d = max(triton.next_power_of_2(D), 16)
    shape = (B, heads, tiles, splits, _TILE)
    partial = torch.empty(*shape, block_d, dtype=torch.float32, device=query.device)
    extremes = torch.empty(*shape, 2, dtype=torch.float32, device=query.device)
    paged = places.ndim == 2
    _split_kernel[(splits, heads * tiles, B)](
        query,
        block_key,
        block_value,
        keys,
        values,
        places,
        coverage_first,
        frontiers,
        counts,
        partial,
        extremes,
        *query.stride()[:3],
        *block_key.stride()[:3],
        *block_value.stride()[:3],
        places.stride(0),
        span,
        window,
        D**-0.5,
        D,
        group,
        heads,
        tiles,
        PAGED=paged,
        CAUSAL=causal,
        PRECISION="ieee" if query.dtype is torch.float32 else "tf32",
        SPLIT=_SPLIT,
        BLOCK_N=_BLOCK_N,
        TILE=_TILE,
        BLOCK_D=block_d,
        num_warps=4,
        num_stages=2,
        **OVERLAPPED,
    )
    _join_kernel[(W, query_heads, B)](
        partial,
        extremes,
        coverage_first,
        frontiers,
        counts,
        out,
        W,
        window,
        D,
        group,
        heads,
        tiles,
        splits,
        PAGED=paged,
        SPLIT=_SPLIT,
        JOIN=_JOIN,
        TILE=_TILE,
        BLOCK_D=block_d,
        num_warps=4,
        **OVERLAPPED,
    )
    return out


def sliding_window_attention(
    query: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    key_ring: Tensor,
    value_ring: Tensor,
    slots: Tensor,
    coverage_first: Tensor,
    frontiers: Tensor,
    counts: Tensor,
    *,
    window: int,
    causal: bool,
) -> Tensor:
    """See the contract."""
    return attend(
        query,
        block_key,
        block_value,
        key_ring,
        value_ring,
        slots,
        coverage_first,
        frontiers,
        counts,
        window=window,
        causal=causal,
        # position F - window is a window away from column 0 already
        context=window - 1,
    )
