"""The gated delta rule's column, shared by the ops that verify, fold and prefill.

`advance` is the one transition: verify and fold both step through it, so that a folded state
equals the state of the block that recorded it bit for bit. To keep that true whatever the number
of rows, layers or columns in a call, everything that reaches the state is elementwise arithmetic
in separately rounded steps, an exponential or its logarithm, or a sum over a whole dimension of
fixed extent; no matrix product, no fused multiply-add and no composed function such as torch's
sigmoid, whose rounding may follow the shape of the batch or the place in it.

Keys are repeated for the value heads they serve before the first column, so that a column costs six
calls on plain shapes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

NORM_EPS = 1e-6  # inside the root of the query and key norms


class Columns(NamedTuple):
    """Columns ready for `advance`, FP32; the leading dimensions are the caller's."""

    decay: torch.Tensor  # [..., Hv, 1, 1], exp(g)
    key: torch.Tensor  # [..., Hv, Dk, 1], unit length
    scaled_key: torch.Tensor  # [..., Hv, Dk, 1], beta * key
    scaled_value: torch.Tensor  # [..., Hv, 1, Dv], beta * value

    def each(self) -> Iterator[Columns]:
        """The columns one by one; they are dimension 1."""
        return map(Columns._make, zip(*(plane.unbind(1) for plane in self), strict=True))


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
    windows = padded.unfold(-2, conv_weight.shape[1], 1).transpose(-1, -2)
    return convolve_windows(windows, conv_weight)


def convolve_windows(windows: torch.Tensor, conv_weight: torch.Tensor) -> torch.Tensor:
    """`convolve` of columns that each bring what their taps see: [..., columns, taps, C]."""
    tap_rows = conv_weight.t().float().contiguous()
    mixed = (windows.float() * tap_rows).sum(-2)
    return mixed.mul_(_sigmoid(mixed)).to(windows.dtype)


def gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b), FP32, shaped as a."""
    rate = a_log.float().exp().neg_()
    x = a.float() + dt_bias.float()
    softplus = torch.where(x > 20.0, x, x.clamp(max=20.0).exp_().log1p_())
    return softplus.mul_(rate), _sigmoid(b.float())


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), in steps that round alike everywhere in a tensor."""
    return x.neg().exp_().add_(1.0).reciprocal_()


def unit(x: torch.Tensor) -> torch.Tensor:
    """Scales the last dimension to unit length: x / sqrt(sum x^2 + 1e-6), FP32."""
    square = (x * x).sum(-1, keepdim=True)
    return x / square.add_(constant(NORM_EPS, x.device)).sqrt_()


def take(slotted: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The entries [B, ...] of slotted [slots, ...] at slots int64 [B]; a single one is a view."""
    if slots.shape[0] == 1:
        return slotted.narrow(0, int(slots), 1)
    return slotted.index_select(0, slots)


def repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeats each head of x [..., Hk, D] for the heads / Hk value heads it serves, in order."""
    *lead, Hk, D = x.shape
    if Hk == heads:
        return x
    return x.unsqueeze(-2).expand(*lead, Hk, heads // Hk, D).reshape(*lead, heads, D)


def columns(
    key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> Columns:
    """Lays normed keys and values out for `advance`.

    Args:
        key: [..., Hv, Dk] FP32 of unit length.
        value: [..., Hv, Dv] FP32.
        decay: [..., Hv] FP32, exp(g).
        beta: [..., Hv] FP32.
    """
    lead, Dk, Dv = decay.shape, key.shape[-1], value.shape[-1]
    key = key.view(*lead, Dk, 1)
    beta = beta.view(*lead, 1, 1)
    return Columns(
        decay=decay.view(*lead, 1, 1),
        key=key,
        scaled_key=key * beta,
        scaled_value=value.view(*lead, 1, Dv) * beta,
    )


def advance(
    state: torch.Tensor, column: Columns, out: torch.Tensor, scratch: torch.Tensor
) -> torch.Tensor:
    """Takes a state through one column: M <- exp(g) M, then M <- M + k^ (beta (v - M^T k^))^T.

    Args:
        state: [..., Hv, Dk, Dv] FP32, read.
        column: one column, its leading dimensions those of state.
        out: written and returned; may be state itself.
        scratch: shaped as state, overwritten; one for a whole block stays in the cache.
    """
    torch.mul(state, column.decay, out=out)
    recalled = torch.mul(out, column.scaled_key, out=scratch).sum(-2, keepdim=True)
    return out.add_(torch.mul(column.key, column.scaled_value - recalled, out=scratch))
