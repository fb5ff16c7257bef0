"""Plain torch form."""

from __future__ import annotations

from torch import Tensor

from kernels.rms_norm.reference import inverse_rms


def prepare(
    x: Tensor, gain: Tensor, base: Tensor, projection: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    rows, width, _ = x.shape
    taps = base.shape[1]
    normed = x.float()
    normed = (normed * inverse_rms(normed, eps)).mul_(gain)
    delta = (normed @ projection.float().T).view(rows, width, 2, taps, -1)
    prepared = _convolve(normed, base[0], delta[:, :, 0])
    return prepared.to(x.dtype), delta[:, :, 1].to(x.dtype)


def finish_add(residual: Tensor, z: Tensor, base: Tensor, finish_delta: Tensor) -> Tensor:
    """See the contract."""
    branch = _convolve(z.float(), base[1], finish_delta.float())
    return branch.add_(residual).to(residual.dtype)


def _convolve(y: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """One side: y [B, W, H], base [taps, H], delta [B, W, taps, G], all but base FP32."""
    rows, width, hidden = y.shape
    taps, groups = delta.shape[2:]
    coefficients = base.float().view(taps, groups, hidden // groups) + delta.unsqueeze(-1)
    coefficients = coefficients.view(rows, width, taps, hidden)
    out = coefficients[:, :, 0] * y
    for tap in range(1, min(taps, width)):
        # columns without a predecessor are left out, not multiplied by zero: inf * 0 is not 0
        out[:, tap:].addcmul_(coefficients[:, tap:, tap], y[:, :-tap])
    return out
