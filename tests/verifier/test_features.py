"""Feature rows in host memory: contiguous, bounded, shared and never written twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.tensors import RowBytes, row_bytes
from verifier.features import FeatureRows


def rows(first: int, end: int) -> RowBytes:
    return row_bytes(torch.arange(first, end).float()[:, None].expand(-1, 3))


def content(kept: FeatureRows) -> list[float]:
    return kept.read(kept.first, kept.end).view(np.float32)[:, 0].tolist() if len(kept) else []


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.sampled_from([1, 2, 7, 63, 64, 65, 200])),
            st.tuples(st.just("again"), st.integers(1, 9)),
            st.tuples(st.just("gap"), st.integers(1, 9)),
            st.tuples(st.just("trim"), st.integers(0, 150)),
            st.tuples(st.just("share"), st.integers(0, 150)),
            st.tuples(st.just("swap"), st.integers(0, 3)),
        ),
        max_size=30,
    )
)
def test_rows_are_what_was_added_whoever_shares_them(steps):
    """Every holder, each with its own continuation, against a plain list of positions."""
    holders: list[tuple[FeatureRows, int, int]] = [(FeatureRows(), 0, 0)]  # with first and end
    for verb, number in steps:
        kept, first, end = holders[0]
        if verb == "append":
            kept.append(end, rows(end, end + number))
            first, end = (first if end > first else end), end + number
        elif verb == "again" and end > first:
            begin = max(0, end - number)
            kept.append(begin, rows(begin, end + 1))
            end += 1
        elif verb == "gap":
            kept.append(end + number, rows(end + number, end + number + 2))
            first, end = end + number, end + number + 2
        elif verb == "trim":
            kept.trim(end - number)
            first = max(first, end - number)
        elif verb == "share":
            copy = kept.tail(number)
            holders.append((copy, max(first, end - number), end))
        holders[0] = (kept, first, end)
        if verb == "swap":
            place = number % len(holders)
            holders[0], holders[place] = holders[place], holders[0]
        for each, expected_first, expected_end in holders:
            assert content(each) == list(range(expected_first, expected_end))
            assert each.end == expected_end
            assert each.byte_count == (expected_end - expected_first) * 3 * 4


def test_few_rows_free_what_they_came_in():
    kept, came = FeatureRows(), rows(0, 5)
    kept.append(0, came)
    came.fill(255)
    assert content(kept) == [0, 1, 2, 3, 4]
    assert len(kept._pieces) == 1
    kept.append(5, rows(5, 9))
    assert len(kept._pieces) == 1, "gathered into one block"


def test_shared_rows_are_the_same_memory_and_grow_apart():
    kept = FeatureRows()
    kept.append(0, rows(0, 10))
    one, two = kept.tail(4), kept.tail(100)
    assert np.shares_memory(one.read(6, 10), kept.read(6, 10))
    kept.append(10, rows(10, 12))
    one.append(10, rows(100, 101))
    two.append(10, rows(200, 203))
    assert content(kept) == list(range(12))
    assert content(one) == [6, 7, 8, 9, 100]
    assert content(two) == [*range(10), 200, 201, 202]


@pytest.mark.parametrize("window", [0, 1, 64, 100])
def test_a_window_over_an_endless_stream_holds_few_pieces(window):
    kept = FeatureRows()
    for position in range(0, 3000, 3):
        kept.append(position, rows(position, position + 3))
        kept.trim(kept.end - window)
        assert len(kept) == min(window, kept.end)
        assert len(kept._pieces) <= window // 64 + 2
