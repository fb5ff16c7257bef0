"""Triton form; see the contract. One program a row and block of columns."""

import torch
import triton
import triton.language as tl

from kernels.overlap import OVERLAPPED, enter

BLOCK = 1024


@triton.jit
def opened(gate, up):
    """SiLU(gate) * up in FP32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def swiglu_kernel(gate_up, out, width, row_stride, BLOCK: tl.constexpr):
    """Columns program_id(1) * BLOCK onwards of row program_id(0)."""
    enter()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, opened(gate, up).to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns SiLU(first half) * second half of gate_up [..., 2*I]."""
    width = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * width)
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        grid = (rows.shape[0], triton.cdiv(width, block))
        swiglu_kernel[grid](
            rows,
            out,
            width,
            rows.stride(0),
            BLOCK=block,
            num_warps=4,
            **OVERLAPPED,
        )
    return out
