"""Attention of a block over a paged context and over the block itself, without a window.

Maths:
    Query i of a row sits at position F + i. Its keys are
        context   the positions [coverage_first, F); position p lies in page
                  page_tables[b, p // page] at offset p mod page
        block     columns j < count, at F + j; with `causal` only j <= i
        out_i = softmax(D**-0.5 * query_i . keys) values
    Query head h uses KV head h // (Hq / Hkv).

Shapes:
    query [B, W, Hq, D]; block_key, block_value [B, W, Hkv, D], K already normalised and rotated
    key_pages, value_pages [pages, page, Hkv, D]; page_tables [B, N] int64
    coverage_first, frontiers, counts [B] int64
    Returns [B, W, Hq*D] in the dtype of `query`.

Domain:
    0 <= coverage_first <= F <= N * page; 0 <= count <= W; Hq a multiple of Hkv. Table entries
    wholly outside the context may be anything.

Numerics:
    FP32 scores, softmax and sums, rounded once to the output.

Effects:
    None. Columns >= count are not read and return exact zero. Page cells outside the context do
    not reach the result, whatever they hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import require, require_that
from kernels.dispatch import select


def context_attention(
    query: Tensor,
    block_key: Tensor,
    block_value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    page_tables: Tensor,
    coverage_first: Tensor,
    frontiers: Tensor,
    counts: Tensor,
    *,
    causal: bool,
) -> Tensor:
    """Attends a block to its paged context and to itself; see the module's contract.

    Args:
        query: [B, W, Hq, D].
        block_key: [B, W, Hkv, D].
        block_value: [B, W, Hkv, D].
        key_pages: [pages, page, Hkv, D].
        value_pages: [pages, page, Hkv, D].
        page_tables: [B, N] int64 page of each `page` consecutive positions.
        coverage_first: [B] int64, first position whose context exists.
        frontiers: [B] int64, F: position of column 0.
        counts: [B] int64, live columns.
        causal: whether block columns see only themselves and earlier ones.

    Returns:
        [B, W, Hq*D] like `query`.

    Raises:
        ValueError: an argument of another shape or dtype.
    """
    rows, width, heads, head_dim = query.shape
    require("block_key", block_key, (rows, width, None, head_dim))
    require("block_value", block_value, block_key.shape)
    key_heads = block_key.shape[2]
    require("key_pages", key_pages, (None, None, key_heads, head_dim))
    require("value_pages", value_pages, key_pages.shape)
    require("page_tables", page_tables, (rows, None), torch.int64)
    for name, value in (
        ("coverage_first", coverage_first),
        ("frontiers", frontiers),
        ("counts", counts),
    ):
        require(name, value, (rows,), torch.int64)
    require_that(heads % key_heads == 0, "query", f"a multiple of {key_heads} heads", heads)
    result: Tensor = select("context_attention", query).context_attention(
        query,
        block_key,
        block_value,
        key_pages,
        value_pages,
        page_tables,
        coverage_first,
        frontiers,
        counts,
        causal=causal,
    )
    return result
