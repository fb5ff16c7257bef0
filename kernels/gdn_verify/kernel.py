"""Triton form; see the contract. One program a row, value head and block of the state's columns.

`transition` is the one step of a state, here and in the fold. Both load what goes into it in the
same shapes, run with the same number of warps, and are compiled without fused multiply-adds, so
that the compiler gives both the same arithmetic: the tests compare the bits.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from kernels.gdn_verify import GdnRecord

VALUES = 16  # of a head's state columns, each a sum of its own, in one program
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


@triton.jit
def unit(x):
    """x / sqrt(sum x^2 + 1e-6)."""
    return tl.div_rn(x, tl.sqrt_rn(tl.sum(x * x) + 1e-6))


@triton.jit
def transition(state, key, value, g, beta):
    """The state [Dk, Dv] after one column: key [Dk] before its norm, value [Dv], all FP32."""
    key = unit(key)
    state = state * tl.exp(g)
    recalled = tl.sum(state * (key * beta)[:, None], axis=0)
    return state + key[:, None] * (value * beta - recalled)[None, :]


@triton.jit
def _mix(first, second, third, raw, taps, tap_stride, inside):
    """The convolution's column before it is rounded: SiLU of four raw columns under four taps."""
    mixed = first * tl.load(taps, mask=inside, other=0.0).to(tl.float32)
    mixed += second * tl.load(taps + tap_stride, mask=inside, other=0.0).to(tl.float32)
    mixed += third * tl.load(taps + 2 * tap_stride, mask=inside, other=0.0).to(tl.float32)
    mixed += raw * tl.load(taps + 3 * tap_stride, mask=inside, other=0.0).to(tl.float32)
    return mixed / (1.0 + tl.exp(-mixed))


