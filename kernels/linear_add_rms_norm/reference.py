"""Plain torch form; see the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.add_rms_norm.reference import add_rms_norm
from kernels.linear.reference import linear

if TYPE_CHECKING:
    import torch


def linear_add_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds x times weight transposed to the residual; returns the sum and its norm."""
    return add_rms_norm(residual, linear(x, weight), gain, eps)
