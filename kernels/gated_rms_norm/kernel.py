"""Triton form; see the contract. Short rows share a program, a warp each."""

import torch
import triton
import triton.language as tl

from kernels.overlap import OVERLAPPED, release, wait

ELEMENTS = 512  # of a program's rows together


@triton.jit
def gated_rms_norm_kernel(
    x,
    gate,
    gain,
    out,
    eps,
    total,
    D,
    middle,
    inner,
    g_outer,
    g_middle,
    g_inner,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalises and gates ROWS rows of x, of `total`; the gate's rows lie in three dimensions."""
    release()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    inside = (row < total)[:, None] & (at < D)[None, :]
    scale = tl.load(gain + at, mask=at < D, other=0.0).to(tl.float32)
    source = (row // (middle * inner)).to(tl.int64) * g_outer
    source += (row // inner % middle).to(tl.int64) * g_middle
    source += (row % inner).to(tl.int64) * g_inner
    cell = row.to(tl.int64)[:, None] * D + at[None, :]
    wait()
    wide = tl.load(x + cell, mask=inside, other=0.0).to(tl.float32)
    opening = tl.load(gate + source[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=1) / D + eps)
    scaled = wide * inverse[:, None] * scale[None, :]
    scaled *= opening / (1.0 + tl.exp(-opening))
    tl.store(out + cell, scaled.to(out.dtype.element_ty), mask=inside)


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
        rows, total = max(ELEMENTS // block, 1), x.numel() // D
        gated_rms_norm_kernel[(triton.cdiv(total, rows),)](
            x,
            gate,
            gain,
            out,
            eps,
            total,
            D,
            gate.shape[1],
            gate.shape[2],
            *gate.stride()[:3],
            ROWS=rows,
            BLOCK=block,
            num_warps=min(max(rows * block // 128, 1), 16),
            **OVERLAPPED,
        )
    return out
