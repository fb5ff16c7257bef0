"""Projects context features into every draft layer's context K and V.

Maths:
    For layer l and a live row with feature c at position t:
        k = W_key[l] c                      one vector a KV head
        k = key_gain[l] * k / sqrt(mean(k**2) + eps)
        keys[l, destination] = rope(k, t)   pairs (j, j + D/2), angle t * theta**(-2j/D)
        values[l, destination] = W_value[l] c

Shapes:
    context [B, T, H] (c_t: projected and normalised, no input norm is applied here)
    positions [B, T] int64, absolute; destinations [B, T] int64, cell or -1
    key_value_weight [L, 2*Hkv*D, H], the K rows first; key_gain [L, D]
    keys, values [L, cells, Hkv, D]

Domain:
    Destinations of live rows are distinct and below `cells`; a destination below 0 marks a dead
    row. D is even. A layer's weight is contiguous; layers may lie apart. Which cell a position
    goes to (ring or page) is the caller's rule; a chunk longer than a ring marks only its last
    rows live.

Numerics:
    FP32 throughout; frequencies and angles as in `head_norm_rope`, since the queries that meet
    these keys are rotated there. K is rounded once, to the dtype of `keys`, after norm and RoPE.
    V is rounded to the dtype of `context`, then to that of `values`: FP16(BF16(v)) in the
    bfloat16 profile.

Effects:
    Writes the live rows' cells of `keys` and `values` in every layer. Dead rows touch nothing and
    are not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import require
from kernels.dispatch import select


def context_kv_materialize(
    context: Tensor,
    positions: Tensor,
    destinations: Tensor,
    key_value_weight: Tensor,
    key_gain: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    eps: float,
    theta: float,
) -> None:
    """Writes context K and V of all layers in place; see the module's contract.

    Args:
        context: [B, T, H] context features c_t.
        positions: [B, T] int64 absolute positions.
        destinations: [B, T] int64 cells, -1 for dead rows.
        key_value_weight: [L, 2*Hkv*D, H] K rows then V rows.
        key_gain: [L, D] plain gain of the key norm.
        keys: [L, cells, Hkv, D], written.
        values: [L, cells, Hkv, D], written.
        eps: added to the mean square.
        theta: RoPE base.

    Raises:
        ValueError: an argument of another shape or dtype.
    """
    rows, width, hidden = context.shape
    layers, _, heads, head_dim = keys.shape
    require("positions", positions, (rows, width), torch.int64)
    require("destinations", destinations, (rows, width), torch.int64)
    require("key_value_weight", key_value_weight, (layers, 2 * heads * head_dim, hidden))
    require("key_gain", key_gain, (layers, head_dim))
    require("values", values, keys.shape)
    select("context_kv_materialize", context).context_kv_materialize(
        context,
        positions,
        destinations,
        key_value_weight,
        key_gain,
        keys,
        values,
        eps=eps,
        theta=theta,
    )
