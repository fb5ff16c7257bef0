"""Triton form; see the contract. One program a row: the sum's order is that of one row alone."""

import torch
import triton
import triton.language as tl

from kernels.overlap import OVERLAPPED, enter


@triton.jit
def norm(wide, gain, eps, H):
    """The norm of a row of H elements in FP32, padded with zeros, times its gain."""
    inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide) / H + eps)
    return wide * inverse * gain.to(tl.float32)


@triton.jit
def rms_norm_kernel(x, gain, out, eps, H, x_row, BLOCK: tl.constexpr):
    """Normalises row program_id(0) of x."""
    enter()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < H
    wide = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    scaled = norm(wide, tl.load(gain + at, mask=inside, other=0.0), eps, H)
    tl.store(out + row * H + at, scaled.to(out.dtype.element_ty), mask=inside)


def extents(H: int) -> dict[str, int]:
    """Block and warps of a program for a row of H elements; both settle the sum's order."""
    block = triton.next_power_of_2(H)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises x [..., H] and scales it by gain [H]."""
    H = x.shape[-1]
    rows = x.reshape(-1, H)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        rms_norm_kernel[(rows.shape[0],)](
            rows, gain, out, eps, H, rows.stride(0), **extents(H), **OVERLAPPED
        )
    return out
