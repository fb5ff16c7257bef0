"""Attention of a block over a cyclic context of S positions and over the block itself.

Maths:
    Query i of a row sits at position F + i. Its keys are
        context   the positions [max(coverage_first, F - S), F), cell p mod S of the row's ring
        block     columns j < count, at F + j; with `causal` only j <= i
    and of those the ones with |p_key - p_query| < window.
        out_i = softmax(D**-0.5 * query_i . keys) values
    Query head h uses KV head h // (Hq / Hkv).

Shapes:
    query [B, W, Hq, D]; block_key, block_value [B, W, Hkv, D], K already normalised and rotated
    key_ring, value_ring [slots, S, Hkv, D]
    slots, coverage_first, frontiers, counts [B] int64
    Returns [B, W, Hq*D] in the dtype of `query`.

Domain:
    1 <= window <= S; 0 <= count <= W; Hq a multiple of Hkv. F and coverage_first are >= 0;
    coverage_first may lie beyond F - S, and at F there is no context.

Numerics:
    FP32 scores, softmax and sums, rounded once to the output.

Effects:
    None. Columns >= count are not read and return exact zero. Ring cells outside the context
    interval are not read, whatever they hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import require, require_that
from kernels.dispatch import select


def sliding_window_attention(
    query: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    key_ring: Tensor,
    value_ring: Tensor,
    slots: Tensor,
    coverage_first: Tensor,
    frontiers: Tensor,
    counts: Tensor,
    *,
    window: int,
    causal: bool,
) -> Tensor:
    """Attends a block to its ring and to itself; see the module's contract.

    Args:
        query: [B, W, Hq, D].
        block_key: [B, W, Hkv, D].
        block_value: [B, W, Hkv, D].
        key_ring: [slots, S, Hkv, D].
        value_ring: [slots, S, Hkv, D].
        slots: [B] int64, each row's ring.
        coverage_first: [B] int64, first position whose context exists.
        frontiers: [B] int64, F: position of column 0.
        counts: [B] int64, live columns.
        window: distances below it are visible.
        causal: whether block columns see only themselves and earlier ones.

    Returns:
        [B, W, Hq*D] like `query`.

    Raises:
        ValueError: an argument of another shape or dtype.
    """
    rows, width, heads, head_dim = query.shape
    ring = key_ring.shape[1]
    require("block_key", block_key, (rows, width, None, head_dim))
    require("block_value", block_value, block_key.shape)
    key_heads = block_key.shape[2]
    require("key_ring", key_ring, (None, ring, key_heads, head_dim))
    require("value_ring", value_ring, key_ring.shape)
    for name, value in (
        ("slots", slots),
        ("coverage_first", coverage_first),
        ("frontiers", frontiers),
        ("counts", counts),
    ):
        require(name, value, (rows,), torch.int64)
    require_that(heads % key_heads == 0, "query", f"a multiple of {key_heads} heads", heads)
    require_that(1 <= window <= ring, "window", f"1..{ring}", window)
    result: Tensor = select("sliding_window_attention", query).sliding_window_attention(
        query,
        block_key,
        block_value,
        key_ring,
        value_ring,
        slots,
        coverage_first,
        frontiers,
        counts,
        window=window,
        causal=causal,
    )
    return result
