"""A product added to the residual stream: bit for bit the product, then the sum and its norm."""

import pytest
import torch

from kernels.add_rms_norm import add_rms_norm
from kernels.linear import linear
from kernels.linear.kernel import cut
from kernels.linear_add_rms_norm import linear_add_rms_norm
from kernels.linear_add_rms_norm.reference import linear_add_rms_norm as reference

HALF = torch.float16


@pytest.fixture(autouse=True, params=[1, 33])
def fewest(request, monkeypatch):
    """Rows from which on the runs are added by the norm's programs."""
    monkeypatch.setattr("kernels.linear_add_rms_norm.kernel.FEWEST", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(
    ("shape", "H"), [((1, 40), 7), ((3, 2048), 70), ((2, 3, 4096), 36), ((130, 2048), 20)], ids=str
)
def test_equals_reference_and_its_parts(random, distance, shape, H, dtype):
    x, weight = random(*shape, dtype=dtype), random(H, shape[-1], dtype=dtype, scale=0.05)
    residual, gain = random(*shape[:-1], H, dtype=dtype), random(H)
    actual = linear_add_rms_norm(x, weight, residual, gain, 1e-6)
    parts = add_rms_norm(residual, linear(x, weight), gain, 1e-6)
    limit = 1e-6 if dtype.itemsize == 4 else 2e-3
    for one, same, other in zip(
        actual, parts, reference(x, weight, residual, gain, 1e-6), strict=True
    ):
        assert one.dtype == dtype
        assert torch.equal(one, same)
        assert distance(one, other) < limit


def test_column_does_not_depend_on_its_neighbours(random):
    assert cut(70, 2048, 2).split > 1
    x, weight = random(33, 2048, dtype=HALF), random(70, 2048, dtype=HALF, scale=0.05)
    residual, gain = random(33, 70, dtype=HALF), random(70)
    x[2] = float("nan")
    together = linear_add_rms_norm(x, weight, residual, gain, 1e-6)
    for rows in (slice(0, 1), slice(8, 16), slice(16, 33)):
        alone = linear_add_rms_norm(x[rows], weight, residual[rows], gain, 1e-6)
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one, other[rows])


def test_more_rows_than_the_kernel_takes_and_none(random, distance):
    weight, gain = random(16, 32), random(16)
    for M in (300, 0):
        x, residual = random(M, 32), random(M, 16)
        actual = linear_add_rms_norm(x, weight, residual, gain, 1e-6)
        for one, other in zip(actual, reference(x, weight, residual, gain, 1e-6), strict=True):
            assert one.shape == other.shape
            if M:
                assert distance(one, other) < 1e-6
