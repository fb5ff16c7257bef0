"""Triton form; see the contract.

One launch convolves and records all columns at once, and leaves queries and keys at unit length
beside the record; a second goes through the columns, one program a row, value head and block of the
state's columns.

In a tree there is one program more for each further path from the anchor to a column that no other
continues: all go through their own columns from the row's state, and of those that several pass the
first gives the output. What is recorded of a column does not depend on the path.

A program holds its block of the state in four parts, of dk = t * (KEYS / T) + part * R + r for
t and r in [T, R]: sums over keys are chains of fused multiply-adds over the parts, then sums within
a thread, then sums over the T groups of threads. `transition` is the one step of a state, here and
in the fold. Both run with the same number of warps and are compiled without any multiply-add but
those written as such, so that the compiler gives both the same arithmetic, and the fold sums the
square of a key in the layout in which it was summed here: the tests compare the bits.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.overlap import OVERLAPPED, enter, release, wait
from kernels.tree_paths import column_at, path_of, places_of
from kernels.trees import MOST_PATHS

if TYPE_CHECKING:
    from kernels.gdn_verify import GdnRecord

VALUES = 16  # of a head's state columns, each a sum of its own, in one program
HEADS = 2  # convolved by one program, a warp each
OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}


@triton.jit
def inverse_norm(square):
    """1 / sqrt(sum + 1e-6): one division for all elements of a vector."""
    return tl.div_rn(1.0, tl.sqrt_rn(square + 1e-6))


@triton.jit
def _against(part, vector, total):
    return tl.fma(part, tl.broadcast_to(vector[:, :, None], part.shape), total)


@triton.jit
def over_keys(state, vector):
    """The sum over keys of the state [parts of T, R, VALUES] times a vector [parts of T, R]."""
    total = state[0] * vector[0][:, :, None]
    total = _against(state[1], vector[1], total)
    total = _against(state[2], vector[2], total)
    total = _against(state[3], vector[3], total)
    return tl.sum(tl.sum(total, axis=1), axis=0)


@triton.jit
def _moved(part, key, change, decay):
    return tl.fma(
        tl.broadcast_to(key[:, :, None], part.shape),
        tl.broadcast_to(change[None, None, :], part.shape),
        part * decay,
    )


@triton.jit
def transition(state, key, value, g, beta):
    """The state after one column: key of unit length in parts, value [VALUES], g and beta."""
    decay = tl.exp(g)
    change = (value.to(tl.float32) - over_keys(state, key) * decay) * beta
    return (
        _moved(state[0], key[0], change, decay),
        _moved(state[1], key[1], change, decay),
        _moved(state[2], key[2], change, decay),
        _moved(state[3], key[3], change, decay),
    )


@triton.jit
def places_in_parts(KEYS: tl.constexpr):
    """dk of the first part's places [T, R]; each further part's are R more."""
    T: tl.constexpr = 8 if KEYS >= 32 else KEYS // 4
    R: tl.constexpr = KEYS // 4 // T
    return tl.arange(0, T)[:, None] * (KEYS // T) + tl.arange(0, R)[None, :]


@triton.jit
def vector_in_parts(vector, end, KEYS: tl.constexpr):
    """The elements of a vector below `end` in parts, zeros beyond."""
    dk = places_in_parts(KEYS)
    R: tl.constexpr = KEYS // 32 if KEYS > 32 else 1
    return (
        tl.load(vector + dk, mask=dk < end, other=0.0),
        tl.load(vector + dk + R, mask=dk + R < end, other=0.0),
        tl.load(vector + dk + 2 * R, mask=dk + 2 * R < end, other=0.0),
        tl.load(vector + dk + 3 * R, mask=dk + 3 * R < end, other=0.0),
    )


@triton.jit
def _state_part(state, dk, dv, is_value, DK: tl.constexpr, DV: tl.constexpr):
    """Pointers of a part's cells [T, R, VALUES] and which of them there are."""
    cells = state + (dk * DV)[:, :, None] + dv[None, None, :]
    return cells, (dk < DK)[:, :, None] & is_value[None, None, :]


@triton.jit
def _load_part(state, dk, dv, is_value, DK: tl.constexpr, DV: tl.constexpr):
    cells, inside = _state_part(state, dk, dv, is_value, DK, DV)
    return tl.load(cells, mask=inside, other=0.0)


@triton.jit
def load_state(state, dv, is_value, DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr):
    """A block of a head's state in parts, zeros outside."""
    dk = places_in_parts(KEYS)
    R: tl.constexpr = KEYS // 32 if KEYS > 32 else 1
    return (
        _load_part(state, dk, dv, is_value, DK, DV),
        _load_part(state, dk + R, dv, is_value, DK, DV),
        _load_part(state, dk + 2 * R, dv, is_value, DK, DV),
        _load_part(state, dk + 3 * R, dv, is_value, DK, DV),
    )


