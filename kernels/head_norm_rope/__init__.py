"""Normalisation of each head followed by rotary position embedding.

Maths: n = gain * x / sqrt(mean(x^2) + eps) over D. Of n, the first R = rotary_dim elements are
    rotated in split-half pairs (r, r + R/2), r = 0..R/2-1, by the angle position * theta^(-2r/R):
        y[r] = n[r] cos - n[r + R/2] sin,    y[r + R/2] = n[r + R/2] cos + n[r] sin;
    elements from R on pass through. With three position axes (temporal, height, width) and
    sections (s0, s1, s2), pair r takes its position from height if r % 3 == 1 and r < 3*s1, from
    width if r % 3 == 2 and r < 3*s2, else from temporal: interleaved, not in blocks.
Shapes: x [B, W, heads, D], gain [D] or a head's own [heads, D], positions int64 [B, W] or
    [3, B, W]; the result is shaped as x.
Domain: R even, 0 < R <= D; s0 + s1 + s2 = R/2, and sections are given whenever positions have
    three axes. With positions [B, W] all axes are equal and sections change nothing. x may be a
    strided view.
Numerics: FP32 throughout, rounded once to the dtype of x. Frequencies and angles are FP32, an
    angle being the FP32 product of a position and a frequency. The gain is FP32 or of x's dtype.
Effects: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.checks import require, require_that
from kernels.dispatch import select

if TYPE_CHECKING:
    import torch


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
    """Normalises every head of x [B, W, heads, D] over D and rotates its first elements.

    Args:
        x: heads before the norm.
        gain: [D], or [heads, D] where heads differ: what multiplies after the norm.
        positions: [B, W], or [3, B, W] for temporal, height and width.
        eps: added to the mean square.
        theta: base of the rotary frequencies.
        rotary_dim: R, how many leading elements of a head are rotated.
        sections: how the R/2 pairs are shared among the three axes.

    Raises:
        ValueError: a shape does not fit, R is odd or beyond D, or sections do not sum to R/2.
    """
    B, W, heads, D = x.shape
    require("gain", gain, (D,) if gain.ndim == 1 else (heads, D))
    require_that(
        rotary_dim % 2 == 0 and 0 < rotary_dim <= D, "rotary_dim", f"even, 2..{D}", rotary_dim
    )
    require("positions", positions, (B, W) if positions.ndim == 2 else (3, B, W))
    if sections is not None or positions.ndim == 3:
        pairs = rotary_dim // 2
        require_that(
            sections is not None and sum(sections) == pairs,
            "sections",
            f"three counts that sum to {pairs}",
            sections,
        )
    result: torch.Tensor = select("head_norm_rope", x).head_norm_rope(
        x, gain, positions, eps=eps, theta=theta, rotary_dim=rotary_dim, sections=sections
    )
    return result
