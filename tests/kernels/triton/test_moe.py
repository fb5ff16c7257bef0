"""The experts' kernels against their reference, and alone against in company."""

import pytest
import torch

from kernels.moe import moe
from kernels.moe.reference import moe as reference


def weights(random, *, H=32, E=4, routed=16, shared=24, dtype=torch.float32):
    shapes = {
        "router": (E, H),
        "gate_up": (E, 2 * routed, H),
        "down": (E, H, routed),
        "shared_gate_up": (2 * shared, H),
        "shared_down": (H, shared),
        "shared_gate": (1, H),
    }
    return {name: random(*shape, dtype=dtype, scale=0.3) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("M", "top_k", "shape"),
    [
        (1, 2, {"E": 7}),  # fewer pairs than experts
        (5, 2, {}),  # more
        (3, 3, {"H": 20, "E": 3, "routed": 70, "shared": 5}),  # every expert, odd extents
        (20, 1, {"E": 2}),  # more rows of an expert than a tile has columns
        (70, 2, {"E": 2}),  # more pairs than are looked through at once
    ],
    ids=str,
)
def test_equals_reference(random, distance, M, top_k, shape, dtype):
    parts = weights(random, **shape, dtype=dtype)
    x = random(M, shape.get("H", 32), dtype=dtype)
    actual = moe(x, **parts, top_k=top_k)
    limit = 2e-6 if dtype.itemsize == 4 else 2e-3
    assert distance(actual, reference(x, **parts, top_k=top_k)) < limit


def test_equal_probabilities_favour_the_lower_expert(random, distance):
    parts = weights(random, E=5)
    parts["router"][:] = parts["router"][:1]
    parts["router"][4] *= 1.5
    x = random(2, 32)
    expected = reference(x, **parts, top_k=2)
    assert distance(moe(x, **parts, top_k=2), expected) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_row_does_not_depend_on_its_neighbours(random, dtype):
    parts = weights(random, dtype=dtype, E=6)
    x = random(18, 32, dtype=dtype)
    x[3] = float("nan")
    together = moe(x, **parts, top_k=2)
    for rows in (slice(0, 1), slice(4, 6), slice(10, 18)):
        assert torch.equal(moe(x[rows], **parts, top_k=2), together[rows])


def test_no_rows(random):
    assert moe(random(0, 32), **weights(random), top_k=2).shape == (0, 32)
