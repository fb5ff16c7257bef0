"""Root-mean-square normalisation with a gain and a SiLU gate.

Maths: y = gain * x / sqrt(mean(x^2) + eps) * gate * sigmoid(gate), the mean over the last
    dimension: normalise first, gate after.
Shapes: x [..., D], gate [..., D], gain [D]; the result is shaped as x.
Domain: D >= 1; gate has the shape of x and may be a strided view.
Numerics: FP32 throughout, rounded once to the dtype of x. The gain is FP32 or of the dtype of x.
Effects: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.checks import require
from kernels.dispatch import select

if TYPE_CHECKING:
    import torch


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, gain: torch.Tensor, eps: float
) -> torch.Tensor:
    """Normalises the last dimension of x [..., D], scales it by gain [D] and SiLU(gate [..., D]).

    Raises:
        ValueError: gate is not shaped as x, or the gain is not [D].
    """
    require("gate", gate, x.shape)
    require("gain", gain, (x.shape[-1],))
    result: torch.Tensor = select("gated_rms_norm", x).gated_rms_norm(x, gate, gain, eps)
    return result
