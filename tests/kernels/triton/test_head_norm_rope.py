"""The head norm and rotation's kernel against its reference."""

import pytest
import torch

from kernels.head_norm_rope import head_norm_rope
from kernels.head_norm_rope.reference import head_norm_rope as reference

THETA = 1e7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "rotary_dim"),
    [((2, 3, 2, 64), 64), ((1, 4, 3, 64), 16), ((2, 2, 2, 12), 6), ((1, 1, 1, 2), 2)],
    ids=str,
)
def test_equals_reference(random, distance, shape, rotary_dim, dtype):
    x, gain = random(*shape, dtype=dtype), random(shape[-1])
    positions = torch.arange(shape[0] * shape[1]).view(shape[:2]) * 17 + 3
    options = {"eps": 1e-6, "theta": THETA, "rotary_dim": rotary_dim}
    actual = head_norm_rope(x, gain, positions, **options)
    assert actual.dtype == dtype
    limit = 2e-6 if dtype.itemsize == 4 else 1e-3
    assert distance(actual, reference(x, gain, positions, **options)) < limit


@pytest.mark.parametrize("sections", [(2, 1, 1), (4, 0, 0)], ids=str)
def test_axes_interleave_as_in_the_reference(random, distance, sections):
    x, gain = random(2, 3, 2, 16), random(16)
    positions = torch.randint(0, 1000, (3, 2, 3), generator=torch.Generator().manual_seed(1))
    options = {"eps": 1e-6, "theta": THETA, "rotary_dim": 8, "sections": sections}
    expected = reference(x, gain, positions, **options)
    assert distance(head_norm_rope(x, gain, positions, **options), expected) < 2e-6


def test_far_positions_keep_their_angles(random, distance):
    x, gain, positions = random(1, 2, 1, 16), random(16), torch.tensor([[262143, 1048575]])
    options = {"eps": 1e-6, "theta": THETA, "rotary_dim": 16}
    expected = reference(x, gain, positions, **options)
    assert distance(head_norm_rope(x, gain, positions, **options), expected) < 2e-6


def test_heads_may_be_part_of_wider_columns(random):
    wide, gain, positions = random(2, 2, 100), random(16), torch.arange(4).view(2, 2)
    heads = wide[..., 10:58].unflatten(-1, (3, 16))
    options = {"eps": 1e-6, "theta": THETA, "rotary_dim": 8}
    expected = head_norm_rope(heads.contiguous(), gain, positions, **options)
    assert torch.equal(head_norm_rope(heads, gain, positions, **options), expected)


def test_column_does_not_depend_on_its_neighbours(random):
    x, gain, positions = random(2, 4, 2, 16), random(16), torch.arange(8).view(2, 4)
    options = {"eps": 1e-6, "theta": THETA, "rotary_dim": 8}
    together = head_norm_rope(x, gain, positions, **options)
    alone = head_norm_rope(x[1:, 2:3], gain, positions[1:, 2:3], **options)
    assert torch.equal(together[1:, 2:3], alone)


def test_heads_with_gains_of_their_own_equal_each_alone(random):
    x, gains, positions = random(2, 3, 4, 16), random(4, 16), torch.arange(6).view(2, 3)
    options = {"eps": 1e-6, "theta": THETA, "rotary_dim": 8}
    together = head_norm_rope(x, gains, positions, **options)
    for head, gain in enumerate(gains):
        alone = head_norm_rope(x[:, :, head : head + 1], gain, positions, **options)
        assert torch.equal(together[:, :, head : head + 1], alone)
