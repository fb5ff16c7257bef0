"""Plain torch form; see the contract.

Rows are taken one by one: each replays its own number of columns, straight from its source slot
into its destination. All layers of a row step together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.gdn_transition import advance, columns, repeat_heads, unit

if TYPE_CHECKING:
    from kernels.gdn_verify import GdnRecord


def gdn_fold(
    records: GdnRecord,
    state: torch.Tensor,
    conv_history: torch.Tensor,
    source_slots: torch.Tensor,
    destination_slots: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Advances each row's state and history by its first counts[row] recorded columns."""
    Hv = state.shape[2]
    scratch = torch.empty_like(state[:, 0])
    moves = zip(source_slots.tolist(), destination_slots.tolist(), counts.tolist(), strict=True)
    for row, (source, destination, count) in enumerate(moves):
        if count == 0:
            continue
        g, beta = records.gate[:, row, :count].unbind(-1)
        key = repeat_heads(unit(records.key[:, row, :count].float()), Hv)
        block = columns(key, records.value[:, row, :count].float(), g.exp(), beta)
        current, result = state[:, source], state[:, destination]
        for column in block.each():
            current = advance(current, column, result, scratch)
        _slide(conv_history, source, destination, records.conv[:, row, :count])


def _slide(
    conv_history: torch.Tensor, source: int, destination: int, recorded: torch.Tensor
) -> None:
    """Leaves the last columns of (history, recorded [L, n, C]) in the destination's history."""
    kept = max(conv_history.shape[2] - recorded.shape[1], 0)
    history = conv_history[:, destination]
    if kept:
        # a copy first: in place, the ranges overlap
        history[:, :kept] = conv_history[:, source, -kept:].clone()
    history[:, kept:] = recorded[:, recorded.shape[1] + kept - conv_history.shape[2] :]
