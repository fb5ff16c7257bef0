"""The draws' kernel gives the reference's bits."""

import pytest
import torch

from kernels.rng import Purpose, uniform
from kernels.rng.reference import uniform as reference

EXTREMES = [0, 1, -1, 2**63 - 1, -(2**63), 0x7FFFFFFF, 0x80000000, 2**32, -(2**31), 12345]


@pytest.mark.parametrize("purpose", list(Purpose))
def test_every_bit_equals_the_reference(purpose):
    seeds = torch.tensor(EXTREMES).unsqueeze(1)
    positions = torch.tensor([0, 1, 63, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 7, -1])
    assert torch.equal(
        uniform(seeds, positions, purpose), reference(seeds, positions, int(purpose), 0)
    )


@pytest.mark.parametrize("count", [1, 255, 257])
def test_tensors_of_everything_broadcast(count):
    generator = torch.Generator().manual_seed(count)
    seeds, positions = torch.randint(-(2**62), 2**62, (2, count), generator=generator)
    purposes = torch.arange(6).unsqueeze(1)
    sub = torch.randint(0, 2**33, (count,), generator=generator)
    actual = uniform(seeds, positions, purposes, sub)
    assert actual.shape == (6, count)
    assert torch.equal(actual, reference(seeds, positions, purposes, sub))


def test_numbers_are_keys_too():
    assert uniform(2**64 - 1, 2**32 + 3, Purpose.BONUS, 5).shape == ()
    expected = reference(torch.tensor(-1), 3, int(Purpose.BONUS), 5)
    assert torch.equal(uniform(2**64 - 1, 2**32 + 3, Purpose.BONUS, 5), expected)


def test_nothing_to_draw():
    assert uniform(torch.zeros(0, dtype=torch.int64), 3, Purpose.ACCEPT).shape == (0,)
