"""Gated delta rule over many columns of one sequence, continuing and replacing a slot's state.

Maths: the recurrence of `kernels.gdn_verify`, in its chunk form. With G_i the sum of g over the
    columns of a chunk up to i, M_0 the state before it, and K^, Q^ its normed rows:
        A_ij = beta_i exp(G_i - G_j) (k^_i . k^_j) for j < i, else 0;
        (I + A) U = diag(beta) (V - diag(exp G) K^ M_0);
        output_i = exp(G_i) M_0^T q^_i + sum over j <= i of exp(G_i - G_j) (k^_j . q^_i) u_j;
        M_next = exp(G_last) M_0 + sum over j of exp(G_last - G_j) k^_j u_j^T.
Shapes: C = 2*Hk*Dk + Hv*Dv. projected [T, C], a and b [T, Hv], conv_weight [C, 4], a_log and
    dt_bias [Hv], state FP32 [slots, Hv, Dk, Dv], conv_history [slots, 3, C], slot an int64
    scalar; the result is [T, Hv, Dv].
Domain: T >= 1, all columns live. A fresh sequence has zeros in its slot.
Numerics: as `kernels.gdn_verify`, but summed in chunks of 64 columns, the sums G kept so that
    their differences are exact to FP32: equal to column by column up to FP32 rounding, and not bit
    for bit; neither are two ways of cutting a prompt into calls. With a projected of 16 bits a form
    may also round to its dtype what enters a product of matrices; the state is summed in FP32.
Effects: writes the slot's state and its history (the last 3 raw columns). Other slots stay.
"""

from __future__ import annotations

import torch

from kernels.checks import require, require_that
from kernels.dispatch import select


def gdn_prefill(
    projected: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    conv_history: torch.Tensor,
    slot: torch.Tensor,
) -> torch.Tensor:
    """Runs T columns from a slot's state and leaves the slot as they leave it.

    Args:
        projected: [T, C], raw q | k | v columns.
        a: [T, Hv], decay inputs.
        b: [T, Hv], write strengths before the sigmoid.
        conv_weight: [C, 4].
        a_log: [Hv] FP32.
        dt_bias: [Hv] FP32.
        state: [slots, Hv, Dk, Dv] FP32, the slot's written in place.
        conv_history: [slots, 3, C], the slot's written in place.
        slot: int64 scalar.

    Returns:
        [T, Hv, Dv] of the dtype of projected.

    Raises:
        ValueError: a shape does not fit, the state is not FP32, or there is no column.
    """
    T, C = projected.shape
    _, Hv, Dk, Dv = state.shape
    Hk = (C - Hv * Dv) // (2 * Dk)
    require_that(T > 0, "projected", "at least one column", T)
    require("projected", projected, (T, 2 * Hk * Dk + Hv * Dv))
    require("a", a, (T, Hv))
    require("b", b, (T, Hv))
    require("conv_weight", conv_weight, (C, 4))
    require("state", state, state.shape, torch.float32)
    require("conv_history", conv_history, (state.shape[0], 3, C), projected.dtype)
    require("slot", slot, ())
    result: torch.Tensor = select("gdn_prefill", projected).gdn_prefill(
        projected, a, b, conv_weight, a_log, dt_bias, state, conv_history, slot
    )
    return result
