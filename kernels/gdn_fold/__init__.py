"""Replays recorded columns into gated delta rule states and conv histories.

Maths: for a row with source s, destination d and N = counts[row] > 0, in every layer: beginning
    at state[s], the first N recorded columns in order through
    M <- exp(g) M,  u = beta (v - M^T k^),  M <- M + k^ u^T,  k^ = k / sqrt(sum k^2 + 1e-6);
    the result becomes state[d], and the last 3 columns of (history[s] followed by the first N
    recorded raw columns) become history[d].
Shapes: records as GdnRecord with a leading L: conv [L, B, W, C], key [L, B, W, Hk, Dk], value
    [L, B, W, Hv, Dv], gate FP32 [L, B, W, Hv, 2]; state FP32 [L, slots, Hv, Dk, Dv], conv_history
    [L, slots, 3, C]; source_slots, destination_slots, counts int64 [B]. W here is the width the
    records were written at.
Domain: 0 <= counts <= W. Destinations of rows with N > 0 are distinct, and none of them is the
    source of another such row; a row may fold in place.
Numerics: FP32, column by column through `kernels.gdn_transition.advance`: state[d] equals, bit for
    bit, the state that the verify block which wrote the records had after N columns.
Effects: writes state[d] and history[d] of rows with N > 0. A row with N = 0 is a strict no-op:
    nothing of it is read or written, whatever its slots say. Columns from N on are never read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.checks import require
from kernels.dispatch import select

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
    """Advances each row's state and history by its first counts[row] recorded columns.

    Args:
        records: planes [L, B, W, ...] as verify wrote them.
        state: [L, slots, Hv, Dk, Dv] FP32, written in place.
        conv_history: [L, slots, 3, C], written in place.
        source_slots: int64 [B], where each row begins.
        destination_slots: int64 [B], where each row's result goes.
        counts: int64 [B], recorded columns to adopt.

    Raises:
        ValueError: a shape does not fit, or state or gate plane are not FP32.
    """
    L, slots, Hv, Dk, Dv = state.shape
    _, B, W, C = records.conv.shape
    Hk = (C - Hv * Dv) // (2 * Dk)
    require("records.conv", records.conv, (L, B, W, 2 * Hk * Dk + Hv * Dv), conv_history.dtype)
    require("records.key", records.key, (L, B, W, Hk, Dk))
    require("records.value", records.value, (L, B, W, Hv, Dv))
    require("records.gate", records.gate, (L, B, W, Hv, 2), torch.float32)
    require("state", state, state.shape, torch.float32)
    require("conv_history", conv_history, (L, slots, 3, C))
    require("source_slots", source_slots, (B,))
    require("destination_slots", destination_slots, (B,))
    require("counts", counts, (B,))
    select("gdn_fold", state).gdn_fold(
        records, state, conv_history, source_slots, destination_slots, counts
    )
