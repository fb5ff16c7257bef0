"""Plain torch form."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import require_that
from kernels.head_products import head_products


def linear_argmax(
    hidden: Tensor, head: Tensor, *, public_vocab: int, token_ids: Tensor | None
) -> Tensor:
    """See the contract."""
    if token_ids is None:
        return _first_largest(hidden, head[:public_vocab], None)
    public = token_ids < public_vocab
    require_that(bool(public.any()), "token_ids", f"one below {public_vocab}", "none")
    excluded = None if public.all() else ~public
    return token_ids[_first_largest(hidden, head, excluded)]


def _first_largest(hidden: Tensor, head: Tensor, excluded: Tensor | None) -> Tensor:
    logits = head_products(hidden, head).to(hidden.dtype)
    if excluded is not None:
        logits.masked_fill_(excluded, -torch.inf)
    # of equal maxima `max` returns the first, faster than `argmax` does
    return logits.max(dim=1).indices
