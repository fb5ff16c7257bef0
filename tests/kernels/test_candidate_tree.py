"""Trees of proposals: every choice replayed in FP64, and each child drawn from what it reports."""

import math

import pytest
import torch
from scipy.stats import chi2

from kernels.candidate_selector import candidate_selector
from kernels.candidate_tree import candidate_tree, reference
from kernels.rng import Purpose, uniform
from tests.kernels.test_candidate_selector import lattice, restated_edges, restated_law


def grow(inputs, temperatures, nodes, paths, *, width, seeds=None, frontiers=None):
    rows = inputs[0].shape[0]
    seeds = torch.arange(rows) + 11 if seeds is None else torch.as_tensor(seeds)
    frontiers = torch.arange(rows) * 9 + 3 if frontiers is None else torch.as_tensor(frontiers)
    return candidate_tree(
        *inputs,
        torch.as_tensor(temperatures, dtype=torch.float32),
        seeds,
        frontiers,
        torch.as_tensor(nodes),
        torch.as_tensor(paths),
        width=width,
    )


class Replay:
    """One row's tree, rebuilt column by column in FP64 from what it reports."""

    def __init__(self, inputs, tree, row, temperature, seed, frontier, paths):
        self.inputs, self.row, self.temperature = inputs, row, temperature
        self.seed, self.frontier, self.paths = seed, frontier, paths
        self.positions = inputs[0].shape[1]
        self.depth, self.score, self.law, self.edge, self.taken = [], [], [], [], []
        self.place(0, int(inputs[5][row]), 1.0)
        self.close_calls = 0
        for column in range(1, int(tree.counts[row]) + 1):
            line = column - 1
            parent = int(tree.parents[row, line])
            if column <= self.positions:
                assert parent == column - 1
            else:
                self.chosen_well(parent)
            self.drawn_well(column, parent, tree, line)

    def place(self, depth, token, score):
        edges = []
        if depth < self.positions:
            edges = restated_edges(self.inputs, self.row, depth, token)
        self.depth.append(depth)
        self.score.append(score)
        self.edge.append(edges)
        temperature = self.temperature if self.temperature > 0 else 1.0
        self.law.append(restated_law(edges, temperature) if edges else [])
        self.taken.append([])

    def left(self, node):
        return [q for c, q in enumerate(self.law[node]) if c not in self.taken[node]]

    def priorities(self):
        leaves = sum(not taken for taken in self.taken)
        for node, score in enumerate(self.score):
            rest = self.left(node)
            mass = math.fsum(rest)
            if mass <= 0 or (self.taken[node] and leaves >= self.paths):
                yield 0.0
            elif self.temperature > 0:
                yield score * math.fsum(q * q for q in rest) / mass
            else:
                yield score * max(rest)

    def chosen_well(self, parent):
        priorities = list(self.priorities())
        best = max(priorities)
        assert best > 0
        if priorities.index(best) != parent:
            # only where the two are too near for FP32 to tell
            assert priorities[parent] == pytest.approx(best, rel=1e-4)
            self.close_calls += 1

    def drawn_well(self, column, parent, tree, line):
        ids = self.inputs[1][self.row, self.depth[parent]].tolist()
        rank = ids.index(int(tree.tokens[self.row, line]))
        taken, law = self.taken[parent], self.law[parent]
        assert rank not in taken
        assert tree.candidate_ids[self.row, line].tolist() == ids
        assert int(tree.depths[self.row, line]) == self.depth[parent] + 1
        q = tree.probabilities[self.row, line].tolist()
        if self.temperature <= 0:
            rest = [e for c, e in enumerate(self.edge[parent]) if c not in taken]
            assert self.edge[parent][rank] == max(rest)
            assert q == [float(c == rank) for c in range(len(ids))]
        else:
            assert q == pytest.approx(law, abs=2e-6, rel=2e-5)
            # the path has the selector's keys
            sub = 0 if column <= self.positions else ((parent + 1) << 5) | len(taken)
            key = self.frontier + self.depth[parent]
            goal = uniform(self.seed, key, Purpose.PROPOSAL, sub).item() * math.fsum(
                self.left(parent)
            )
            before = math.fsum(law[c] for c in range(rank) if c not in taken)
            assert before - 1e-5 <= goal <= before + law[rank] + 1e-5
        taken.append(rank)
        self.place(self.depth[parent] + 1, ids[rank], self.score[parent] * law[rank])


