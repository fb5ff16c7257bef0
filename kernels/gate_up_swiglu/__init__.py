"""The first half of a dense feed-forward block: a product, and the activation that it ends in.

Maths: y = SiLU(g) * u, where g = x G^T and u = x U^T, G being the first half of the weight's rows
    and U the second.
Shapes: x [..., K], weight [2*I, K]; the result is [..., I].
Domain: any number of rows; one dtype for x and weight.
Numerics: as `kernels.swiglu` of `kernels.linear`: FP32 accumulation, g and u rounded once to the
    dtype of x, the result rounded once.
Effects: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.checks import require, require_that
from kernels.dispatch import select

if TYPE_CHECKING:
    import torch


def gate_up_swiglu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns SiLU of the first half of x [..., K] weight^T times the second half.

    Raises:
        ValueError: the weight is not [2*I, K] of the dtype of x.
    """
    require("weight", weight, (None, x.shape[-1]), x.dtype)
    rows = weight.shape[0]
    require_that(rows % 2 == 0, "weight", "an even number of rows", rows)
    result: torch.Tensor = select("gate_up_swiglu", x).gate_up_swiglu(x, weight)
    return result
