"""The kernel that looks for what is not finite, against its reference."""

import pytest
import torch

from kernels.rows_finite import rows_finite
from kernels.rows_finite.reference import rows_finite as reference

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True, params=[64, 8192])
def tile(request, monkeypatch):
    monkeypatch.setattr("kernels.rows_finite.kernel._TILE", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_place_of_every_part_is_looked_at(random, dtype):
    counts, lines = torch.tensor([3, 0, 1]), torch.tensor([5, 2, 0])
    parts = (counts, random(3, 3, 40, dtype=dtype)), (lines, random(3, 5, 16))
    assert rows_finite(*parts).all()
    for part, (_, values) in enumerate(parts):
        for row, position, at, value in (
            (0, 0, 0, NAN), (0, 2, 15, INF), (1, 0, 1, -INF), (2, 1, 3, NAN), (1, 2, 0, NAN),
        ):  # fmt: skip
            kept = values[row, position, at].clone()
            values[row, position, at] = value
            actual, expected = rows_finite(*parts), reference(*parts)
            assert torch.equal(actual, expected), (part, row, position)
            values[row, position, at] = kept
    assert rows_finite(*parts).all()


def test_parts_may_be_views_and_rows_none(random):
    hidden = random(2, 4, 48)
    hidden[:, 0] = NAN
    counts = torch.tensor([3, 2])
    parts = [(counts, hidden[:, 1:])] * 3 + [(counts, random(48, 3, 2).permute(2, 1, 0))]
    assert rows_finite(*parts).tolist() == [True, True]
    hidden[:, 3] = INF
    assert rows_finite(*parts).tolist() == [False, True]
    assert rows_finite((counts[:0], hidden[:0])).shape == (0,)
