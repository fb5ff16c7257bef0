"""Triton form; see the contract.

Where `linear` would cut the weight over K, the runs' sums stay where they are, and the programs
that norm a row add them, in the same order: no program has a tile's runs to add up while the others
are done.
"""

import torch
import triton
import triton.language as tl

from kernels.add_rms_norm.kernel import add_rms_norm
from kernels.linear.kernel import product, runs
from kernels.overlap import OVERLAPPED, release, wait
from kernels.rms_norm.kernel import extents, norm

FEWEST = 33  # rows; fewer runs' sums are added faster by the last program of each tile


@triton.jit
def runs_norm_kernel(
    partial,
    residual,
    gain,
    total,
    out,
    eps,
    H,
    size,
    r_row,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row program_id(0): the sum of its runs and the residual, and its norm."""
    release()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < H
    scale = tl.load(gain + at, mask=inside, other=0.0)
    wait()
    added = tl.load(residual + row * r_row + at, mask=inside, other=0.0).to(tl.float32)
    product = tl.load(partial + row * H + at, mask=inside, other=0.0)
    for run in tl.static_range(1, SPLIT):
        product += tl.load(partial + run * size + row * H + at, mask=inside, other=0.0)
    dtype: tl.constexpr = total.dtype.element_ty
    added = (added + product.to(dtype).to(tl.float32)).to(dtype)
    tl.store(total + row * H + at, added, mask=inside)
    scaled = norm(added.to(tl.float32), scale, eps, H)
    tl.store(out + row * H + at, scaled.to(dtype), mask=inside)


def linear_add_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds x times weight transposed to the residual; returns the sum and its norm."""
    H = weight.shape[0]
    rows = residual.reshape(-1, H)
    partial = runs(x, weight) if rows.shape[0] >= FEWEST else None
    if partial is None:
        return add_rms_norm(residual, product(x, weight, x.dtype), gain, eps)
    total, out = (torch.empty(rows.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    runs_norm_kernel[(rows.shape[0],)](
        partial,
        rows,
        gain,
        total,
        out,
        eps,
        H,
        partial.stride(0),
        rows.stride(0),
        SPLIT=partial.shape[0],
        **extents(H),
        **OVERLAPPED,
    )
    return total.view(residual.shape), out.view(residual.shape)
