"""The paged attention's kernels against their reference, and alone against in company."""

import pytest
import torch

from kernels.causal_attention import causal_attention, kernel
from kernels.causal_attention.reference import causal_attention as reference
from kernels.trees import ancestor_masks, members
from tests.kernels.test_trees import few_paths

NAN = float("nan")
NEAR = kernel.NEAR


def arguments(random, frontiers, counts, W, *, Hq=4, Hkv=2, D=16, page=64, dtype=torch.float32):
    """Rows over scattered pages; all that must not be read is NaN."""
    B = len(frontiers)
    needed = [-(-(f + n) // page) for f, n in zip(frontiers, counts, strict=True)]
    pages = sum(needed) + 2
    order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(3)) + 1
    tables = torch.zeros(B, max(needed) + 1, dtype=torch.int64)
    key_pages = torch.full((pages, page, Hkv, D), NAN, dtype=dtype)
    value_pages = key_pages.clone()
    used = 0
    for row, (frontier, length) in enumerate(zip(frontiers, needed, strict=True)):
        tables[row, :length] = order[used : used + length]
        used += length
        for position in range(frontier):
            cell = tables[row, position // page], position % page
            key_pages[cell] = random(Hkv, D, dtype=dtype)
            value_pages[cell] = random(Hkv, D, dtype=dtype)
    block = [random(B, W, heads, D, dtype=dtype) for heads in (Hq, Hkv, Hkv, Hq)]
    for row, count in enumerate(counts):
        for plane in block:
            plane[row, count:] = NAN
    return [
        *block,
        key_pages,
        value_pages,
        tables,
        torch.tensor(frontiers),
        torch.tensor(counts),
    ]


def copied(x):
    return [*x[:4], x[4].clone(), x[5].clone(), *x[6:]]


def same(a, b):
    return torch.equal(torch.isnan(a), torch.isnan(b)) and torch.equal(
        a.nan_to_num(), b.nan_to_num()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("frontiers", "counts", "W", "shape"),
    [
        ((0, 5), (3, 1), 3, {}),
        ((NEAR - 2, 270), (4, 0), 4, {}),
        ((13,), (2,), 5, {"Hq": 3, "Hkv": 1, "D": 12, "page": 5}),
        ((4 * NEAR + 1,), (1,), 1, {"Hq": 6, "Hkv": 1, "D": 32, "page": 16}),
        ((30,), (20,), 20, {"Hq": 4, "Hkv": 1}),
    ],
    ids=str,
)
def test_equals_reference(random, distance, frontiers, counts, W, shape, dtype):
    x = arguments(random, frontiers, counts, W, dtype=dtype, **shape)
    mine, theirs = copied(x), copied(x)
    actual, expected = causal_attention(*mine), reference(*theirs)
    assert distance(actual, expected) < (2e-6 if dtype.itemsize == 4 else 1.5e-3)
    for row, count in enumerate(counts):
        assert not actual[row, count:].any()
    for plane in (4, 5):
        assert same(mine[plane], theirs[plane])


@pytest.mark.parametrize(("frontier", "count"), [(0, 40), (37, 33)], ids=str)
def test_prefill_equals_reference(random, distance, frontier, count):
    x = arguments(random, (frontier,), (count,), 40, page=16)
    mine, theirs = copied(x), copied(x)
    assert distance(causal_attention(*mine), reference(*theirs)) < 2e-6
    for plane in (4, 5):
        assert same(mine[plane], theirs[plane])


def test_values_may_be_stored_narrower_than_keys(random, distance):
    x = arguments(random, (20,), (3,), 3)
    x[5] = x[5].half()
    mine, theirs = copied(x), copied(x)
    assert distance(causal_attention(*mine), reference(*theirs)) < 1e-3
    assert same(mine[5], theirs[5])


@pytest.fixture
def soon_far(monkeypatch):
    """Runs that grow at once, for the interpreter is slow."""
    monkeypatch.setattr(kernel, "FAR_FROM", 2 * NEAR)
    monkeypatch.setattr(kernel, "FAR", 4 * NEAR)


@pytest.mark.usefixtures("soon_far")
@pytest.mark.parametrize("page", [64, 20], ids=lambda p: f"page={p}")
def test_runs_that_grow_equal_reference(random, distance, page):
    frontiers, counts = (2 * NEAR - 2, 2 * NEAR, 6 * NEAR - 1, 9 * NEAR + 3), (4, 1, 3, 4)
    x = arguments(random, frontiers, counts, 4, page=page)
    mine, theirs = copied(x), copied(x)
    assert distance(causal_attention(*mine), reference(*theirs)) < 2e-6
    for plane in (4, 5):
        assert same(mine[plane], theirs[plane])


@pytest.mark.usefixtures("soon_far")
@pytest.mark.parametrize("frontier", [3, NEAR - 3, 2 * NEAR - 3], ids=lambda f: f"F={f}")
def test_column_does_not_depend_on_width_neighbours_or_bucket(random, frontier):
    """Column by column, and in narrower blocks, with a longer table, among rows and alone."""
    x = arguments(random, (frontier, 90), (8, 2), 8)
    pages = copied(x)
    together = causal_attention(*pages)[0]
    for width in (1, 3):
        alone = copied(x)
        for first in range(0, 8, width):
            count = min(width, 8 - first)
            part = [plane[:1, first : first + count] for plane in x[:4]]
            table = torch.nn.functional.pad(x[6][:1], (0, 9))
            moved = [table, torch.tensor([frontier + first]), torch.tensor([count])]
            actual = causal_attention(*part, alone[4], alone[5], *moved)
            assert torch.equal(actual[0], together[first : first + count])
    for plane in (4, 5):
        mine = x[6][0]
        assert same(alone[plane][mine], pages[plane][mine])


def test_inputs_may_be_part_of_wider_columns(random):
    x = arguments(random, (9,), (2,), 2)
    wide = torch.cat([plane.flatten(2) for plane in x[:4]], dim=-1)
    sizes = [plane.shape[2] * plane.shape[3] for plane in x[:4]]
    parts = [
        part.unflatten(-1, plane.shape[2:])
        for part, plane in zip(wide.split(sizes, dim=-1), x[:4], strict=True)
    ]
    mine = copied(x)
    assert torch.equal(causal_attention(*parts, *mine[4:]), causal_attention(*copied(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("frontiers", "counts", "W", "shape"),
    [
        ((0, 5), (12, 7), 12, {}),
        ((NEAR - 2, 2 * NEAR - 9), (16, 1), 16, {}),
        ((NEAR - 20,), (32,), 32, {"Hq": 6, "Hkv": 1, "page": 5}),
        ((61, 0), (0, 32), 32, {"Hq": 4, "Hkv": 1}),
    ],
    ids=str,
)
def test_trees_equal_reference(random, distance, frontiers, counts, W, shape, dtype):
    x = arguments(random, frontiers, counts, W, dtype=dtype, **shape)
    masks = ancestor_masks(few_paths(len(counts), W - 1, seed=W))
    for row, count in enumerate(counts):
        masks[row, count:] = -1
    mine, theirs = copied(x), copied(x)
    actual, expected = causal_attention(*mine, masks), reference(*theirs, masks)
    assert distance(actual, expected) < (2e-6 if dtype.itemsize == 4 else 1.5e-3)
    for row, count in enumerate(counts):
        assert not actual[row, count:].any()
    for plane in (4, 5):
        assert same(mine[plane], theirs[plane])


@pytest.mark.usefixtures("soon_far")
@pytest.mark.parametrize("frontier", [3, NEAR - 3, 2 * NEAR - 3], ids=lambda f: f"F={f}")
def test_masks_of_a_chain_change_no_bit(random, frontier):
    x = arguments(random, (frontier, 90), (20, 2), 20)
    masks = ancestor_masks(torch.arange(19).expand(2, 19))
    assert torch.equal(causal_attention(*copied(x), masks), causal_attention(*copied(x)))


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
def test_height_of_a_tile_changes_no_bit(random, monkeypatch, chain):
    x = arguments(random, (NEAR - 5,), (22,), 22, dtype=torch.float16, Hq=4, Hkv=1)
    masks = None if chain else ancestor_masks(few_paths(1, 21, most=4))
    expect_height_to_change_no_bit(x, masks, monkeypatch)


def expect_height_to_change_no_bit(x, masks, monkeypatch):
    results = []
    for first in (1 << 40, 0):
        monkeypatch.setattr(kernel, "TALL_FROM", first)
        pages = copied(x)
        results.append((causal_attention(*pages, masks), *pages[4:6]))
    assert torch.equal(results[0][0], results[1][0])
    for low, tall in zip(results[0][1:], results[1][1:], strict=True):
        assert same(low, tall)


def paths_of(masks, counts):
    """Each row's ways from the anchor to a column that no other continues."""
    rows = []
    for seen, count in zip(members(masks).tolist(), counts, strict=True):
        ways = [[c for c, sees in enumerate(line) if sees] for line in seen[:count]]
        last = [way for way in ways if sum(way[-1] in other for other in ways) == 1]
        rows.append(last)
    return rows


def expect_paths_to_be_chains(x, masks, counts):
    """The results and keys and values of every path have the bits of a chain of its columns."""
    pages = copied(x)
    tree = causal_attention(*pages, masks)
    rows = paths_of(masks, counts)
    for number in range(max(map(len, rows))):
        ways = [ways[number] if number < len(ways) else [] for ways in rows]
        width = max(map(len, ways))
        columns = torch.tensor([way + [0] * (width - len(way)) for way in ways], device=x[0].device)
        row = torch.arange(len(ways), device=x[0].device).unsqueeze(1)
        chain = copied(x)
        chain[:4] = [plane[row, columns] for plane in x[:4]]
        chain[8] = torch.tensor([len(way) for way in ways], device=x[0].device)
        alone = causal_attention(*chain)
        for b, way in enumerate(ways):
            assert torch.equal(tree[b, way], alone[b, : len(way)])


@pytest.mark.usefixtures("soon_far")
@pytest.mark.parametrize(
    ("frontiers", "W", "most", "dtype", "shape"),
    [
        ((0, NEAR - 4, 2 * NEAR - 2), 8, 2, torch.float32, {"Hq": 2, "Hkv": 1, "page": 20}),
        ((NEAR - 5, 2 * NEAR + 57), 12, 4, torch.float16, {"Hq": 6, "Hkv": 1}),
        ((66, 2 * NEAR - 7), 16, 8, torch.float32, {"Hq": 3, "Hkv": 1, "page": 16}),
        ((60, NEAR - 2), 16, 8, torch.float16, {"Hq": 3, "Hkv": 1}),
        ((61,), 32, 8, torch.float16, {"Hq": 4, "Hkv": 1}),
    ],
    ids=str,
)
def test_path_of_a_tree_is_a_chain_bit_for_bit(random, frontiers, W, most, dtype, shape):
    """Across the ends of pages, tiles and runs, whichever other paths there are."""
    counts = (*(W for _ in frontiers[1:]), W - 3)
    x = arguments(random, frontiers, counts, W, dtype=dtype, **shape)
    masks = ancestor_masks(few_paths(len(counts), W - 1, seed=W, most=most))
    masks[-1, W - 3 :] = -1
    expect_paths_to_be_chains(x, masks, counts)
