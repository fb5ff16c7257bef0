"""Matrix products against FP64."""

import pytest
import torch

from kernels.linear import linear


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 33, 256])
@pytest.mark.parametrize(("N", "K"), [(1, 1), (16, 256), (784, 256), (256, 768)], ids=str)
def test_equals_formula_in_float32(rows, N, K):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, K), torch.randn(N, K)
    expected = x.double() @ weight.double().T
    actual = linear(x, weight)
    assert actual.shape == (rows, N)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-4)


def test_leading_dimensions_are_kept():
    x, weight = torch.randn(2, 3, 5, 8), torch.randn(4, 8)
    assert torch.equal(linear(x, weight), linear(x.view(30, 8), weight).view(2, 3, 5, 4))


def test_transposed_storage_gives_the_same_product():
    torch.manual_seed(1)
    x, weight = torch.randn(8, 64), torch.randn(96, 64)
    stored = weight.T.contiguous().T
    torch.testing.assert_close(linear(x, stored), linear(x, weight), rtol=1e-5, atol=1e-5)


def test_bfloat16_accumulates_in_float32():
    torch.manual_seed(2)
    # 4096 equal terms: a bfloat16 sum would stall at 256
    x, weight = torch.ones(3, 4096).bfloat16(), torch.ones(5, 4096).bfloat16()
    assert torch.equal(linear(x, weight), torch.full((3, 5), 4096.0).bfloat16())
    x, weight = torch.randn(9, 512).bfloat16(), torch.randn(33, 512).bfloat16()
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(linear(x, weight).double(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(
    "weight",
    [torch.zeros(4, 7), torch.zeros(4, 8).bfloat16(), torch.zeros(8)],
    ids=["K", "dtype", "1-d"],
)
def test_other_weight_is_refused(weight):
    with pytest.raises(ValueError, match=r"weight: expected \[\*, 8\] float32"):
        linear(torch.zeros(2, 8), weight)


def test_result_goes_where_it_is_told():
    x, weight = torch.randn(2, 3, 8), torch.randn(4, 8)
    out = torch.full((2, 3, 4), float("nan"))
    assert linear(x, weight, out) is out
    assert torch.equal(out, linear(x, weight))
    with pytest.raises(ValueError, match="out: expected"):
        linear(x, weight, torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match="out: expected contiguous memory"):
        linear(x, weight, torch.zeros(2, 3, 8)[..., ::2])
