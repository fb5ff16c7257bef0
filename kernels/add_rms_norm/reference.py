"""Plain torch form; see the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.rms_norm.reference import rms_norm

if TYPE_CHECKING:
    import torch


def add_rms_norm(
    x: torch.Tensor, z: torch.Tensor, gain: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x + z and its norm, scaled by gain [H]."""
    total = x + z
    return total, rms_norm(total, gain, eps)
