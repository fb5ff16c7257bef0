"""Plain torch form: the path at once, then one column a step in all rows that still grow."""

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
    law = laws(table, temperatures)
    greedy = temperatures <= 0.0
    choices = table.max(dim=3).indices
    if not greedy.all():
        drawn = draw(law, seeds, frontiers)
        choices = torch.where(greedy.view(-1, 1, 1), choices, drawn)
    growth = _Growth(table, law, greedy, walk(choices), width)
    for column in range(ids.shape[1] + 1, width):
        parents, grows = growth.choose(paths)
        rows = (grows & (column < nodes)).nonzero().squeeze(1)
        if not rows.numel():
            break
        growth.add(column, rows, parents[rows], seeds, frontiers)
    return growth.tree(ids)


class _Growth:
    """Trees as far as they have grown; node tables have a line a column, zero where none is yet."""

    def __init__(
        self, table: Tensor, law: Tensor, greedy: Tensor, ranks: Tensor, width: int
    ) -> None:
        """Begins with the path of these ranks [B, P]."""
        batch, positions, _, k = table.shape
        self.greedy, self.all_greedy = greedy, bool(greedy.all())
        # law and edges after each candidate; at the last depth nothing can be drawn
        self.after = pad(torch.stack([law, table], dim=3), (0, 0, 0, 0, 0, 0, 0, 1))
        self.nodes = law.new_zeros(batch, width, 2, k)
        before = pad(ranks, (1, 0))
        rows = torch.arange(batch, device=ranks.device).unsqueeze(1)
        steps = torch.arange(positions + 1, device=ranks.device)
        self.nodes[:, : positions + 1] = self.after[rows, steps, before]
        self.open = self.nodes[:, :, 0].clone()
        worth = self.open[:, :positions].gather(2, ranks.unsqueeze(2)).squeeze(2)
        self.open[:, :positions].scatter_(2, ranks.unsqueeze(2), 0.0)
        self.score = law.new_zeros(batch, width)
        self.score[:, : positions + 1] = pad(worth.cumprod(dim=1), (1, 0), value=1.0)
        # of each column its depth, rank, parent, and number of children, -1 before it is there
        self.depth, self.rank, self.parent, self.children = ranks.new_zeros(4, batch, width)
        self.depth[:, : positions + 1] = steps
        self.rank[:, 1 : positions + 1] = ranks
        self.parent[:, 1 : positions + 1] = steps[:-1]
        self.children[:, :positions] = 1
        self.children[:, positions + 1 :] = -1

    def choose(self, paths: Tensor) -> tuple[Tensor, Tensor]:
        """The node [B] that gets the next child, and whether there is one."""
        worth = self.open.amax(dim=2)
        if not self.all_greedy:
            mean = self.open.square().sum(dim=2) / self.open.sum(dim=2)
            worth = torch.where(self.greedy.unsqueeze(1), worth, mean)
        priority = self.score * worth
        leaf = self.children == 0
        allowed = leaf | (leaf.sum(dim=1) < paths).unsqueeze(1)
        allowed &= priority > 0.0
        best = priority.mul_(allowed).nan_to_num_(0.0).max(dim=1)
        return best.indices, best.values > 0.0

    def add(
        self, column: int, rows: Tensor, parents: Tensor, seeds: Tensor, frontiers: Tensor
    ) -> None:
        """Draws a child of the parents [n] of these rows [n], and puts it on the column."""
        at = rows, parents
        law, table = self.nodes[at].unbind(1)
        depth, weights = self.depth[at], self.open[at]
        # what is taken has no weight, and what has none is not the best
        ranks = torch.where(weights > 0.0, table, -torch.inf).max(dim=1).indices
        if not self.all_greedy:
            sub = ((parents + 1) << 5) | self.children[at]
            u = uniform(seeds[rows], frontiers[rows] + depth, Purpose.PROPOSAL, sub).unsqueeze(1)
            passed = (weights.cumsum(dim=1) <= u * weights.sum(dim=1, keepdim=True)).sum(dim=1)
            # rounding can leave the whole sum below the goal: then the last open rank
            last = (weights > 0.0) * torch.arange(law.shape[1], device=law.device)
            drawn = torch.minimum(passed, last.amax(dim=1))
            ranks = torch.where(self.greedy[rows], ranks, drawn)
        self.score[rows, column] = self.score[at] * law.gather(1, ranks.unsqueeze(1)).squeeze(1)
        self.open[rows, parents, ranks] = 0.0
        self.children[at] += 1
        self.children[rows, column] = 0
        self.depth[rows, column] = depth + 1
        self.rank[rows, column] = ranks
        self.parent[rows, column] = parents
        after = self.after[rows, depth + 1, ranks]
        self.nodes[rows, column] = after
        self.open[rows, column] = after[:, 0]

    def tree(self, ids: Tensor) -> Tree:
        """Columns 1.. as they are reported."""
        alive = self.children[:, 1:] >= 0
        parents, depths, ranks = self.parent[:, 1:], self.depth[:, 1:], self.rank[:, 1:]
        rows = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1)
        candidates = ids[rows, (depths - 1).clamp(min=0)]
        chosen = ranks.unsqueeze(2)
        law = self.nodes[rows, parents, 0]
        if self.greedy.any():
            one_hot = torch.zeros_like(law).scatter_(2, chosen, 1.0)
            law = torch.where(self.greedy.view(-1, 1, 1), one_hot, law)
        shown = alive.unsqueeze(2)
        return Tree(
            candidates.gather(2, chosen).squeeze(2).mul_(alive),
            parents.clone(),
            depths.clone(),
            alive.sum(dim=1),
            candidates.mul_(shown),
            torch.where(shown, law, 0.0),
        )
