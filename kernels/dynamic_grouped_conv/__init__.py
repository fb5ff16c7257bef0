"""Dynamic grouped convolution around a branch: an input side with its norm, an output side.

Maths:
    n = gain * x / sqrt(mean(x**2) + eps)
    delta = reshape(projection n, [2 sides, taps, G])               from the column itself
    conv(s, y)_i = sum over tap <= i of (base[s, tap] + delta_i[s, tap, group]) * y_(i - tap)
    prepare:     prepared = conv(0, n), finish_delta = delta[1]
    finish_add:  residual + conv(1, z), with the delta that `prepare` returned

Shapes:
    x, prepared, residual, z [B, W, H]; gain [H]; base [2, taps, H]; projection [2*taps*G, H]
    finish_delta [B, W, taps, G]; G groups of H/G neighbouring channels share a delta

Domain:
    Columns of a row are neighbours in one block: column 0 has no predecessor, rows are separate
    and nothing is kept between calls. H a multiple of G.

Numerics:
    FP32 inside; base and delta are added before the product. n and the input side's delta are
    never rounded; prepared and finish_delta round once to the dtype of x, the sum of `finish_add`
    once to the dtype of `residual`. A tap before the block contributes exactly zero, also where
    values are not finite.

Effects:
    None.
"""

from __future__ import annotations

from torch import Tensor

from kernels.checks import require, require_that
from kernels.dispatch import select


def prepare(
    x: Tensor, gain: Tensor, base: Tensor, projection: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Normalises a branch's input and convolves it; see the module's contract.

    Args:
        x: [B, W, H] residual stream.
        gain: [H] plain gain of the norm.
        base: [2, taps, H] coefficients of both sides.
        projection: [2*taps*G, H], rows in the order side, tap, group.
        eps: added to the mean square.

    Returns:
        prepared [B, W, H] and finish_delta [B, W, taps, G], like `x`.

    Raises:
        ValueError: an argument of another shape.
    """
    hidden = x.shape[-1]
    require("x", x, (None, None, hidden))
    require("gain", gain, (hidden,))
    require("base", base, (2, None, hidden))
    require("projection", projection, (None, hidden))
    _groups("projection", projection.shape[0], 2 * base.shape[1], hidden)
    result: tuple[Tensor, Tensor] = select("dynamic_grouped_conv", x).prepare(
        x, gain, base, projection, eps
    )
    return result


def finish_add(residual: Tensor, z: Tensor, base: Tensor, finish_delta: Tensor) -> Tensor:
    """Convolves a branch's output and adds it to the residual; see the module's contract.

    Args:
        residual: [B, W, H].
        z: [B, W, H] branch output, FP32 or the dtype of `residual`.
        base: [2, taps, H] coefficients of both sides.
        finish_delta: [B, W, taps, G] from `prepare` of the same branch.

    Returns:
        [B, W, H] like `residual`.

    Raises:
        ValueError: an argument of another shape.
    """
    rows, width, hidden = residual.shape
    require("z", z, residual.shape)
    require("base", base, (2, None, hidden))
    require("finish_delta", finish_delta, (rows, width, base.shape[1], None))
    _groups("finish_delta", finish_delta.shape[3], 1, hidden)
    result: Tensor = select("dynamic_grouped_conv", residual).finish_add(
        residual, z, base, finish_delta
    )
    return result


def _groups(name: str, outputs: int, per_group: int, hidden: int) -> None:
    holds = outputs > 0 and outputs % per_group == 0 and hidden % (outputs // per_group) == 0
    require_that(holds, name, f"{per_group} x a divisor of {hidden}", outputs)
