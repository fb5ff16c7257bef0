"""Draft attention over rings and pages: who sees whom, where it lies, and what it weighs."""

import math

import pytest
import torch

from kernels.context_attention import context_attention
from kernels.sliding_window_attention import sliding_window_attention

PAGE = 4


def attend(query, keys, values):
    """One query [Hq, D] over its visible keys and values, each a list of [Hkv, D]; FP64 [Hq*D]."""
    heads, size = query.shape
    out = torch.zeros(heads, size, dtype=torch.float64)
    group = heads // keys[0].shape[0]
    for head in range(heads):
        scores = [
            float(query[head].double() @ key[head // group].double()) / math.sqrt(size)
            for key in keys
        ]
        top = max(scores)
        weights = [math.exp(score - top) for score in scores]
        for weight, value in zip(weights, values, strict=True):
            out[head] += weight / sum(weights) * value[head // group].double()
    return out.flatten()


def visible_block(column, count, *, causal, window=math.inf):
    """Block columns that a column sees."""
    return [
        other
        for other in range(count)
        if abs(other - column) < window and (other <= column or not causal)
    ]


def visible_context(column, frontier, first, window=math.inf):
    """Context positions that a column sees."""
    return [p for p in range(max(0, first), frontier) if frontier + column - p < window]


def place(frontier, coverage, ring):
    """Positions that the ring of a row holds; anything else in it is unreachable."""
    return range(max(coverage, frontier - ring, 0), frontier)


def setup(rows, width, heads, key_heads, size, ring, slots, *, dtype=torch.float32):
    g = torch.Generator().manual_seed(rows * 1000 + width * 10 + ring)
    query = torch.randn(rows, width, heads, size, generator=g).to(dtype)
    block_key = torch.randn(rows, width, key_heads, size, generator=g).to(dtype)
    block_value = torch.randn(rows, width, key_heads, size, generator=g).to(dtype)
    key_ring = torch.full((slots, ring, key_heads, size), torch.nan, dtype=dtype)
    value_ring = torch.full_like(key_ring, torch.nan)
    return g, query, block_key, block_value, key_ring, value_ring


def fill(g, key_ring, value_ring, slots, frontiers, coverage):
    """Gives the reachable cells numbers and leaves NaN everywhere else."""
    ring = key_ring.shape[1]
    for slot, frontier, first in zip(slots, frontiers, coverage, strict=True):
        for p in place(frontier, first, ring):
            key_ring[slot, p % ring] = torch.randn(key_ring.shape[2:], generator=g)
            value_ring[slot, p % ring] = torch.randn(value_ring.shape[2:], generator=g)


def expected(inputs, slots, frontiers, coverage, counts, *, window, causal):
    query, block_key, block_value, key_ring, value_ring = inputs
    ring = key_ring.shape[1]
    rows, width = query.shape[:2]
    out = torch.zeros(rows, width, query.shape[2] * query.shape[3], dtype=torch.float64)
    for row, (slot, frontier) in enumerate(zip(slots, frontiers, strict=True)):
        first = max(coverage[row], frontier - ring)
        for column in range(counts[row]):
            context = visible_context(column, frontier, first, window)
            block = visible_block(column, counts[row], causal=causal, window=window)
            out[row, column] = attend(
                query[row, column],
                [key_ring[slot, p % ring] for p in context] + [block_key[row, j] for j in block],
                [value_ring[slot, p % ring] for p in context]
                + [block_value[row, j] for j in block],
            )
    return out


def run(inputs, slots, frontiers, coverage, counts, *, window, causal):
    return sliding_window_attention(
        *inputs,
        *(torch.tensor(x) for x in (slots, coverage, frontiers, counts)),
        window=window,
        causal=causal,
    )


CASES = {
    "empty-context": (8, 8, [0], [0], [5]),
    "short-context": (8, 8, [3], [0], [5]),
    "ring-not-yet-full": (8, 8, [7], [0], [4]),
    "ring-exactly-full": (8, 8, [8], [0], [4]),
    "wrapped-once": (8, 8, [13], [0], [4]),
    "wrapped-often": (8, 8, [1003], [0], [4]),
    "coverage-later-than-window": (8, 8, [21], [18], [5]),
    "coverage-at-frontier": (8, 8, [21], [21], [5]),
    "coverage-earlier-than-window": (8, 8, [21], [2], [5]),
    "window-below-ring": (8, 5, [21], [0], [5]),
    "window-below-block": (4, 4, [10], [0], [5]),
    "window-1": (4, 1, [10], [0], [5]),
    "counts-0-1-W": (8, 8, [13, 6, 30], [0, 0, 0], [0, 1, 5]),
    "mixed-rows": (8, 8, [0, 5, 8, 100, 64, 21], [0, 2, 0, 0, 60, 21], [5, 3, 1, 5, 4, 2]),
}


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("case", CASES)
def test_ring_equals_the_formula_and_never_reads_unreachable_cells(case, causal):
    ring, window, frontiers, coverage, counts = CASES[case]
    rows, width = len(frontiers), 5
    slots = torch.randperm(rows + 1, generator=torch.Generator().manual_seed(3))[:rows].tolist()
    g, *inputs = setup(rows, width, 4, 2, 8, ring, rows + 1)
    fill(g, *inputs[3:], slots, frontiers, coverage)
    for row, count in enumerate(counts):
        for plane in inputs[:3]:
            plane[row, count:] = torch.nan
    out = run(inputs, slots, frontiers, coverage, counts, window=window, causal=causal)
    want = expected(inputs, slots, frontiers, coverage, counts, window=window, causal=causal)
    torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=0)
    for row, count in enumerate(counts):
        assert (out[row, count:] == 0).all()


@pytest.mark.parametrize(
    ("window", "frontier", "causal", "sets"),
    [
        # S=4, F=10, K=4: the block is at 10..14
        (
            4,
            10,
            False,
            {
                0: [7, 8, 9, 10, 11, 12, 13],
                1: [8, 9, 10, 11, 12, 13, 14],
                2: [9, 10, 11, 12, 13, 14],
                3: [10, 11, 12, 13, 14],
                4: [11, 12, 13, 14],
            },
        ),
        (
            4,
            10,
            True,
            {
                0: [7, 8, 9, 10],
                1: [8, 9, 10, 11],
                2: [9, 10, 11, 12],
                3: [10, 11, 12, 13],
                4: [11, 12, 13, 14],
            },
        ),
        # with W <= S every block column sees the whole block, and S-1-i of the context
        (
            6,
            20,
            False,
            {i: [*range(20 + i - 5, 20), *range(20, 25)] for i in range(5)},
        ),
    ],
    ids=["window-4", "window-4-causal", "window-6"],
)
def test_ring_distance_S_is_excluded_and_S_minus_1_included(window, frontier, causal, sets):
    """Values are one-hot in their position, so each output shows exactly which keys were seen."""
    width, size = 5, frontier + 5
    query = torch.zeros(1, width, 1, size)
    basis = torch.eye(size).view(size, 1, size)
    ring = torch.full((1, window, 1, size), torch.nan)
    for p in range(max(0, frontier - window), frontier):
        ring[0, p % window] = basis[p]
    keys = torch.where(ring.isnan(), ring, 0.0)
    block = basis[frontier : frontier + width].unsqueeze(0)
    out = run(
        [query, torch.zeros_like(block), block, keys, ring],
        [0],
        [frontier],
        [0],
        [width],
        window=window,
        causal=causal,
    )
    for column, positions in sets.items():
        weights = out[0, column]
        assert weights.nonzero().flatten().tolist() == positions
        torch.testing.assert_close(
            weights[positions], torch.full((len(positions),), 1 / len(positions))
        )


def test_ring_rows_do_not_influence_each_other():
    _, *inputs = setup(3, 5, 4, 2, 8, 8, 3)
    frontiers, coverage, counts = [3, 12, 40], [0, 9, 0], [5, 2, 4]
    g = torch.Generator().manual_seed(1)
    fill(g, *inputs[3:], [0, 1, 2], frontiers, coverage)
    together = run(inputs, [0, 1, 2], frontiers, coverage, counts, window=8, causal=False)
    for row in range(3):
        alone = run(
            [x[row : row + 1] for x in inputs[:3]] + inputs[3:],
            [row],
            [frontiers[row]],
            [coverage[row]],
            [counts[row]],
            window=8,
            causal=False,
        )
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=0)


def test_ring_bfloat16_profile_within_its_tolerance():
    g, *inputs = setup(2, 8, 8, 2, 32, 64, 2, dtype=torch.bfloat16)
    inputs[4] = inputs[4].to(torch.float16)
    fill(g, *inputs[3:], [0, 1], [200, 40], [0, 0])
    out = run(inputs, [0, 1], [200, 40], [0, 0], [8, 8], window=64, causal=False)
    assert out.dtype is torch.bfloat16
    want = expected(inputs, [0, 1], [200, 40], [0, 0], [8, 8], window=64, causal=False)
    assert (out.double() - want).norm() / want.norm() <= 3.95e-3


def test_ring_unfit_arguments_are_refused():
    _, *inputs = setup(1, 2, 4, 2, 8, 8, 1)
    with pytest.raises(ValueError, match=r"^window: expected 1\.\.8, got 9$"):
        run(inputs, [0], [4], [0], [2], window=9, causal=False)
    with pytest.raises(ValueError, match=r"^frontiers: expected \[1\] int64"):
        run(inputs, [0], [4, 4], [0], [2], window=8, causal=False)


def paged(frontiers, coverage, counts, *, width=5, dtype=torch.float32, value_dtype=None):
    """Pages in shuffled order; only covered cells and live columns hold numbers."""
    g = torch.Generator().manual_seed(sum(frontiers) + width)
    rows = len(frontiers)
    table_width = max(max(frontiers), 1) // PAGE + 2
    pages = rows * table_width + 1
    tables = torch.randperm(pages, generator=g)[: rows * table_width].view(rows, table_width)
    query = torch.randn(rows, width, 4, 8, generator=g).to(dtype)
    block_key = torch.randn(rows, width, 2, 8, generator=g).to(dtype)
    block_value = torch.randn(rows, width, 2, 8, generator=g).to(dtype)
    key_pages = torch.full((pages, PAGE, 2, 8), torch.nan, dtype=dtype)
    value_pages = torch.full_like(key_pages, torch.nan, dtype=value_dtype or dtype)
    for row, (first, frontier, count) in enumerate(zip(coverage, frontiers, counts, strict=True)):
        for p in range(first, frontier):
            cell = (int(tables[row, p // PAGE]), p % PAGE)
            key_pages[cell] = torch.randn(2, 8, generator=g)
            value_pages[cell] = torch.randn(2, 8, generator=g)
        for plane in (query, block_key, block_value):
            plane[row, count:] = torch.nan
    return query, block_key, block_value, key_pages, value_pages, tables


def run_paged(inputs, frontiers, coverage, counts, *, causal):
    numbers = (torch.tensor(x) for x in (coverage, frontiers, counts))
    return context_attention(*inputs, *numbers, causal=causal)


def expected_paged(inputs, frontiers, coverage, counts, *, causal):
    query, block_key, block_value, key_pages, value_pages, tables = inputs
    out = torch.zeros(*query.shape[:2], query.shape[2] * query.shape[3], dtype=torch.float64)
    for row, frontier in enumerate(frontiers):
        cells = [(int(tables[row, p // PAGE]), p % PAGE) for p in range(coverage[row], frontier)]
        for column in range(counts[row]):
            block = visible_block(column, counts[row], causal=causal)
            out[row, column] = attend(
                query[row, column],
                [key_pages[cell] for cell in cells] + [block_key[row, j] for j in block],
                [value_pages[cell] for cell in cells] + [block_value[row, j] for j in block],
            )
    return out


PAGED_CASES = {
    "empty-context": ([0], [0], [5]),
    "one-cell": ([1], [0], [5]),
    "page-end": ([PAGE], [0], [5]),
    "page-end-plus-1": ([PAGE + 1], [0], [5]),
    "several-pages": ([19], [0], [5]),
    "coverage-inside-a-page": ([19], [6], [5]),
    "coverage-at-a-page-end": ([19], [8], [5]),
    "coverage-at-frontier": ([19], [19], [5]),
    "coverage-at-frontier-and-page-end": ([16], [16], [5]),
    "counts-0-1-W": ([9, 9, 9], [0, 0, 0], [0, 1, 5]),
    "mixed-rows": ([0, 3, 40, 17], [0, 1, 33, 0], [5, 2, 5, 3]),
}


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("case", PAGED_CASES)
def test_pages_equals_the_formula_and_never_reads_uncovered_cells(case, causal):
    frontiers, coverage, counts = PAGED_CASES[case]
    inputs = paged(frontiers, coverage, counts)
    out = run_paged(inputs, frontiers, coverage, counts, causal=causal)
    want = expected_paged(inputs, frontiers, coverage, counts, causal=causal)
    torch.testing.assert_close(out.double(), want, atol=2e-6, rtol=0)
    for row, count in enumerate(counts):
        assert (out[row, count:] == 0).all()


def test_pages_rows_do_not_influence_each_other():
    frontiers, coverage, counts = [3, 40, 17], [1, 33, 0], [2, 5, 3]
    inputs = paged(frontiers, coverage, counts)
    together = run_paged(inputs, frontiers, coverage, counts, causal=False)
    for row in range(3):
        part = [x[row : row + 1] for x in inputs[:3]] + [*inputs[3:5], inputs[5][row : row + 1]]
        alone = run_paged(part, [frontiers[row]], [coverage[row]], [counts[row]], causal=False)
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=0)


def test_pages_bfloat16_profile_within_its_tolerance():
    frontiers, coverage, counts = [60, 33], [0, 5], [8, 8]
    inputs = paged(
        frontiers, coverage, counts, width=8, dtype=torch.bfloat16, value_dtype=torch.float16
    )
    out = run_paged(inputs, frontiers, coverage, counts, causal=False)
    assert out.dtype is torch.bfloat16
    want = expected_paged(inputs, frontiers, coverage, counts, causal=False)
    assert (out.double() - want).norm() / want.norm() <= 3.95e-3


def test_pages_other_shape_is_refused():
    inputs = list(paged([4], [0], [2]))
    inputs[4] = inputs[4][:, :, :1]
    with pytest.raises(
        ValueError, match=r"^value_pages: expected \[4, 4, 2, 8\], got \[4, 4, 1, 8"
    ):
        run_paged(inputs, [4], [0], [2], causal=False)
