"""Doubles at the two ends of a served pair: what the target says, and what the drafter proposes.

Everything between them is real: both services, the wire, acceptance, preview, commit and state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

import drafter.__main__ as drafter_process
from drafter.model import DraftBlock
from drafter.selector import Proposals
from kernels.candidate_selector import candidate_selector
from outrider.client import Client
from tests.tiny_target import TEXT
from verifier.blocks import Block, Blocks
from verifier.drafter_link import DrafterLink
from verifier.proposals import Ask, Drafted
from verifier.state import Residency
from verifier.target import Forward, Target

VOCAB = TEXT["vocab_size"]
# far enough below any other logit for a probability of exactly 0 in FP32
NEVER = -1e4

Law = Callable[[torch.Tensor], torch.Tensor]


def scripted(monkeypatch: pytest.MonkeyPatch, law: Law) -> None:
    """Lets every target say ``law``: positions [B, W] of its inputs to logits [B, W, V].

    The model still runs: KV, records, features and state are those of the tokens it was given.
    """
    prefill, verify, first_token = Target.prefill, Target.verify, Blocks.first_token

    def prefilled(self, residency, token_ids, first, *, want_logits) -> Forward:
        forward = prefill(self, residency, token_ids, first, want_logits=want_logits)
        if forward.logits is None:
            return forward
        return replace(forward, logits=law(torch.tensor([[first + len(token_ids) - 1]])))

    def verified(self, rows, token_ids, frontiers, counts, **options) -> Forward:
        forward = verify(self, rows, token_ids, frontiers, counts, **options)
        assert forward.logits is not None
        with torch.inference_mode():
            forward.logits.copy_(law(frontiers[:, None] + torch.arange(token_ids.shape[1])))
        return forward

    def first(self, residency, token_id, end) -> Block:
        block = first_token(self, residency, token_id, end)
        block.buffers.results.logits.copy_(law(torch.tensor([[end - 1]])))
        return block

    monkeypatch.setattr(Blocks, "first_token", first)
    monkeypatch.setattr(Target, "prefill", prefilled)
    monkeypatch.setattr(Target, "verify", verified)


def always(logits: Mapping[int, float]) -> Law:
    """The same logits at every position; ids that are not named never come."""
    row = torch.full((VOCAB,), NEVER)
    for token_id, logit in logits.items():
        row[token_id] = logit
    return lambda positions: row.expand(*positions.shape, VOCAB).clone()


def saying(prompt_ids: Sequence[int], output: Sequence[int]) -> Law:
    """A target whose greedy continuation of the prompt is ``output``, and then its last token."""

    def law(positions: torch.Tensor) -> torch.Tensor:
        index = (positions + 1 - len(prompt_ids)).clamp(0, len(output) - 1)
        return 9.0 * torch.nn.functional.one_hot(torch.tensor(output)[index], VOCAB).float()

    return law


def logits_of(p: Mapping[int, float]) -> dict[int, float]:
    """Logits whose softmax is ``p``."""
    return {token_id: float(np.log(mass)) for token_id, mass in p.items() if mass}


def plant(monkeypatch: pytest.MonkeyPatch, selector: Any) -> None:
    """Gives drafters that start from now on this selector."""
    monkeypatch.setattr(drafter_process, "selector_for", lambda config, weights: selector)


class Lattice:
    """Proposes by the drafter's own walk and draws, from the same scores at every position."""

    def __init__(self, scores: Mapping[int, float]) -> None:
        ranked = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
        self.ids = torch.tensor([token_id for token_id, _ in ranked])
        self.scores = torch.tensor([score for _, score in ranked], dtype=torch.float32)
        self.reported: list[torch.Tensor] = []  # q of each block, [B, P, k]

    def select(self, hidden: torch.Tensor, block: DraftBlock) -> Proposals:
        extents = hidden.shape[0], block.most_live, len(self.ids)
        ids = self.ids.expand(extents).contiguous()
        tokens, q = candidate_selector(
            self.scores.expand(extents).contiguous(),
            ids,
            torch.zeros(*extents[:2], 1),
            torch.zeros(VOCAB, 1),
            torch.zeros(VOCAB, 1),
            block.anchors,
            block.temperatures,
            block.seeds,
            block.rows.frontiers,
        )
        self.reported.append(q)
        return Proposals(tokens, torch.ones(extents[0], dtype=torch.bool), ids, q)


