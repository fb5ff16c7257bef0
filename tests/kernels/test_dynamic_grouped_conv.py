"""The grouped convolution: its formula, its boundary and what it does not mix."""

import math

import pytest
import torch

from kernels.dynamic_grouped_conv import finish_add, prepare

EPS = 1e-6


def restated_conv(y, base, delta):
    """One side in FP64 loops: y [B, W, H], base [taps, H], delta [B, W, taps, G]."""
    rows, width, hidden = y.shape
    taps, groups = delta.shape[2:]
    out = torch.zeros(y.shape, dtype=torch.float64)
    for b in range(rows):
        for i in range(width):
            for h in range(hidden):
                for tap in range(min(taps, i + 1)):
                    coefficient = float(base[tap, h]) + float(
                        delta[b, i, tap, h // (hidden // groups)]
                    )
                    out[b, i, h] += coefficient * float(y[b, i - tap, h])
    return out


def restated_prepare(x, gain, base, projection):
    x = x.double()
    normed = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            rms = math.sqrt(float((x[b, i] ** 2).mean()) + EPS)
            normed[b, i] = gain.double() * x[b, i] / rms
    taps = base.shape[1]
    delta = (normed @ projection.double().T).view(*x.shape[:2], 2, taps, -1)
    return restated_conv(normed, base[0], delta[:, :, 0]), delta[:, :, 1]


def weights(rows, width, hidden, group, taps, dtype=torch.float32):
    g = torch.Generator().manual_seed(rows * 100 + width * 10 + taps)
    x = torch.randn(rows, width, hidden, generator=g).to(dtype)
    gain = (1 + 0.2 * torch.randn(hidden, generator=g)).to(dtype)
    base = torch.randn(2, taps, hidden, generator=g).to(dtype)
    projection = torch.randn(2 * taps * hidden // group, hidden, generator=g) / hidden**0.5
    z = torch.randn(rows, width, hidden, generator=g).to(dtype)
    return x, gain, base, projection.to(dtype), z


@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 2), (3, 4), (2, 8)])
@pytest.mark.parametrize(("hidden", "group"), [(32, 16), (12, 4), (6, 1)])
def test_equals_the_formula_in_fp64(rows, width, hidden, group, taps):
    x, gain, base, projection, z = weights(rows, width, hidden, group, taps)
    prepared, finish_delta = prepare(x, gain, base, projection, EPS)
    expected, expected_delta = restated_prepare(x, gain, base, projection)
    torch.testing.assert_close(prepared.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(finish_delta.double(), expected_delta, atol=5e-6, rtol=0)
    out = finish_add(x, z, base, finish_delta)
    expected = x.double() + restated_conv(z, base[1], finish_delta)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


def test_tap_before_the_block_contributes_exactly_zero():
    """Column 0 has no predecessor: a coefficient or a neighbour that is inf must not make NaN."""
    x, gain, base, projection, z = weights(2, 3, 32, 16, 2)
    clean, delta = prepare(x, gain, base, projection, EPS)
    clean_out = finish_add(x, z, base, delta)
    base[:, 1] = torch.inf
    prepared, _ = prepare(x, gain, base, projection, EPS)
    assert torch.equal(prepared[:, 0], clean[:, 0])
    assert torch.equal(finish_add(x, z, base, delta)[:, 0], clean_out[:, 0])


def test_column_reaches_itself_and_its_successors_within_the_taps_alone():
    x, gain, base, projection, z = weights(2, 6, 32, 16, 2)
    before, delta = prepare(x, gain, base, projection, EPS)
    before_out = finish_add(x, z, base, delta)
    changed_x, changed_z = x.clone(), z.clone()
    changed_x[0, 2] += 1.0
    changed_z[0, 2] += 1.0
    after, _ = prepare(changed_x, gain, base, projection, EPS)
    after_out = finish_add(x, changed_z, base, delta)
    expected = [(0, 2), (0, 3)]
    assert (after != before).any(dim=2).nonzero().tolist() == [list(at) for at in expected]
    assert (after_out != before_out).any(dim=2).nonzero().tolist() == [list(at) for at in expected]


def test_coefficients_of_the_previous_tap_come_from_the_column_itself():
    x, gain, base, projection, z = weights(1, 2, 32, 16, 2)
    _, delta = prepare(x, gain, base, projection, EPS)
    delta = torch.zeros_like(delta)
    delta[0, 1, 1] = 1.0
    base = torch.zeros_like(base)
    out = finish_add(torch.zeros_like(x), z, base, delta)
    assert torch.equal(out[0, 1], z[0, 0])
    assert (out[0, 0] == 0).all()


def test_arguments_are_left_alone():
    arguments = weights(2, 3, 32, 16, 2)
    copies = [argument.clone() for argument in arguments]
    x, gain, base, projection, z = arguments
    _, delta = prepare(x, gain, base, projection, EPS)
    finish_add(x, z, base, delta)
    assert all(torch.equal(*pair) for pair in zip(arguments, copies, strict=True))


def test_bfloat16_profile_within_its_tolerances():
    x, gain, base, projection, z = weights(2, 8, 64, 16, 2, torch.bfloat16)
    prepared, finish_delta = prepare(x, gain, base, projection, EPS)
    expected, expected_delta = restated_prepare(x, gain, base, projection)
    out = finish_add(x, z, base, finish_delta)
    expected_out = x.double() + restated_conv(z, base[1], finish_delta)

    def relative(actual, wanted):
        assert actual.dtype is torch.bfloat16
        return ((actual.double() - wanted).norm() / wanted.norm()).item()

    assert relative(prepared, expected) <= 3.6e-3
    assert relative(finish_delta, expected_delta) <= 3.2e-3
    assert relative(out, expected_out) <= 3.2e-3


def test_other_shape_is_refused():
    x, gain, base, projection, z = weights(1, 2, 32, 16, 2)
    with pytest.raises(ValueError, match=r"^projection: expected 4 x a divisor of 32, got 6$"):
        prepare(x, gain, base, projection[:6], EPS)
    with pytest.raises(ValueError, match=r"^finish_delta: expected \[1, 2, 2, \*\]"):
        finish_add(x, z, base, torch.zeros(1, 2, 3, 2))
