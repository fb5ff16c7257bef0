"""Plain torch form: row by row over views of the ring, so that dead cells are never read."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.block_attention import attend_block


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
    """See the contract."""
    out = torch.zeros(*query.shape[:2], query.shape[2] * query.shape[3], dtype=query.dtype)
    out = out.to(query.device)
    ring = key_ring.shape[1]
    extents = torch.stack([slots, coverage_first, frontiers, counts]).T.tolist()
    for row, (slot, covered, frontier, count) in enumerate(extents):
        if count == 0:
            continue
        # position F - window is a window away from column 0 already
        first = max(covered, frontier - window + 1)
        cells = _cells(first, frontier, ring)
        out[row, :count] = attend_block(
            query[row, :count],
            [*(key_ring[slot, cell] for cell in cells), block_key[row, :count]],
            [*(value_ring[slot, cell] for cell in cells), block_value[row, :count]],
            causal=causal,
            hidden_first=frontier - window + 1 - first,
            window=window,
        )
    return out


def _cells(first: int, end: int, ring: int) -> list[slice]:
    """Cells of the positions [first, end), at most `ring` of them, in order of position."""
    if first >= end:
        return []
    start, stop = first % ring, (end - 1) % ring + 1
    return [slice(start, stop)] if start < stop else [slice(start, ring), slice(0, stop)]
