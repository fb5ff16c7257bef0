"""Attention over pages, rings and blocks, and what writes the draft's context."""

import pytest
import torch

from kernels.causal_attention import causal_attention
from kernels.causal_attention.reference import causal_attention as causal_reference
from kernels.context_attention import context_attention
from kernels.context_attention.reference import context_attention as paged_reference
from kernels.context_kv_materialize import context_kv_materialize
from kernels.context_kv_materialize.reference import context_kv_materialize as context_reference
from kernels.prefill_attention import prefill_attention
from kernels.prefill_attention.reference import prefill_attention as prefill_reference
from kernels.sliding_window_attention import sliding_window_attention
from kernels.sliding_window_attention.reference import (
    sliding_window_attention as ring_reference,
)
from tests.kernels.gpu.shared import BF16, FP16, FP32, on_device, same
from tests.kernels.triton import test_causal_attention as causal
from tests.kernels.triton import test_context_kv_materialize as context
from tests.kernels.triton import test_draft_attention as draft

pytestmark = pytest.mark.gpu
TARGETS = {"27B": {"Hq": 24, "Hkv": 4, "D": 256}, "35B": {"Hq": 16, "Hkv": 2, "D": 256}}
DRAFT = {"Hq": 32, "Hkv": 8, "D": 128}


def paged(host_random, frontiers, counts, W, **shape):
    """Keys BF16, values FP16, as the bfloat16 profile keeps them."""
    x = causal.arguments(host_random, frontiers, counts, W, dtype=BF16, **shape)
    x[5] = x[5].to(FP16)
    return on_device(x)


@pytest.mark.parametrize(
    ("frontiers", "counts", "W", "shape"),
    [
        ((0, 63, 64, 255, 256, 257, 1000, 4090), (16, 0, 1, 16, 7, 2, 16, 9), 16, "27B"),
        ((0, 511, 130), (8, 3, 8), 8, "35B"),
        ((300,), (1,), 1, "27B"),
        ((13, 40), (2, 5), 5, {"Hq": 3, "Hkv": 1, "D": 12, "page": 5}),
    ],
    ids=str,
)
def test_blocks_over_pages(host_random, distance, frontiers, counts, W, shape):
    x = paged(host_random, frontiers, counts, W, **TARGETS.get(str(shape), shape))
    mine, theirs = causal.copied(x), causal.copied(x)
    actual = causal_attention(*mine)
    assert distance(actual, causal_reference(*theirs)) < 3.95e-3
    for row, count in enumerate(counts):
        assert not actual[row, count:].any()
    for plane in (4, 5):
        assert same(mine[plane], theirs[plane])


@pytest.mark.parametrize("shape", TARGETS)
def test_block_of_a_row_ignores_width_neighbours_and_table(host_random, shape):
    frontier = 500
    x = paged(host_random, (frontier, 90, 2000), (16, 2, 16), 16, **TARGETS[shape])
    together = causal_attention(*causal.copied(x))[0]
    for width in range(1, 17):
        alone = causal.copied(x)
        for first in range(0, 16, width):
            count = min(width, 16 - first)
            columns = [plane[:1, first : first + count] for plane in x[:4]]
            table = torch.nn.functional.pad(x[6][:1], (0, 40 * (width % 2)))
            place = [torch.tensor([n], device="cuda") for n in (frontier + first, count)]
            actual = causal_attention(*columns, *alone[4:6], table, *place)
            assert torch.equal(actual[0], together[first : first + count])


def prefilled(x, op):
    """A row of `paged` as a prefill, with its pages afterwards."""
    block = [plane[0] for plane in x[:4]]
    pages = [plane.clone() for plane in x[4:6]]
    return op(*block, *pages, x[6][0], x[7][0]), pages


@pytest.mark.parametrize(
    ("frontier", "T", "shape"),
    [
        (0, 1, "27B"),
        (0, 129, "35B"),
        (63, 65, "27B"),
        (130, 1000, "27B"),
        (4096, 700, "35B"),
        (13, 40, {"Hq": 3, "Hkv": 1, "D": 12, "page": 5}),
    ],
    ids=str,
)
def test_prefill_over_pages(host_random, distance, frontier, T, shape):
    x = paged(host_random, (frontier,), (T,), T, **TARGETS.get(str(shape), shape))
    actual, pages = prefilled(x, prefill_attention)
    expected, wanted = prefilled(x, prefill_reference)
    assert distance(actual, expected) < 3.95e-3
    for plane, other in zip(pages, wanted, strict=True):
        assert same(plane, other)
    again, _ = prefilled(x, prefill_attention)
    assert torch.equal(again, actual)


