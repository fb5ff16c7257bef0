"""Plain torch form; see the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from kernels.gdn_transition import (
    advance,
    columns,
    constant,
    convolve,
    convolve_windows,
    gates,
    repeat_heads,
    take,
    unit,
)
from kernels.trees import members

if TYPE_CHECKING:
    from kernels.gdn_transition import Columns
    from kernels.gdn_verify import GdnRecord


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
    """Runs the live columns of each row from its slot's state and records them."""
    B, W, _ = projected.shape
    _, Hv, Dk, Dv = state.shape
    live_counts = counts.tolist()
    live = max(live_counts, default=0)
    if live < W:
        # columns that are dead in every row are not computed at all
        projected, a, b = projected[:, :live], a[:, :live], b[:, :live]
        record = type(record)(*(plane[:, :live] for plane in record))
    if live == 0:
        return projected.new_zeros(B, W, Hv, Dv)

    padded = torch.cat((take(conv_history, slots), projected), dim=1)
    ways = None if ancestors is None else _ways(ancestors[:, :live], conv_weight.shape[1])
    if ways is None:
        mixed = convolve(padded, conv_weight)
    else:
        mixed = convolve_windows(_windows(padded, ways), conv_weight)
    split = mixed.shape[-1] - Hv * Dv
    query_key = mixed[..., :split].view(B, live, 2, -1, Dk)
    value = mixed[..., split:].view(B, live, Hv, Dv)
    g, beta = gates(a, b, a_log, dt_bias)

    all_live = min(live_counts) == live
    alive = None if all_live else _alive(counts, live)
    recorded_g, recorded_beta = record.gate.unbind(-1)
    _write(record.conv, projected, alive)
    _write(record.key, query_key.select(2, 1), alive)
    _write(record.value, value, alive)
    _write(recorded_g, g, alive)
    _write(recorded_beta, beta, alive)

    query, key = repeat_heads(unit(query_key.float()), Hv).unbind(2)
    block = columns(key, value.float(), g.exp(), beta)
    if ways is None:
        states = block_states(take(state, slots), block)
    else:
        states = tree_states(take(state, slots), block, ways[..., -2])
    scaled_query = (query * constant(Dk**-0.5, state.device)).unsqueeze(-1)
    read = (states * scaled_query).sum(-2)
    if all_live and live == W:
        return read.to(projected.dtype)
    output = projected.new_zeros(B, W, Hv, Dv)
    output[:, :live] = read if alive is None else read.masked_fill(~alive[..., None, None], 0.0)
    return output


def block_states(state: torch.Tensor, block: Columns) -> torch.Tensor:
    """The state after each column of a block.

    Args:
        state: [B, Hv, Dk, Dv] FP32, before the block.
        block: its columns, leading dimensions [B, W].

    Returns:
        [B, W, Hv, Dk, Dv] FP32.
    """
    B, W = block.decay.shape[:2]
    states = state.new_empty(B, W, *state.shape[1:])
    scratch = torch.empty_like(state)
    if W == 1:
        # a plain step: nothing to take apart
        advance(state.unsqueeze(1), block, states, scratch.unsqueeze(1))
        return states
    for column, after in zip(block.each(), states.unbind(1), strict=True):
        state = advance(state, column, after, scratch)
    return states


def tree_states(state: torch.Tensor, block: Columns, parents: torch.Tensor) -> torch.Tensor:
    """As `block_states`, each column after its parent's: [B, W], below its own."""
    B, W = block.decay.shape[:2]
    states = state.new_empty(B, W, *state.shape[1:])
    scratch = torch.empty_like(state)
    rows = torch.arange(B, device=state.device)
    for index, (column, after) in enumerate(zip(block.each(), states.unbind(1), strict=True)):
        if index:
            state = states[rows, parents[:, index].clamp(0, index - 1)]
        advance(state, column, after, scratch)
    return states


def _ways(ancestors: torch.Tensor, taps: int) -> torch.Tensor:
    """The last columns on the way to each, itself the last: [B, W, taps]; below 0 the history's."""
    seen = members(ancestors)
    columns = torch.arange(seen.shape[1], device=seen.device)
    ordered = pad(torch.where(seen, columns, -1).sort(dim=2).values, (taps - 1, 0))
    steps = torch.arange(1 - taps, 1, device=seen.device)
    place = seen.sum(dim=2, keepdim=True) - 1 + steps
    return torch.where(place < 0, place, ordered[..., -taps:])


def _windows(padded: torch.Tensor, ways: torch.Tensor) -> torch.Tensor:
    """What each column's taps see of padded [B, taps - 1 + W, C]: [B, W, taps, C]."""
    rows = torch.arange(padded.shape[0], device=padded.device).view(-1, 1, 1)
    # dead columns may ask for anything
    return padded[rows, (ways + ways.shape[2] - 1).clamp(min=0)]


def _alive(counts: torch.Tensor, live: int) -> torch.Tensor:
    """True for the live columns among the first `live`: bool [B, live]."""
    return torch.arange(live, device=counts.device) < counts.unsqueeze(1)


def _write(plane: torch.Tensor, columns: torch.Tensor, alive: torch.Tensor | None) -> None:
    """Copies live columns into a plane [B, live, ...] and leaves its other columns alone."""
    if alive is None:
        plane.copy_(columns)
    else:
        mask = alive.view(*alive.shape, *(1,) * (plane.ndim - 2))
        plane.copy_(torch.where(mask, columns, plane))
