"""The gated activation's kernel against its reference."""

import pytest
import torch

from kernels.swiglu import swiglu
from kernels.swiglu.reference import swiglu as reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 10), (2, 2, 2100), (4, 256), (0, 8)], ids=str)
def test_equals_reference(random, distance, shape, dtype):
    gate_up = random(*shape, dtype=dtype, scale=4)
    actual = swiglu(gate_up)
    assert actual.dtype == dtype
    if actual.numel():
        limit = 1e-6 if dtype.itemsize == 4 else 1e-3
        assert distance(actual, reference(gate_up)) < limit


def test_extremes_stay_finite():
    gate = torch.tensor([[-1e4, -90.0, 0.0, 90.0, 1e4]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=-1)
    torch.testing.assert_close(swiglu(gate_up), reference(gate_up), atol=1e-30, rtol=1e-6)


def test_rows_may_be_part_of_wider_ones(random):
    wide = random(3, 50)
    assert torch.equal(swiglu(wide[:, 4:24]), swiglu(wide[:, 4:24].contiguous()))
