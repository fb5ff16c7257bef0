"""Triton form; see the contract. One program a head of a column."""

import torch
import triton
import triton.language as tl

from kernels.head_norm_rope.reference import frequencies
from kernels.overlap import OVERLAPPED, enter


@triton.jit
def head_norm_rope_kernel(
    x,
    gain,
    positions,
    rates,
    out,
    eps,
    width,
    heads,
    columns,
    x_row,
    x_column,
    x_head,
    gain_head,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    HEIGHT_END: tl.constexpr,
    WIDTH_END: tl.constexpr,
    AXES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Head program_id(1) of column program_id(0), columns counted over all rows.

    `columns` is their number; positions are [columns], or [3, columns] with AXES.
    """
    enter()
    column = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    x += column // width * x_row + column % width * x_column + head * x_head
    gain += head * gain_head
    at = tl.arange(0, BLOCK)
    inside = at < D
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide) / D + eps)
    normed = wide * inverse * tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)

    half: tl.constexpr = ROTARY // 2
    rotated = at < ROTARY
    pair = at % half
    partner = tl.where(at < half, at + half, at - half)
    other = tl.load(x + partner, mask=rotated, other=0.0).to(tl.float32) * inverse
    other *= tl.load(gain + partner, mask=rotated, other=0.0).to(tl.float32)
    if AXES:
        axis = tl.where((pair % 3 == 1) & (pair < HEIGHT_END), 1, 0)
        axis = tl.where((pair % 3 == 2) & (pair < WIDTH_END), 2, axis)
        place = tl.load(positions + axis.to(tl.int64) * columns + column, mask=rotated, other=0)
    else:
        place = tl.load(positions + column)
    angle = place.to(tl.float32) * tl.load(rates + pair, mask=rotated, other=0.0)
    sine = tl.where(at < half, -tl.sin(angle), tl.sin(angle))
    turned = tl.where(rotated, normed * tl.cos(angle) + other * sine, normed)
    out += (column * heads + head) * D
    tl.store(out + at, turned.to(out.dtype.element_ty), mask=inside)


def head_norm_rope(
    x: torch.Tensor,
    gain: torch.Tensor,
    positions: torch.Tensor,
    *,
    eps: float,
    theta: float,
    rotary_dim: int,
    sections: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """Normalises heads x [B, W, heads, D] over D and rotates their first rotary_dim elements."""
    B, W, heads, D = x.shape
    if x.stride(-1) != 1:
        x = x.contiguous()
    _, height, width = sections or (0, 0, 0)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        head_norm_rope_kernel[(B * W, heads)](
            x,
            gain.contiguous(),
            positions.contiguous(),
            frequencies(theta, rotary_dim, x.device),
            out,
            eps,
            W,
            heads,
            B * W,
            *x.stride()[:3],
            D if gain.ndim == 2 else 0,
            D=D,
            ROTARY=rotary_dim,
            HEIGHT_END=3 * height,
            WIDTH_END=3 * width,
            AXES=positions.ndim == 3,
            BLOCK=triton.next_power_of_2(D),
            num_warps=1,
            **OVERLAPPED,
        )
    return out
