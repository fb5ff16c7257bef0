"""Pieces that target and drafts share: norms, rotary positions, the feed-forward network."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .shapes import EPS, THETA


class PlainNorm(nn.Module):
    """RMS norm with weight w, in float32."""

    def __init__(self, width: int) -> None:
        """Starts with unit gain."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Returns float32 [..., width]."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), EPS)


class CentredNorm(nn.Module):
    """RMS norm with weight 1 + w, in float32."""

    def __init__(self, width: int) -> None:
        """Starts with unit gain."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Returns float32 [..., width]."""
        return functional.rms_norm(x.float(), self.weight.shape, 1 + self.weight.float(), EPS)


class FeedForward(nn.Module):
    """SwiGLU without biases."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        """Makes the three matrices."""
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., hidden]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, positions: Tensor, width: int) -> Tensor:
    """Rotates the first `width` channels by position, split-half; the others pass through.

    x [..., heads, D], positions [...] with the same leading extents; returns x's dtype.
    """
    order = torch.arange(width // 2, device=x.device, dtype=torch.float32)
    angles = positions.float()[..., None, None] * THETA ** (-2 * order / width)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :width].float().chunk(2, -1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*(part.to(x.dtype) for part in turned), x[..., width:]), -1)


def spread(matrix: Tensor, gain: float) -> None:
    """Draws a matrix [out, in] with standard deviation gain / sqrt(in)."""
    nn.init.normal_(matrix, std=gain / math.sqrt(matrix.shape[-1]))
