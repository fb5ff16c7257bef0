"""The dynamic grouped convolution's kernels against their references."""

import pytest
import torch

from kernels.dynamic_grouped_conv import finish_add, linear_finish_add, prepare
from kernels.dynamic_grouped_conv.reference import finish_add as finish_reference
from kernels.dynamic_grouped_conv.reference import prepare as prepare_reference
from kernels.linear import linear
from kernels.linear.kernel import cut

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


@pytest.fixture(params=[0, 32])
def most_joined(request, monkeypatch):
    """Rows up to which a product's last runs end its branch."""
    monkeypatch.setattr("kernels.dynamic_grouped_conv.kernel._MOST_JOINED", request.param)


def ending(random, B, W, K, H, G, taps, dtype=torch.float16):
    """Arguments of `linear_finish_add`."""
    return {
        "residual": random(B, W, H, dtype=dtype),
        "x": random(B, W, K, dtype=dtype),
        "weight": random(H, K, dtype=dtype, scale=K**-0.5),
        "base": random(2, taps, H, dtype=dtype),
        "finish_delta": random(B, W, taps, G, dtype=dtype),
        "gain": random(H),
    }


@pytest.mark.usefixtures("most_joined")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "split"),
    [((1, 1, 2048, 36, 3, 2), 2), ((3, 7, 2080, 70, 7, 3), 2), ((2, 3, 40, 48, 3, 2), 1)],
    ids=str,
)
def test_branch_that_ends_in_its_product_has_the_bits_of_its_parts(random, shape, split, dtype):
    arguments = ending(random, *shape, dtype=dtype)
    x, weight = arguments["x"], arguments["weight"]
    assert cut(*weight.shape, 2).split >= split
    x[-1, -1] = float("nan")  # the last column's own
    residual, base, delta = (arguments[n] for n in ("residual", "base", "finish_delta"))
    for _ in range(2):  # the counters must be left as they were found
        out, scaled = linear_finish_add(**arguments)
        assert out.dtype is dtype
        same = finish_add(residual, linear(x, weight), base, delta)
        assert torch.equal(out.nan_to_num(9.0), same.nan_to_num(9.0))
        assert out[-1, -1].isnan().all()
        assert out.isnan().sum() == out.shape[2]
    _, gain, base, projection = case(random, *shape[:2], *shape[3:], dtype=dtype)
    out, scaled = linear_finish_add(**arguments | {"x": x.nan_to_num(1.0), "gain": gain})
    for one, other in zip(
        prepare(out, gain, base, projection, 1e-6, scaled),
        prepare(out, gain, base, projection, 1e-6),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("most_joined")
def test_column_that_ends_in_its_product_ignores_other_rows(random):
    arguments = ending(random, 5, 4, 2048, 70, 7, 2)
    together, _ = linear_finish_add(**arguments)
    for row, width in ((0, 4), (4, 2)):
        part = {
            name: value[row : row + 1, :width]
            if name in ("residual", "x", "finish_delta")
            else value
            for name, value in arguments.items()
        }
        alone, _ = linear_finish_add(**part)
        assert torch.equal(alone[0], together[row, :width])
