"""Plain torch form; see the contract."""

from __future__ import annotations

import torch

from kernels.gdn_transition import constant


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns 1 / sqrt(mean(x^2) + eps) over the last dimension of FP32 x [..., H], as [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(constant(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises x [..., H] and scales it by gain [H]."""
    wide = x.float()
    return (wide * inverse_rms(wide, eps)).mul_(gain).to(x.dtype)
