"""Masks are the closure of the parents, and say depths and members."""

import torch

from kernels.trees import MOST_COLUMNS, ancestor_masks, depths, members


def random_parents(rows, count, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(rows, count, generator=generator)
    return (draws * torch.arange(1, count + 1)).long()


def few_paths(rows, count, *, seed=0, most=8):
    """Random parents [rows, count] with at most `most` columns that no other continues."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.zeros(rows, count, dtype=torch.int64)
    for row in range(rows):
        leaves = {0}
        for column in range(1, count + 1):
            free = range(column) if len(leaves) < most else sorted(leaves)
            parent = free[int(torch.randint(len(free), (1,), generator=generator))]
            leaves = (leaves - {parent}) | {column}
            parents[row, column - 1] = parent
    return parents


def test_masks_are_the_closure_of_the_parents():
    parents = random_parents(20, MOST_COLUMNS - 1)
    masks = ancestor_masks(parents)
    assert masks.dtype is torch.int32
    for row in range(20):
        for column in range(MOST_COLUMNS):
            seen, at = {column}, column
            while at:
                at = int(parents[row, at - 1])
                seen.add(at)
            word = int(masks[row, column]) & 0xFFFFFFFF
            assert word == sum(1 << j for j in seen)
            assert members(masks)[row, column].nonzero().flatten().tolist() == sorted(seen)
            assert depths(masks)[row, column] == len(seen) - 1


def test_a_chain_sees_all_before_it():
    masks = ancestor_masks(torch.arange(31).unsqueeze(0))
    assert torch.equal(members(masks)[0], torch.ones(32, 32).tril().bool())
    assert torch.equal(depths(masks)[0], torch.arange(32))


def test_an_anchor_alone_sees_itself():
    assert ancestor_masks(torch.zeros(2, 0, dtype=torch.int64)).tolist() == [[1], [1]]
