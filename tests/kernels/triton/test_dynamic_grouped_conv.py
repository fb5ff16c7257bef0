"""The dynamic grouped convolution's kernels against their references."""

import pytest
import torch

from kernels.dynamic_grouped_conv import finish_add, prepare
from kernels.dynamic_grouped_conv.reference import finish_add as finish_reference
from kernels.dynamic_grouped_conv.reference import prepare as prepare_reference

SHAPES = [(1, 1, 48, 3, 2), (2, 3, 40, 10, 2), (3, 7, 36, 3, 3)]


def case(random, B, W, H, G, taps, dtype=torch.float32):
    x = random(B, W, H, dtype=dtype)
    base = random(2, taps, H, dtype=dtype)
    projection = random(2 * taps * G, H, dtype=dtype, scale=H**-0.5)
    return x, random(H), base, projection


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prepare_equals_reference(random, distance, shape, dtype):
    arguments = case(random, *shape, dtype=dtype)
    actual, expected = prepare(*arguments, 1e-6), prepare_reference(*arguments, 1e-6)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype is dtype
        assert distance(one, other) < (2e-6 if dtype is torch.float32 else 1e-3)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_finish_equals_reference(random, distance, shape, wide):
    B, W, H, G, taps = shape
    dtype = torch.float16
    residual, base = random(B, W, H, dtype=dtype), random(2, taps, H, dtype=dtype)
    z = random(B, W, H, dtype=torch.float32 if wide else dtype)
    delta = random(B, W, taps, G, dtype=dtype)
    actual = finish_add(residual, z, base, delta)
    assert actual.dtype is dtype
    assert distance(actual, finish_reference(residual, z, base, delta)) < 1e-3


def test_tap_before_the_block_is_left_out_where_values_are_not_finite(random):
    x, gain, base, projection = case(random, 2, 2, 32, 2, 2)
    base[:, 1] = float("inf")
    prepared, _ = prepare(x, gain, base, projection, 1e-6)
    assert prepared[:, 0].isfinite().all()
    finished = finish_add(x, x, base, torch.zeros(2, 2, 2, 2))
    assert finished[:, 0].isfinite().all()
    assert not finished[:, 1].isfinite().any()


def test_row_is_the_same_bits_alone_narrow_and_among_others(random):
    x, gain, base, projection = case(random, 6, 4, 64, 4, 2)
    prepared, delta = prepare(x, gain, base, projection, 1e-6)
    finished = finish_add(x, prepared, base, delta)
    for row, width in ((0, 4), (5, 2)):
        part = x[row : row + 1, :width]
        alone, alone_delta = prepare(part, gain, base, projection, 1e-6)
        assert torch.equal(alone[0], prepared[row, :width])
        assert torch.equal(alone_delta[0], delta[row, :width])
        again = finish_add(part, alone, base, alone_delta)
        assert torch.equal(again[0], finished[row, :width])
