"""Attention of one row's block over its context and itself, shared by the draft attention ops."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def attend_block(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    causal: bool,
    hidden_first: int = -(1 << 62),
    window: int = 1 << 62,
) -> Tensor:
    """Attends n block columns to context keys and to the n block keys.

    Args:
        query: [n, Hq, D].
        keys: pieces [*, Hkv, D] in order of position; the last piece is the block's n keys.
        values: pieces like `keys`.
        causal: whether block columns see only themselves and earlier ones.
        hidden_first: query i does not see the first `hidden_first + i` context keys; below zero
            it hides none until i reaches past it.
        window: block keys at this distance or beyond are not seen.

    Returns:
        [n, Hq*D] FP32.
    """
    count = query.shape[0]
    key = torch.cat([piece.float() for piece in keys])
    value = torch.cat([piece.float() for piece in values])
    context = key.shape[0] - count
    masked = (causal and count > 1) or hidden_first + count > 1 or window < count
    out = scaled_dot_product_attention(
        query.float().transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        # in a long context neighbouring rounds have the same mask
        attn_mask=_mask(count, context, causal, hidden_first, window, query.device)
        if masked
        else None,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1).flatten(1)


@lru_cache(maxsize=64)
def _mask(
    count: int, context: int, causal: bool, hidden_first: int, window: int, device: torch.device
) -> Tensor:
    """Returns what `attend_block` adds to the scores [n, context + n]: 0 or -inf."""
    # made outside inference mode, so that a kept one may take part in any later computation
    with torch.inference_mode(False):
        query = torch.arange(count, device=device).unsqueeze(1)
        block = torch.arange(count, device=device)
        hidden = torch.cat(
            [
                torch.arange(context, device=device) < hidden_first + query,
                ((block - query).abs() >= window) | ((block > query) & causal),
            ],
            dim=1,
        )
        return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
