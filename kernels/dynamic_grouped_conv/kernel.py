"""Triton form; see the contract.

`prepare` is three launches: the norm, the products of the deltas and the convolution. The products
read the normed column as two 16-bit parts, so that it is not rounded, and sum over H in a fixed
number of ranges that the convolution adds in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.overlap import OVERLAPPED, enter

_BLOCK_H = 512
_RANGES = 5


@triton.jit
def _norm_kernel(x, gain, upper, rest, inverses, eps, H, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """The normed column, in one FP32 part or in two of the dtype of x."""
    enter()
    line = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < H
    column = tl.load(x + line * H + at, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(column * column) / H + eps)
    normed = column * inverse * tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    first = normed.to(upper.dtype.element_ty)
    tl.store(upper + line * H + at, first, mask=inside)
    if not WIDE:
        # of a number that is not finite the first part says all
        left = tl.where(tl.abs(normed) < float("inf"), normed - first.to(tl.float32), 0.0)
        tl.store(rest + line * H + at, left.to(rest.dtype.element_ty), mask=inside)
    tl.store(inverses + line, inverse)


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
def _prepare_kernel(
    x,
    gain,
    inverses,
    base,
    partial,
    prepared,
    finish_delta,
    rows,
    width,
    H,
    groups,
    TAPS: tl.constexpr,
    RANGES: tl.constexpr,
    BLOCK: tl.constexpr,
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
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        delta_at = line * outputs + tap * groups + group
        # a tap before the block is not read at all
        if column >= tap:
            value = tl.load(x + (line - tap) * H + at, mask=inside, other=0.0).to(tl.float32)
            value = value * tl.load(inverses + line - tap) * scale
            coefficient = tl.load(base + tap * H + at, mask=inside, other=0.0).to(tl.float32)
            coefficient += _sum_ranges(partial, delta_at, inside, rows, outputs, RANGES)
            total += coefficient * value
        later = _sum_ranges(partial, delta_at + TAPS * groups, leads, rows, outputs, RANGES)
        later_at = finish_delta + (line * TAPS + tap) * groups + group
        tl.store(later_at, later.to(finish_delta.dtype.element_ty), mask=leads)
    tl.store(prepared + line * H + at, total.to(prepared.dtype.element_ty), mask=inside)


@triton.jit
def _finish_kernel(
    z,
    base,
    deltas,
    residual,
    out,
    width,
    H,
    groups,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One column's channels, convolved and added to the residual."""
    enter()
    line = tl.program_id(0).to(tl.int64)
    column = line % width
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < H
    group = at // (H // groups)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        # a tap before the block is not read at all
        if column >= tap:
            value = tl.load(z + (line - tap) * H + at, mask=inside, other=0.0).to(tl.float32)
            coefficient = tl.load(base + tap * H + at, mask=inside, other=0.0).to(tl.float32)
            delta_at = deltas + (line * TAPS + tap) * groups + group
            coefficient += tl.load(delta_at, mask=inside, other=0.0).to(tl.float32)
            total += coefficient * value
    total += tl.load(residual + line * H + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + line * H + at, total.to(out.dtype.element_ty), mask=inside)


def prepare(
    x: Tensor, gain: Tensor, base: Tensor, projection: Tensor, eps: float
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
    upper = torch.empty(rows, H, dtype=x.dtype, device=x.device)
    rest = upper if wide else torch.empty_like(upper)
    inverses = torch.empty(rows, dtype=torch.float32, device=x.device)
    partial = torch.empty(_RANGES, rows, outputs, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(H)
    _norm_kernel[(rows,)](
        x,
        gain,
        upper,
        rest,
        inverses,
        eps,
        H,
        WIDE=wide,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **OVERLAPPED,
    )
    block_k = 32 if wide else 128
    span = triton.cdiv(triton.cdiv(H, _RANGES), block_k) * block_k
    _delta_kernel[(triton.cdiv(rows, 16), triton.cdiv(outputs, 32), _RANGES)](
        upper,
        rest,
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
    _prepare_kernel[(rows, triton.cdiv(H, _BLOCK_H))](
        x,
        gain,
        inverses,
        base,
        partial,
        prepared,
        finish_delta,
        rows,
        W,
        H,
        groups,
        TAPS=taps,
        RANGES=_RANGES,
        BLOCK=_BLOCK_H,
        num_warps=4,
        **OVERLAPPED,
    )
    return prepared, finish_delta


def finish_add(residual: Tensor, z: Tensor, base: Tensor, finish_delta: Tensor) -> Tensor:
    """See the contract."""
    B, W, H = residual.shape
    taps, groups = finish_delta.shape[2:]
    out = torch.empty(B, W, H, dtype=residual.dtype, device=residual.device)
    if B * W == 0:
        return out
    residual, base = residual.contiguous(), base.contiguous()
    _finish_kernel[(B * W, triton.cdiv(H, _BLOCK_H))](
        z.contiguous(),
        base[1],
        finish_delta.contiguous(),
        residual,
        out,
        W,
        H,
        groups,
        TAPS=taps,
        BLOCK=_BLOCK_H,
        num_warps=4,
        **OVERLAPPED,
    )
    return out
