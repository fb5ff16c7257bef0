"""Triton form; see the contract. All layers in one launch: states first, then histories."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.gdn_verify.kernel import (
    OPTIONS,
    VALUES,
    inverse_norm,
    load_state,
    store_state,
    transition,
    value_of,
    vector_in_parts,
)
from kernels.overlap import OVERLAPPED, enter

if TYPE_CHECKING:
    from kernels.gdn_verify import GdnRecord

CHANNELS = 256  # of a history, in one program


@triton.jit
def key_of(keys, live, DK: tl.constexpr, KEYS: tl.constexpr):
    """A recorded key as a whole, for its norm, and in parts; zeros unless it is live."""
    end = tl.where(live, DK, 0)
    at = tl.arange(0, KEYS)
    whole = tl.load(keys + at, mask=at < end, other=0.0)
    return whole, vector_in_parts(keys, end, KEYS)


@triton.jit
def unit(whole, parts):
    """The parts of a key at unit length, FP32."""
    whole = whole.to(tl.float32)
    inverse = inverse_norm(tl.sum(whole * whole, axis=0))
    return (
        parts[0].to(tl.float32) * inverse,
        parts[1].to(tl.float32) * inverse,
        parts[2].to(tl.float32) * inverse,
        parts[3].to(tl.float32) * inverse,
    )


@triton.jit
def gdn_fold_kernel(  # noqa: PLR0915
    record_conv,
    record_key,
    record_value,
    record_gate,
    state,
    conv_history,
    source_slots,
    destination_slots,
    counts,
    rows,
    state_programs,
    state_layer,
    history_layer,
    conv_layer,
    conv_row,
    conv_column,
    key_layer,
    key_row,
    key_column,
    value_layer,
    value_row,
    value_column,
    gate_layer,
    gate_row,
    gate_column,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """The first state_programs fold a block of a state each, the others slide histories."""
    enter()
    BLOCKS: tl.constexpr = (DV + VALUES - 1) // VALUES
    C: tl.constexpr = 2 * HK * DK + HV * DV
    PARTS: tl.constexpr = (C + CHANNELS - 1) // CHANNELS
    index = tl.program_id(0)
    if index < state_programs:
        block = index % BLOCKS
        head = index // BLOCKS % HV
        row = (index // (BLOCKS * HV) % rows).to(tl.int64)
        layer = (index // (BLOCKS * HV) // rows).to(tl.int64)
        count = tl.load(counts + row).to(tl.int32)
        if count > 0:
            dv = block * VALUES + tl.arange(0, VALUES)
            is_value = dv < DV
            source = state + layer * state_layer
            source += (tl.load(source_slots + row) * HV + head) * DK * DV
            current = load_state(source, dv, is_value, DK, DV, KEYS)
            keys = record_key + layer * key_layer + row * key_row + head // (HV // HK) * DK
            values = record_value + layer * value_layer + row * value_row + head * DV + dv
            gates = record_gate + layer * gate_layer + row * gate_row + 2 * head
            # while one column is folded the next is made ready, and the one after it is asked for
            whole, parts = key_of(keys, True, DK, KEYS)
            key = unit(whole, parts)
            value, g, beta = value_of(values, gates, dv, True, DV)
            keys, values, gates = keys + key_column, values + value_column, gates + gate_column
            whole, parts = key_of(keys, count > 1, DK, KEYS)
            for i in range(count):
                keys = keys + key_column
                next_whole, next_parts = key_of(keys, i + 2 < count, DK, KEYS)
                next_value, next_g, next_beta = value_of(values, gates, dv, i + 1 < count, DV)
                values, gates = values + value_column, gates + gate_column
                current = transition(current, key, value, g, beta)
                key = unit(whole, parts)
                whole, parts = next_whole, next_parts
                value, g, beta = next_value, next_g, next_beta
            destination = state + layer * state_layer
            destination += (tl.load(destination_slots + row) * HV + head) * DK * DV
            store_state(destination, current, dv, is_value, DK, DV, KEYS)
    else:
        part = index - state_programs
        channel = part % PARTS * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < C
        line = (part // PARTS % rows).to(tl.int64)
        plane = (part // PARTS // rows).to(tl.int64)
        adopted = tl.load(counts + line)
        if adopted > 0:
            old = conv_history + plane * history_layer + channel
            old += tl.load(source_slots + line) * 3 * C
            recorded = record_conv + plane * conv_layer + line * conv_row + channel
            # all three are read before any is written: in place, the ranges overlap
            kept = channel < tl.where(adopted < 3, C, 0)
            oldest = tl.load(old + adopted * C, mask=kept, other=0.0)
            kept = channel < tl.where(adopted < 2, C, 0)
            middle = tl.load(old + (adopted + 1) * C, mask=kept, other=0.0)
            late = channel < tl.where(adopted >= 3, C, 0)
            newer = tl.load(recorded + (adopted - 3) * conv_column, mask=late, other=0.0)
            oldest = tl.where(adopted < 3, oldest, newer)
            late = channel < tl.where(adopted >= 2, C, 0)
            newer = tl.load(recorded + (adopted - 2) * conv_column, mask=late, other=0.0)
            middle = tl.where(adopted < 2, middle, newer)
            newest = tl.load(recorded + (adopted - 1) * conv_column, mask=inside, other=0.0)
            new = conv_history + plane * history_layer + channel
            new += tl.load(destination_slots + line) * 3 * C
            tl.store(new, oldest, mask=inside)
            tl.store(new + C, middle, mask=inside)
            tl.store(new + 2 * C, newest, mask=inside)


def gdn_fold(
    records: "GdnRecord",
    state: torch.Tensor,
    conv_history: torch.Tensor,
    source_slots: torch.Tensor,
    destination_slots: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Advances each row's state and history by its first counts[row] recorded columns."""
    L, _, HV, DK, DV = state.shape
    B, C = counts.shape[0], conv_history.shape[-1]
    values = min(VALUES, triton.next_power_of_2(DV))
    channels = min(CHANNELS, triton.next_power_of_2(C))
    state_programs = L * B * HV * triton.cdiv(DV, values)
    gdn_fold_kernel[(state_programs + L * B * triton.cdiv(C, channels),)](
        *records,
        state,
        conv_history,
        source_slots,
        destination_slots,
        counts,
        B,
        state_programs,
        state.stride(0),
        conv_history.stride(0),
        *(stride for plane in records for stride in plane.stride()[:3]),
        HK=(C - HV * DV) // (2 * DK),
        HV=HV,
        DK=DK,
        DV=DV,
        KEYS=max(triton.next_power_of_2(DK), 4),
        VALUES=values,
        CHANNELS=channels,
        **OPTIONS,
        **OVERLAPPED,
    )
