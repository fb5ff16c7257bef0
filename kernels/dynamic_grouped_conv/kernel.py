"""Triton form; see the contract.

`prepare` is two launches where whatever made its column has scaled it: the products of the deltas
and the convolution. The products read the column times its gain as two 16-bit parts, so that it is
not rounded, and sum over H in a fixed number of ranges that the convolution adds in order. The
inverse root mean square is a factor of both, and only the convolution needs it.

`linear_finish_add` of a few rows is one launch where `linear` cuts the weight over K: the last run
of a tile, which adds up what all have left in memory, finds its columns' predecessors there too.
With more rows the runs' sums are added by the programs that convolve them. Neither changes a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.kernel import counters as arrivals_on
from kernels.linear.kernel import cut, linear, runs, sum_of_runs, tile_rows
from kernels.overlap import OVERLAPPED, enter, release, wait

_BLOCK_H = 512
_RANGES = 5
_MOST_JOINED = 32  # rows; more runs' sums are added faster by programs of their own


@triton.jit
def _store_scaled(scaled, cell, total, value, scale, inside, WIDE: tl.constexpr):
    """Keeps value times scale as one FP32 number, or as two of 16 bits, `total` cells apart."""
    value = value * scale
    first = value.to(scaled.dtype.element_ty)
    tl.store(scaled + cell, first, mask=inside)
    if not WIDE:
        # of a number that is not finite the first part says all
        left = tl.where(tl.abs(value) < float("inf"), value - first.to(tl.float32), 0.0)
        tl.store(scaled + total + cell, left.to(scaled.dtype.element_ty), mask=inside)


@triton.jit
def _scale_kernel(x, gain, scaled, rows, H, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The column times its gain, not yet normed."""
    enter()
    line = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < H
    value = tl.load(x + line * H + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    _store_scaled(scaled, line * H + at, tl.cast(rows, tl.int64) * H, value, scale, inside, WIDE)


@triton.jit
def _delta_kernel(
    upper,
    rest,
    projection,
    partial,
    rows,
    H,
    outputs,
    span,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Partial deltas [ranges, rows, outputs] of the range program_id(2) of H."""
    enter()
    at_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(2) * span
    across = tl.arange(0, BLOCK_K)
    x_at = at_m.to(tl.int64)[:, None] * H + across[None, :]
    w_at = projection + at_n.to(tl.int64)[None, :] * H + across[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(begin, tl.minimum(begin + span, H), BLOCK_K):
        inside = across < H - first
        mask = (at_m < rows)[:, None] & inside[None, :]
        w = tl.load(w_at + first, mask=(at_n < outputs)[None, :] & inside[:, None], other=0.0)
        x = tl.load(upper + x_at + first, mask=mask, other=0.0)
        if WIDE:
            acc = tl.dot(x, w.to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, w, acc)
            acc = tl.dot(tl.load(rest + x_at + first, mask=mask, other=0.0), w, acc)
    line = tl.program_id(2).to(tl.int64) * rows + at_m
    live = (at_m < rows)[:, None] & (at_n < outputs)[None, :]
    tl.store(partial + line[:, None] * outputs + at_n[None, :], acc, mask=live)


@triton.jit
def _sum_ranges(partial, at, inside, rows, outputs, RANGES: tl.constexpr):
    total = tl.load(partial + at, mask=inside, other=0.0)
    for index in tl.static_range(1, RANGES):
        more = partial + tl.cast(index, tl.int64) * rows * outputs + at
        total += tl.load(more, mask=inside, other=0.0)
    return total


@triton.jit
def _inverse(x, line, H, eps, ROW: tl.constexpr):
    """The inverse root mean square of a column."""
    at = tl.arange(0, ROW)
    wide = tl.load(x + line * H + at, mask=at < H, other=0.0).to(tl.float32)
    return 1.0 / tl.sqrt_rn(tl.sum(wide * wide) / H + eps)


@triton.jit
def _prepare_kernel(
    x,
    gain,
    base,
    partial,
    prepared,
    finish_delta,
    eps,
    rows,
    width,
    H,
    groups,
    TAPS: tl.constexpr,
    RANGES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW: tl.constexpr,
):
    """One column's channels, convolved; the other side's deltas, rounded."""
    enter()
    line = tl.program_id(0).to(tl.int64)
    column = line % width
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < H
    group = at // (H // groups)
    leads = inside & (at % (H // groups) == 0)
    outputs = 2 * TAPS * groups
    scale = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    own = _inverse(x, line, H, eps, ROW)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        delta_at = line * outputs + tap * groups + group
        # a tap before the block is not read at all
        if column >= tap:
            value = tl.load(x + (line - tap) * H + at, mask=inside, other=0.0).to(tl.float32)
            value = value * (own if tap == 0 else _inverse(x, line - tap, H, eps, ROW)) * scale
            coefficient = tl.load(base + tap * H + at, mask=inside, other=0.0).to(tl.float32)
            coefficient += own * _sum_ranges(partial, delta_at, inside, rows, outputs, RANGES)
            total += coefficient * value
        later = own * _sum_ranges(partial, delta_at + TAPS * groups, leads, rows, outputs, RANGES)
        later_at = finish_delta + (line * TAPS + tap) * groups + group
        tl.store(later_at, later.to(finish_delta.dtype.element_ty), mask=leads)
    tl.store(prepared + line * H + at, total.to(prepared.dtype.element_ty), mask=inside)


@triton.jit
def _finish_kernel(
    z,
    base,
    deltas,
    residual,
    gain,
    out,
    scaled,
    rows,
    width,
    H,
    groups,
    TAPS: tl.constexpr,
    RUNS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One column's channels, convolved and added to the residual; with a gain also scaled.

    z are as many FP32 sums as there are RUNS, to be added and rounded, or without any z itself.
    """
    enter()
    line = tl.program_id(0).to(tl.int64)
    column = line % width
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < H
    group = at // (H // groups)
    cells = tl.cast(rows, tl.int64) * H
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        # a tap before the block is not read at all
        if column >= tap:
            place = z + (line - tap) * H + at
            if RUNS:
                value = sum_of_runs(place, cells, inside, RUNS)
                value = value.to(out.dtype.element_ty).to(tl.float32)
            else:
                value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            coefficient = tl.load(base + tap * H + at, mask=inside, other=0.0).to(tl.float32)
            delta_at = deltas + (line * TAPS + tap) * groups + group
            coefficient += tl.load(delta_at, mask=inside, other=0.0).to(tl.float32)
            total += coefficient * value
    total += tl.load(residual + line * H + at, mask=inside, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + line * H + at, rounded, mask=inside)
    if gain is not None:
        scale = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
        cell = line * H + at
        _store_scaled(scaled, cell, cells, rounded.to(tl.float32), scale, inside, WIDE)


@triton.jit(do_not_specialize=["M"])
def _linear_finish_kernel(
    x,
    weight,
    partial,
    arrivals,
    base,
    deltas,
    residual,
    gain,
    out,
    scaled,
    M,
    N,
    K,
    x_row,
    w_row,
    w_k,
    width,
    groups,
    TAPS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """A tile of the weight's rows and a run of K, by program_id(0); the last run ends the tile.

    The sums are those of `linear_kernel` where it cuts all rows, and what follows is what
    `_finish_kernel` does with them. All M columns are one tile.
    """
    wait()
    tile = tl.program_id(0) // SPLIT
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK_K)
    # rows beyond the edge repeat the last one and are not stored
    w = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * w_row + k[None, :] * w_k
    columns = x + m.to(tl.int64)[None, :] * x_row + k[:, None]
    is_column = (m < M)[None, :]
    blocks = tl.cdiv(K, BLOCK_K)
    run = tl.cdiv(blocks, SPLIT)
    first = tl.program_id(0) % SPLIT * run
    end = tl.minimum(first + run, blocks)
    accumulated = tl.zeros((BLOCK_N, COLUMNS), dtype=tl.float32)
    for block in range(first, end):
        at = block * BLOCK_K
        if EVEN_K:
            left = tl.load(w + at * w_k, eviction_policy="evict_first")
            right = tl.load(columns + at, mask=is_column, other=0.0)
        else:
            left = tl.load(w + at * w_k, mask=k[None, :] < K - at, other=0.0)
            right = tl.load(columns + at, mask=(k[:, None] < K - at) & is_column, other=0.0)
        accumulated = tl.dot(left, right, accumulated, input_precision="ieee")

    # not earlier: the next kernel's programs would stand in the way of those that stream
    release()
    is_row = n < N
    inside = is_row[:, None] & is_column
    cell = m.to(tl.int64)[None, :] * N + n[:, None]
    size = M.to(tl.int64) * N
    tl.store(partial + tl.program_id(0) % SPLIT * size + cell, accumulated, mask=inside)
    tl.debug_barrier()
    mine = arrivals + tile
    if tl.atomic_add(mine, 1, sem="acq_rel") == SPLIT - 1:
        column = m % width
        group = n // (N // groups)
        total = tl.zeros((BLOCK_N, COLUMNS), dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            # a tap before the block is not read at all
            reached = inside & (column >= tap)[None, :]
            value = sum_of_runs(partial + cell - tap * N, size, reached, SPLIT)
            value = value.to(out.dtype.element_ty).to(tl.float32)
            own = tl.load(base + tap * N + n, mask=is_row, other=0.0).to(tl.float32)
            delta_at = deltas + (m.to(tl.int64) * TAPS + tap)[None, :] * groups + group[:, None]
            coefficient = own[:, None] + tl.load(delta_at, mask=reached, other=0.0).to(tl.float32)
            total = tl.where(reached, total + coefficient * value, total)
        total += tl.load(residual + cell, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(out.dtype.element_ty)
        tl.store(out + cell, rounded, mask=inside)
        scale = tl.load(gain + n, mask=is_row, other=0.0).to(tl.float32)[:, None]
        _store_scaled(scaled, cell, size, rounded.to(tl.float32), scale, inside, WIDE)
        tl.atomic_xchg(mine, 0)


def prepare(
    x: Tensor,
    gain: Tensor,
    base: Tensor,
    projection: Tensor,
    eps: float,
    scaled: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    B, W, H = x.shape
    taps, outputs = base.shape[1], projection.shape[0]
    groups = outputs // (2 * taps)
    prepared = torch.empty(B, W, H, dtype=x.dtype, device=x.device)
    finish_delta = torch.empty(B, W, taps, groups, dtype=x.dtype, device=x.device)
    rows = B * W
    if rows == 0:
        return prepared, finish_delta
    x, base = x.contiguous(), base.contiguous()
    wide = x.dtype is torch.float32
    across = triton.cdiv(H, _BLOCK_H)
    if scaled is None:
        scaled = _room_for_scaled(x)
        _scale_kernel[(rows, across)](
            x, gain, scaled, rows, H, WIDE=wide, BLOCK=_BLOCK_H, num_warps=4, **OVERLAPPED
        )
    partial = torch.empty(_RANGES, rows, outputs, dtype=torch.float32, device=x.device)
    block_k = 32 if wide else 128
    span = triton.cdiv(triton.cdiv(H, _RANGES), block_k) * block_k
    _delta_kernel[(triton.cdiv(rows, 16), triton.cdiv(outputs, 32), _RANGES)](
        scaled[0],
        scaled[-1],
        projection.contiguous(),
        partial,
        rows,
        H,
        outputs,
        span,
        WIDE=wide,
        BLOCK_M=16,
        BLOCK_N=32,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=4,
        **OVERLAPPED,
    )
    _prepare_kernel[(rows, across)](
        x,
        gain,
        base,
        partial,
        prepared,
        finish_delta,
        eps,
        rows,
        W,
        H,
        groups,
        TAPS=taps,
        RANGES=_RANGES,
        BLOCK=_BLOCK_H,
        ROW=triton.next_power_of_2(H),
        num_warps=4,
        **OVERLAPPED,
    )
    return prepared, finish_delta


def finish_add(residual: Tensor, z: Tensor, base: Tensor, finish_delta: Tensor) -> Tensor:
    """See the contract."""
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    if out.numel():
        _finish(residual, z.contiguous(), 0, base, finish_delta, None, out, None)
    return out


def linear_finish_add(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    base: Tensor,
    finish_delta: Tensor,
    gain: Tensor,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    B, W, H = residual.shape
    out = torch.empty(B, W, H, dtype=residual.dtype, device=residual.device)
    scaled = _room_for_scaled(residual)
    if not out.numel():
        return out, scaled
    plan = cut(H, x.shape[2], weight.element_size())
    if B * W > _MOST_JOINED or plan.split == 1 or plan.whole:
        sums = runs(x, weight)
        z, count = (linear(x, weight), 0) if sums is None else (sums, sums.shape[0])
        _finish(residual, z, count, base, finish_delta, gain, out, scaled)
        return out, scaled
    columns = x.reshape(B * W, -1)
    if columns.stride(1) != 1:
        columns = columns.contiguous()
    (M, K), taps, groups = columns.shape, *finish_delta.shape[2:]
    tile = max(triton.next_power_of_2(M), 16)
    block_n = tile_rows(H, plan, tile)
    _linear_finish_kernel[(triton.cdiv(H, block_n) * plan.split,)](
        columns,
        weight,
        torch.empty(plan.split, M, H, dtype=torch.float32, device=x.device),
        arrivals_on(x.device),
        base[1].contiguous(),
        finish_delta.contiguous(),
        residual.contiguous(),
        gain,
        out,
        scaled,
        M,
        H,
        K,
        columns.stride(0),
        *weight.stride(),
        W,
        groups,
        TAPS=taps,
        WIDE=residual.dtype is torch.float32,
        BLOCK_N=block_n,
        BLOCK_K=plan.block_k,
        COLUMNS=tile,
        SPLIT=plan.split,
        EVEN_K=K % plan.block_k == 0,
        num_warps=8 if tile > 64 else 4,
        num_stages=3 if tile > 64 else 5 if tile <= 32 and block_n == 64 else 4,
        **OVERLAPPED,
    )
    return out, scaled


def _finish(
    residual: Tensor,
    z: Tensor,
    run_count: int,
    base: Tensor,
    finish_delta: Tensor,
    gain: Tensor | None,
    out: Tensor,
    scaled: Tensor | None,
) -> None:
    B, W, H = residual.shape
    taps, groups = finish_delta.shape[2:]
    _finish_kernel[(B * W, triton.cdiv(H, _BLOCK_H))](
        z,
        base[1].contiguous(),
        finish_delta.contiguous(),
        residual.contiguous(),
        gain,
        out,
        scaled,
        B * W,
        W,
        H,
        groups,
        TAPS=taps,
        RUNS=run_count,
        WIDE=residual.dtype is torch.float32,
        BLOCK=_BLOCK_H,
        num_warps=4,
        **OVERLAPPED,
    )


def _room_for_scaled(x: Tensor) -> Tensor:
    """For one FP32 part of every column, or for two of the dtype of x."""
    parts = 1 if x.dtype is torch.float32 else 2
    return torch.empty(parts, *x.shape, dtype=x.dtype, device=x.device)
