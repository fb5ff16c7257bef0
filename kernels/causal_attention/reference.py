"""Plain torch form; see the contract.

Rows are taken one by one: their contexts differ in length, so a batch would copy and score every
row up to the longest, and a row's result would depend on its neighbours. Within a row all heads
and columns are one product.
"""

from __future__ import annotations

import torch

from kernels.gdn_transition import constant

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
) -> torch.Tensor:
    """Stores the live columns' keys and values, then attends causally."""
    B, W, Hq, D = query.shape
    page = key_pages.shape[1]
    output = query.new_zeros(B, W, Hq * D)
    rows = list(enumerate(zip(frontiers.tolist(), counts.tolist(), strict=True)))
    tables = {
        row: page_tables[row, : -(-(frontier + count) // page)].tolist()
        for row, (frontier, count) in rows
        if count
    }
    for row, table in tables.items():
        frontier, count = rows[row][1]
        _store(key_pages, table, frontier, key[row, :count])
        _store(value_pages, table, frontier, value[row, :count])
        keys = _stored(key_pages, table, frontier + count)
        values = _stored(value_pages, table, frontier + count)
        for first in range(0, count, QUERY_COLUMNS):
            end = min(first + QUERY_COLUMNS, count)
            attended = _attend(
                query[row, first:end], keys[: frontier + end], values[: frontier + end]
            )
            gated = attended.mul_(gate[row, first:end].float().sigmoid())
            output[row, first:end] = gated.flatten(1)
    return output


def _store(pages: torch.Tensor, table: list[int], frontier: int, columns: torch.Tensor) -> None:
    """Writes columns [n, Hkv, D] at positions frontier..frontier+n-1."""
    page = pages.shape[1]
    first, count = 0, columns.shape[0]
    while first < count:
        logical, offset = divmod(frontier + first, page)
        end = min(first + page - offset, count)
        pages[table[logical], offset : offset + end - first] = columns[first:end]
        first = end


def _stored(pages: torch.Tensor, table: list[int], end: int) -> torch.Tensor:
    """Positions [0, end) of a row as FP32 [end, Hkv, D], without a copy where pages are a run."""
    if table == list(range(table[0], table[0] + len(table))):
        run = pages[table[0] : table[0] + len(table)]
    else:
        run = pages[torch.tensor(table, device=pages.device)]
    return run.flatten(0, 1)[:end].float()


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal softmax attention of the last n of the positions.

    Args:
        query: [n, Hq, D], at the last n positions.
        keys: [positions, Hkv, D] FP32.
        values: [positions, Hkv, D] FP32.

    Returns:
        [n, Hq, D] FP32.
    """
    n, Hq, D = query.shape
    Hkv = keys.shape[1]
    # the heads that share a key are further columns of one product
    grouped = query.float().view(n, Hkv, Hq // Hkv, D).transpose(0, 1)  # [Hkv, n, G, D]
    scaled = (grouped * constant(D**-0.5, query.device)).reshape(Hkv, -1, D)
    scores = scaled @ keys.permute(1, 2, 0)  # [Hkv, n*G, positions]
    if n > 1:
        block = scores.view(Hkv, n, Hq // Hkv, -1)[..., -n:]
        block.masked_fill_(_later(n, query.device), float("-inf"))
    attended = scores.softmax(-1) @ values.transpose(0, 1)
    return attended.view(Hkv, n, Hq // Hkv, D).transpose(0, 1).reshape(n, Hq, D)


def _later(n: int, device: torch.device) -> torch.Tensor:
    """True where a key of the block comes after a query of it: bool [n, 1, n]."""
    return torch.ones(n, n, dtype=torch.bool, device=device).triu_(1).unsqueeze(1)
