"""A matrix product with a weight stored [out, in], without a bias.

Maths: y[..., n] = sum over k of x[..., k] * weight[n, k].
Shapes: x [..., K], weight [N, K]; the result is [..., N].
Domain: any number of rows; one dtype for x and weight, either of which may be a strided view. On
    the CPU a weight that is the transpose of a contiguous [K, N] is the fastest: up to twice, for
    eight rows and a large N.
Numerics: FP32 accumulation, rounded once to the dtype of x.
Effects: writes `out` where it is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.checks import require, require_that
from kernels.dispatch import select

if TYPE_CHECKING:
    import torch


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies the last dimension of x [..., K] by weight [N, K] transposed.

    Args:
        x: [..., K].
        weight: [N, K].
        out: [..., N], contiguous, where to put the result; None for a new tensor.

    Raises:
        ValueError: the weight is not [N, K] of the dtype of x, or out not what the result is.
    """
    require("weight", weight, (None, x.shape[-1]), x.dtype)
    if out is not None:
        require("out", out, (*x.shape[:-1], weight.shape[0]), x.dtype)
        require_that(out.is_contiguous(), "out", "contiguous memory", out.stride())
    result: torch.Tensor = select("linear", x).linear(x, weight, out)
    return result
