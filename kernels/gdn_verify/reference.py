"""Plain torch form; see the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.gdn_transition import Columns, advance, columns, constant, convolve, gates, unit

if TYPE_CHECKING:
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

    padded = torch.cat((conv_history.index_select(0, slots), projected), dim=1)
    mixed = convolve(padded, conv_weight)
    split = mixed.shape[-1] - Hv * Dv
    query_key = mixed[..., :split].view(B, live, 2, -1, Dk)
    value = mixed[..., split:].view(B, live, Hv, Dv)
    g, beta = gates(a, b, a_log, dt_bias)

    all_live = min(live_counts) == live
    alive = None if all_live else _alive(counts, live)
    _write(record.conv, projected, alive)
    _write(record.key, query_key[:, :, 1], alive)
    _write(record.value, value, alive)
    _write(record.gate, torch.stack((g, beta), dim=-1), alive)

    normed = unit(query_key.float())
    states = block_states(
        state.index_select(0, slots), columns(normed[:, :, 1], value.float(), g.exp(), beta)
    )
    query = normed[:, :, 0] * constant(Dk**-0.5, state.device)
    read = (states * query[..., :, None, :, None]).sum(-2).view(B, live, Hv, Dv)
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
        [B, W, Hk, G, Dk, Dv] FP32.
    """
    B, W, Hk, G = block.decay.shape[:4]
    states = state.new_empty(B, W, Hk, G, *state.shape[2:])
    current = state.view(B, Hk, G, *state.shape[2:])
    parts = (plane.unbind(1) for plane in block)
    for column, after in zip(zip(*parts, strict=True), states.unbind(1), strict=True):
        current = advance(current, Columns(*column), out=after)
    return states


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
