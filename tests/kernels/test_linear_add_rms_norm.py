"""A product added to the residual stream, and its norm."""

import pytest
import torch

from kernels.add_rms_norm import add_rms_norm
from kernels.linear import linear
from kernels.linear_add_rms_norm import linear_add_rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lead", [(3,), (2, 4), (0,)], ids=str)
def test_is_its_parts_bit_for_bit(lead, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(*lead, 24).to(dtype), torch.randn(10, 24).to(dtype)
    residual, gain = torch.randn(*lead, 10).to(dtype), torch.randn(10)
    fused = linear_add_rms_norm(x, weight, residual, gain, 1e-6)
    for one, other in zip(
        fused, add_rms_norm(residual, linear(x, weight), gain, 1e-6), strict=True
    ):
        assert one.dtype == dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("weight", "residual", "gain", "message"),
    [
        (torch.zeros(4, 7), torch.zeros(2, 4), torch.zeros(4), "weight: expected"),
        (torch.zeros(4, 8), torch.zeros(3, 4), torch.zeros(4), "residual: expected"),
        (torch.zeros(4, 8), torch.zeros(2, 4).half(), torch.zeros(4), "residual: expected"),
        (torch.zeros(4, 8), torch.zeros(2, 4), torch.zeros(5), "gain: expected"),
    ],
    ids=["weight", "rows", "dtype", "gain"],
)
def test_what_does_not_fit_is_refused(weight, residual, gain, message):
    with pytest.raises(ValueError, match=message):
        linear_add_rms_norm(torch.zeros(2, 8), weight, residual, gain, 1e-6)
