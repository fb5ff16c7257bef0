"""The gated delta rule's column, shared by the ops that verify, fold and prefill.

`advance` is the one transition: verify and fold both step through it, so that a folded state
equals the state of the block that recorded it bit for bit. To keep that true whatever the number
of rows, layers or columns in a call, everything that reaches the state is elementwise arithmetic
in separately rounded steps, an exponential, or a sum over a whole dimension of fixed extent; no
matrix product and no fused multiply-add, whose rounding may follow the shape of the batch.

Grouped heads are kept apart as [..., Hk, G, ...] with G = Hv / Hk, so that a key broadcasts to the
G value heads it serves.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

NORM_EPS = 1e-6  # inside the root of the query and key norms


class Columns(NamedTuple):
    """Columns ready for `advance`, FP32; the leading dimensions are the caller's."""

    decay: torch.Tensor  # [..., Hk, G, 1, 1], exp(g)
    key: torch.Tensor  # [..., Hk, 1, Dk, 1], unit length
    scaled_key: torch.Tensor  # [..., Hk, G, Dk, 1], beta * key
    scaled_value: torch.Tensor  # [..., Hk, G, 1, Dv], beta * value


@lru_cache(maxsize=64)
def constant(value: float, device: torch.device) -> torch.Tensor:
    """A number as an FP32 scalar tensor: cheaper in an op than a Python number, and kept."""
    # made outside inference mode, so that a kept one may take part in any later computation
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32, device=device)


def convolve(padded: torch.Tensor, conv_weight: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution and SiLU.

    Args:
        padded: [..., taps - 1 + columns, C], the history's columns first.
        conv_weight: [C, taps], the last tap being the current column.

    Returns:
        [..., columns, C] of the dtype of padded.
    """
    taps = conv_weight.shape[1]
    tap_rows = conv_weight.t().float().contiguous()
    windows = padded.float().unfold(-2, taps, 1).transpose(-1, -2)  # [..., columns, taps, C]
    return F.silu((windows * tap_rows).sum(-2)).to(padded.dtype)


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b), FP32, shaped as a."""
    rate = a_log.float().exp().neg_()
    return F.softplus(a.float() + dt_bias.float()).mul_(rate), b.float().sigmoid()


def unit(x: torch.Tensor) -> torch.Tensor:
    """Scales the last dimension to unit length: x / sqrt(sum x^2 + 1e-6), FP32."""
    square = (x * x).sum(-1, keepdim=True)
    return x / square.add_(constant(NORM_EPS, x.device)).sqrt_()


def columns(
    key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> Columns:
    """Lays normed keys and values out for `advance`.

    Args:
        key: [..., Hk, Dk] FP32 of unit length.
        value: [..., Hv, Dv] FP32.
        decay: [..., Hv] FP32, exp(g).
        beta: [..., Hv] FP32.
    """
    heads = key.shape[-2]
    grouped = (heads, decay.shape[-1] // heads)
    key = key[..., :, None, :, None]
    beta = torch.unflatten(beta, -1, grouped)[..., None, None]
    return Columns(
        decay=torch.unflatten(decay, -1, grouped)[..., None, None],
        key=key,
        scaled_key=key * beta,
        scaled_value=torch.unflatten(value, -2, grouped).unsqueeze(-2) * beta,
    )


def advance(state: torch.Tensor, column: Columns, out: torch.Tensor) -> torch.Tensor:
    """Takes a state through one column: M <- exp(g) M, then M <- M + k^ (beta (v - M^T k^))^T.

    Args:
        state: [..., Hk, G, Dk, Dv] FP32, read.
        column: one column, its leading dimensions those of state.
        out: written and returned; may be state itself.
    """
    torch.mul(state, column.decay, out=out)
    recalled = (out * column.scaled_key).sum(-2, keepdim=True)
    return out.add_(column.key * (column.scaled_value - recalled))
