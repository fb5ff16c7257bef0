"""The k best rows of a head for each hidden vector.

Maths:
    z = head hidden
    choose the k rows with the largest z whose global id is below public_vocab, best first,
    exact ties to the lower global id; id = token_ids[row], or the row itself without token_ids
    score = z * multiplier, then softcap * tanh(score / softcap) where softcap > 0

Shapes:
    hidden [M, H]; head [rows, H]; token_ids [rows] int64
    Returns scores [M, k] FP32 and ids [M, k] int64.

Domain:
    At least k rows have an id below public_vocab; token_ids are distinct; multiplier > 0, so that
    scaling and capping do not change the order.

Numerics:
    FP32 from the products to the scores: z is not rounded to the dtype of `hidden`. Rows that are
    not finite rank first and are returned as they are: the caller checks.

Effects:
    None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import require, require_that
from kernels.dispatch import select


def linear_topk(
    hidden: Tensor,
    head: Tensor,
    k: int,
    *,
    public_vocab: int,
    token_ids: Tensor | None = None,
    multiplier: float = 1.0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns the k best scores and their global ids; see the module's contract.

    Args:
        hidden: [M, H].
        head: [rows, H], the dtype of `hidden`.
        k: how many.
        public_vocab: ids from here on are never returned.
        token_ids: [rows] int64 global id of each row of an indexed head.
        multiplier: factor of the scores.
        softcap: bound of the scores; 0 for none.

    Returns:
        scores [M, k] FP32 and ids [M, k] int64, best first.

    Raises:
        ValueError: an argument of another shape or dtype, or fewer than k rows to choose from.
    """
    require("hidden", hidden, (None, head.shape[-1]))
    require("head", head, (None, hidden.shape[-1]), hidden.dtype)
    if token_ids is not None:
        require("token_ids", token_ids, (head.shape[0],), torch.int64)
    require_that(multiplier > 0.0, "multiplier", "a positive factor", multiplier)
    result: tuple[Tensor, Tensor] = select("linear_topk", hidden).linear_topk(
        hidden,
        head,
        k,
        public_vocab=public_vocab,
        token_ids=token_ids,
        multiplier=multiplier,
        softcap=softcap,
    )
    return result
