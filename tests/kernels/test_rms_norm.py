"""RMS norm against its formula in FP64 and against the zero-centred norm it serves."""

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from kernels.rms_norm import rms_norm

SHAPES = [(1, 1), (5, 7), (1, 1, 256), (2, 8, 256), (3, 2, 4, 128)]


def formula(x, gain, eps):
    x = x.double()
    return gain.double() * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_formula_in_float32(shape):
    torch.manual_seed(0)
    x, gain = torch.randn(shape) * 3, torch.randn(shape[-1])
    actual = rms_norm(x, gain, 1e-6)
    assert actual.dtype is torch.float32
    torch.testing.assert_close(actual.double(), formula(x, gain, 1e-6), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("gain_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_is_rounded_once(gain_dtype):
    torch.manual_seed(1)
    x, gain = torch.randn(64, 256).bfloat16(), torch.randn(256).to(gain_dtype)
    actual = rms_norm(x, gain, 1e-6)
    assert actual.dtype is torch.bfloat16
    expected = formula(x, gain, 1e-6)
    # half a step of bfloat16, and a little for what FP32 itself rounds
    torch.testing.assert_close(actual.double(), expected, rtol=2**-8 * 1.001, atol=1e-30)


def test_zero_centred_norm_passes_one_plus_weight():
    torch.manual_seed(2)
    x, norm = torch.randn(3, 5, 64), Qwen3_5RMSNorm(64, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    gain = 1 + norm.weight.detach().float()
    torch.testing.assert_close(rms_norm(x, gain, 1e-6), norm(x).detach(), rtol=2e-6, atol=1e-6)


def test_eps_is_inside_the_root():
    x = torch.full((1, 4), 1e-3)
    expected = 1e-3 / (1e-6 + 1e-6) ** 0.5
    torch.testing.assert_close(rms_norm(x, torch.ones(4), 1e-6), torch.full((1, 4), expected))


def test_zero_row_stays_zero():
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


def test_strided_view_equals_its_copy():
    torch.manual_seed(3)
    wide, gain = torch.randn(4, 6, 96), torch.randn(32)
    view = wide[..., 32:64]
    assert torch.equal(rms_norm(view, gain, 1e-6), rms_norm(view.contiguous(), gain, 1e-6))


def test_input_is_left_alone():
    x = torch.randn(4, 32)
    kept = x.clone()
    rms_norm(x, torch.randn(32), 1e-6)
    assert torch.equal(x, kept)


def test_gain_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"gain: expected \[8\], got \[1\]"):
        rms_norm(torch.zeros(2, 8), torch.ones(1), 1e-6)