@pytest.mark.parametrize(
    ("rows", "positions", "k", "width"),
    [(4, 7, 16, 32), (4, 5, 16, 12), (3, 3, 4, 32), (2, 1, 16, 17), (2, 15, 8, 32)],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 2.5])
def test_choices_equal_a_replay_in_fp64(rows, positions, k, width, temperature):
    close_calls = 0
    for paths in (2, 3, 8):
        inputs = lattice(rows, positions, k, 8, 60, seed=paths, scale=0.5)
        tree = grow(inputs, [temperature] * rows, [width] * rows, [paths] * rows, width=width)
        for row in range(rows):
            replay = Replay(inputs, tree, row, temperature, row + 11, row * 9 + 3, paths)
            close_calls += replay.close_calls
            leaves = sum(not taken for taken in replay.taken)
            assert leaves <= paths
            assert max(replay.depth) == positions
            if len(replay.depth) < width:
                assert max(replay.priorities()) == 0  # stopped short for want of a node
    assert close_calls <= 1


@pytest.mark.parametrize("temperatures", [[0.0, 1.0, 0.3, -1.0, 2.5], [0.0] * 5, [0.7] * 5])
def test_path_is_the_selector_s_bit_for_bit(temperatures):
    inputs = lattice(5, 7, 16, 8, 60)
    seeds, frontiers = torch.arange(5) + 11, torch.arange(5) * 9 + 3
    tokens, q = candidate_selector(*inputs, torch.tensor(temperatures), seeds, frontiers)
    for width in (8, 9, 16, 32):
        tree = grow(inputs, temperatures, [width] * 5, [4] * 5, width=width)
        assert torch.equal(tree.tokens[:, :7], tokens)
        assert torch.equal(tree.probabilities[:, :7], q)
        assert torch.equal(tree.candidate_ids[:, :7], inputs[1])
        assert torch.equal(tree.parents[:, :7], torch.arange(7).expand(5, 7))


def test_nodes_limit_each_row_and_narrower_trees_are_the_first_columns():
    inputs = lattice(5, 4, 16, 8, 60)
    five = [x[:1].expand(5, *x.shape[1:]) for x in inputs[:3]]
    five += [*inputs[3:5], inputs[5][:1].expand(5)]
    nodes = [1, 5, 6, 11, 20]
    tree = grow(five, [1.0] * 5, nodes, [8] * 5, width=20, seeds=[7] * 5, frontiers=[3] * 5)
    assert tree.counts.tolist() == [4, 4, 5, 10, 19]
    for row, count in enumerate(tree.counts.tolist()):
        for plane in (tree.tokens, tree.parents, tree.depths, tree.candidate_ids):
            assert torch.equal(plane[row, :count], plane[4, :count])
            assert not plane[row, count:].any()
        assert torch.equal(tree.probabilities[row, :count], tree.probabilities[4, :count])
        assert not tree.probabilities[row, count:].any()


def test_last_position_has_no_children_and_all_candidates_may_be_used_up():
    """One position with 4 candidates makes 4 children of the anchor, and then stops."""
    inputs = lattice(2, 1, 4, 3, 20)
    tree = grow(inputs, [1.0, 0.0], [9, 9], [8, 8], width=9)
    assert tree.counts.tolist() == [4, 4]
    for row in range(2):
        assert sorted(tree.tokens[row, :4].tolist()) == sorted(inputs[1][row, 0].tolist())


def test_at_the_limit_of_paths_only_leaves_are_extended():
    inputs = lattice(1, 6, 16, 8, 60, scale=0.2)
    tree = grow(inputs, [1.0], [20], [2], width=20)
    count = int(tree.counts)
    parents = tree.parents[0, :count].tolist()
    # the path, one branch, and that branch's own path to the last position
    branch = parents[6]
    assert count == 6 + 6 - branch
    assert parents[7:] == list(range(7, count))


def test_equal_priorities_go_to_the_lowest_column_and_equal_edges_to_the_lowest_rank():
    inputs = lattice(1, 3, 4, 2, 20)
    inputs[0].zero_()
    inputs[3].zero_()
    tree = grow(inputs, [0.0], [6], [8], width=6)
    # all laws are 1/4: the anchor's second child has the first priority, then its third
    assert tree.parents[0].tolist() == [0, 1, 2, 0, 0]
    assert tree.tokens[0, 3:].tolist() == inputs[1][0, 0, 1:3].tolist()


