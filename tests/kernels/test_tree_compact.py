"""Columns of a branch move to the front in every plane, and what follows cannot tell."""

import pytest
import torch

from kernels.causal_attention import causal_attention
from kernels.gdn_fold import gdn_fold
from kernels.gdn_verify import GdnRecord, gdn_verify
from kernels.tree_compact import compact_columns, compact_pages
from kernels.trees import ancestor_masks

NAN = float("nan")
# of three rows of 9 columns: a branch with its own places, a chain, a branch from the anchor
COLUMNS = torch.tensor(
    [[0, 1, 6, 7, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 5, 8, 3, 4, 5, 6, 7, 8]]
)


def bits(plane):
    return plane.contiguous().view({4: torch.int32, 2: torch.int16}[plane.element_size()])


def moved(plane, columns):
    """The plane [L, B, W, ...] as it should be left."""
    after = plane.clone()
    for row, places in enumerate(columns.tolist()):
        for place, source in enumerate(places):
            after[:, row, place] = plane[:, row, source]
    return after


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("entry", [(), (1,), (5,), (3, 7), (2, 16, 2)], ids=str)
def test_columns_move_in_every_layer(entry, dtype):
    planes = [torch.randn(layers, 3, 9, *entry).to(dtype) for layers in (1, 4)]
    planes[1][2] = NAN
    expected = [moved(plane, COLUMNS) for plane in planes]
    compact_columns(planes, COLUMNS)
    for plane, wanted in zip(planes, expected, strict=True):
        assert torch.equal(bits(plane), bits(wanted))


def test_parts_of_larger_planes_are_taken():
    whole = torch.randn(2, 5, 12, 6)
    part = whole[:, 1:4, 2:11]
    expected = whole.clone()
    expected[:, 1:4, 2:11] = moved(part, COLUMNS)
    compact_columns([part], COLUMNS)
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("page", [1, 3, 64])
def test_cells_move_between_pages(page):
    frontiers = [0, 7, 2 * page + 1]
    needed = [-(-(frontier + 9) // page) for frontier in frontiers]
    order = torch.randperm(sum(needed) + 2)
    # entries past the needed ones are far outside the pool, and so are a chain's
    tables = torch.full((3, max(needed) + 1), 10**6)
    used = 0
    for row, length in enumerate(needed):
        if row != 1:
            tables[row, :length] = order[used : used + length]
        used += length
    shape = (3, sum(needed) + 2, page, 2, 5)
    keys, values = torch.randn(shape).bfloat16(), torch.randn(shape).half()
    expected = keys.clone(), values.clone()
    for row in (0, 2):
        for place, source in enumerate(COLUMNS[row].tolist()):
            to, old = frontiers[row] + place, frontiers[row] + source
            for after, before in zip(expected, (keys, values), strict=True):
                after[:, tables[row, to // page], to % page] = before[
                    :, tables[row, old // page], old % page
                ]
    compact_pages(keys, values, tables, torch.tensor(frontiers), COLUMNS)
    assert torch.equal(bits(keys), bits(expected[0]))
    assert torch.equal(bits(values), bits(expected[1]))


def test_nothing_moves_where_the_branch_is_the_chain():
    plane = torch.randn(2, 3, 9, 4)
    before = plane.clone()
    compact_columns([plane], torch.arange(9).expand(3, 9))
    assert torch.equal(plane, before)


@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_fold_of_a_compacted_tree_is_the_fold_of_its_branch(gdn, kept):
    """State and history equal, bit for bit, those of a chain of the branch alone."""
    parents = torch.tensor([[0, 1, 2, 3, 1, 5, 6, 0]])
    branch = [0, 1, 5, 6]
    tree = gdn.block(1, 9, (2, 6, 12, 20)) | {"ancestors": ancestor_masks(parents)}
    gdn_verify(**tree)
    alone = gdn.block(1, 9, (2, 6, 12, 20))
    for name in ("projected", "a", "b"):
        alone[name] = alone[name][:, branch]
    alone["counts"] = torch.tensor([4])
    alone["record"] = GdnRecord(*(plane[:, :4].clone() for plane in alone["record"]))
    gdn_verify(**alone)
    columns = torch.tensor([[*branch, *range(4, 9)]])
    compact_columns([plane.unsqueeze(0) for plane in tree["record"]], columns)
    left = []
    for block in (tree, alone):
        state, history = block["state"].clone()[None], block["conv_history"].clone()[None]
        records = GdnRecord(*(plane[None] for plane in block["record"]))
        place = block["slots"], block["slots"], torch.tensor([kept])
        gdn_fold(records, state, history, *place)
        left.append((state, history))
    assert torch.equal(left[0][0], left[1][0])
    assert torch.equal(left[0][1], left[1][1])


def test_attention_after_compaction_is_that_after_the_branch_alone():
    parents = torch.tensor([[0, 1, 2, 0, 4, 5]])
    branch = [0, 4, 5, 6]
    query, key, value, gate = torch.randn(4, 1, 7, 2, 8)
    table, frontier = torch.tensor([[2, 0, 1, 3]]), torch.tensor([3])
    past = torch.randn(2, 4, 4, 2, 8)
    pages = past.clone()
    counts = torch.tensor([7])
    masks = ancestor_masks(parents)
    causal_attention(query, key, value, gate, *pages, table, frontier, counts, masks)
    columns = torch.tensor([[*branch, 4, 5, 6]])
    compact_pages(pages[0, None], pages[1, None], table, frontier, columns)
    chain = past.clone()
    part = [x[:, branch] for x in (query, key, value, gate)]
    causal_attention(*part, *chain, table, frontier, torch.tensor([4]))
    following = torch.randn(4, 1, 1, 2, 8)
    place = table, frontier + 4, torch.tensor([1])
    assert torch.equal(
        causal_attention(*following, *pages, *place), causal_attention(*following, *chain, *place)
    )


def test_what_does_not_fit_is_refused():
    columns = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^planes\[0\]: expected \[1, 2, 3, 4\]"):
        compact_columns([torch.zeros(1, 2, 4, 4)], columns)
    with pytest.raises(ValueError, match=r"^planes\[0\]: expected contiguous entries"):
        compact_columns([torch.zeros(1, 2, 3, 4, 5).transpose(3, 4)], columns)
    with pytest.raises(ValueError, match=r"^columns: expected \[2, 3\] int64"):
        compact_columns([], columns.int())
    pages = torch.zeros(1, 4, 4, 2, 8)
    table, frontiers = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^value_pages: expected \[1, 4, 4, 2, 8\]"):
        compact_pages(pages, pages[..., :4], table, frontiers, columns)
    with pytest.raises(ValueError, match=r"^key_pages: expected contiguous pages"):
        compact_pages(pages.transpose(1, 2), pages, table, frontiers, columns)
