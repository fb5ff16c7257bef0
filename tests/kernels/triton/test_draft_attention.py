"""The kernels of a block's attention over ring, pages and itself against their references."""

import pytest
import torch

from kernels.context_attention import context_attention
from kernels.context_attention.reference import context_attention as paged_reference
from kernels.sliding_window_attention import kernel, sliding_window_attention
from kernels.sliding_window_attention.reference import sliding_window_attention as reference

NAN = float("nan")


@pytest.fixture(autouse=True)
def small_splits(monkeypatch):
    monkeypatch.setattr(kernel, "_SPLIT", 32)
    monkeypatch.setattr(kernel, "_BLOCK_N", 16)


def ring_case(random, counts, frontiers, covered, *, W=3, Hq=4, Hkv=2, D=16, S=48, **kinds):
    """Arguments whose unreachable cells and dead columns are NaN; slots are in reverse."""
    key_kind = kinds.get("dtype", torch.float32)
    value_kind = kinds.get("value_dtype", key_kind)
    B = len(counts)
    slots = torch.arange(B).flip(0)
    rings = [torch.full((B, S, Hkv, D), NAN, dtype=kind) for kind in (key_kind, value_kind)]
    block = [random(B, W, heads, D, dtype=key_kind) for heads in (Hq, Hkv, Hkv)]
    for row, (count, frontier, first) in enumerate(zip(counts, frontiers, covered, strict=True)):
        for position in range(max(first, frontier - S), frontier):
            for ring in rings:
                ring[slots[row], position % S] = random(Hkv, D, dtype=ring.dtype)
        for x in block:
            x[row, count:] = NAN
    extents = [torch.tensor(x) for x in (covered, frontiers, counts)]
    return [*block, *rings, slots, *extents]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [48, 7, 1])
def test_ring_equals_reference_at_both_ends_of_the_window(random, distance, window, causal):
    arguments = ring_case(random, [3, 2, 0, 1, 3], [47, 130, 60, 0, 96], [0, 100, 0, 0, 90], W=3)
    actual = sliding_window_attention(*arguments, window=window, causal=causal)
    expected = reference(*arguments, window=window, causal=causal)
    assert distance(actual, expected) < 2e-6
    for row, count in enumerate([3, 2, 0, 1, 3]):
        assert (actual[row, count:] == 0).all()


@pytest.mark.parametrize("Hq,Hkv,D,W", [(6, 2, 20, 5), (8, 1, 32, 3), (2, 2, 16, 17)])
def test_odd_heads_and_widths(random, distance, Hq, Hkv, D, W):
    arguments = ring_case(random, [W], [70], [40], W=W, Hq=Hq, Hkv=Hkv, D=D)
    actual = sliding_window_attention(*arguments, window=48, causal=False)
    assert distance(actual, reference(*arguments, window=48, causal=False)) < 2e-6


def test_half_precision_with_values_of_another_type_and_strided_heads(random, distance):
    arguments = ring_case(random, [2], [53], [0], dtype=torch.float16, value_dtype=torch.float32)
    together = torch.cat(arguments[:3], dim=2)  # as one projection gives them
    arguments[:3] = together[:, :, :4], together[:, :, 4:6], together[:, :, 6:]
    actual = sliding_window_attention(*arguments, window=48, causal=False)
    assert actual.dtype is torch.float16
    assert distance(actual, reference(*arguments, window=48, causal=False)) < 1e-3


def test_row_is_the_same_bits_alone_narrow_and_among_others(random):
    arguments = ring_case(random, [2, 3, 3], [77, 50, 300], [0, 0, 0])
    together = sliding_window_attention(*arguments, window=48, causal=False)
    query, key, value, key_ring, value_ring, slots, *extents = arguments
    for row, width in ((0, 2), (2, 3)):
        rows = slice(row, row + 1)
        block = [x[rows, :width] for x in (query, key, value)]
        rest = [x[rows] for x in (slots, *extents)]
        alone = sliding_window_attention(
            *block, key_ring, value_ring, *rest, window=48, causal=False
        )
        assert torch.equal(alone[0], together[row, :width])


def paged_case(random, counts, frontiers, covered, *, W=3, Hq=4, Hkv=2, D=16, page=8, N=12):
    B = len(counts)
    order = torch.randperm(B * N, generator=torch.Generator().manual_seed(5))
    tables = order.view(B, N).clone()
    pools = [torch.full((B * N, page, Hkv, D), NAN) for _ in range(2)]
    block = [random(B, W, heads, D) for heads in (Hq, Hkv, Hkv)]
    for row, (count, frontier, first) in enumerate(zip(counts, frontiers, covered, strict=True)):
        for position in range(first, frontier):
            for pool in pools:
                pool[tables[row, position // page], position % page] = random(Hkv, D)
        for x in block:
            x[row, count:] = NAN
        # what lies outside the context may be anything
        tables[row, -(-frontier // page) :] = 10**9
        tables[row, : first // page] = -(10**9)
    return [*block, *pools, tables, *(torch.tensor(x) for x in (covered, frontiers, counts))]


@pytest.mark.parametrize("causal", [False, True])
def test_pages_equal_reference(random, distance, causal):
    arguments = paged_case(random, [3, 0, 1, 2], [96, 33, 0, 65], [0, 0, 0, 37])
    actual = context_attention(*arguments, causal=causal)
    assert distance(actual, paged_reference(*arguments, causal=causal)) < 2e-6
    for row, count in enumerate([3, 0, 1, 2]):
        assert (actual[row, count:] == 0).all()


def test_row_does_not_depend_on_how_many_pages_its_neighbours_have(random):
    query, key, value, *pools, tables, covered, frontiers, counts = paged_case(
        random, [3, 2], [90, 41], [0, 3]
    )
    together = context_attention(
        query, key, value, *pools, tables, covered, frontiers, counts, causal=False
    )
    block = [x[1:, :2] for x in (query, key, value)]
    extents = [x[1:] for x in (covered, frontiers, counts)]
    alone = context_attention(*block, *pools, tables[1:, :6], *extents, causal=False)
    assert torch.equal(alone[0], together[1, :2])