@triton.jit
def store_state(state, parts, dv, is_value, DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr):
    """Puts a block of a head's state back."""
    dk = places_in_parts(KEYS)
    R: tl.constexpr = KEYS // 32 if KEYS > 32 else 1
    for part in tl.static_range(4):
        cells, inside = _state_part(state, dk + part * R, dv, is_value, DK, DV)
        tl.store(cells, parts[part], mask=inside)


@triton.jit
def convolved(
    projected, past, conv_weight, record_conv, channel, inside, depth, places, p_column, w_channel,
    w_tap, dtype: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The convolution of a column's channels after SiLU, rounded; the raw column is recorded.

    depth counts the columns before it, which are in order, or those at `places`.
    """
    mixed = tl.zeros(channel.shape, dtype=tl.float32)
    for tap in tl.static_range(4):
        j = depth + tap - 3
        at = tl.maximum(j, 0)
        if places is not None:
            at = column_at(places, at)
        older = tl.load(
            past + (j + 3) * C + channel, mask=inside & (channel < tl.where(j < 0, C, 0)), other=0.0
        )
        raw = tl.load(
            projected + at * p_column + channel,
            mask=inside & (channel < tl.where(j < 0, 0, C)),
            other=0.0,
        )
        raw = tl.where(j < 0, older.to(dtype), raw)
        weight = tl.load(conv_weight + channel * w_channel + tap * w_tap, mask=inside, other=0.0)
        mixed += raw.to(tl.float32) * weight.to(tl.float32)
        if tap == 3:
            tl.store(record_conv + channel, raw, mask=inside)
    return (mixed / (1.0 + tl.exp(-mixed))).to(dtype)


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
    units,
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
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    GATES: tl.constexpr,
):
    """Some heads, by program_id(1), of column program_id(0), counted over all rows.

    Queries come first, then keys, then values; the first heads' program has the gates too. units
    are FP32 [B, width, 2*HK, DK], queries and keys at unit length. KEYS, VALUES and GATES are
    powers of two from DK, DV and HV on.
    """
    enter()
    C: tl.constexpr = 2 * HK * DK + HV * DV
    PARTS: tl.constexpr = (2 * HK + HEADS - 1) // HEADS
    row = (tl.program_id(0) // width).to(tl.int64)
    i = tl.program_id(0) % width
    if i < tl.load(counts + row):
        dtype: tl.constexpr = record_key.dtype.element_ty
        past = conv_history + tl.load(slots + row) * 3 * C
        raw = projected + row * p_row
        recorded = record_conv + row * conv_row + i * conv_column
        places = None
        depth = i
        if ancestors is not None:
            places = places_of(tl.load(ancestors + tl.program_id(0)))
            depth = tl.max(places, axis=0)
        if tl.program_id(1) < PARTS:
            head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
            d = tl.arange(0, KEYS)
            channel = head[:, None] * DK + d[None, :]
            inside = (head < 2 * HK)[:, None] & (d < DK)[None, :]
            mixed = convolved(
                raw, past, conv_weight, recorded, channel, inside, depth, places, p_column,
                w_channel, w_tap, dtype, C,
            )  # fmt: skip
            key = record_key + row * key_row + i * key_column - HK * DK
            tl.store(key + channel, mixed, mask=inside & (head >= HK)[:, None])
            wide = mixed.to(tl.float32)
            unit = wide * inverse_norm(tl.sum(wide * wide, axis=1))[:, None]
            unit *= tl.where(head < HK, DK**-0.5, 1.0)[:, None]
            units += tl.program_id(0).to(tl.int64) * 2 * HK * DK
            tl.store(units + channel, unit, mask=inside)
        else:
            # names of their own: these blocks are as wide as a value, those above as a key
            value_head = (tl.program_id(1) - PARTS) * HEADS + tl.arange(0, HEADS)
            dv = tl.arange(0, VALUES)
            value_channel = 2 * HK * DK + value_head[:, None] * DV + dv[None, :]
            is_inside = (value_head < HV)[:, None] & (dv < DV)[None, :]
            value = convolved(
                raw, past, conv_weight, recorded, value_channel, is_inside, depth, places, p_column,
                w_channel, w_tap, dtype, C,
            )  # fmt: skip
            kept = record_value + row * value_row + i * value_column - 2 * HK * DK
            tl.store(kept + value_channel, value, mask=is_inside)
        if tl.program_id(1) == 0:
            nth = tl.arange(0, GATES)
            is_value = nth < HV
            x = tl.load(a + row * a_row + i * a_column + nth, mask=is_value, other=0.0)
            opening = tl.load(b + row * b_row + i * b_column + nth, mask=is_value, other=0.0)
            rate = tl.exp(tl.load(a_log + nth, mask=is_value, other=0.0).to(tl.float32))
            bias = tl.load(dt_bias + nth, mask=is_value, other=0.0).to(tl.float32)
            # softplus(x) = log(1 + y), y = exp(x); the quotient undoes the rounding of 1 + y
            x = x.to(tl.float32) + bias
            y = tl.exp(tl.minimum(x, 20.0))
            softplus = tl.log(1.0 + y) * tl.div_rn(y, (1.0 + y) - 1.0)
            softplus = tl.where(y + 1.0 == 1.0, y, softplus)
            g = -rate * tl.where(x > 20.0, x, softplus)
            beta = 1.0 / (1.0 + tl.exp(-opening.to(tl.float32)))
            pair = record_gate + row * gate_row + i * gate_column + 2 * nth
            tl.store(pair, g, mask=is_value)
            tl.store(pair + 1, beta, mask=is_value)


@triton.jit
def gdn_verify_kernel(
    state,
    slots,
    counts,
    ancestors,
    units,
    record_value,
    record_gate,
    out,
    width,
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
    count = tl.minimum(tl.load(counts + row), width).to(tl.int32)
    dv = block * VALUES + tl.arange(0, VALUES)
    is_value = dv < DV
    length = count
    if ancestors is not None:
        places, owned = path_of(ancestors + row * width, count, tl.program_id(1))
        length = tl.max(places, axis=0) + 1
        is_value = dv < tl.where(length > 0, DV, 0)
    source = state + (tl.load(slots + row) * HV + head) * DK * DV
    current = load_state(source, dv, is_value, DK, DV, KEYS)

    queries = units + (row * width * 2 * HK + head // (HV // HK)) * DK
    keys = queries + HK * DK
    values = record_value + row * value_row + head * DV + dv
    gates = record_gate + row * gate_row + 2 * head
    outs = out + (row * width * HV + head) * DV + dv
    release()
    # while one column is computed the next is asked for
    end = tl.where(length > 0, DK, 0)
    query, key = vector_in_parts(queries, end, KEYS), vector_in_parts(keys, end, KEYS)
    value, g, beta = value_of(values, gates, dv, length > 0, DV)
    for i in range(length):
        if ancestors is None:
            following, at, is_mine = i + 1, i, is_value
        else:
            following, at = column_at(places, i + 1), column_at(places, i)
            mine = tl.sum(((places == i) & owned).to(tl.int32), axis=0)
            is_mine = dv < tl.where(mine > 0, DV, 0)
        live = i + 1 < length
        end = tl.where(live, DK, 0)
        next_query = vector_in_parts(queries + following * 2 * HK * DK, end, KEYS)
        next_key = vector_in_parts(keys + following * 2 * HK * DK, end, KEYS)
        next_value, next_g, next_beta = value_of(
            values + following * value_column, gates + following * gate_column, dv, live, DV
        )
        current = transition(current, key, value, g, beta)
        read = over_keys(current, query)
        tl.store(outs + at * HV * DV, read.to(out.dtype.element_ty), mask=is_mine)
        query, key = next_query, next_key
        value, g, beta = next_value, next_g, next_beta
    for i in range(tl.where(tl.program_id(1) == 0, count, width), width):
        nothing = tl.zeros((VALUES,), dtype=tl.float32)
        tl.store(outs + i * HV * DV, nothing.to(out.dtype.element_ty), mask=dv < DV)


@triton.jit
def value_of(values, gates, dv, live, DV: tl.constexpr):
    """Value, g and beta of a column, zeros unless it is live; values have dv in."""
    value = tl.load(values, mask=dv < tl.where(live, DV, 0), other=0.0)
    return value, tl.load(gates, mask=live, other=0.0), tl.load(gates + 1, mask=live, other=0.0)


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
    keys = max(triton.next_power_of_2(DK), 4)
    units = projected.new_empty((B, W, 2 * HK, DK), dtype=torch.float32)
    if ancestors is not None:
        ancestors = ancestors.contiguous()
    strides = [stride for plane in record for stride in plane.stride()[:2]]
    parts = triton.cdiv(2 * HK, HEADS) + triton.cdiv(HV, HEADS)
    record_kernel[(B * W, parts)](
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
        units,
        *record,
        W,
        *projected.stride()[:2],
        *a.stride()[:2],
        *b.stride()[:2],
        *conv_weight.stride(),
        *strides,
        HK=HK,
        HV=HV,
        DK=DK,
        DV=DV,
        HEADS=HEADS,
        KEYS=keys,
        VALUES=triton.next_power_of_2(DV),
        GATES=triton.next_power_of_2(HV),
        **OPTIONS | {"num_warps": HEADS},
        **OVERLAPPED,
    )
    values = min(VALUES, triton.next_power_of_2(DV))
    paths = 1 if ancestors is None else MOST_PATHS
    gdn_verify_kernel[(B * HV * triton.cdiv(DV, values), paths)](
        state.contiguous(),
        slots,
        counts,
        ancestors,
        units,
        record.value,
        record.gate,
        out,
        W,
        *strides[4:],
        HK=HK,
        HV=HV,
        DK=DK,
        DV=DV,
        KEYS=keys,
        VALUES=values,
        **OPTIONS,
        **OVERLAPPED,
    )
    return out
