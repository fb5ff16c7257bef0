"""Plain torch form; see the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from kernels.rms_norm.reference import inverse_rms

if TYPE_CHECKING:
    import torch


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, gain: torch.Tensor, eps: float
) -> torch.Tensor:
    """Normalises x [..., D], scales it by gain [D] and by SiLU(gate [..., D])."""
    wide = x.float()
    return (wide * inverse_rms(wide, eps)).mul_(gain).mul_(F.silu(gate.float())).to(x.dtype)
