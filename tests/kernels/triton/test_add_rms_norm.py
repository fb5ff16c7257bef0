"""The sum with its norm: the kernel against its reference."""

import pytest
import torch

from kernels.add_rms_norm import add_rms_norm
from kernels.add_rms_norm.reference import add_rms_norm as reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 64), (1, 1000), (0, 8)], ids=str)
def test_equals_reference(random, distance, shape, dtype):
    x, z, gain = random(*shape, dtype=dtype), random(*shape, dtype=dtype), random(shape[-1])
    total, normed = add_rms_norm(x, z, gain, 1e-6)
    expected = reference(x, z, gain, 1e-6)
    assert torch.equal(total, expected[0])
    if x.numel():
        assert distance(normed, expected[1]) < (1e-6 if dtype.itemsize == 4 else 1e-3)


def test_strided_rows_equal_their_copies(random):
    x, z, gain = random(4, 96)[:, 32:64], random(4, 64)[:, :32], random(32)
    apart = add_rms_norm(x, z, gain, 1e-6)
    copies = add_rms_norm(x.contiguous(), z.contiguous(), gain, 1e-6)
    assert all(torch.equal(a, b) for a, b in zip(apart, copies, strict=True))


def test_row_does_not_depend_on_its_neighbours(random):
    x, z, gain = random(8, 96), random(8, 96), random(96)
    x[3] = float("nan")
    together = add_rms_norm(x, z, gain, 1e-6)
    for row in (0, 5, 7):
        alone = add_rms_norm(x[row], z[row], gain, 1e-6)
        assert all(torch.equal(a[row], b) for a, b in zip(together, alone, strict=True))
