"""Plain torch form: the path first, then one column a step in all rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.candidate_selector.reference import draw, edges, laws, walk
from kernels.candidate_tree import Tree
from kernels.rng import Purpose, uniform


def candidate_tree(
    scores: Tensor,
    ids: Tensor,
    projected: Tensor,
    predecessor: Tensor,
    successor: Tensor,
    anchors: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    frontiers: Tensor,
    nodes: Tensor,
    paths: Tensor,
    *,
    width: int,
) -> Tree:
    """See the contract."""
    table = edges(scores, ids, projected, predecessor, successor, anchors)
    growth = _Growth(ids, table, laws(table, temperatures), temperatures <= 0.0, width)
    growth.follow(seeds, frontiers)
    for column in range(ids.shape[1] + 1, width):
        parent, grows = growth.choose(paths)
        grows &= column < nodes
        if not grows.any():
            break
        growth.add(column, parent, growth.draw(parent, seeds, frontiers), grows)
    return growth.tree


class _Growth:
    """Trees as far as they have grown; node tables have a line a column."""

    def __init__(self, ids: Tensor, table: Tensor, law: Tensor, greedy: Tensor, width: int) -> None:
        rows, self.positions, k = ids.shape
        lines = rows, width - 1
        self.ids = ids
        # a node at the last depth has no law: nothing of it is open
        self.table = pad(table, (0, 0, 0, 0, 0, 1))  # [B, P + 1, k predecessors, k candidates]
        self.law = pad(law, (0, 0, 0, 0, 0, 1))
        self.greedy = greedy
        self.rows = torch.arange(rows, device=ids.device)
        self.tree = Tree(
            ids.new_zeros(lines),
            ids.new_zeros(lines),
            ids.new_zeros(lines),
            ids.new_zeros(rows),
            ids.new_zeros(*lines, k),
            law.new_zeros(*lines, k),
        )
        self.depth = ids.new_zeros(rows, width)
        self.children = ids.new_zeros(rows, width)
        self.score = law.new_zeros(rows, width)
        self.node_edges = table.new_zeros(rows, width, k)
        self.node_law = law.new_zeros(rows, width, k)
        self.open = law.new_zeros(rows, width, k)
        self.untaken = torch.ones(rows, width, k, dtype=torch.bool, device=ids.device)
        every = torch.ones_like(greedy)
        self._place(0, self.rows * 0, self.rows * 0, every)
        self.score[:, 0] = 1.0

    def follow(self, seeds: Tensor, frontiers: Tensor) -> None:
        """Columns 1..P: the selector's path."""
        law, best = self.law[:, :-1], self.table[:, :-1].max(dim=3).indices
        drawn = torch.where(self.greedy.view(-1, 1, 1), best, draw(law, seeds, frontiers))
        every = torch.ones_like(self.greedy)
        for position, ranks in enumerate(walk(drawn).unbind(1)):
            self.add(position + 1, torch.full_like(ranks, position), ranks, every)

    def choose(self, paths: Tensor) -> tuple[Tensor, Tensor]:
        """The node [B] that gets the next child, and whether there is one."""
        mass = self.open.sum(dim=2)
        expected = torch.where(
            self.greedy.unsqueeze(1), self.open.amax(dim=2), self.open.square().sum(dim=2) / mass
        )
        priority = self.score * expected
        leaf = self.children == 0
        # a node's line counts from its own column on
        alive = torch.arange(leaf.shape[1], device=leaf.device) <= self.tree.counts.unsqueeze(1)
        branches = (leaf & alive).sum(dim=1) < paths
        allowed = (priority > 0.0) & (leaf | branches.unsqueeze(1))
        best = torch.where(allowed, priority, 0.0).max(dim=1)
        return best.indices, best.values > 0.0

    def draw(self, parent: Tensor, seeds: Tensor, frontiers: Tensor) -> Tensor:
        """Rank of each parent's next child."""
        at = self.rows, parent
        law, untaken = self.open[at], self.untaken[at]
        sub = ((parent + 1) << 5) | self.children[at]
        u = uniform(seeds, frontiers + self.depth[at], Purpose.PROPOSAL, sub).unsqueeze(1)
        passed = (law.cumsum(dim=1) <= u * law.sum(dim=1, keepdim=True)).sum(dim=1)
        ranks = torch.arange(law.shape[1], device=law.device)
        # rounding can leave the whole sum below the goal: then the last open rank
        drawn = torch.minimum(passed, ((law > 0.0) * ranks).amax(dim=1))
        best = torch.where(untaken, self.node_edges[at], -torch.inf).max(dim=1).indices
        return torch.where(self.greedy, best, drawn)

    def add(self, column: int, parent: Tensor, rank: Tensor, grows: Tensor) -> None:
        """Puts the candidate of that rank on the column, in the rows that grow."""
        at = self.rows, parent
        depth, law = self.depth[at], self.node_law[at]
        chosen = torch.zeros_like(law).scatter_(1, rank.unsqueeze(1), 1.0)
        score = self.score[at] * (chosen * law).sum(dim=1)
        candidates = self.ids[self.rows, depth.clamp(max=self.positions - 1)]
        tree, line = self.tree, column - 1
        for plane, values in (
            (tree.tokens, candidates.gather(1, rank.unsqueeze(1)).squeeze(1)),
            (tree.parents, parent),
            (tree.depths, depth + 1),
            (tree.candidate_ids, candidates),
            (tree.probabilities, torch.where(self.greedy.unsqueeze(1), chosen, law)),
        ):
            plane[grows, line] = values[grows]
        tree.counts.add_(grows)
        taken = chosen.bool() & grows.unsqueeze(1)
        self.untaken[at] &= ~taken
        self.open[at] = torch.where(taken, 0.0, self.open[at])
        self.children[at] += grows
        self.score[:, column] = torch.where(grows, score, 0.0)
        self._place(column, depth + 1, rank, grows)

    def _place(self, column: int, depth: Tensor, rank: Tensor, grows: Tensor) -> None:
        """A new node's depth and law; the anchor's stands at every rank of its position."""
        at = self.rows, depth.clamp(max=self.positions), rank
        self.depth[:, column] = depth
        self.node_edges[:, column] = self.table[at]
        self.node_law[:, column] = self.law[at]
        self.open[:, column] = torch.where(grows.unsqueeze(1), self.law[at], 0.0)
