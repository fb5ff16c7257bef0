"""A residual sum and its root-mean-square norm.

Maths: s = x + z;  y = gain * s / sqrt(mean(s^2) + eps), the mean over the last dimension.
Shapes: x [..., H], z [..., H], gain [H]; both results are shaped as x.
Domain: H >= 1; x and z of one dtype. The gain is that of `kernels.rms_norm`.
Numerics: FP32 throughout. s is rounded once to the dtype of x, and y is of s as rounded, itself
    rounded once: bit for bit what the sum and `kernels.rms_norm` give one after the other.
Effects: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.checks import require
from kernels.dispatch import select

if TYPE_CHECKING:
    import torch


def add_rms_norm(
    x: torch.Tensor, z: torch.Tensor, gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds z to x [..., H], normalises the sum's last dimension and scales it by gain [H].

    Returns:
        The sum and its norm.

    Raises:
        ValueError: z is not shaped as x or of another dtype, or the gain is not [H].
    """
    require("z", z, x.shape, x.dtype)
    require("gain", gain, (x.shape[-1],))
    result: tuple[torch.Tensor, torch.Tensor]
    result = select("add_rms_norm", x).add_rms_norm(x, z, gain, eps)
    return result
