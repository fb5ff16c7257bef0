"""Triton form; see the contract. One program a row, as in `rms_norm`."""

import torch
import triton
import triton.language as tl

from kernels.overlap import OVERLAPPED, release, wait
from kernels.rms_norm.kernel import extents, norm


@triton.jit
def add_rms_norm_kernel(x, z, gain, total, out, eps, H, x_row, z_row, BLOCK: tl.constexpr):
    """Adds and normalises row program_id(0)."""
    release()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < H
    scale = tl.load(gain + at, mask=inside, other=0.0)
    wait()
    added = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    added += tl.load(z + row * z_row + at, mask=inside, other=0.0).to(tl.float32)
    added = added.to(total.dtype.element_ty)
    tl.store(total + row * H + at, added, mask=inside)
    scaled = norm(added.to(tl.float32), scale, eps, H)
    tl.store(out + row * H + at, scaled.to(out.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: torch.Tensor, z: torch.Tensor, gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x + z [..., H] and its norm, scaled by gain [H]."""
    H = x.shape[-1]
    rows, others = x.reshape(-1, H), z.reshape(-1, H)
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    if rows.shape[0]:
        add_rms_norm_kernel[(rows.shape[0],)](
            rows,
            others,
            gain,
            total,
            out,
            eps,
            H,
            rows.stride(0),
            others.stride(0),
            **extents(H),
            **OVERLAPPED,
        )
    return total, out
