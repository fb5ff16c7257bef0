"""Plain torch form; see the contract."""

from __future__ import annotations

from functools import lru_cache

import torch

from kernels.rms_norm.reference import inverse_rms


def head_norm_rope(
    x: torch.Tensor,
    gain: torch.Tensor,
    positions: torch.Tensor,
    *,
    eps: float,
    theta: float,
    rotary_dim: int,
    sections: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """Normalises heads x [B, W, heads, D] over D and rotates their first rotary_dim elements."""
    wide = x.float()
    normed = (wide * inverse_rms(wide, eps)).mul_(gain)
    cos, sin = rotation(positions, theta, rotary_dim, sections)
    pairs = torch.unflatten(normed[..., :rotary_dim], -1, (2, rotary_dim // 2))
    # (first, second) -> (first cos - second sin, second cos + first sin), the rest untouched
    swapped = pairs.flip(-2)
    pairs.mul_(cos).addcmul_(swapped, sin)
    return normed.to(x.dtype)


def rotation(
    positions: torch.Tensor,
    theta: float,
    rotary_dim: int,
    sections: tuple[int, int, int] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines [B, W, 1, 1, R/2] and sines [B, W, 1, 2, R/2] of the angles, FP32.

    The sines carry the sign of their half: minus for the first, plus for the second.
    """
    rates = frequencies(theta, rotary_dim, positions.device)
    if positions.ndim == 3:
        axes = _pair_axes(sections, rotary_dim // 2, positions.device)
        places = positions.movedim(0, -1)[..., axes]  # [B, W, R/2]
    else:
        places = positions.unsqueeze(-1)
    angles = (places * rates)[..., None, None, :]
    sin = angles.sin()
    return angles.cos(), torch.cat((-sin, sin), dim=-2)


@lru_cache(maxsize=16)
def frequencies(theta: float, rotary_dim: int, device: torch.device) -> torch.Tensor:
    """theta^(-2r/R) for r = 0..R/2-1, FP32 at every step."""
    with torch.inference_mode(False):
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
        return (1.0 / theta**exponents).to(device)


@lru_cache(maxsize=16)
def _pair_axes(
    sections: tuple[int, int, int] | None, pairs: int, device: torch.device
) -> torch.Tensor:
    """Which of (temporal, height, width) each pair takes its position from, int64 [R/2]."""
    axes = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, 3 * sections[axis] if sections else 0, 3):
            axes[pair] = axis
    with torch.inference_mode(False):
        return torch.tensor(axes, device=device)
