"""The flag that says how wide trees are."""

import pytest

from outrider.tree_nodes import TreeNodes


@pytest.mark.parametrize("text", ["off", "auto", "16", "16,12,0"])
def test_it_is_written_as_it_is_read(text):
    assert str(TreeNodes.parse(text)) == text


@pytest.mark.parametrize("text", ["", "on", "16;12", "16,", "1.5"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError, match="--draft-tree-nodes: expected off, auto or column counts"):
        TreeNodes.parse(text)


def test_the_last_entry_is_for_more_rows_too():
    nodes = TreeNodes.parse("16,12,0")
    assert [nodes.for_rows(rows) for rows in (1, 2, 3, 8)] == [16, 12, 0, 0]
    assert nodes.widths(7) == (12, 16)
    assert [nodes.widths(7, rows) for rows in (1, 2, 3)] == [(16,), (12,), ()]
    assert nodes.most(7) == 16


def test_only_zeros_are_no_trees():
    assert TreeNodes.parse("0").off
    assert TreeNodes.parse("0").most(7) == 0
    TreeNodes.parse("0").expect_served(7, 0)


@pytest.mark.parametrize(
    ("draft_tokens", "widths"), [(1, (6, 10, 18)), (7, (12, 16, 24)), (15, (20, 24, 32))]
)
def test_auto_has_three_widths_that_fit(draft_tokens, widths):
    nodes = TreeNodes.parse("auto")
    nodes.expect_served(draft_tokens, 16)
    assert nodes.widths(draft_tokens) == nodes.widths(draft_tokens, 3) == widths


@pytest.mark.parametrize("count", [1, 8, 33, -1])
def test_a_count_that_no_tree_has_is_refused(count):
    with pytest.raises(ValueError, match=r"expected 0 or 9\.\.32 columns for 7 draft tokens"):
        TreeNodes(by_rows=(16, count)).expect_served(7, 16)
