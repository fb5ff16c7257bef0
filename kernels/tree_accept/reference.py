"""Plain torch form: all rows walk at once, one child after the other."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.rng import Purpose, uniform
from kernels.speculative_accept.reference import draw


class _Proposals(NamedTuple):
    """What is known of columns 1.., one entry each."""

    tokens: Tensor
    ids: Tensor
    probabilities: Tensor


class _Walk(NamedTuple):
    """Where rows stand, each at one column."""

    order: Tensor  # [n, V]: p there
    weights: Tensor  # [n, V]: what is left of it after the children that were rejected
    children: Tensor  # [n, W]: those still to be tried


def tree_accept(
    p: Tensor,
    proposals: Tensor,
    live: Tensor,
    ancestors: Tensor,
    candidate_ids: Tensor,
    candidate_probabilities: Tensor,
    seeds: Tensor,
    frontiers: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the contract."""
    batch, width, _ = p.shape
    device = p.device
    drafts = _Proposals(proposals, candidate_ids, candidate_probabilities)
    index = torch.arange(width, device=device)
    columns = index.repeat(batch, 1)
    # a child sees what its parent sees, and itself
    before = ancestors ^ (1 << index).to(torch.int32)
    alive = (index > 0) & (index <= live.unsqueeze(1))
    accepted = torch.zeros_like(live)
    rejected = torch.zeros_like(live, dtype=torch.bool)
    order, weights = torch.empty_like(p[:, 0]), torch.empty_like(p[:, 0])

    rows = torch.arange(batch, device=device)
    nodes = torch.zeros_like(rows)
    while rows.numel():
        children = (before[rows] == ancestors[rows, nodes].unsqueeze(1)) & alive[rows]
        here = p[rows, nodes]
        rejected[rows] = children.any(dim=1)
        walk = _Walk(here, here.clone(), children)
        keys = seeds[rows], frontiers[rows] + accepted[rows] + 1
        found = _first_accepted(walk, _Proposals(*(x[rows] for x in drafts)), keys)
        done = found == 0
        order[rows[done]], weights[rows[done]] = here[done], walk.weights[done]
        rows, nodes = rows[~done], found[~done]
        accepted[rows] += 1
        columns[rows, accepted[rows]] = nodes

    def terminal_draws() -> Tensor:
        purposes = torch.where(rejected, int(Purpose.CORRECTION), int(Purpose.BONUS))
        return uniform(seeds, frontiers + accepted + 1, purposes)

    terminal = draw(order, weights, terminal_draws)
    tokens = torch.zeros(batch, width, dtype=torch.int64, device=device)
    tokens[:, :-1] = proposals.gather(1, (columns[:, 1:] - 1))
    tokens.mul_(index < accepted.unsqueeze(1))
    return tokens.scatter_(1, accepted.unsqueeze(1), terminal.unsqueeze(1)), accepted, columns


def _first_accepted(walk: _Walk, drafts: _Proposals, keys: tuple[Tensor, Tensor]) -> Tensor:
    """Column [n] of the first child that is accepted, 0 where none is; leaves the weights."""
    found = torch.zeros_like(keys[0])
    taken = torch.zeros(found.shape[0], drafts.ids.shape[2], dtype=torch.bool, device=found.device)
    mass = torch.ones_like(walk.order[:, 0])
    for sibling in count():
        at = (walk.children.any(dim=1) & (found == 0)).nonzero().squeeze(1)
        if not at.numel():
            return found
        column = walk.children[at].int().argmax(dim=1)
        walk.children[at, column] = False
        token, ids, q = (x[at, column - 1] for x in drafts)
        chosen = token.unsqueeze(1)
        q = torch.where(taken[at], 0.0, q)
        share = q.sum(dim=1) if sibling else torch.ones_like(q[:, 0])
        owed = walk.weights[at].gather(1, chosen).squeeze(1) / mass[at]
        # candidates beside the proposal count nothing
        offered = torch.where(ids == chosen, q, 0.0).sum(dim=1) / share
        passes = owed > 0.0
        contested = passes & (owed < offered)
        if contested.any():
            u = uniform(keys[0][at], keys[1][at], Purpose.ACCEPT, sibling)
            passes &= ~contested | (u * offered < owed)
        found[at] = torch.where(passes, column, 0)
        taken[at] |= ids == chosen

        refused, at = ~passes, at[~passes]
        spent = (mass[at] / share[refused]).unsqueeze(1) * q[refused]
        rest = walk.weights[at].scatter_add(1, ids[refused], -spent).clamp_min_(0.0)
        left = rest.sum(dim=1)
        # where p equals q only rounding can have rejected, and p itself is what is left
        empty = left <= 0.0
        walk.weights[at] = torch.where(empty.unsqueeze(1), walk.order[at], rest)
        mass[at] = torch.where(empty, 1.0, left)
    raise AssertionError  # a row has no more children than columns