@triton.jit
def gdn_verify_kernel(  # noqa: PLR0915
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
    record_conv,
    record_key,
    record_value,
    record_gate,
    out,
    width,
    p_row,
    p_column,
    a_row,
    a_column,
    b_row,
    b_column,
    w_channel,
    w_tap,
    conv_row,
    conv_column,
    key_row,
    key_column,
    value_row,
    value_column,
    gate_row,
    gate_column,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Block program_id(0) % blocks of value head .. % HV of row .. of the batch."""
    BLOCKS: tl.constexpr = (DV + VALUES - 1) // VALUES
    C: tl.constexpr = 2 * HK * DK + HV * DV
    head = tl.program_id(0) // BLOCKS % HV
    row = (tl.program_id(0) // (BLOCKS * HV)).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    shared = head // (HV // HK)
    slot = tl.load(slots + row)
    count = tl.minimum(tl.load(counts + row), width).to(tl.int32)

    dk = tl.arange(0, KEYS)
    dv = block * VALUES + tl.arange(0, VALUES)
    is_key, is_value = dk < DK, dv < DV
    query_channel = shared * DK + dk
    key_channel = HK * DK + query_channel
    value_channel = 2 * HK * DK + head * DV + dv
    # of several programs with the same key or head, one records it
    records_key = dk < tl.where((head % (HV // HK) == 0) & (block == 0), DK, 0)

    past = conv_history + slot * 3 * C
    q0 = tl.load(past + query_channel, mask=is_key, other=0.0).to(tl.float32)
    q1 = tl.load(past + C + query_channel, mask=is_key, other=0.0).to(tl.float32)
    q2 = tl.load(past + 2 * C + query_channel, mask=is_key, other=0.0).to(tl.float32)
    k0 = tl.load(past + key_channel, mask=is_key, other=0.0).to(tl.float32)
    k1 = tl.load(past + C + key_channel, mask=is_key, other=0.0).to(tl.float32)
    k2 = tl.load(past + 2 * C + key_channel, mask=is_key, other=0.0).to(tl.float32)
    v0 = tl.load(past + value_channel, mask=is_value, other=0.0).to(tl.float32)
    v1 = tl.load(past + C + value_channel, mask=is_value, other=0.0).to(tl.float32)
    v2 = tl.load(past + 2 * C + value_channel, mask=is_value, other=0.0).to(tl.float32)

    cells = dk[:, None] * DV + dv[None, :]
    is_cell = is_key[:, None] & is_value[None, :]
    current = tl.load(state + (slot * HV + head) * DK * DV + cells, mask=is_cell, other=0.0)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)

    raw = projected + row * p_row
    # a column's inputs are asked for while the one before it is computed
    live = count > 0
    live_key, live_value = dk < tl.where(live, DK, 0), dv < tl.where(live, DV, 0)
    q3 = tl.load(raw + query_channel, mask=live_key, other=0.0)
    k3 = tl.load(raw + key_channel, mask=live_key, other=0.0)
    v3 = tl.load(raw + value_channel, mask=live_value, other=0.0)
    a3 = tl.load(a + row * a_row + head, mask=live, other=0.0).to(tl.float32)
    b3 = tl.load(b + row * b_row + head, mask=live, other=0.0).to(tl.float32)
    for i in range(count):
        following = i + 1 < count
        live_key = dk < tl.where(following, DK, 0)
        live_value = dv < tl.where(following, DV, 0)
        raw += p_column
        q4 = tl.load(raw + query_channel, mask=live_key, other=0.0)
        k4 = tl.load(raw + key_channel, mask=live_key, other=0.0)
        v4 = tl.load(raw + value_channel, mask=live_value, other=0.0)
        next_a = a + row * a_row + (i + 1) * a_column + head
        next_b = b + row * b_row + (i + 1) * b_column + head
        a4 = tl.load(next_a, mask=following, other=0.0).to(tl.float32)
        b4 = tl.load(next_b, mask=following, other=0.0).to(tl.float32)

        dtype: tl.constexpr = out.dtype.element_ty
        taps = conv_weight + query_channel * w_channel
        query = _mix(q0, q1, q2, q3.to(tl.float32), taps, w_tap, is_key).to(dtype)
        taps = conv_weight + key_channel * w_channel
        key = _mix(k0, k1, k2, k3.to(tl.float32), taps, w_tap, is_key).to(dtype)
        taps = conv_weight + value_channel * w_channel
        value = _mix(v0, v1, v2, v3.to(tl.float32), taps, w_tap, is_value).to(dtype)
        # softplus(x) = log(1 + y), y = exp(x); the quotient undoes the rounding of 1 + y
        x = a3 + bias
        y = tl.exp(tl.minimum(x, 20.0))
        softplus = tl.where(y + 1.0 == 1.0, y, tl.log(1.0 + y) * tl.div_rn(y, (1.0 + y) - 1.0))
        g = rate * tl.where(x > 20.0, x, softplus)
        beta = 1.0 / (1.0 + tl.exp(-b3))

        conv = record_conv + row * conv_row + i * conv_column
        tl.store(conv + query_channel, q3, mask=records_key)
        tl.store(conv + key_channel, k3, mask=records_key)
        tl.store(conv + value_channel, v3, mask=is_value)
        recorded = record_key + row * key_row + i * key_column + shared * DK
        tl.store(recorded + dk, key, mask=records_key)
        recorded = record_value + row * value_row + i * value_column + head * DV
        tl.store(recorded + dv, value, mask=is_value)
        recorded = record_gate + row * gate_row + i * gate_column + 2 * head
        tl.store(recorded, g, mask=block == 0)
        tl.store(recorded + 1, beta, mask=block == 0)

        current = transition(current, key.to(tl.float32), value.to(tl.float32), g, beta)
        query = unit(query.to(tl.float32)) * (DK**-0.5)
        read = tl.sum(current * query[:, None], axis=0)
        cell = ((row * width + i) * HV + head) * DV + dv
        tl.store(out + cell, read.to(dtype), mask=is_value)

        q0, q1, q2, q3 = q1, q2, q3.to(tl.float32), q4
        k0, k1, k2, k3 = k1, k2, k3.to(tl.float32), k4
        v0, v1, v2, v3 = v1, v2, v3.to(tl.float32), v4
        a3, b3 = a4, b4
    for i in range(count, width):
        cell = ((row * width + i) * HV + head) * DV + dv
        nothing = tl.zeros((VALUES,), dtype=tl.float32)
        tl.store(out + cell, nothing.to(out.dtype.element_ty), mask=is_value)


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
    record: "GdnRecord",
) -> torch.Tensor:
    """Runs the live columns of each row from its slot's state and records them."""
    B, W, C = projected.shape
    _, HV, DK, DV = state.shape
    HK = (C - HV * DV) // (2 * DK)
    out = torch.empty((B, W, HV, DV), dtype=projected.dtype, device=projected.device)
    values = min(VALUES, triton.next_power_of_2(DV))
    gdn_verify_kernel[(B * HV * triton.cdiv(DV, values),)](
        projected,
        a,
        b,
        conv_weight,
        a_log,
        dt_bias,
        state.contiguous(),
        conv_history.contiguous(),
        slots,
        counts,
        *record,
        out,
        W,
        *projected.stride()[:2],
        *a.stride()[:2],
        *b.stride()[:2],
        *conv_weight.stride(),
        *(stride for plane in record for stride in plane.stride()[:2]),
        HK=HK,
        HV=HV,
        DK=DK,
        DV=DV,
        KEYS=triton.next_power_of_2(DK),
        VALUES=values,
        **OPTIONS,
    )
    return out
