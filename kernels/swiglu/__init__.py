"""The gated activation of a feed-forward block.

Maths: y = g * sigmoid(g) * u, where g is the first half of the last dimension and u the second.
Shapes: gate_up [..., 2*I]; the result is [..., I].
Domain: an even last dimension.
Numerics: FP32, rounded once to the dtype of gate_up.
Effects: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.checks import require_that
from kernels.dispatch import select

if TYPE_CHECKING:
    import torch


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns SiLU(first half) * second half of gate_up [..., 2*I].

    Raises:
        ValueError: the last dimension is odd.
    """
    width = gate_up.shape[-1]
    require_that(width % 2 == 0, "gate_up", "an even last dimension", width)
    result: torch.Tensor = select("swiglu", gate_up).swiglu(gate_up)
    return result
