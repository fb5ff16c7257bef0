"""Plain torch form."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import require_that
from kernels.head_products import head_products
from kernels.ordering import top_ranks


def linear_topk(
    hidden: Tensor,
    head: Tensor,
    k: int,
    *,
    public_vocab: int,
    token_ids: Tensor | None,
    multiplier: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    if token_ids is None:
        head = head[:public_vocab]
        choices = head.shape[0]
        scores = head_products(hidden, head)
    else:
        public = token_ids < public_vocab
        choices = int(public.sum())
        scores = head_products(hidden, head)
        if choices < head.shape[0]:
            scores.masked_fill_(~public, -torch.inf)
    require_that(choices >= k, "head", f"at least {k} public rows", choices)
    best, ids = top_ranks(scores, k, token_ids)
    if token_ids is not None:
        ids = token_ids[ids]
    if multiplier != 1.0:
        best = best * multiplier
    if softcap > 0.0:
        best = softcap * torch.tanh(best / softcap)
    return best, ids
