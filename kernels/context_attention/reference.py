"""Plain torch form: row by row over the gathered pages."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.block_attention import attend_block


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
    out = torch.zeros(*query.shape[:2], query.shape[2] * query.shape[3], dtype=query.dtype)
    out = out.to(query.device)
    extents = torch.stack([coverage_first, frontiers, counts]).T.tolist()
    for row, (covered, frontier, count) in enumerate(extents):
        if count == 0:
            continue
        out[row, :count] = attend_block(
            query[row, :count],
            [_gather(key_pages, page_tables[row], covered, frontier), block_key[row, :count]],
            [_gather(value_pages, page_tables[row], covered, frontier), block_value[row, :count]],
            causal=causal,
        )
    return out


def _gather(pages: Tensor, table: Tensor, first: int, end: int) -> Tensor:
    """[end - first, Hkv, D] cells of the positions [first, end)."""
    page = pages.shape[1]
    first_page = first // page
    gathered = pages[table[first_page : -(-end // page)]].flatten(0, 1)
    return gathered[first - first_page * page : end - first_page * page]
