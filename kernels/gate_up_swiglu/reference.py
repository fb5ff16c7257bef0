"""Plain torch form; see the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.linear.reference import linear
from kernels.swiglu.reference import swiglu

if TYPE_CHECKING:
    import torch


def gate_up_swiglu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns SiLU of the first half of x [..., K] weight^T times the second half."""
    return swiglu(linear(x, weight))
