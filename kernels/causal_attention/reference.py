"""Plain torch form; see the contract.

Rows are taken one by one: their contexts differ in length, so a batch would copy and score every
row up to the longest, and a row's result would depend on its neighbours. Within a row all heads
and columns are one product.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kernels.gdn_transition import constant
from kernels.trees import members

QUERY_COLUMNS = 128  # a long prefill is scored this many columns at a time


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
    """Stores the live columns' keys and values, then attends causally."""
    B, W, Hq, D = query.shape
    page, Hkv = key_pages.shape[1:3]
    grouped = (B, W, Hkv, Hq // Hkv, D)
    # what is the same for all rows, dead columns included: those are not looked at again
    scaled = torch.mul(query.float(), constant(D**-0.5, query.device)).reshape(grouped)
    scaled = scaled.transpose(1, 2).contiguous()  # [B, Hkv, W, G, D]
    openness = gate.float().sigmoid().reshape(grouped)
    output = query.new_zeros(grouped)
    hidden = None if ancestors is None else ~members(ancestors).unsqueeze(2)  # [B, W, 1, W]
    for row, (frontier, count) in enumerate(zip(frontiers.tolist(), counts.tolist(), strict=True)):
        if count == 0:
            continue
        table = page_tables[row, : -(-(frontier + count) // page)]
        physical = table.tolist()
        _store(key_pages, physical, frontier, key[row, :count])
        _store(value_pages, physical, frontier, value[row, :count])
        keys = _stored(key_pages, physical, table)
        values = _stored(value_pages, physical, table)
        for first in range(0, count, QUERY_COLUMNS):
            end = min(first + QUERY_COLUMNS, count)
            attended = _attend(
                scaled[row, :, first:end],
                keys[: frontier + end],
                values[: frontier + end],
                _later(end - first, query.device) if hidden is None else hidden[row, :end, :, :end],
            )
            torch.mul(attended, openness[row, first:end], out=output[row, first:end])
    return output.flatten(2)


def _store(pages: torch.Tensor, table: list[int], frontier: int, columns: torch.Tensor) -> None:
    """Writes columns [n, Hkv, D] at positions frontier..frontier+n-1."""
    page = pages.shape[1]
    first, count = 0, columns.shape[0]
    while first < count:
        logical, offset = divmod(frontier + first, page)
        end = min(first + page - offset, count)
        pages[table[logical], offset : offset + end - first] = columns[first:end]
        first = end


def _stored(pages: torch.Tensor, physical: list[int], table: torch.Tensor) -> torch.Tensor:
    """A row's pages in order as FP32 [cells, Hkv, D], without a copy where they are one run."""
    first, count = physical[0], len(physical)
    if physical == list(range(first, first + count)):
        return pages[first : first + count].flatten(0, 1).float()
    return pages.index_select(0, table).flatten(0, 1).float()


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Softmax attention of the last n of the positions, over all others and some of themselves.

    Args:
        query: [Hkv, n, G, D] FP32, scaled, at the last n positions.
        keys: [positions, Hkv, D] FP32.
        values: [positions, Hkv, D] FP32.
        hidden: bool [n, 1, n], which of the last n positions (dimension 2) a query does not see.

    Returns:
        [n, Hkv, G, D] FP32.
    """
    Hkv, n, G, D = query.shape
    # the heads that share a key are further columns of one product
    scores = torch.bmm(query.reshape(Hkv, n * G, D), keys.permute(1, 2, 0))
    if n > 1:
        block = scores.view(Hkv, n, G, -1)[..., -n:]
        block.masked_fill_(hidden, float("-inf"))
    attended = torch.bmm(scores.softmax(-1), values.transpose(0, 1))
    return attended.view(Hkv, n, G, D).transpose(0, 1)


@lru_cache(maxsize=256)
def _later(n: int, device: torch.device) -> torch.Tensor:
    """True where a key of the block comes after a query of it: bool [n, 1, n]."""
    with torch.inference_mode(False):
        return torch.ones(n, n, dtype=torch.bool, device=device).triu_(1).unsqueeze(1)
