"""Tokens a round, by the real loop: draft, verify, accept; all prompts side by side.

Everything is recomputed from position 0 in float32, so that the figures are the model's and not
a cache's. Prompt lookup, a drafter without weights, is scored on the same outputs.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from .draft import Draft
from .target import Target
from .tokenizer import PUBLIC_VOCAB

HORIZON = 64


@dataclass
class Tally:
    """Rounds of one setting: lane, new tokens out before the round, accepted proposals."""

    lanes: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, lane: int, start: int, accepted: int) -> None:
        """Counts one round."""
        self.lanes.append(lane)
        self.starts.append(start)
        self.accepted.append(accepted)

    def rate(self, chosen: list[bool]) -> float:
        """Returns tokens a round over the chosen rounds."""
        tokens = [a + 1 for a, keep in zip(self.accepted, chosen, strict=True) if keep]
        return round(sum(tokens) / max(1, len(tokens)), 3)

    def figures(self, kinds: list[str]) -> dict[str, object]:
        """Returns the figures that are published. kinds: each lane's."""
        early = [start < HORIZON for start in self.starts]
        figures: dict[str, object] = {
            "first_64": self.rate(early),
            "all": self.rate([True] * len(early)),
        }
        for kind in sorted(set(kinds)):
            of_kind = [kinds[lane] == kind for lane in self.lanes]
            figures[f"first_64_{kind}"] = self.rate(
                [a and b for a, b in zip(early, of_kind, strict=True)]
            )
        lowest = min(
            self.rate([other == lane for other in self.lanes]) for lane in range(len(kinds))
        )
        depth = max(self.accepted)
        shares = [sum(a > i for a in self.accepted) / len(self.accepted) for i in range(depth)]
        return {
            **figures,
            "lowest_prompt": lowest,
            "accepted_at": [round(share, 3) for share in shares],
            "rounds": len(self.accepted),
        }


@dataclass(frozen=True)
class Proposal:
    """Proposed ids [N, K], and the distributions that they came from, [N, K, public]."""

    token_ids: Tensor
    law: Tensor


def point_mass(token_ids: Tensor) -> Tensor:
    """Returns one-hot distributions over the public vocabulary."""
    return functional.one_hot(token_ids, PUBLIC_VOCAB).float()


def propose(draft: Draft, logits: Tensor, hidden: Tensor, anchors: Tensor, heat: float) -> Proposal:
    """Chooses the proposals. logits [N, K, public], hidden [N, K, H], anchors [N] ids."""
    if not draft.shape.selector_rank:
        ids = logits.argmax(-1)
        return Proposal(ids, point_mass(ids))
    unary, candidates = logits.topk(draft.shape.top_k)
    before, path, laws = anchors, [], []
    for i in range(logits.shape[1]):
        edges = draft.candidate_selector(hidden[:, i], before, unary[:, i], candidates[:, i])
        if heat > 0:
            q = (edges / heat).softmax(-1)
            index = q.multinomial(1)
        else:
            index = edges.argmax(-1, keepdim=True)
            q = functional.one_hot(index[:, 0], edges.shape[-1]).float()
        before = candidates[:, i].gather(-1, index)[:, 0]
        path.append(before)
        laws.append(torch.zeros_like(logits[:, i]).scatter(-1, candidates[:, i], q))
    return Proposal(torch.stack(path, 1), torch.stack(laws, 1))


def verify(logits: Tensor, proposal: Proposal, heat: float) -> tuple[Tensor, Tensor]:
    """Returns accepted counts [N] and the token after them [N]. logits [N, K + 1, public]."""
    p = (logits / heat).softmax(-1) if heat > 0 else point_mass(logits.argmax(-1))
    ids = proposal.token_ids[..., None]
    offered, wanted = proposal.law.gather(-1, ids), p[:, :-1].gather(-1, ids)
    agreed = (torch.rand_like(offered) * offered < wanted).squeeze(-1)
    accepted = agreed.long().cumprod(-1).sum(-1)
    # the row after the last proposal has nothing to subtract: its draw is the bonus
    law = functional.pad(proposal.law, (0, 0, 0, 1))
    at = accepted[:, None, None].expand(-1, 1, PUBLIC_VOCAB)
    p, q = p.gather(1, at)[:, 0], law.gather(1, at)[:, 0]
    residual = (p - q).clamp_min(0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    return accepted, residual.multinomial(1)[:, 0]


@torch.no_grad()
def run_rounds(
    target: Target, draft: Draft, prompts: Tensor, new_tokens: int, heat: float
) -> tuple[Tally, Tensor]:
    """Runs the loop until each lane has its new tokens. prompts [N, P]; heat 0 is greedy.

    Returns the rounds and the token ids [N, P + new_tokens].
    """
    lanes, length = prompts.shape
    width, taps = draft.shape.block, draft.shape.taps
    head = target.embedding[:PUBLIC_VOCAB]
    tokens = functional.pad(prompts, (0, new_tokens + 2 * width))
    hidden, features = target(prompts, taps)
    nothing = Proposal(prompts[:, :0], prompts.new_zeros((lanes, 0, PUBLIC_VOCAB)).float())
    tokens[:, length] = verify(functional.linear(hidden[:, -1:], head), nothing, heat)[1]
    frontier = torch.full((lanes,), length, device=prompts.device)
    offsets = torch.arange(width, device=prompts.device)
    tally = Tally()
    while bool((live := frontier + 1 < length + new_tokens).any()):
        at = frontier[:, None] + offsets
        anchors = tokens.gather(1, frontier[:, None])
        block = draft.embed_block(target.embedding, anchors, width)
        columns = draft(block, features, frontier[:, None])[:, 0, 1:]
        scores = functional.linear(columns, head)
        proposal = propose(draft, scores, columns, anchors[:, 0], heat)
        tokens.scatter_(1, at[:, 1:], proposal.token_ids)
        hidden, features = target(tokens[:, : int(frontier.max()) + width], taps)
        rows = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
        accepted, after = verify(functional.linear(rows, head), proposal, heat)
        tokens.scatter_(1, (frontier + accepted + 1)[:, None], after[:, None])
        rounds = zip(live.tolist(), frontier.tolist(), accepted.tolist(), strict=True)
        for lane, (counted, at_start, kept) in enumerate(rounds):
            if counted:
                tally.add(lane, at_start - length, kept)
        frontier = torch.where(live, frontier + accepted + 1, frontier)
    return tally, tokens[:, : length + new_tokens]


def look_up(history: list[int], width: int, longest: int = 3) -> list[int]:
    """Proposes what followed the latest earlier occurrence of the longest matching suffix."""
    for size in range(longest, 0, -1):
        suffix = history[-size:]
        for first in range(len(history) - size - 1, -1, -1):
            if history[first : first + size] == suffix:
                grown = list(history)
                for offset in range(width):
                    grown.append(grown[first + size + offset])
                return grown[len(history) :]
    return []


def score_lookup(token_ids: Tensor, prompt_tokens: int, width: int) -> Tally:
    """Scores prompt lookup on finished outputs [N, T], which no drafter changes in law."""
    tally = Tally()
    for lane, ids in enumerate(token_ids.tolist()):
        frontier = prompt_tokens
        while frontier + 1 < len(ids):
            proposed = look_up(ids[: frontier + 1], width)
            accepted = 0
            for proposal, actual in zip(proposed, ids[frontier + 1 :], strict=False):
                if proposal != actual:
                    break
                accepted += 1
            tally.add(lane, frontier - prompt_tokens, accepted)
            frontier += accepted + 1
    return tally
