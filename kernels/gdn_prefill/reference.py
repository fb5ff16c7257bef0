"""Plain torch form; see the contract."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.gdn_transition import constant, convolve, gates, unit

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
    query_key = unit(mixed[:, :split].float().view(T, 2, -1, Dk))
    query, key = query_key.unbind(1)
    value = mixed[:, split:].float().view(T, Hv, Dv)
    g, beta = gates(a, b, a_log, dt_bias)
    output, after = chunked_delta_rule(
        query * constant(Dk**-0.5, state.device), key, value, g, beta, state[index]
    )
    state[index] = after
    conv_history[index] = padded[-conv_history.shape[1] :]
    return output.to(projected.dtype)


def chunked_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunk form of the contract, all FP32.

    Args:
        query: [T, Hk, Dk], normed and scaled.
        key: [T, Hk, Dk], normed.
        value: [T, Hv, Dv].
        g: [T, Hv], logarithm of the decay, at most 0.
        beta: [T, Hv].
        state: [Hv, Dk, Dv], before the first column.

    Returns:
        Outputs [T, Hv, Dv] and the state after the last column.
    """
    T, Hk, _ = key.shape
    Hv, Dk, Dv = state.shape
    G = Hv // Hk
    size = min(CHUNK, T)
    query, key = (_chunks(x, size).unsqueeze(1) for x in (query, key))  # [Hk, 1, chunks, size, Dk]
    value, beta, g = (
        torch.unflatten(_chunks(x, size), 0, (Hk, G))
        for x in (value, beta[..., None], g[..., None])
    )  # [Hk, G, chunks, size, Dv or 1]

    total = g.cumsum(-2)
    # exp(G_i - G_j) where j <= i, else 0; masked before exp, where it could overflow
    later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu_(1)
    between = (total - total.transpose(-1, -2)).masked_fill_(later, float("-inf")).exp_()
    from_start = total.exp()
    to_end = (total[..., -1:, :] - total).exp_()

    # (I + A) [X Y] = diag(beta) [V, diag(exp G) K^], so that U = X - Y M_0 for any M_0
    system = (key @ key.transpose(-1, -2)) * between * beta
    given = torch.cat((value * beta, key * (beta * from_start)), dim=-1)
    solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    free, bound = solved.split((Dv, Dk), dim=-1)
    mixing = (query @ key.transpose(-1, -2)) * between
    reading = query * from_start
    writing = (key * to_end).transpose(-1, -2)
    decay = from_start[..., -1:, :]

    current = state.view(Hk, G, Dk, Dv)
    outputs = torch.empty_like(value)
    for chunk in range(value.shape[2]):
        update = free[:, :, chunk] - bound[:, :, chunk] @ current
        outputs[:, :, chunk] = reading[:, :, chunk] @ current + mixing[:, :, chunk] @ update
        current = current * decay[:, :, chunk] + writing[:, :, chunk] @ update
    return outputs.flatten(0, 1).flatten(1, 2)[:, :T].transpose(0, 1), current.flatten(0, 1)


def _chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Cuts x [T, heads, D] into [heads, chunks, size, D]; zeros fill the last chunk up.

    Zero columns have beta = 0 and g = 0, so they change no state.
    """
    missing = -x.shape[0] % size
    if missing:
        x = F.pad(x, (0, 0, 0, 0, 0, missing))
    return torch.unflatten(x.transpose(0, 1), 1, (-1, size))
