"""The gated activation against FP64."""

import pytest
import torch

from kernels.swiglu import swiglu


def formula(gate_up):
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half].double(), gate_up[..., half:].double()
    return gate / (1 + torch.exp(-gate)) * up


@pytest.mark.parametrize("shape", [(1, 2), (3, 10), (1, 1, 1536), (2, 8, 96), (0, 6)], ids=str)
def test_first_half_gates_the_second(shape):
    torch.manual_seed(0)
    gate_up = torch.randn(shape) * 3
    actual = swiglu(gate_up)
    torch.testing.assert_close(actual.double(), formula(gate_up), rtol=2e-6, atol=1e-6)


def test_bfloat16_is_rounded_once():
    torch.manual_seed(1)
    gate_up = torch.randn(40, 64).bfloat16()
    actual = swiglu(gate_up)
    assert actual.dtype is torch.bfloat16
    torch.testing.assert_close(actual.double(), formula(gate_up), rtol=2**-8 * 1.001, atol=1e-30)


def test_input_is_left_alone():
    gate_up = torch.randn(4, 16)
    kept = gate_up.clone()
    swiglu(gate_up)
    assert torch.equal(gate_up, kept)


def test_odd_width_is_refused():
    with pytest.raises(ValueError, match="gate_up: expected an even last dimension, got 5"):
        swiglu(torch.zeros(2, 5))
