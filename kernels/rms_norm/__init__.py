"""Root-mean-square normalisation with a gain.

Maths: y = gain * x / sqrt(mean(x^2) + eps), the mean over the last dimension.
Shapes: x [..., H], gain [H]; the result is shaped as x.
Domain: H >= 1. The gain is what multiplies: a norm whose stored weight w is centred on zero passes
    1 + w, formed in FP32 when the weights are read.
Numerics: FP32 throughout, rounded once to the dtype of x. The gain is FP32 or of the dtype of x.
Effects: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.checks import require
from kernels.dispatch import select

if TYPE_CHECKING:
    import torch


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises the last dimension of x [..., H] and scales it by gain [H].

    Raises:
        ValueError: the gain is not [H].
    """
    require("gain", gain, (x.shape[-1],))
    result: torch.Tensor = select("rms_norm", x).rms_norm(x, gain, eps)
    return result
