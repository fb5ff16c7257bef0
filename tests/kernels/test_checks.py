"""Refusals name the argument, what was expected and what came."""

import re

import pytest
import torch

from kernels.checks import require, require_that


@pytest.mark.parametrize(
    "shape",
    [(3, 4), (None, 4), (3, None), (None, None), (..., 4), (..., 3, 4), (...,), (..., None, 4)],
    ids=str,
)
def test_matching_shape_passes(shape):
    require("rows", torch.zeros(3, 4), shape, torch.float32)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((None, 5), None, "rows: expected [*, 5], got [3, 4] float32"),
        ((3,), None, "rows: expected [3], got [3, 4] float32"),
        ((1, 3, 4), None, "rows: expected [1, 3, 4], got [3, 4] float32"),
        ((..., 3), None, "rows: expected [..., 3], got [3, 4] float32"),
        ((..., 1, 3, 4), None, "rows: expected [..., 1, 3, 4], got [3, 4] float32"),
        ((), None, "rows: expected [], got [3, 4] float32"),
        (
            (None, 4),
            torch.bfloat16,
            "rows: expected [*, 4] bfloat16, got [3, 4] float32",
        ),
    ],
)
def test_other_shape_or_dtype_is_refused(shape, dtype, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        require("rows", torch.zeros(3, 4), shape, dtype)


def test_broken_rule_is_refused():
    require_that(True, "k", "1..16", 3)
    with pytest.raises(ValueError, match=r"^k: expected 1\.\.16, got 17$"):
        require_that(False, "k", "1..16", 17)
