"""Triton form; see the contract. One program: one K or V head of one layer for a tile of rows.

The two halves of a head are separate accumulators, since RoPE pairs each element with its other
half's. All layers are one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import require_that
from kernels.head_norm_rope.reference import frequencies
from kernels.overlap import OVERLAPPED, enter

# the same for any number of rows: it decides how the warps share a head, and so in which order the
# squares of its elements are added
_BLOCK_M = 16


@triton.jit
def _materialize_kernel(
    context,
    positions,
    destinations,
    weight,
    gain,
    rates,
    keys,
    values,
    eps,
    rows,
    H,
    cells,
    heads,
    D,
    weight_layer,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALF: tl.constexpr,
):
    enter()
    at_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    layer, line = tl.program_id(1) // (2 * heads), tl.program_id(1) % (2 * heads)
    cell = tl.load(destinations + at_m, mask=at_m < rows, other=-1)
    live = cell >= 0
    half = D // 2
    at_d = tl.arange(0, HALF)
    in_half = at_d < half
    across = tl.arange(0, BLOCK_K)
    context_at = context + at_m.to(tl.int64)[:, None] * H + across[None, :]
    weight += layer.to(tl.int64) * weight_layer
    low_at = weight + (line.to(tl.int64) * D + at_d)[None, :] * H + across[:, None]
    high_at = low_at + half.to(tl.int64) * H
    low = tl.zeros([BLOCK_M, HALF], tl.float32)
    high = tl.zeros([BLOCK_M, HALF], tl.float32)
    for first in range(0, H, BLOCK_K):
        inside = across < H - first
        x = tl.load(context_at + first, mask=live[:, None] & inside[None, :], other=0.0)
        mask = inside[:, None] & in_half[None, :]
        low = tl.dot(
            x, tl.load(low_at + first, mask=mask, other=0.0), low, input_precision=PRECISION
        )
        high = tl.dot(
            x, tl.load(high_at + first, mask=mask, other=0.0), high, input_precision=PRECISION
        )
    is_key = line < heads
    head = line % heads
    cell_at = ((layer.to(tl.int64) * cells + cell) * heads + head) * D
    at = cell_at[:, None] + at_d[None, :]
    mask = live[:, None] & in_half[None, :]
    if is_key:
        square = tl.sum(low * low + high * high, axis=1)
        inverse = 1.0 / tl.sqrt_rn(square / D + eps)
        gain_at = gain + layer * D + at_d
        low_gain = tl.load(gain_at, mask=in_half, other=0.0).to(tl.float32)
        high_gain = tl.load(gain_at + half, mask=in_half, other=0.0).to(tl.float32)
        low = low * inverse[:, None] * low_gain[None, :]
        high = high * inverse[:, None] * high_gain[None, :]
        place = tl.load(positions + at_m, mask=live, other=0).to(tl.float32)
        rate = tl.load(rates + at_d, mask=in_half, other=0.0)
        angle = place[:, None] * rate[None, :]
        cos, sin = tl.cos(angle), tl.sin(angle)
        rotated_low, rotated_high = low * cos - high * sin, high * cos + low * sin
        tl.store(keys + at, rotated_low.to(keys.dtype.element_ty), mask=mask)
        tl.store(keys + at + half, rotated_high.to(keys.dtype.element_ty), mask=mask)
    else:
        low = low.to(context.dtype.element_ty).to(tl.float32)
        high = high.to(context.dtype.element_ty).to(tl.float32)
        tl.store(values + at, low.to(values.dtype.element_ty), mask=mask)
        tl.store(values + at + half, high.to(values.dtype.element_ty), mask=mask)


def context_kv_materialize(
    context: Tensor,
    positions: Tensor,
    destinations: Tensor,
    key_value_weight: Tensor,
    key_gain: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    eps: float,
    theta: float,
) -> None:
    """See the contract."""
    layers, cells, heads, D = keys.shape
    rows, H = context.shape[0] * context.shape[1], context.shape[2]
    if rows == 0 or layers == 0:
        return
    # a layer's rows may be part of a larger matrix
    for name, tensor in (("keys", keys), ("values", values), ("weight", key_value_weight[0])):
        require_that(tensor.is_contiguous(), name, "contiguous cells", tuple(tensor.stride()))
    wide = context.dtype is torch.float32
    _materialize_kernel[(triton.cdiv(rows, _BLOCK_M), layers * 2 * heads)](
        context.contiguous(),
        positions.contiguous(),
        destinations.contiguous(),
        key_value_weight,
        key_gain.contiguous(),
        frequencies(theta, D, context.device),
        keys,
        values,
        eps,
        rows,
        H,
        cells,
        heads,
        D,
        key_value_weight.stride(0),
        PRECISION="ieee" if wide else "tf32",
        BLOCK_M=_BLOCK_M,
        BLOCK_K=32 if wide else 128,
        HALF=max(triton.next_power_of_2(D // 2), 16),
        num_warps=4,
        num_stages=3,
        **OVERLAPPED,
    )
