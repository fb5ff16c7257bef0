"""The root-mean-square norm's kernel against its reference."""

import pytest
import torch

from kernels.rms_norm import rms_norm
from kernels.rms_norm.reference import rms_norm as reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 64), (1, 1000), (0, 8)], ids=str)
def test_equals_reference(random, distance, shape, dtype):
    x, gain = random(*shape, dtype=dtype), random(shape[-1])
    actual = rms_norm(x, gain, 1e-6)
    assert actual.dtype == dtype
    if x.numel():
        assert distance(actual, reference(x, gain, 1e-6)) < (1e-6 if dtype.itemsize == 4 else 1e-3)


def test_gain_may_have_the_dtype_of_x(random, distance):
    x, gain = random(2, 48, dtype=torch.float16), random(48, dtype=torch.float16)
    assert distance(rms_norm(x, gain, 1e-5), reference(x, gain, 1e-5)) < 1e-3


def test_row_does_not_depend_on_its_neighbours(random):
    x, gain = random(8, 96), random(96)
    x[3] = float("nan")
    together = rms_norm(x, gain, 1e-6)
    for row in (0, 5, 7):
        assert torch.equal(together[row], rms_norm(x[row], gain, 1e-6))
