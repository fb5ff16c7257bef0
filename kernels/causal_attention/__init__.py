"""Causal softmax attention over a paged cache that it first extends, with an output gate.

Maths: row b holds positions [0, F) in its pages, F = frontiers[b], and brings n = counts[b] live
    columns at positions F..F+n-1. Their keys and values are stored; then column i attends
    positions [0, F+i]:
        s_p = D^-0.5 query_i . key_p,    y_i = softmax(s) values * sigmoid(gate_i).
    Query head h reads key and value head h // (Hq / Hkv).
    With ancestors the block is a tree (`kernels.trees`): column i attends [0, F) and, of the
    columns, those in its mask; their keys and values are stored at F..F+n-1 all the same.
Shapes: query [B, W, Hq, D], key [B, W, Hkv, D], value [B, W, Hkv, D], gate [B, W, Hq, D],
    key_pages and value_pages [pages, page, Hkv, D], page_tables int64 [B, N], frontiers and
    counts int64 [B], ancestors int32 [B, W]; the result is [B, W, Hq*D], heads in order.
Domain: 0 <= n <= W; any W at B = 1, W <= 32 otherwise, and with ancestors. A live
    column's mask has itself, the anchor, and no later column; a row has at most 8 columns that no
    other continues. Position p lies in physical page page_tables[b, p // page] at offset p % page;
    table entries from ceil((F+n)/page) on are never looked at. No two live cells coincide. Query
    and key come normed and rotated. Inputs may be strided views; the pages are contiguous.
Numerics: FP32 scores, softmax, sums and gate, rounded once to the dtype of query. A key or value
    is rounded to the dtype of its pages when stored, its own column included, and read back from
    there. The masks of a chain give the result without masks, bit for bit. In a tree the columns of
    a path have the results of a chain of them alone: the kernel's bit for bit, the reference's to
    the rounding of sums.
Effects: writes the n live columns of each row into the pages and nothing else. Dead columns
    (i >= n) store nothing and give exact zeros; whatever lies in unused cells, dead columns or
    pages of others, NaN included, does not reach a result.
"""

from __future__ import annotations

import torch

from kernels.checks import require, require_that
from kernels.dispatch import select


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_tables: torch.Tensor,
    frontiers: torch.Tensor,
    counts: torch.Tensor,
    ancestors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stores the live columns' keys and values, then attends causally.

    Args:
        query: [B, W, Hq, D], normed and rotated.
        key: [B, W, Hkv, D], normed and rotated.
        value: [B, W, Hkv, D].
        gate: [B, W, Hq, D], before the sigmoid.
        key_pages: [pages, page, Hkv, D], written in place.
        value_pages: [pages, page, Hkv, D], written in place.
        page_tables: int64 [B, N], physical page of each logical page.
        frontiers: int64 [B], positions already stored.
        counts: int64 [B], live columns.
        ancestors: int32 [B, W], bit j of entry i: column i sees column j. None: all up to itself.

    Returns:
        [B, W, Hq*D] of the dtype of query; dead columns are zero.

    Raises:
        ValueError: a shape does not fit, Hq is no multiple of Hkv, or W > 32 with B > 1
            or ancestors.
    """
    B, W, Hq, D = query.shape
    _, page, Hkv, _ = key_pages.shape
    require("key", key, (B, W, Hkv, D))
    require("value", value, (B, W, Hkv, D))
    require("gate", gate, (B, W, Hq, D))
    require("key_pages", key_pages, (None, page, Hkv, D))
    require("value_pages", value_pages, key_pages.shape)
    require("page_tables", page_tables, (B, None))
    require("frontiers", frontiers, (B,))
    require("counts", counts, (B,))
    require_that(Hq % Hkv == 0, "query", f"heads in a multiple of {Hkv}", Hq)
    require_that(B == 1 or W <= 32, "query", "at most 32 columns for several rows", W)
    if ancestors is not None:
        require("ancestors", ancestors, (B, W), torch.int32)
        require_that(W <= 32, "query", "at most 32 columns of a tree", W)
    result: torch.Tensor = select("causal_attention", query).causal_attention(
        query, key, value, gate, key_pages, value_pages, page_tables, frontiers, counts, ancestors
    )
    return result
