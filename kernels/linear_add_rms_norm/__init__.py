"""A product that leaves or enters the residual stream: added to it, and the sum normed.

Maths: s = r + x W^T;  y = gain * s / sqrt(mean(s^2) + eps), the mean over the last dimension.
Shapes: x [..., K], weight W [H, K], residual r [..., H], gain [H]; both results are shaped as r.
Domain: any number of rows; one dtype for x, weight and residual.
Numerics: bit for bit `kernels.add_rms_norm` of r and `kernels.linear`: the product is rounded once,
    then the sum, then its norm.
Effects: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.checks import require
from kernels.dispatch import select

if TYPE_CHECKING:
    import torch


def linear_add_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds x [..., K] times weight [H, K] transposed to the residual and norms the sum.

    Returns:
        The sum and its norm, scaled by gain [H].

    Raises:
        ValueError: the weight is not [H, K] of the dtype of x, the residual not [..., H] of that
            dtype, or the gain not [H].
    """
    H = residual.shape[-1]
    require("weight", weight, (H, x.shape[-1]), x.dtype)
    require("residual", residual, (*x.shape[:-1], H), x.dtype)
    require("gain", gain, (H,))
    result: tuple[torch.Tensor, torch.Tensor]
    result = select("linear_add_rms_norm", x).linear_add_rms_norm(x, weight, residual, gain, eps)
    return result
