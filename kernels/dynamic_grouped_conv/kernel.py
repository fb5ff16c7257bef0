"""Triton form; see the contract.

`prepare` is two launches: the deltas, whose products read the normed column in two 16-bit parts so
that it is not rounded, and the convolution.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_H = 512


@triton.jit
def _delta_kernel(
    x,
    gain,
    projection,
    deltas,
    finish_delta,
    inverses,
    eps,
    rows,
    H,
    outputs,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    at_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    across = tl.arange(0, BLOCK_K)
    x_at = x + at_m.to(tl.int64)[:, None] * H + across[None, :]
    w_at = projection + at_n.to(tl.int64)[None, :] * H + across[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for first in range(0, H, BLOCK_K):
        inside = across < H - first
        mask = (at_m < rows)[:, None] & inside[None, :]
        column = tl.load(x_at + first, mask=mask, other=0.0).to(tl.float32)
        squares += column * column
        scaled = column * tl.load(gain + across + first, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(w_at + first, mask=(at_n < outputs)[None, :] & inside[:, None], other=0.0)
        if WIDE:
            acc = tl.dot(scaled, w.to(tl.float32), acc, input_precision="ieee")
        else:
            # what the first part leaves of a finite number fits the second
            upper = scaled.to(w.dtype)
            rest = tl.where(tl.abs(scaled) < float("inf"), scaled - upper.to(tl.float32), 0.0)
            acc = tl.dot(upper, w, acc)
            acc = tl.dot(rest.to(w.dtype), w, acc)
    # the norm's factor is one number a column, so that it may come after the sum
    inverse = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1) / H + eps)
    delta = acc * inverse[:, None]
    # side 0 stays as it is for the convolution; side 1 leaves, rounded
    side = outputs // 2
    at = at_m.to(tl.int64)[:, None] * side + at_n[None, :]
    live = (at_m < rows)[:, None]
    tl.store(deltas + at, delta, mask=live & (at_n < side)[None, :])
    later = live & ((at_n >= side) & (at_n < outputs))[None, :]
    tl.store(finish_delta + at - side, delta.to(finish_delta.dtype.element_ty), mask=later)
    if tl.program_id(1) == 0:
        tl.store(inverses + at_m, inverse, mask=at_m < rows)


@triton.jit
def _convolve_kernel(
    y,
    gain,
    inverses,
    base,
    deltas,
    residual,
    out,
    width,
    H,
    groups,
    TAPS: tl.constexpr,
    PREPARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One column's channels: of the normed y when it prepares, else of y, added to residual."""
    line = tl.program_id(0).to(tl.int64)
    column = line % width
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < H
    group = at // (H // groups)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        # a tap before the block is not read at all
        if column >= tap:
            value = tl.load(y + (line - tap) * H + at, mask=inside, other=0.0).to(tl.float32)
            if PREPARES:
                value = value * tl.load(inverses + line - tap)
                value = value * tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
            coefficient = tl.load(base + tap * H + at, mask=inside, other=0.0).to(tl.float32)
            delta_at = deltas + (line * TAPS + tap) * groups + group
            coefficient += tl.load(delta_at, mask=inside, other=0.0).to(tl.float32)
            total += coefficient * value
    if not PREPARES:
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
    deltas = torch.empty(rows, taps * groups, dtype=torch.float32, device=x.device)
    inverses = torch.empty(rows, dtype=torch.float32, device=x.device)
    wide = x.dtype is torch.float32
    _delta_kernel[(triton.cdiv(rows, 16), triton.cdiv(outputs, 16))](
        x,
        gain,
        projection.contiguous(),
        deltas,
        finish_delta,
        inverses,
        eps,
        rows,
        H,
        outputs,
        WIDE=wide,
        BLOCK_M=16,
        BLOCK_N=16,
        BLOCK_K=64 if wide else 256,
        num_warps=4,
        num_stages=3,
    )
    _convolve_kernel[(rows, triton.cdiv(H, _BLOCK_H))](
        x,
        gain,
        inverses,
        base[0],
        deltas,
        x,
        prepared,
        W,
        H,
        groups,
        TAPS=taps,
        PREPARES=True,
        BLOCK=_BLOCK_H,
        num_warps=4,
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
    _convolve_kernel[(B * W, triton.cdiv(H, _BLOCK_H))](
        z.contiguous(),
        base,
        base,
        base[1],
        finish_delta.contiguous(),
        residual,
        out,
        W,
        H,
        groups,
        TAPS=taps,
        PREPARES=False,
        BLOCK=_BLOCK_H,
        num_warps=4,
    )
    return out
