"""The first half of a feed-forward block against FP64."""

import pytest
import torch

from kernels.gate_up_swiglu import gate_up_swiglu


def formula(x, weight):
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


@pytest.mark.parametrize("shape", [(1, 1), (3, 10), (2, 8, 96), (0, 6)], ids=str)
def test_equals_formula(shape):
    torch.manual_seed(0)
    x, weight = torch.randn(shape), torch.randn(14, shape[-1])
    actual = gate_up_swiglu(x, weight)
    assert actual.shape == (*shape[:-1], 7)
    torch.testing.assert_close(actual.double(), formula(x, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(4, 7), r"weight: expected \[\*, 8\] float32"),
        (torch.zeros(4, 8).bfloat16(), r"weight: expected \[\*, 8\] float32"),
        (torch.zeros(5, 8), "weight: expected an even number of rows, got 5"),
    ],
    ids=["K", "dtype", "odd"],
)
def test_other_weight_is_refused(weight, message):
    with pytest.raises(ValueError, match=message):
        gate_up_swiglu(torch.zeros(2, 8), weight)
