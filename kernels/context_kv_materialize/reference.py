"""Plain torch form: one product for K and V of all layers."""

from __future__ import annotations

from torch import Tensor

from kernels.head_norm_rope.reference import rotation
from kernels.rms_norm.reference import inverse_rms


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
    """See the contract."""
    layers, _, heads, head_dim = keys.shape
    rows, cells, at = context.flatten(0, 1), destinations.flatten(), positions.flatten()
    live = cells >= 0
    if not live.all():
        rows, cells, at = rows[live], cells[live], at[live]
    weight = key_value_weight.flatten(0, 1).float()
    projected = (rows.float() @ weight.T).view(-1, layers, 2, heads, head_dim)
    key, value = projected.unbind(2)
    key = (key * inverse_rms(key, eps)).mul_(key_gain.unsqueeze(1))
    cos, sin = rotation(at.unsqueeze(1), theta, head_dim, None)
    pairs = key.view(*key.shape[:-1], 2, head_dim // 2)
    swapped = pairs.flip(-2)
    pairs.mul_(cos).addcmul_(swapped, sin)
    keys.index_copy_(1, cells, key.transpose(0, 1).to(keys.dtype))
    value = value.transpose(0, 1).to(context.dtype)
    values.index_copy_(1, cells, value.to(values.dtype))
