"""A feed-forward block's first half: its kernel against its reference, and alone in company."""

import pytest
import torch

from kernels.gate_up_swiglu import gate_up_swiglu
from kernels.gate_up_swiglu.kernel import is_aligned
from kernels.gate_up_swiglu.reference import gate_up_swiglu as reference
from kernels.linear import linear
from kernels.linear.kernel import cut
from kernels.swiglu import swiglu

HALF = torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(
    ("shape", "inner"), [((1, 40), 7), ((2, 3, 200), 130), ((17, 64), 64), ((0, 8), 3)], ids=str
)
def test_equals_reference(random, distance, shape, inner, dtype):
    x, weight = random(*shape, dtype=dtype), random(2 * inner, shape[-1], dtype=dtype, scale=0.1)
    actual = gate_up_swiglu(x, weight)
    assert actual.dtype == dtype
    assert actual.shape == (*shape[:-1], inner)
    if actual.numel():
        limit = 1e-6 if dtype.itemsize == 4 else 2e-3
        assert distance(actual, reference(x, weight)) < limit


@pytest.fixture(params=[2, 132])
def processors(request, monkeypatch):
    """Of a device that a few tiles fill, so that the rest are cut, and of one they do not."""
    cut.cache_clear()
    monkeypatch.setattr("kernels.linear.kernel.PROCESSORS", request.param)
    yield request.param
    cut.cache_clear()


@pytest.mark.parametrize("inner", [70, 130, 150, 300])
@pytest.mark.parametrize("M", [5, 20])
def test_tiles_that_are_cut(random, distance, processors, inner, M):
    """Twice, because the counters must be left as they were found."""
    x, weight = random(M, 600), random(2 * inner, 600, scale=0.05)
    if (processors, inner) == (2, 150):
        assert cut(300, 600, 4) == (64, 2, 256)
    first = gate_up_swiglu(x, weight)
    assert distance(first, reference(x, weight)) < 1e-6
    assert torch.equal(gate_up_swiglu(x, weight), first)
    rows = slice(3, 4) if M <= 16 else slice(3, 20)  # the interpreter's sums follow a tile's width
    assert torch.equal(gate_up_swiglu(x[rows], weight), first[rows])


def test_what_the_engine_does_not_take(random, distance):
    """Rows that are not whole 16 bytes, or do not begin at one."""
    shifted, weight = random(20, 601)[:, 1:], random(300, 600, scale=0.05)
    aligned = shifted.contiguous()
    assert not is_aligned(shifted)
    assert is_aligned(aligned)
    apart = gate_up_swiglu(aligned, weight)
    assert distance(gate_up_swiglu(shifted, weight), apart) < 1e-6


def test_column_does_not_depend_on_its_neighbours(random, processors):
    x, weight = random(20, 600, dtype=HALF), random(300, 600, dtype=HALF)
    x[2] = float("nan")
    together = gate_up_swiglu(x, weight)
    for rows in (slice(0, 1), slice(8, 16), slice(16, 20)):
        assert torch.equal(together[rows], gate_up_swiglu(x[rows], weight))


def test_has_the_bits_of_product_and_activation_where_the_same_rows_are_cut(random):
    x, weight = random(4, 256, dtype=HALF), random(300, 256, dtype=HALF, scale=0.1)
    assert torch.equal(gate_up_swiglu(x, weight), swiglu(linear(x, weight)))


def test_more_rows_than_a_tile_and_than_the_kernel_takes(random, distance):
    weight = random(300, 200, scale=0.1)
    for M in (130, 300):
        x = random(M, 200)
        assert distance(gate_up_swiglu(x, weight), reference(x, weight)) < 1e-6


def test_views(random, distance):
    wide, weight = random(5, 100), random(40, 30).t()
    rows = wide[:, 4:44]
    apart = gate_up_swiglu(rows.contiguous(), weight.contiguous())
    assert distance(gate_up_swiglu(rows, weight), apart) < 1e-6
