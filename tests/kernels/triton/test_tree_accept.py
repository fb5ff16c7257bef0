"""The kernels of accepting a tree draw what their reference draws."""

import pytest
import torch

from kernels.speculative_accept import kernel as chain_kernel
from kernels.speculative_accept import speculative_accept
from kernels.tree_accept import kernel, tree_accept
from kernels.tree_accept.reference import tree_accept as reference
from kernels.trees import ancestor_masks
from tests.kernels.test_tree_accept import forest, one_hot
from tests.kernels.triton.test_speculative_accept import case


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    for module in (kernel, chain_kernel):
        monkeypatch.setattr(module, "_CHUNK", 32)
        monkeypatch.setattr(module, "_PASS", 128)
        # short rankings, so that some draws go beyond them
        monkeypatch.setattr(module, "_TILE", 8)
        monkeypatch.setattr(module, "_RANKED", 4)


def check(arguments):
    actual, expected = tree_accept(*arguments), reference(*arguments)
    for mine, theirs in zip(actual, expected, strict=True):
        assert torch.equal(mine, theirs)
    return actual


@pytest.mark.parametrize(
    ("rows", "lines", "vocab", "k"), [(8, 3, 20, 4), (12, 12, 24, 16), (6, 31, 40, 16)], ids=str
)
def test_sampled_rows_equal_reference(rows, lines, vocab, k):
    trees = forest(rows, lines, vocab, k, seed=lines)
    p, _, live, masks, *_ = trees.arguments
    for row in range(rows):
        p[row, int(live[row]) + 1 :] = float("nan")
        masks[row, int(live[row]) + 1 :] = -1
    actual = check(trees.arguments)
    if lines == 12:
        assert (actual.accepted > 1).any()
        assert (actual.columns != torch.arange(13)).any()


def test_siblings_are_held_to_what_their_elders_left():
    """Many rows over one small tree, p near q: younger siblings pass and fail."""
    trees = forest(24, 3, 12, 8, seed=2)
    p, tokens, live, _, ids, q, *_ = trees.arguments
    live[:] = 3
    masks = ancestor_masks(torch.zeros(24, 3, dtype=torch.int64))
    ids[:], q[:] = ids[:, :1], q[:, :1]
    tokens[:] = ids[:, 0, [3, 0, 5]]
    p[:, 0] = 0.3 * p[:, 0] + 0.7 * torch.zeros(24, 12).scatter_(1, ids[:, 0], q[:, 0].flip(1))
    trees.arguments[3] = masks
    actual = check(trees.arguments)
    assert set(actual.columns[actual.accepted == 1, 1].tolist()) >= {1, 2}
    assert (actual.accepted == 0).any()


def test_a_chain_gives_speculative_accept_s_kernels_bit_for_bit(random):
    arguments = case(random, 10, 4, 16)
    expected = speculative_accept(*arguments)
    masks = ancestor_masks(torch.arange(4).expand(10, 4))
    actual = check([*arguments[:3], masks, *arguments[3:]])
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.accepted, expected.accepted)


def test_point_masses_padded_with_repeated_ids_equal_reference(random):
    arguments = case(random, 6, 2, 4)
    arguments[3][..., 1:] = arguments[3][..., :1]
    arguments[4][:] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    arguments[2][:] = 2
    check([*arguments[:3], ancestor_masks(torch.arange(2).expand(6, 2)), *arguments[3:]])


def test_no_drafts_are_a_draw_from_p(random):
    arguments = case(random, 5, 0, 1)
    check([*arguments[:3], torch.ones(5, 1, dtype=torch.int32), *arguments[3:]])


def test_greedy_rows_follow_the_argmax():
    argmaxes = [[7, 0, 0, 0, 0, 0], [1, 2, 5, 0, 0, 0], [1, 8, 0, 0, 0, 0]]
    argmaxes += [[3, 0, 0, 5, 0, 6], [3, 0, 0, 4, 2, 0], [3, 0, 0, 9, 0, 0]]
    tokens = torch.arange(1, 6)
    ids = torch.tensor([[1, 3], [2, 6], [1, 3], [4, 5], [4, 5]])
    actual = check(
        [
            torch.stack([one_hot(row, 10) for row in argmaxes]),
            tokens.expand(6, 5),
            torch.full((6,), 5),
            ancestor_masks(torch.tensor([[0, 1, 0, 3, 3]]).expand(6, 5)),
            ids.expand(6, 5, 2),
            (ids == tokens[:, None]).float().expand(6, 5, 2),
            torch.arange(6),
            torch.arange(6),
        ]
    )
    assert actual.accepted.tolist() == [0, 2, 1, 2, 2, 1]


def test_where_p_equals_q_and_rejects_p_is_left():
    trees = forest(6, 2, 8, 8, seed=1)
    p, tokens, live, _, ids, q, *_ = trees.arguments
    live[:] = 2
    trees.arguments[3] = ancestor_masks(torch.zeros(6, 2, dtype=torch.int64))
    ids[:] = torch.arange(8)
    p[:, 0, 7] = 0.0
    q[:] = p[:, :1]
    tokens[:] = torch.tensor([7, 3])
    check(trees.arguments)


def test_not_a_number_gives_some_id():
    trees = forest(2, 5, 40, 8, seed=3)
    trees.arguments[2][:] = 5
    clean = tree_accept(*trees.arguments)
    trees.arguments[0][0] = float("nan")
    result = tree_accept(*trees.arguments)
    assert ((result.tokens >= 0) & (result.tokens < 40)).all()
    assert torch.equal(result.tokens[1], clean.tokens[1])


def test_row_does_not_depend_on_its_neighbours():
    trees = forest(4, 9, 40, 8, seed=4)
    together = tree_accept(*trees.arguments)
    for row in (0, 3):
        alone = tree_accept(*(x[row : row + 1] for x in trees.arguments))
        for mine, all_of in zip(alone, together, strict=True):
            assert torch.equal(mine[0], all_of[row])
