"""The sum with its norm, against the formula in FP64."""

import pytest
import torch

from kernels.add_rms_norm import add_rms_norm


def formula(total, gain, eps):
    total = total.double()
    return gain.double() * total / torch.sqrt((total * total).mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (2, 8, 256)], ids=str)
def test_equals_formula_in_float32(shape):
    torch.manual_seed(0)
    x, z, gain = torch.randn(shape) * 3, torch.randn(shape), torch.randn(shape[-1])
    total, normed = add_rms_norm(x, z, gain, 1e-6)
    torch.testing.assert_close(total.double(), x.double() + z.double(), rtol=2**-23, atol=0)
    expected = formula(x.double() + z.double(), gain, 1e-6)
    torch.testing.assert_close(normed.double(), expected, rtol=2e-6, atol=1e-7)


def test_norm_is_of_the_sum_as_rounded():
    torch.manual_seed(1)
    x, z, gain = (
        torch.randn(64, 32).bfloat16(),
        torch.randn(64, 32).bfloat16() / 64,
        torch.randn(32),
    )
    total, normed = add_rms_norm(x, z, gain, 1e-6)
    assert total.dtype is normed.dtype is torch.bfloat16
    rounded = (x.double() + z.double()).bfloat16()
    assert torch.equal(total, rounded)
    expected = formula(rounded, gain, 1e-6)
    # half a step of bfloat16, and a little for what FP32 itself rounds
    torch.testing.assert_close(normed.double(), expected, rtol=2**-8 * 1.001, atol=1e-30)
    exact = formula(x.double() + z.double(), gain, 1e-6).bfloat16()
    assert not torch.equal(normed, exact)


def test_inputs_are_left_alone():
    x, z = torch.randn(4, 32), torch.randn(4, 32)
    kept = x.clone(), z.clone()
    add_rms_norm(x, z, torch.randn(32), 1e-6)
    assert torch.equal(x, kept[0])
    assert torch.equal(z, kept[1])


@pytest.mark.parametrize(
    ("z", "gain", "message"),
    [
        (torch.zeros(2, 4), torch.ones(8), r"z: expected \[2, 8\] float32, got \[2, 4\] float32"),
        (torch.zeros(2, 8).bfloat16(), torch.ones(8), r"z: expected \[2, 8\] float32, got"),
        (torch.zeros(2, 8), torch.ones(1), r"gain: expected \[8\], got \[1\]"),
    ],
    ids=["width", "dtype", "gain"],
)
def test_misfits_are_refused(z, gain, message):
    with pytest.raises(ValueError, match=message):
        add_rms_norm(torch.zeros(2, 8), z, gain, 1e-6)