class Reporting(Lattice):
    """Draws like a Lattice, and reports another q."""

    def __init__(self, drawn: Mapping[int, float], reported: Mapping[int, float]) -> None:
        super().__init__(drawn)
        self.q = torch.tensor([reported[token_id] for token_id in self.ids.tolist()])

    def select(self, hidden: torch.Tensor, block: DraftBlock) -> Proposals:
        drawn = super().select(hidden, block)
        assert drawn.probabilities is not None
        return replace(drawn, probabilities=self.q.expand_as(drawn.probabilities).contiguous())


class Foretelling:
    """Proposes, as point masses, given tokens for given positions; token 0 beyond them.

    ``wrong`` holds, round by round and over again, the index of a proposal that is spoilt.
    """

    def __init__(self, sequence: Sequence[int], wrong: Sequence[int] = (99,)) -> None:
        self.sequence = list(sequence)  # by position, prompt included
        self.wrong = wrong
        self.rounds = 0

    def select(self, hidden: torch.Tensor, block: DraftBlock) -> Proposals:
        frontiers = block.rows.frontiers.tolist()
        padded = [*self.sequence, *([0] * 64)]
        ids = torch.tensor([padded[f + 1 : f + 1 + block.most_live] for f in frontiers])
        wrong = self.wrong[self.rounds % len(self.wrong)]
        if wrong < ids.shape[1]:
            ids[:, wrong] = (ids[:, wrong] + 1) % 150
        self.rounds += 1
        return Proposals(ids, torch.ones(len(frontiers), dtype=torch.bool))


@dataclass
class Overheard:
    """What the verifier took from the drafter, and what it adopted."""

    proposals: list[tuple[Ask, Drafted]] = field(default_factory=list)
    batches: list[tuple[float, ...]] = field(default_factory=list)  # temperatures of a round
    commits: list[tuple[Residency, int]] = field(default_factory=list)  # with N
    features: list[tuple[int, int]] = field(default_factory=list)  # first position, rows


def overhear(monkeypatch: pytest.MonkeyPatch) -> Overheard:
    """Listens on the verifier's side of the wire and at its commits."""
    heard = Overheard()
    proposal_of, exchange, extend = (
        DrafterLink._proposal_of,
        DrafterLink.exchange,
        DrafterLink.extend,
    )
    commit = Blocks.commit

    def taken(self, ask, row):
        drafted = proposal_of(self, ask, row)
        if drafted is not None:
            heard.proposals.append((ask, drafted))
        return drafted

    def exchanged(self, asks, **options):
        heard.batches.append(tuple(ask.temperature for ask in asks if ask.live))
        return exchange(self, asks, **options)

    def extended(self, context, first_position, rows):
        heard.features.append((first_position, len(rows)))
        extend(self, context, first_position, rows)

    def committed(self, block, kept):
        if not block.prefilled:
            heard.commits += zip((row.residency for row in block.rows), kept, strict=True)
        commit(self, block, kept)

    monkeypatch.setattr(DrafterLink, "_proposal_of", taken)
    monkeypatch.setattr(DrafterLink, "exchange", exchanged)
    monkeypatch.setattr(DrafterLink, "extend", extended)
    monkeypatch.setattr(Blocks, "commit", committed)
    return heard


@dataclass
class Drawn:
    """Tokens of many rounds."""

    all: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)  # of rounds that proposed
    accepted: list[bool] = field(default_factory=list)  # whether that was the first proposal


def drawn_tokens(client: Client, prompt_ids: Sequence[int], calls: int, **sampling: Any) -> Drawn:
    """Samples, eight beside each other in a call, each with many rounds."""
    drawn = Drawn()
    for call in range(calls):
        for completion in client.samples(
            prompt_ids=prompt_ids,
            n=8,
            seed=1 + call * 7919,
            ignore_eos=True,
            return_rounds=True,
            **sampling,
        ):
            drawn.all += completion.token_ids
            for trace in completion.rounds:
                if trace.proposed:
                    # the round at F publishes the token of position F + 1 first
                    index = trace.frontier + 1 - len(prompt_ids)
                    drawn.first.append(completion.token_ids[index])
                    drawn.accepted.append(trace.accepted > 0)
    return drawn


def misfit(tokens: Sequence[int], p: Mapping[int, float]) -> float:
    """p-value of Pearson's chi-square; a token outside p's support makes it 0."""
    if any(token not in p or not p[token] for token in tokens):
        return 0.0
    support = [token for token in p if p[token]]
    observed = [sum(token == each for token in tokens) for each in support]
    expected = [p[each] * len(tokens) for each in support]
    return float(scipy.stats.chisquare(observed, expected).pvalue)
