"""Plain torch form: all columns are checked at once, one residual a row is built and drawn from."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch

from kernels.rng import Purpose, uniform

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def speculative_accept(
    p: Tensor,
    proposals: Tensor,
    live: Tensor,
    candidate_ids: Tensor,
    candidate_probabilities: Tensor,
    seeds: Tensor,
    frontiers: Tensor,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    batch, width, _ = p.shape
    drafts = width - 1
    rows, columns, offsets, purposes = _constants(batch, drafts, p.device)

    @cache
    def draws() -> Tensor:
        # every number that the round may need, once some row needs one: greedy rows never do
        return uniform(seeds.unsqueeze(1), frontiers.unsqueeze(1) + offsets, purposes)

    if drafts == 0:
        return draw(p[:, 0], p[:, 0], lambda: draws()[:, 0]).unsqueeze(1), torch.zeros_like(live)
    chosen = proposals.unsqueeze(2)
    target = p[:, :drafts].gather(2, chosen).squeeze(2)
    # candidates beside the proposal count nothing towards q(d)
    proposed = torch.where(candidate_ids == chosen, candidate_probabilities, 0.0).sum(dim=2)
    passes = target > 0.0
    contested = passes & (target < proposed)
    if contested.any():
        passes &= ~contested | (draws()[:, :drafts] * proposed < target)
    accepted = passes.logical_and_(columns < live.unsqueeze(1)).cumprod(dim=1).sum(dim=1)

    order = weights = p.flatten(0, 1).index_select(0, rows * width + accepted)
    rejected = accepted < live
    if rejected.any():
        at = accepted.clamp(max=drafts - 1).add_(rows * drafts)
        ids = candidate_ids.flatten(0, 1).index_select(0, at)
        q = candidate_probabilities.flatten(0, 1).index_select(0, at)
        weights = _residual(order, ids, q, rejected)

    def terminal_draws() -> Tensor:
        keys = accepted + torch.where(rejected, drafts, 2 * drafts)
        return draws().gather(1, keys.unsqueeze(1)).squeeze(1)

    terminal = draw(order, weights, terminal_draws)
    tokens = torch.zeros(batch, width, dtype=torch.int64, device=p.device)
    torch.mul(proposals, columns < accepted.unsqueeze(1), out=tokens[:, :drafts])
    return tokens.scatter_(1, accepted.unsqueeze(1), terminal.unsqueeze(1)), accepted


@lru_cache(maxsize=64)
def _constants(
    batch: int, drafts: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns 0..B-1, 0..K-1, and offsets from F and purposes of every draw of a round.

    These are K accepts, a correction after 0..K-1 accepted, a bonus after 0..K accepted.
    """
    # made outside inference mode, so that kept ones may take part in any later computation
    with torch.inference_mode(False):
        columns = torch.arange(drafts, device=device)
        offsets = torch.cat([columns, columns, torch.arange(drafts + 1, device=device)]) + 1
        purposes = [Purpose.ACCEPT] * drafts + [Purpose.CORRECTION] * drafts
        purposes += [Purpose.BONUS] * (drafts + 1)
        rows = torch.arange(batch, device=device)
        return rows, columns, offsets, torch.tensor(purposes, device=device)


def _residual(p: Tensor, ids: Tensor, q: Tensor, rejected: Tensor) -> Tensor:
    """Weights [B, V] of the terminal token: max(p - q, 0) after a rejection, else p."""
    q = torch.where(rejected.unsqueeze(1), -q, 0.0)
    residual = p.scatter_add(1, ids, q).clamp_min_(0.0)
    has_mass = residual.sum(dim=1, keepdim=True) > 0.0
    # where p equals q only rounding can have rejected, and p itself is what is left
    return residual if has_mass.all() else torch.where(has_mass, residual, p)


def draw(order: Tensor, weights: Tensor, draws: Callable[[], Tensor]) -> Tensor:
    """Draws a token [B] by inverse cumulative weights, ranked by `order` [B, V].

    `draws` gives u [B]; it is not asked where one token has all the weight.
    """
    mass = weights.sum(dim=1, keepdim=True)
    # most draws fall on the first rank, which needs no ranking
    tokens = order.max(dim=1, keepdim=True).indices
    first = weights.gather(1, tokens)
    if not torch.equal(first, mass):
        goal = draws().unsqueeze(1) * mass
        left = (goal >= first).squeeze(1)
        if left.any():
            tokens[left] = _draw_ranked(order[left], weights[left], goal[left], 64)
    return tokens.squeeze(1)


def _draw_ranked(order: Tensor, weights: Tensor, goal: Tensor, count: int) -> Tensor:
    """As `draw` for goals [B, 1]; ranks `count` entries, or more where those do not do."""
    vocab = order.shape[1]
    if count < vocab:
        values, columns = order.topk(count, dim=1)
    else:
        # a stable sort leaves equal entries in the order of their ids
        values, columns = order.sort(dim=1, descending=True, stable=True)
    ranked = weights.gather(1, columns)
    rank = (ranked.cumsum(dim=1) <= goal).sum(dim=1, keepdim=True)
    if count >= vocab:
        # rounding can leave the whole sum below the goal: then the last with any weight
        positive = (ranked > 0.0) * torch.arange(vocab, device=order.device)
        return columns.gather(1, torch.minimum(rank, positive.amax(dim=1, keepdim=True)))
    # the choice must not be one of equals: among those `topk` does not order by id
    at = torch.cat([rank - 1, rank, rank + 1], dim=1).clamp_(0, count - 1)
    before, chosen, after = values.gather(1, at).unbind(1)
    tied = ((before == chosen) & (rank.squeeze(1) > 0)) | (chosen == after)
    tokens = columns.gather(1, at[:, 1:2])
    if tied.any():
        tokens[tied] = _draw_ranked(order[tied], weights[tied], goal[tied], 4 * count)
    return tokens
