"""The kernels that move columns against their reference, bit for bit."""

import pytest
import torch

from kernels.tree_compact import compact_columns, compact_pages, kernel, reference
from tests.kernels.test_tree_compact import COLUMNS, bits


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(kernel, "_BLOCK", 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("entry", [(), (5,), (3, 7), (2, 16, 2)], ids=str)
def test_columns_equal_reference(random, entry, dtype):
    plane = random(4, 5, 12, *entry, dtype=dtype)
    plane[2] = float("nan")
    mine, theirs = plane.clone(), plane.clone()
    compact_columns([mine[:, 1:4, 2:11], mine[:1, :3, :9]], COLUMNS)
    reference.compact_columns([theirs[:, 1:4, 2:11], theirs[:1, :3, :9]], COLUMNS)
    assert torch.equal(bits(mine), bits(theirs))
    assert not torch.equal(bits(mine), bits(plane))


@pytest.mark.parametrize("page", [1, 3, 16])
def test_pages_equal_reference(random, page):
    tables = torch.randperm(3 * 40)[:120].view(3, 40)
    frontiers = torch.tensor([0, 7, 2 * page + 1])
    shape = (3, 120, page, 2, 12)
    keys, values = random(*shape), random(*shape, dtype=torch.float16)
    mine, theirs = (keys.clone(), values.clone()), (keys.clone(), values.clone())
    compact_pages(*mine, tables, frontiers, COLUMNS)
    reference.compact_pages(*theirs, tables, frontiers, COLUMNS)
    for actual, expected, before in zip(mine, theirs, (keys, values), strict=True):
        assert torch.equal(actual, expected)
        assert not torch.equal(actual, before)


def test_nothing_to_move_touches_nothing(random):
    plane = random(2, 3, 9, 4)
    before = plane.clone()
    compact_columns([plane, plane[:0]], torch.arange(9).expand(3, 9))
    assert torch.equal(plane, before)
