"""Triton form; see the contract. One program a row."""

import torch
import triton
import triton.language as tl

from kernels.overlap import OVERLAPPED, enter


@triton.jit
def gated_rms_norm_kernel(
    x, gate, gain, out, eps, D, middle, inner, g_outer, g_middle, g_inner, BLOCK: tl.constexpr
):
    """Normalises and gates row program_id(0) of x; the gate's rows lie in three dimensions."""
    enter()
    row = tl.program_id(0).to(tl.int64)
    gate += row // (middle * inner) * g_outer + row // inner % middle * g_middle
    gate += row % inner * g_inner
    at = tl.arange(0, BLOCK)
    inside = at < D
    wide = tl.load(x + row * D + at, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide) / D + eps)
    scaled = wide * inverse * tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    opening = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    scaled *= opening / (1.0 + tl.exp(-opening))
    tl.store(out + row * D + at, scaled.to(out.dtype.element_ty), mask=inside)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, gain: torch.Tensor, eps: float
) -> torch.Tensor:
    """Normalises x [..., D], scales it by gain [D] and by SiLU(gate [..., D])."""
    D = x.shape[-1]
    x = x.contiguous()
    if gate.stride(-1) != 1:
        gate = gate.contiguous()
    # up to three leading dimensions keep their strides: a gate is often part of wider columns
    while gate.ndim < 4:
        gate = gate.unsqueeze(0)
    if gate.ndim > 4:
        gate = gate.flatten(0, -4)
    out = torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(D)
        gated_rms_norm_kernel[(x.numel() // D,)](
            x,
            gate,
            gain,
            out,
            eps,
            D,
            gate.shape[1],
            gate.shape[2],
            *gate.stride()[:3],
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **OVERLAPPED,
        )
    return out
