"""Plain torch form; see the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    import torch


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies x [..., K] by weight [N, K] transposed."""
    result = F.linear(x, weight)
    return result if out is None else out.copy_(result)
