"""Whether everything that a row of a batch relies on is finite.

Maths:
    finite[b] = all values[b, :counts[b]] are finite, for every part (counts, values)

Shapes:
    of each part: counts [B] int64, values [B, N, D]; N, D and the dtype are the part's own
    Returns finite [B] bool.

Domain:
    1 to 4 parts; values of 32 bits at most; 0 <= counts <= N. A row whose counts are all 0 is
    finite.

Numerics:
    Exact.

Effects:
    None. Values from a row's count on are not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import require, require_that
from kernels.dispatch import select

MOST_PARTS = 4


def rows_finite(*parts: tuple[Tensor, Tensor]) -> Tensor:
    """Looks for infinities and NaN; see the module's contract.

    Args:
        parts: counts [B] int64 and values [B, N, D] of each.

    Returns:
        [B] bool.

    Raises:
        ValueError: an argument of another shape or dtype, no part or too many.
    """
    require_that(0 < len(parts) <= MOST_PARTS, "parts", f"1..{MOST_PARTS}", len(parts))
    rows = parts[0][1].shape[0]
    for counts, values in parts:
        require("counts", counts, (rows,), torch.int64)
        require("values", values, (rows, None, None))
    result: Tensor = select("rows_finite", parts[0][1]).rows_finite(*parts)
    return result
