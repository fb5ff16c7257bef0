"""Gated delta rule over a block of columns: outputs and records, no state written.

Maths: h_t are the raw columns, the three of the history first. For a live column i of a row:
    x = SiLU(sum over j = 0..3 of conv_weight[:, j] * h_(i-3+j)), tap 3 being column i itself;
    x = (q | k | v), q and k of Hk heads of Dk, v of Hv heads of Dv; value head h uses q and k of
    head h // (Hv / Hk);
    g = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b);
    q^ = Dk^-0.5 q / sqrt(sum q^2 + 1e-6), k^ = k / sqrt(sum k^2 + 1e-6);
    with the state M [Dk, Dv], beginning at the slot's:
    M <- exp(g) M,  u = beta (v - M^T k^),  M <- M + k^ u^T,  output = M^T q^.
    With ancestors the block is a tree (`kernels.trees`): for column i the columns before it are its
    ancestors, in order. h_(i-1), h_(i-2), h_(i-3) are the nearest three, the history's last before
    the anchor, and M is the state after its parent.
Shapes: C = 2*Hk*Dk + Hv*Dv. projected [B, W, C], a and b [B, W, Hv], conv_weight [C, 4], a_log
    and dt_bias [Hv], state FP32 [slots, Hv, Dk, Dv], conv_history [slots, 3, C] (raw columns,
    oldest first), slots and counts int64 [B], ancestors int32 [B, W], record as GdnRecord; the
    result is [B, W, Hv, Dv].
Domain: 0 <= counts <= W, W in 1..32; every slot in range, and several rows may read one. Hk
    divides Hv. A live column's mask has itself, the anchor, and no later column; a row has at most
    8 columns that no other continues. Inputs may be strided views with a contiguous last dimension.
Numerics: FP32, state included. x is rounded once to the dtype of projected and used as rounded;
    g and beta stay FP32; the output is rounded once to the dtype of projected. Column by column
    through `kernels.gdn_transition.advance`, as the fold does: for every N the folded state
    equals, bit for bit, the state that this block had after N columns. In a tree the columns of a
    path have the outputs and records of a chain of them alone, bit for bit.
Effects: writes the live columns of the record: the raw column, k and v before any norm, {g, beta}.
    The rest of the record, the state and the history stay as they are. Dead columns
    (i >= counts[b]) give exact zeros, whatever they hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.checks import require
from kernels.dispatch import select


class GdnRecord(NamedTuple):
    """What a fold needs to replay columns; any number of equal leading dimensions is allowed."""

    conv: torch.Tensor  # [B, W, C], activation dtype: raw columns, as they enter the history
    key: torch.Tensor  # [B, W, Hk, Dk], activation dtype: after conv and SiLU, before the norm
    value: torch.Tensor  # [B, W, Hv, Dv], activation dtype: after conv and SiLU
    gate: torch.Tensor  # [B, W, Hv, 2], FP32: {g, beta}


def gdn_verify(
    projected: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    conv_history: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    record: GdnRecord,
    ancestors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs the live columns of each row from its slot's state and records them.

    Args:
        projected: [B, W, C], raw q | k | v columns.
        a: [B, W, Hv], decay inputs.
        b: [B, W, Hv], write strengths before the sigmoid.
        conv_weight: [C, 4]; fastest when its transpose is the contiguous one.
        a_log: [Hv] FP32.
        dt_bias: [Hv] FP32.
        state: [slots, Hv, Dk, Dv] FP32, read only.
        conv_history: [slots, 3, C], read only.
        slots: int64 [B], where each row begins.
        counts: int64 [B], live columns.
        record: planes [B, W, ...], live columns written in place.
        ancestors: int32 [B, W], bit j of entry i: column i comes after column j. None: a chain.

    Returns:
        [B, W, Hv, Dv] of the dtype of projected; dead columns are zero.

    Raises:
        ValueError: a shape does not fit, or state or gate plane are not FP32.
    """
    B, W, C = projected.shape
    _, Hv, Dk, Dv = state.shape
    Hk = (C - Hv * Dv) // (2 * Dk)
    require("projected", projected, (B, W, 2 * Hk * Dk + Hv * Dv))
    require("a", a, (B, W, Hv))
    require("b", b, (B, W, Hv))
    require("conv_weight", conv_weight, (C, 4))
    require("state", state, (None, Hv, Dk, Dv), torch.float32)
    require("conv_history", conv_history, (state.shape[0], 3, C))
    require("counts", counts, (B,))
    require("slots", slots, (B,))
    require("record.conv", record.conv, (B, W, C), projected.dtype)
    require("record.key", record.key, (B, W, Hk, Dk), projected.dtype)
    require("record.value", record.value, (B, W, Hv, Dv), projected.dtype)
    require("record.gate", record.gate, (B, W, Hv, 2), torch.float32)
    if ancestors is not None:
        require("ancestors", ancestors, (B, W), torch.int32)
    result: torch.Tensor = select("gdn_verify", projected).gdn_verify(
        projected,
        a,
        b,
        conv_weight,
        a_log,
        dt_bias,
        state,
        conv_history,
        slots,
        counts,
        record,
        ancestors,
    )
    return result
