"""Plain torch form; see the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    import torch


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiplies x [..., K] by weight [N, K] transposed."""
    return F.linear(x, weight)
