"""The best row of a head for each hidden vector.

Maths:
    z = head hidden, rounded to the dtype of `hidden`
    row = the lowest row with the largest z among those whose global id is below public_vocab
    id = token_ids[row], or the row itself without token_ids

Shapes:
    hidden [M, H]; head [rows, H]; token_ids [rows] int64
    Returns ids [M] int64.

Domain:
    At least one row has an id below public_vocab. Ties go to the lowest row, not to the lowest
    id: an indexed head lists frequent tokens first.

Numerics:
    FP32 sums, rounded once to the dtype of `hidden` before the comparison. A hidden vector that is
    not finite gives some valid id: the caller checks the vectors.

Effects:
    None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import require
from kernels.dispatch import select


def linear_argmax(
    hidden: Tensor, head: Tensor, *, public_vocab: int, token_ids: Tensor | None = None
) -> Tensor:
    """Returns the id of the best row; see the module's contract.

    Args:
        hidden: [M, H].
        head: [rows, H], the dtype of `hidden`.
        public_vocab: ids from here on are never returned.
        token_ids: [rows] int64 global id of each row of an indexed head.

    Returns:
        [M] int64 global ids.

    Raises:
        ValueError: an argument of another shape or dtype, or no row to choose from.
    """
    require("hidden", hidden, (None, head.shape[-1]))
    require("head", head, (None, hidden.shape[-1]), hidden.dtype)
    if token_ids is not None:
        require("token_ids", token_ids, (head.shape[0],), torch.int64)
    result: Tensor = select("linear_argmax", hidden).linear_argmax(
        hidden, head, public_vocab=public_vocab, token_ids=token_ids
    )
    return result
