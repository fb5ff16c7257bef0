"""Plain torch form; see the contract.

Rows are taken one by one: each replays its own number of columns, straight from its source slot
into its destination. All layers of a row step together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.gdn_transition import Columns, advance, columns, unit

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
    L, slots, Hv, Dk, Dv = state.shape
    Hk = records.key.shape[3]
    grouped = state.view(L, slots, Hk, Hv // Hk, Dk, Dv)
    moves = zip(source_slots.tolist(), destination_slots.tolist(), counts.tolist(), strict=True)
    for row, (source, destination, count) in enumerate(moves):
        if count == 0:
            continue
        g, beta = records.gate[:, row, :count].unbind(-1)
        key = unit(records.key[:, row, :count].float())
        block = columns(key, records.value[:, row, :count].float(), g.exp(), beta)
        current, result = grouped[:, source], grouped[:, destination]
        for column in zip(*(plane.unbind(1) for plane in block), strict=True):
            current = advance(current, Columns(*column), out=result)
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