def test_row_is_the_same_alone_and_among_others():
    inputs = lattice(4, 5, 16, 8, 60)
    temperatures, nodes, paths = [0.0, 1.0, 0.6, 0.0], [12, 16, 9, 20], [3, 8, 4, 8]
    together = grow(inputs, temperatures, nodes, paths, width=20)
    for row in range(4):
        part = [x[row : row + 1] for x in inputs[:3]] + inputs[3:5] + [inputs[5][row : row + 1]]
        alone = grow(
            part,
            temperatures[row : row + 1],
            nodes[row : row + 1],
            paths[row : row + 1],
            width=20,
            seeds=[row + 11],
            frontiers=[row * 9 + 3],
        )
        for mine, all_of in zip(alone, together, strict=True):
            assert torch.equal(mine[0], all_of[row])


def test_scores_that_are_not_finite_show_on_the_path_and_concern_their_own_row():
    inputs = lattice(3, 4, 16, 8, 60)
    clean = grow(inputs, [1.0, 1.0, 0.0], [12] * 3, [8] * 3, width=12)
    inputs[0][1] = torch.nan
    tree = grow(inputs, [1.0, 1.0, 0.0], [12] * 3, [8] * 3, width=12)
    assert tree.probabilities[1, :4].isnan().any()
    for plane, before in zip(tree, clean, strict=True):
        assert torch.equal(plane[[0, 2]], before[[0, 2]])


def second_children(count=40_000):
    """First and second child of the anchor over many seeds, and the law they were drawn from."""
    one = lattice(1, 2, 4, 3, 20, scale=0.5)
    rows = [x.expand(count, *x.shape[1:]) for x in one[:3]] + [*one[3:5], one[5].expand(count)]
    tree = grow(
        rows,
        [3.0] * count,
        [6] * count,
        [8] * count,
        width=6,
        seeds=torch.arange(count),
        frontiers=torch.full((count,), 55),
    )
    ranks = (one[1][0, 0] == tree.tokens.unsqueeze(2)).int().argmax(dim=2)
    of_anchor = (tree.parents == 0) & (torch.arange(5) < tree.counts.unsqueeze(1))
    # of the side columns, the first that continues the anchor
    side = of_anchor[:, 2:].int().argmax(dim=1) + 2
    has = of_anchor[:, 2:].any(dim=1)
    second = ranks.gather(1, side.unsqueeze(1)).squeeze(1)
    return ranks[has, 0], second[has], restated_law(restated_edges(one, 0, 0, int(one[5])), 3.0)


def misfit(first, second, law):
    """p-value of the second child's law given the first: the law without it, renormalised."""
    statistic = freedom = 0
    for a in range(len(law)):
        observed = torch.bincount(second[first == a], minlength=len(law)).double()
        wanted = torch.tensor([0.0 if b == a else q for b, q in enumerate(law)]).double()
        assert observed[a] == 0
        wanted = wanted / wanted.sum() * observed.sum()
        used = wanted > 10
        statistic += float(((observed - wanted)[used] ** 2 / wanted[used]).sum())
        freedom += max(int(used.sum()) - 1, 0)
    assert freedom >= 4
    return float(chi2.sf(statistic, freedom))


def test_second_child_follows_the_law_without_the_first():
    assert misfit(*second_children()) > 1e-3


def test_a_key_shared_by_siblings_would_break_that_law(monkeypatch):
    monkeypatch.setattr(
        reference, "uniform", lambda seeds, at, purpose, _: uniform(seeds, at, purpose)
    )
    assert misfit(*second_children()) < 1e-6


@pytest.mark.parametrize("width", [4, 33], ids="width={}".format)
def test_width_that_does_not_fit_is_refused(width):
    with pytest.raises(ValueError, match=rf"^width: expected 5\.\.32, got {width}$"):
        grow(lattice(1, 4, 4, 2, 20), [0.0], [4], [2], width=width)


def test_other_dtype_is_refused():
    inputs = lattice(1, 4, 4, 2, 20)
    with pytest.raises(ValueError, match=r"^paths: expected \[1\] int64, got \[1\] int32$"):
        grow(inputs, [0.0], [8], torch.tensor([2], dtype=torch.int32), width=8)
