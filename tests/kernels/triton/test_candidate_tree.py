"""The tree's kernel against its reference, and its path against the selector's kernel."""

import pytest
import torch

from kernels.candidate_selector import candidate_selector
from kernels.candidate_tree import candidate_tree
from kernels.candidate_tree.reference import candidate_tree as reference
from tests.kernels.triton.test_candidate_selector import case

TEMPERATURES = [0.0, 1.0, 0.3, -1.0, 2.5]


def grown(x, nodes, paths, width):
    limits = torch.tensor(nodes), torch.tensor(paths)
    return candidate_tree(*x, *limits, width=width), reference(*x, *limits, width=width)


@pytest.mark.parametrize(
    ("P", "k", "R", "width"), [(7, 16, 24, 16), (5, 5, 7, 32), (1, 16, 8, 12)], ids=str
)
def test_trees_equal_reference(random, P, k, R, width):
    x = case(random, 5, P, k, R, TEMPERATURES)
    tree, expected = grown(x, [width, width, P + 3, width, width], [8, 8, 2, 3, 4], width)
    for name in ("tokens", "parents", "depths", "counts", "candidate_ids"):
        assert torch.equal(getattr(tree, name), getattr(expected, name)), name
    torch.testing.assert_close(tree.probabilities, expected.probabilities, rtol=2e-5, atol=2e-6)
    for row in (0, 3):
        assert torch.equal(tree.probabilities[row], expected.probabilities[row])


def test_path_is_the_selector_s_bit_for_bit(random):
    x = case(random, 5, 6, 16, 12, TEMPERATURES)
    tokens, q = candidate_selector(*x)
    tree, _ = grown(x, [16, 12, 7, 1, 9], [8] * 5, 16)
    assert torch.equal(tree.tokens[:, :6], tokens)
    assert torch.equal(tree.probabilities[:, :6], q)
    assert tree.counts.tolist()[2:4] == [6, 6]


def test_row_is_the_same_bits_alone_narrower_and_among_others(random):
    x = case(random, 3, 4, 16, 12, [1.0, 0.7, 0.0])
    together, _ = grown(x, [14] * 3, [8] * 3, 14)
    for row in range(3):
        alone = [part if i in (3, 4) else part[row : row + 1] for i, part in enumerate(x)]
        tree, _ = grown(alone, [9], [8], 9)
        assert int(tree.counts) == 8
        for name in ("tokens", "parents", "depths", "candidate_ids", "probabilities"):
            assert torch.equal(getattr(tree, name)[0], getattr(together, name)[row, :8]), name


def test_what_is_not_finite_stops_the_tree_and_ids_stay_valid(random):
    x = case(random, 2, 2, 16, 4, [1.0, 0.0])
    x[0][:, 1, 3] = float("nan")
    tree, _ = grown(x, [9, 9], [8, 8], 9)
    assert tree.probabilities[0, 1].isnan().any()
    for row in range(2):
        for line in range(int(tree.counts[row])):
            assert tree.tokens[row, line] in x[1][row, int(tree.depths[row, line]) - 1]
