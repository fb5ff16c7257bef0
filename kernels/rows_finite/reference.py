"""Plain torch form; see the contract."""

from __future__ import annotations

import torch
from torch import Tensor


def rows_finite(*parts: tuple[Tensor, Tensor]) -> Tensor:
    """See the contract."""
    return torch.stack([_finite(counts, values) for counts, values in parts]).all(dim=0)


def _finite(counts: Tensor, values: Tensor) -> Tensor:
    dead = torch.arange(values.shape[1], device=counts.device) >= counts.unsqueeze(1)
    return (torch.isfinite(values).all(dim=2) | dead).all(dim=1)
