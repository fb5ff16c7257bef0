"""Plain torch form; see the contract."""

from __future__ import annotations

import torch

from kernels.gdn_transition import constant, convolve, gates, repeat_heads, unit

CHUNK = 64


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
    """Runs T columns from a slot's state and leaves the slot as they leave it."""
    T = projected.shape[0]
    _, Hv, Dk, Dv = state.shape
    index = int(slot)
    padded = torch.cat((conv_history[index], projected))
    mixed = convolve(padded, conv_weight)
    split = mixed.shape[-1] - Hv * Dv
    query_key = repeat_heads(unit(mixed[:, :split].float().view(T, 2, -1, Dk)), Hv)
    value = mixed[:, split:].float().view(T, Hv, Dv)
    g, beta = gates(a, b, a_log, dt_bias)
    output = torch.empty_like(value)
    current = state[index]
    for first in range(0, T, CHUNK):
        part = slice(first, first + CHUNK)
        output[part], current = _chunk(query_key[part], value[part], g[part], beta[part], current)
    state[index] = current
    conv_history[index] = padded[-conv_history.shape[1] :]
    return (output * constant(Dk**-0.5, state.device)).to(projected.dtype)


def _chunk(
    query_key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunk form of the contract, all FP32.

    Args:
        query_key: [n, 2, Hv, Dk], normed queries and normed keys.
        value: [n, Hv, Dv].
        g: [n, Hv], logarithm of the decay, at most 0.
        beta: [n, Hv].
        state: [Hv, Dk, Dv], M_0.

    Returns:
        Outputs [n, Hv, Dv], not yet scaled by Dk^-0.5, and M_next.
    """
    n, _, Hv, Dk = query_key.shape
    Dv = value.shape[-1]
    # sums of g in FP64: after one strong decay, the differences of later sums would lose their bits
    total = g.t().double().cumsum(-1)  # [Hv, n]
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).clamp_(max=0.0).float().exp_().tril_()
    from_start = total.float().exp_()
    to_end = (total[:, -1:] - total).float().exp_()
    beta = beta.t().unsqueeze(-1)

    # queries and keys meet the keys, and the state, in one product each
    pairs = query_key.permute(2, 1, 0, 3).reshape(Hv, 2 * n, Dk)
    keys = pairs[:, n:]
    grams = torch.bmm(pairs, keys.transpose(1, 2)).view(Hv, 2, n, n) * between.unsqueeze(1)
    reads = torch.bmm(pairs, state).view(Hv, 2, n, Dv) * from_start.view(Hv, 1, n, 1)
    mixing, system = grams[:, 0], grams[:, 1] * beta
    update = torch.linalg.solve_triangular(
        system, (value.transpose(0, 1) - reads[:, 1]) * beta, upper=False, unitriangular=True
    )
    output = torch.baddbmm(reads[:, 0], mixing, update)
    written = (keys * to_end.unsqueeze(-1)).transpose(1, 2)
    following = torch.baddbmm(state * from_start[:, -1].view(Hv, 1, 1), written, update)
    return output.transpose(0, 1), following
