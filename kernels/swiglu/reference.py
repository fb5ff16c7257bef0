"""Plain torch form; see the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

if TYPE_CHECKING:
    import torch


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns SiLU(first half) * second half of gate_up [..., 2*I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.float()).mul_(up).to(gate_up.dtype)
