"""Triton form; see the contract. All layers in one launch: states first, then histories."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.gdn_verify.kernel import OPTIONS, VALUES, column_of, ready, transition
from kernels.overlap import OVERLAPPED, enter

if TYPE_CHECKING:
    from kernels.gdn_verify import GdnRecord

CHANNELS = 256  # of a history, in one program


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
            dk = tl.arange(0, KEYS)
            dv = block * VALUES + tl.arange(0, VALUES)
            is_key, is_value = dk < DK, dv < DV
            cells = dk[:, None] * DV + dv[None, :]
            is_cell = is_key[:, None] & is_value[None, :]
            source = state + layer * state_layer
            source += (tl.load(source_slots + row) * HV + head) * DK * DV
            current = tl.load(source + cells, mask=is_cell, other=0.0)
            keys = record_key + layer * key_layer + row * key_row + head // (HV // HK) * DK
            values = record_value + layer * value_layer + row * value_row + head * DV
            gates = record_gate + layer * gate_layer + row * gate_row + 2 * head
            keys, values = keys + dk, values + dv
            # while one column is folded the next is made ready, and the one after it is asked for
            column = ready(*column_of(keys, values, gates, dk, dv, True, DK, DV))
            keys, values, gates = keys + key_column, values + value_column, gates + gate_column
            following = column_of(keys, values, gates, dk, dv, count > 1, DK, DV)
            for i in range(count):
                keys, values, gates = keys + key_column, values + value_column, gates + gate_column
                later = column_of(keys, values, gates, dk, dv, i + 2 < count, DK, DV)
                current = transition(current, *column)
                column = ready(*following)
                following = later
            destination = state + layer * state_layer
            destination += (tl.load(destination_slots + row) * HV + head) * DK * DV
            tl.store(destination + cells, current, mask=is_cell)
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
        KEYS=triton.next_power_of_2(DK),
        VALUES=values,
        CHANNELS=channels,
        **OPTIONS,
        **OVERLAPPED,
    )
