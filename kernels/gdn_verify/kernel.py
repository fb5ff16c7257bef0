"""Triton form; see the contract.

One launch convolves and records all columns at once; a second goes through them, one program a row,
value head and block of the state's columns, and reads them from the record.

In a tree there is one program more for each further path from the anchor to a column that no other
continues: all go through their own columns from the row's state, and of those that several pass the
first gives the output. What is recorded of a column does not depend on the path.

`transition` is the one step of a state, here and in the fold. Both load what goes into it in the
same shapes, run with the same number of warps, and are compiled without fused multiply-adds, so
that the compiler gives both the same arithmetic: the tests compare the bits.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.overlap import OVERLAPPED, enter, release, wait
from kernels.trees import MOST_COLUMNS, MOST_PATHS

if TYPE_CHECKING:
    from kernels.gdn_verify import GdnRecord

VALUES = 16  # of a head's state columns, each a sum of its own, in one program
CHANNELS = 256  # convolved by one program
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
_BITS = tl.constexpr(MOST_COLUMNS)


@triton.jit
def unit(x):
    """x / sqrt(sum x^2 + 1e-6)."""
    # one division for all elements: a correctly rounded one each costs as much as the update
    return x * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x) + 1e-6))


@triton.jit
def ready(key, value, g, beta):
    """What `transition` takes of a column: raw key [Dk] and value [Dv], g and beta; all FP32."""
    key = unit(key.to(tl.float32))
    return key, key * beta, value.to(tl.float32) * beta, tl.exp(g)


@triton.jit
def transition(state, key, scaled_key, scaled_value, decay):
    """The state [Dk, Dv] after one column, which is `ready`."""
    state = state * decay
    recalled = tl.sum(state * scaled_key[:, None], axis=0)
    return tl.fma(
        tl.broadcast_to(key[:, None], state.shape),
        tl.broadcast_to((scaled_value - recalled)[None, :], state.shape),
        state,
    )


@triton.jit
def places_of(mask):
    """For each of 32 columns its place among the members of a mask, or -1."""
    bit = (mask >> tl.arange(0, _BITS)) & 1
    return tl.where(bit != 0, tl.cumsum(bit, axis=0) - 1, -1)


@triton.jit
def column_at(places, place):
    """The column at a place; 0 where there is none."""
    return tl.sum(tl.where(places == place, tl.arange(0, _BITS), 0), axis=0)


@triton.jit
def path_of(ancestors, count, path):
    """Places of the columns of a row's path of this number, and which no earlier path has."""
    column = tl.arange(0, _BITS)
    masks = tl.load(ancestors + column, mask=column < count, other=0)
    sees = (masks[:, None] >> column[None, :]) & 1
    # a path ends at a column that none sees but itself
    last = (column < count) & (tl.sum(sees, axis=0) == 1)
    number = tl.cumsum(last.to(tl.int32), axis=0) - 1
    places = places_of(tl.sum(tl.where(last & (number == path), masks, 0), axis=0))
    earlier = (last & (number < path)).to(tl.int32)
    return places, (places >= 0) & (tl.max(sees * earlier[:, None], axis=0) == 0)


