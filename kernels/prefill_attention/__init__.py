"""Causal softmax attention of many columns of one sequence over its pages, with an output gate.

Maths: the sequence holds positions [0, F) in its pages and brings T columns at F..F+T-1. Their keys
    and values are stored; then column i attends positions [0, F+i], as in
    `kernels.causal_attention`:
        s_p = D^-0.5 query_i . key_p,    y_i = softmax(s) values * sigmoid(gate_i).
    Query head h reads key and value head h // (Hq / Hkv).
Shapes: query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D], gate [T, Hq, D], key_pages and
    value_pages [pages, page, Hkv, D], page_table int64 [N], frontier an int64 scalar; the result is
    [T, Hq*D], heads in order.
Domain: T >= 1, all columns live. Position p lies in physical page page_table[p // page] at offset
    p % page; table entries from ceil((F+T)/page) on are never looked at. Query and key come normed
    and rotated. Inputs may be strided views; the pages are contiguous.
Numerics: FP32 scores, softmax, sums and gate, rounded once to the dtype of query; where query has
    16 bits, a weight of the softmax is rounded to the dtype of the values that it multiplies. A key
    or value is rounded to the dtype of its pages when stored, its own column included, and read
    back from there. Two ways of cutting a prompt into calls differ in rounding.
Effects: writes the T columns into the pages and nothing else. What lies in unused cells or in pages
    of others, NaN included, does not reach the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.checks import require, require_that
from kernels.dispatch import select

if TYPE_CHECKING:
    import torch


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    frontier: torch.Tensor,
) -> torch.Tensor:
    """Stores the columns' keys and values, then attends causally.

    Args:
        query: [T, Hq, D], normed and rotated.
        key: [T, Hkv, D], normed and rotated.
        value: [T, Hkv, D].
        gate: [T, Hq, D], before the sigmoid.
        key_pages: [pages, page, Hkv, D], written in place.
        value_pages: [pages, page, Hkv, D], written in place.
        page_table: int64 [N], physical page of each logical page.
        frontier: int64 scalar, F: positions already stored.

    Returns:
        [T, Hq*D] of the dtype of query.

    Raises:
        ValueError: a shape does not fit, there is no column, or Hq is no multiple of Hkv.
    """
    T, Hq, D = query.shape
    _, page, Hkv, _ = key_pages.shape
    require_that(T > 0, "query", "at least one column", T)
    require("key", key, (T, Hkv, D))
    require("value", value, (T, Hkv, D))
    require("gate", gate, (T, Hq, D))
    require("key_pages", key_pages, (None, page, Hkv, D))
    require("value_pages", value_pages, key_pages.shape)
    require("page_table", page_table, (None,))
    require("frontier", frontier, ())
    require_that(Hq % Hkv == 0, "query", f"heads in a multiple of {Hkv}", Hq)
    result: torch.Tensor = select("prefill_attention", query).prefill_attention(
        query, key, value, gate, key_pages, value_pages, page_table, frontier
    )
    return result
