"""A matrix product with a weight stored [out, in], without a bias.

Maths: y[..., n] = sum over k of x[..., k] * weight[n, k].
Shapes: x [..., K], weight [N, K]; the result is [..., N].
Domain: any number of rows; one dtype for x and weight, either of which may be a strided view. On
    the CPU a weight that is the transpose of a contiguous [K, N] is the fastest: up to twice, for
    eight rows and a large N.
Numerics: FP32 accumulation, rounded once to the dtype of x.
Effects: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.checks import require
from kernels.dispatch import select

if TYPE_CHECKING:
    import torch


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiplies the last dimension of x [..., K] by weight [N, K] transposed.

    Raises:
        ValueError: the weight is not [N, K] of the dtype of x.
    """
    require("weight", weight, (None, x.shape[-1]), x.dtype)
    result: torch.Tensor = select("linear", x).linear(x, weight)
    return result