@triton.jit
def record_kernel(  # noqa: PLR0915
    projected,
    a,
    b,
    conv_weight,
    a_log,
    dt_bias,
    conv_history,
    slots,
    counts,
    ancestors,
    query,
    record_conv,
    record_key,
    record_value,
    record_gate,
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
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Channels of part program_id(1) of column program_id(0), counted over all rows.

    KEYS and VALUES are the channels of all heads; the first part has the gates too.
    """
    enter()
    C: tl.constexpr = 2 * KEYS + VALUES
    row = (tl.program_id(0) // width).to(tl.int64)
    i = tl.program_id(0) % width
    if i < tl.load(counts + row):
        dtype: tl.constexpr = record_key.dtype.element_ty
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < C
        past = conv_history + tl.load(slots + row) * 3 * C + channel
        mixed = tl.zeros((CHANNELS,), dtype=tl.float32)
        if ancestors is None:
            depth = i
        else:
            places = places_of(tl.load(ancestors + tl.program_id(0)))
            depth = tl.max(places, axis=0)
        for tap in tl.static_range(4):
            j = depth + tap - 3
            at = tl.maximum(j, 0)
            if ancestors is not None:
                at = column_at(places, at)
            older = tl.load(past + (j + 3) * C, mask=channel < tl.where(j < 0, C, 0), other=0.0)
            raw = projected + row * p_row + at * p_column + channel
            raw = tl.load(raw, mask=channel < tl.where(j < 0, 0, C), other=0.0)
            raw = tl.where(j < 0, older.to(dtype), raw)
            weight = tl.load(conv_weight + channel * w_channel + tap * w_tap, mask=inside, other=0)
            mixed += raw.to(tl.float32) * weight.to(tl.float32)
            if tap == 3:
                recorded = record_conv + row * conv_row + i * conv_column
                tl.store(recorded + channel, raw, mask=inside)
        mixed = (mixed / (1.0 + tl.exp(-mixed))).to(dtype)
        cell = tl.program_id(0).to(tl.int64) * KEYS
        tl.store(query + cell + channel, mixed, mask=channel < KEYS)
        recorded = record_key + row * key_row + i * key_column - KEYS
        is_key = (channel >= KEYS) & (channel < 2 * KEYS)
        tl.store(recorded + channel, mixed, mask=is_key)
        recorded = record_value + row * value_row + i * value_column - 2 * KEYS
        tl.store(recorded + channel, mixed, mask=(channel >= 2 * KEYS) & inside)
        if tl.program_id(1) == 0:
            head = tl.arange(0, HEADS_BLOCK)
            is_head = head < HEADS
            x = tl.load(a + row * a_row + i * a_column + head, mask=is_head, other=0.0)
            opening = tl.load(b + row * b_row + i * b_column + head, mask=is_head, other=0.0)
            rate = tl.exp(tl.load(a_log + head, mask=is_head, other=0.0).to(tl.float32))
            bias = tl.load(dt_bias + head, mask=is_head, other=0.0).to(tl.float32)
            # softplus(x) = log(1 + y), y = exp(x); the quotient undoes the rounding of 1 + y
            x = x.to(tl.float32) + bias
            y = tl.exp(tl.minimum(x, 20.0))
            softplus = tl.log(1.0 + y) * tl.div_rn(y, (1.0 + y) - 1.0)
            softplus = tl.where(y + 1.0 == 1.0, y, softplus)
            g = -rate * tl.where(x > 20.0, x, softplus)
            beta = 1.0 / (1.0 + tl.exp(-opening.to(tl.float32)))
            pair = record_gate + row * gate_row + i * gate_column + 2 * head
            tl.store(pair, g, mask=is_head)
            tl.store(pair + 1, beta, mask=is_head)


@triton.jit
def column_of(keys, values, gates, dk, dv, live, DK: tl.constexpr, DV: tl.constexpr):
    """Key, value, g and beta of a column, zeros unless it is live; pointers have dk and dv in."""
    key = tl.load(keys, mask=dk < tl.where(live, DK, 0), other=0.0)
    value = tl.load(values, mask=dv < tl.where(live, DV, 0), other=0.0)
    return key, value, tl.load(gates, mask=live, other=0.0), tl.load(gates + 1, mask=live, other=0)


@triton.jit
def gdn_verify_kernel(
    state,
    slots,
    counts,
    ancestors,
    query,
    record_key,
    record_value,
    record_gate,
    out,
    width,
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
    """Block program_id(0) % blocks of value head .. % HV of row .., on its path program_id(1)."""
    wait()
    BLOCKS: tl.constexpr = (DV + VALUES - 1) // VALUES
    head = tl.program_id(0) // BLOCKS % HV
    row = (tl.program_id(0) // (BLOCKS * HV)).to(tl.int64)
    block = tl.program_id(0) % BLOCKS
    shared = head // (HV // HK)
    count = tl.minimum(tl.load(counts + row), width).to(tl.int32)
    dk = tl.arange(0, KEYS)
    dv = block * VALUES + tl.arange(0, VALUES)
    is_key, is_value = dk < DK, dv < DV
    # columns of the path, and the second of them
    length, second = count, 1
    if ancestors is not None:
        places, owned = path_of(ancestors + row * width, count, tl.program_id(1))
        length, second = tl.max(places, axis=0) + 1, column_at(places, 1)
        is_value = dv < tl.where(length > 0, DV, 0)
    is_cell = is_key[:, None] & is_value[None, :]
    source = state + (tl.load(slots + row) * HV + head) * DK * DV
    current = tl.load(source + dk[:, None] * DV + dv[None, :], mask=is_cell, other=0.0)

    queries = query + (row * width * HK + shared) * DK + dk
    keys = record_key + row * key_row + shared * DK + dk
    values = record_value + row * value_row + head * DV + dv
    gates = record_gate + row * gate_row + 2 * head
    outs = out + (row * width * HV + head) * DV + dv
    release()
    # while one column is computed the next is made ready, and the one after it is asked for
    key, value, g, beta = column_of(keys, values, gates, dk, dv, length > 0, DK, DV)
    asked = tl.load(queries, mask=dk < tl.where(length > 0, DK, 0), other=0.0)
    column = ready(key, value, g, beta)
    asked = unit(asked.to(tl.float32)) * (DK**-0.5)
    following = column_of(
        keys + second * key_column,
        values + second * value_column,
        gates + second * gate_column,
        dk,
        dv,
        length > 1,
        DK,
        DV,
    )
    next_asked = tl.load(
        queries + second * HK * DK, mask=dk < tl.where(length > 1, DK, 0), other=0.0
    )
    for i in range(length):
        live = i + 2 < length
        if ancestors is None:
            third, at, is_mine = i + 2, i, is_value
        else:
            third, at = column_at(places, i + 2), column_at(places, i)
            mine = tl.sum(((places == i) & owned).to(tl.int32), axis=0)
            is_mine = dv < tl.where(mine > 0, DV, 0)
        later = column_of(
            keys + third * key_column,
            values + third * value_column,
            gates + third * gate_column,
            dk,
            dv,
            live,
            DK,
            DV,
        )
        later_asked = tl.load(queries + third * HK * DK, mask=dk < tl.where(live, DK, 0), other=0.0)
        current = transition(current, *column)
        read = tl.sum(current * asked[:, None], axis=0)
        tl.store(outs + at * HV * DV, read.to(out.dtype.element_ty), mask=is_mine)
        column = ready(*following)
        asked = unit(next_asked.to(tl.float32)) * (DK**-0.5)
        following, next_asked = later, later_asked
    for i in range(tl.where(tl.program_id(1) == 0, count, width), width):
        nothing = tl.zeros((VALUES,), dtype=tl.float32)
        tl.store(outs + i * HV * DV, nothing.to(out.dtype.element_ty), mask=dv < DV)


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
    ancestors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs the live columns of each row from its slot's state and records them."""
    B, W, C = projected.shape
    _, HV, DK, DV = state.shape
    HK = (C - HV * DV) // (2 * DK)
    out = projected.new_empty(B, W, HV, DV)
    query = projected.new_empty(B, W, HK, DK)
    channels = min(CHANNELS, triton.next_power_of_2(C))
    if ancestors is not None:
        ancestors = ancestors.contiguous()
    strides = [stride for plane in record for stride in plane.stride()[:2]]
    record_kernel[(B * W, triton.cdiv(C, channels))](
        projected,
        a,
        b,
        conv_weight,
        a_log,
        dt_bias,
        conv_history.contiguous(),
        slots,
        counts,
        ancestors,
        query,
        *record,
        W,
        *projected.stride()[:2],
        *a.stride()[:2],
        *b.stride()[:2],
        *conv_weight.stride(),
        *strides,
        KEYS=HK * DK,
        VALUES=HV * DV,
        HEADS=HV,
        HEADS_BLOCK=triton.next_power_of_2(HV),
        CHANNELS=channels,
        num_warps=2,
        **OVERLAPPED,
    )
    values = min(VALUES, triton.next_power_of_2(DV))
    paths = 1 if ancestors is None else MOST_PATHS
    gdn_verify_kernel[(B * HV * triton.cdiv(DV, values), paths)](
        state.contiguous(),
        slots,
        counts,
        ancestors,
        query,
        record.key,
        record.value,
        record.gate,
        out,
        W,
        *strides[2:],
        HK=HK,
        HV=HV,
        DK=DK,
        DV=DV,
        KEYS=triton.next_power_of_2(DK),
        VALUES=values,
        **OPTIONS,
        **OVERLAPPED,
    )
    return out
