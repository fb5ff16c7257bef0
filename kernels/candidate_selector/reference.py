"""Plain torch form: all edges at once, then a walk over the choices they imply."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.rng import Purpose, uniform


def candidate_selector(
    scores: Tensor,
    ids: Tensor,
    projected: Tensor,
    predecessor: Tensor,
    successor: Tensor,
    anchors: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    frontiers: Tensor,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    rows, positions, k = ids.shape
    if rows == 0 or positions == 0:
        return ids.new_zeros(rows, positions), torch.zeros_like(scores)
    table = edges(scores, ids, projected, predecessor, successor, anchors)
    greedy = temperatures <= 0.0
    choices = table.max(dim=3).indices
    if greedy.all():
        ranks = walk(choices)
        q = torch.zeros_like(scores)
        q.scatter_(2, ranks.unsqueeze(2), 1.0)
    else:
        q = laws(table, temperatures)
        drawn = draw(q, seeds, frontiers)
        if greedy.any():
            greedy = greedy.view(-1, 1, 1)
            one_hot = torch.zeros_like(q).scatter_(3, choices.unsqueeze(3), 1.0)
            q = torch.where(greedy.unsqueeze(3), one_hot, q)
            drawn = torch.where(greedy, choices, drawn)
        ranks = walk(drawn)
        conditions = torch.cat([torch.zeros_like(ranks[:, :1]), ranks[:, :-1]], dim=1)
        q = q.gather(2, conditions.view(rows, positions, 1, 1).expand(-1, -1, 1, k)).squeeze(2)
    return ids.gather(2, ranks.unsqueeze(2)).squeeze(2), q


def edges(
    scores: Tensor,
    ids: Tensor,
    projected: Tensor,
    predecessor: Tensor,
    successor: Tensor,
    anchors: Tensor,
) -> Tensor:
    """Edges [B, P, k predecessors, k candidates]; at position 0 every predecessor is the anchor."""
    k = ids.shape[2]
    previous = torch.cat([anchors.view(-1, 1, 1).expand(-1, 1, k), ids[:, :-1]], dim=1)
    left = predecessor[previous].float() * projected.float().unsqueeze(2)
    table = left @ successor[ids].float().transpose(2, 3)
    return table.add_(scores.unsqueeze(2))


def laws(table: Tensor, temperatures: Tensor) -> Tensor:
    """The law that each predecessor's edges imply, at temperature 1 in greedy rows."""
    divisors = torch.where(temperatures <= 0.0, 1.0, temperatures).view(-1, 1, 1, 1)
    weights = table.sub(table.amax(dim=3, keepdim=True)).div_(divisors).exp_()
    return weights.div_(weights.sum(dim=3, keepdim=True))


def draw(q: Tensor, seeds: Tensor, frontiers: Tensor) -> Tensor:
    """Rank drawn from each q [B, P, k, k]; every predecessor of a position shares its draw."""
    positions, k = q.shape[1], q.shape[3]
    step = torch.arange(positions, device=q.device)
    u = uniform(seeds[:, None], frontiers[:, None] + step, Purpose.PROPOSAL)
    rank = (q.cumsum(dim=3) <= u[..., None, None]).sum(dim=3)
    if (rank == k).any():
        # rounding can leave the sum of q below u: then the last rank with q > 0
        last = ((q > 0.0) * torch.arange(k, device=q.device)).amax(dim=3)
        rank = torch.minimum(rank, last)
    return rank


def walk(choices: Tensor) -> Tensor:
    """Follows choices [B, P, k] from predecessor to choice; returns ranks [B, P]."""
    paths = []
    for row in choices.tolist():
        path, rank = [], 0
        for position in row:
            rank = position[rank]
            path.append(rank)
        paths.append(path)
    return torch.tensor(paths, device=choices.device)
