"""Products of hidden vectors with a head, shared by the ops that rank its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

# rows of a head that is not FP32 are widened so many at a time
_ROWS = 1 << 14


def head_products(hidden: Tensor, head: Tensor) -> Tensor:
    """Returns hidden [M, H] times head [rows, H] as FP32 [M, rows], not rounded on the way."""
    if head.dtype is torch.float32:
        return hidden @ head.T
    wide = hidden.float()
    pieces = [
        wide @ head[first : first + _ROWS].float().T for first in range(0, head.shape[0], _ROWS)
    ]
    return torch.cat(pieces, dim=1)
