"""Gated RMS norm against its formula in FP64 and against transformers' module."""

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from kernels.gated_rms_norm import gated_rms_norm


def formula(x, gate, gain, eps):
    x, gate = x.double(), gate.double()
    normed = gain.double() * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return normed * gate / (1 + torch.exp(-gate))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1, 1, 8, 32), (2, 8, 8, 32)], ids=str)
def test_equals_formula_in_float32(shape):
    torch.manual_seed(0)
    x, gate, gain = torch.randn(shape), torch.randn(shape) * 4, torch.randn(shape[-1])
    actual = gated_rms_norm(x, gate, gain, 1e-6)
    torch.testing.assert_close(actual.double(), formula(x, gate, gain, 1e-6), rtol=3e-6, atol=1e-6)


def test_bfloat16_is_rounded_once():
    torch.manual_seed(1)
    x, gate, gain = torch.randn(50, 32).bfloat16(), torch.randn(50, 32).bfloat16(), torch.randn(32)
    actual = gated_rms_norm(x, gate, gain, 1e-6)
    assert actual.dtype is torch.bfloat16
    expected = formula(x, gate, gain, 1e-6)
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8 * 1.001, atol=1e-30)


def test_equals_the_module_of_the_reference_model():
    torch.manual_seed(2)
    module = Qwen3_5RMSNormGated(32, eps=1e-6)
    torch.nn.init.normal_(module.weight)
    x, gate = torch.randn(40, 32), torch.randn(40, 32)
    expected = module(x, gate).detach()
    actual = gated_rms_norm(x, gate, module.weight.detach(), 1e-6)
    torch.testing.assert_close(actual, expected, rtol=3e-6, atol=1e-6)


def test_gate_may_be_a_strided_view():
    torch.manual_seed(3)
    x, gain, packed = torch.randn(2, 3, 4, 32), torch.randn(32), torch.randn(2, 3, 784)
    gate = packed[..., 512:640].view(2, 3, 4, 32)
    expected = formula(x, gate, gain, 1e-6)
    actual = gated_rms_norm(x, gate, gain, 1e-6)
    torch.testing.assert_close(actual.double(), expected, rtol=3e-6, atol=1e-6)


def test_extreme_gates_close_or_open():
    x, gain = torch.ones(1, 2), torch.ones(2)
    actual = gated_rms_norm(x, torch.tensor([[-200.0, 200.0]]), gain, 0.0)
    torch.testing.assert_close(actual, torch.tensor([[0.0, 200.0]]))


def test_gate_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"gate: expected \[2, 4\], got \[1, 4\]"):
        gated_rms_norm(torch.zeros(2, 4), torch.zeros(1, 4), torch.ones(4), 1e-6)
