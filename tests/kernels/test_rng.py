"""Draws are the stated function of their key, uniform, and independent between keys."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from kernels.rng import Purpose, uniform

WORD = (1 << 64) - 1


def finalise(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def restated(seed: int, position: int, purpose: int, sub: int) -> float:
    """The contract on Python's unbounded integers."""
    u32 = 0xFFFFFFFF
    k1 = finalise(seed ^ (((position & u32) * 0xD1B54A32D192ED03) & WORD))
    k2 = finalise(k1 ^ ((purpose & u32) << 21) ^ (((sub & u32) * 0x2545F4914F6CDD1D) & WORD))
    return (k2 >> 40) / (1 << 24)


def signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def test_restatement_is_splitmix64():
    # the first outputs that SplitMix64's author publishes for seeds 0 and 1234567
    assert finalise(0) == 0xE220A8397B1DCDAF
    assert finalise(1234567) == 6457827717110365317


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, WORD),
    position=st.integers(0, (1 << 32) - 1),
    purpose=st.integers(0, 5),
    sub=st.integers(0, 1 << 12),
)
def test_draw_equals_restatement(seed, position, purpose, sub):
    expected = restated(seed, position, purpose, sub)
    as_tensors = uniform(*(torch.tensor([signed(x)]) for x in (seed, position, purpose, sub)))
    assert as_tensors.dtype is torch.float32
    assert as_tensors.tolist() == [expected]
    assert uniform(seed, position, purpose, sub).item() == expected
    assert uniform(signed(seed), torch.tensor([position]), purpose, sub).tolist() == [expected]


def test_keys_broadcast():
    seeds = torch.tensor([3, -1])[:, None]
    positions = torch.arange(4)
    drawn = uniform(seeds, positions, Purpose.ACCEPT)
    assert drawn.shape == (2, 4)
    for row, seed in enumerate((3, WORD)):
        for position in range(4):
            assert drawn[row, position].item() == restated(seed, position, 2, 0)


def test_arguments_are_left_alone():
    seeds, positions, purpose = torch.tensor([9]), torch.tensor([4]), torch.tensor([2])
    uniform(seeds, positions, purpose, purpose)
    assert (seeds.item(), positions.item(), purpose.item()) == (9, 4, 2)


def test_only_int64_tensors_are_taken():
    with pytest.raises(ValueError, match=r"^positions: expected int64, got torch.int32$"):
        uniform(torch.tensor([1]), torch.tensor([1], dtype=torch.int32), 0)


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("axis", ["seeds", "positions", "sub"])
def test_draws_are_uniform_along_each_axis(axis, purpose):
    count, bins = 100_000, 64
    key = {"seeds": 12345, "positions": 678, "sub": 0, axis: torch.arange(count)}
    drawn = uniform(key["seeds"], key["positions"], purpose, key["sub"])
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    assert (drawn * 2**24 == (drawn * 2**24).round()).all()
    observed = torch.bincount((drawn * bins).long(), minlength=bins)
    assert chisquare(observed.numpy()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(({"purpose": a}, {"purpose": b}) for a, b in itertools.combinations(Purpose, 2)),
        ({"position": 0}, {"position": 1}),
        ({"seed": 0}, {"seed": 1}),
        ({"sub": 0}, {"sub": 1}),
    ],
    ids=str,
)
def test_draws_of_different_keys_are_independent(first, second):
    """A shared purpose between a draft and its correction biases what is published."""
    count, bins = 100_000, 8

    def draw(change):
        return uniform(
            torch.arange(count) * 2 + change.get("seed", 0),
            500 + change.get("position", 0),
            int(change.get("purpose", Purpose.ACCEPT)),
            change.get("sub", 0),
        )

    a, b = draw(first), draw(second)
    assert (a == b).float().mean() < 1e-3
    cells = (a * bins).long() * bins + (b * bins).long()
    observed = torch.bincount(cells, minlength=bins * bins)
    assert chisquare(observed.numpy()).pvalue > 1e-4
