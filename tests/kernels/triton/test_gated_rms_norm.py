"""The gated norm's kernel against its reference."""

import pytest
import torch

from kernels.gated_rms_norm import gated_rms_norm
from kernels.gated_rms_norm.reference import gated_rms_norm as reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (2, 2, 3, 32), (2, 1, 2, 2, 7)], ids=str)
def test_equals_reference(random, distance, shape, dtype):
    x, gate, gain = random(*shape, dtype=dtype), random(*shape, dtype=dtype), random(shape[-1])
    actual = gated_rms_norm(x, gate, gain, 1e-6)
    assert actual.dtype == dtype
    limit = 1e-6 if dtype.itemsize == 4 else 1e-3
    assert distance(actual, reference(x, gate, gain, 1e-6)) < limit


def test_gate_may_be_part_of_wider_columns(random):
    x, wide, gain = random(2, 3, 4, 16), random(2, 3, 100), random(16)
    gate = wide[..., 20:84].unflatten(-1, (4, 16))
    expected = gated_rms_norm(x, gate.contiguous(), gain, 1e-6)
    assert torch.equal(gated_rms_norm(x, gate, gain, 1e-6), expected)


def test_row_does_not_depend_on_its_neighbours(random):
    x, gate, gain = random(6, 24), random(6, 24), random(24)
    x[1], gate[2] = float("nan"), float("inf")
    together = gated_rms_norm(x, gate, gain, 1e-6)
    for row in (0, 5):
        assert torch.equal(together[row], gated_rms_norm(x[row], gate[row], gain, 1e-6))