def test_prefill_waits_for_nothing(host_random):
    x = paged(host_random, (100,), (70,), 70, **TARGETS["27B"])
    prefilled(x, prefill_attention)
    torch.cuda.set_sync_debug_mode("error")
    try:
        prefilled(x, prefill_attention)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("causal_block", [False, True])
@pytest.mark.parametrize("window", [2048, 100])
def test_ring_at_both_ends_of_the_window(host_random, distance, window, causal_block):
    counts, frontiers = [16, 1, 0, 7, 16], [2047, 2048, 60, 0, 5000]
    covered = [0, 100, 0, 0, 4000]
    x = on_device(
        draft.ring_case(
            host_random,
            counts,
            frontiers,
            covered,
            W=16,
            S=2048,
            dtype=BF16,
            value_dtype=FP16,
            **DRAFT,
        )
    )
    options = {"window": window, "causal": causal_block}
    actual = sliding_window_attention(*x, **options)
    assert distance(actual, ring_reference(*x, **options)) < 3.95e-3
    for row, count in enumerate(counts):
        assert not actual[row, count:].any()
    query, key, value, *rings, slots, first, frontier, live = x
    for row in (0, 4):
        rows = slice(row, row + 1)
        columns = [plane[rows] for plane in (query, key, value)]
        extents = [extent[rows] for extent in (slots, first, frontier, live)]
        alone = sliding_window_attention(*columns, *rings, *extents, **options)
        assert torch.equal(alone[0], actual[row])


def test_pages_of_the_draft(host_random, distance):
    counts, frontiers, covered = [16, 0, 1, 5], [1500, 33, 0, 65], [0, 0, 0, 37]
    x = draft.paged_case(host_random, counts, frontiers, covered, W=16, page=64, N=24, **DRAFT)
    x = on_device([plane.to(BF16) if plane.is_floating_point() else plane for plane in x])
    actual = context_attention(*x, causal=False)
    assert distance(actual, paged_reference(*x, causal=False)) < 3.95e-3
    query, key, value, *pools, tables, first, frontier, live = x
    columns = [plane[3:, :5] for plane in (query, key, value)]
    extents = [extent[3:] for extent in (first, frontier, live)]
    alone = context_attention(*columns, *pools, tables[3:, :2], *extents, causal=False)
    assert torch.equal(alone[0], actual[3, :5])


@pytest.mark.parametrize("T", [1, 8, 300])
def test_context_keys_and_values(host_random, distance, T):
    destinations = [[(7 * i) % 2048 if i % 5 else -1 for i in range(1, T + 1)]]
    x = context.case(host_random, destinations, L=5, Hkv=8, D=128, H=5120, cells=2048, dtype=BF16)
    x = [*x[:5], x[5].to(BF16), x[6]]
    x = on_device(x)
    keys, values = context.run(context_kv_materialize, x)
    wanted = context.run(context_reference, x)
    for actual, expected in zip((keys, values), wanted, strict=True):
        assert torch.equal(actual.isnan(), expected.isnan())
        written = ~expected.isnan()
        assert distance(actual[written], expected[written]) < 3e-3
    for width in (1, 7, 16, 64):
        pieces = x[5].clone(), x[6].clone()
        for first in range(0, T, width):
            part = [plane[:, first : first + width] for plane in x[:3]]
            context_kv_materialize(*part, *x[3:5], *pieces, **context.OPTIONS)
        assert same(pieces[0], keys)
        assert same(pieces[1], values)


def test_float32_attention_keeps_float32(host_random, distance):
    x = on_device(causal.arguments(host_random, (300, 5), (3, 2), 3, dtype=FP32, **TARGETS["27B"]))
    mine, theirs = causal.copied(x), causal.copied(x)
    assert distance(causal_attention(*mine), causal_reference(*theirs)) < 2e-6
    x = on_device(causal.arguments(host_random, (70,), (90,), 90, dtype=FP32, **TARGETS["27B"]))
    actual, _ = prefilled(x, prefill_attention)
    assert distance(actual, prefilled(x, prefill_reference)[0]) < 2e-6
