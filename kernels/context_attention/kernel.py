"""Triton form; see the contract. The kernels are those of `sliding_window_attention`."""

from __future__ import annotations

from torch import Tensor

from kernels.sliding_window_attention.kernel import attend

_EVERYTHING = 1 << 30


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
    """See the contract."""
    return attend(
        query,
        block_key,
        block_value,
        key_pages,
        value_pages,
        page_tables,
        coverage_first,
        frontiers,
        counts,
        window=_EVERYTHING,
        causal=causal,
        context=page_tables.shape[1] * key_pages.shape[1],
    )
