"""What is not finite is found where it counts."""

import math

import pytest
import torch

from kernels.rows_finite import rows_finite


def restated(*parts):
    rows = parts[0][1].shape[0]
    return [
        all(
            math.isfinite(number)
            for counts, values in parts
            for line in values[row, : counts[row]].tolist()
            for number in line
        )
        for row in range(rows)
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_formula_wherever_the_value_stands(value, dtype):
    counts, lines = torch.tensor([0, 2, 3]), torch.tensor([1, 0, 4])
    for part in range(2):
        for row in range(3):
            for position in range(3):
                values = [torch.zeros(3, 3, 2, dtype=dtype), torch.zeros(3, 4, 5)]
                values[part][row, position, 1] = value
                parts = (counts, values[0]), (lines, values[1])
                assert rows_finite(*parts).tolist() == restated(*parts)


def test_largest_numbers_are_finite_and_nothing_is():
    counts = torch.tensor([1])
    for dtype in (torch.float32, torch.bfloat16):
        most = torch.full((1, 1, 3), torch.finfo(dtype).max, dtype=dtype)
        assert rows_finite((counts, most), (counts, -most)).tolist() == [True]
    assert rows_finite((counts * 0, torch.full((1, 2, 2), math.nan))).tolist() == [True]
    assert rows_finite((counts * 0, torch.zeros(1, 0, 2))).tolist() == [True]


def test_other_shapes_and_no_part_are_refused():
    counts, values = torch.tensor([1]), torch.zeros(1, 2, 3)
    with pytest.raises(ValueError, match=r"^parts: expected 1\.\.4, got 0$"):
        rows_finite()
    with pytest.raises(ValueError, match=r"^counts: expected \[1\] int64"):
        rows_finite((counts, values), (counts.int(), values))
    with pytest.raises(ValueError, match=r"^values: expected \[1, \*, \*\]"):
        rows_finite((counts, values), (counts, values[0]))
