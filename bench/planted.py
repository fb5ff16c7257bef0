"""A drafter that knows the future, and errs where it is told to.

It proposes a plain run's own tokens with one of them wrong at a place that moves from round to
round, so that accepted counts run through 0..K and every number of columns is kept and folded. With
branches every other row offers the right tokens too, behind the chain, as a tree.
Whatever it proposes, the output must be the plain run's. Works on the verifier's blocks alone,
without a service or a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.pair import DraftFacts, TargetFacts
from outrider.random_weights import open_checkpoint
from verifier.__main__ import Plan
from verifier.blocks import BlockRow, Blocks
from verifier.config import TargetConfig
from verifier.options import PREFILL_CHUNK, VerifierOptions
from verifier.proposals import POINT_MASSES, Law
from verifier.request import Request, Sampling
from verifier.state import Residency

GREEDY = Sampling(temperature=0.0)


class Resident:
    """One sequence of ``new_tokens`` outputs, prefilled in chunks and decoded by hand."""

    def __init__(
        self, blocks: Blocks, prompt: Sequence[int], sampling: Sampling, new_tokens: int, chunk: int
    ) -> None:
        self.blocks = blocks
        self.prompt = tuple(prompt)
        self.new_tokens = new_tokens
        positions = len(prompt) + new_tokens + 2 * blocks.width
        residency = blocks.target.state.acquire(positions)
        assert residency is not None
        self.residency: Residency = residency
        blocks.tables.admit(residency.lane, _request(self.prompt, sampling, new_tokens))
        for first in range(0, len(prompt), chunk):
            end = min(len(prompt), first + chunk)
            block, _ = blocks.prefill(
                residency, prompt[first:end], first, last=end == len(prompt), features_from=None
            )
        assert block is not None
        (licensed,) = blocks.accept(block, [None])
        blocks.commit(block, [1])
        self.output = list(licensed.token_ids)

    @property
    def done(self) -> bool:
        """Whether all tokens are there."""
        return len(self.output) >= self.new_tokens

    def row(self, proposals: Sequence[int], branch: Sequence[int] = (), at: int = 0) -> BlockRow:
        """The next block's row; with a branch, a tree that leaves the chain at column ``at``."""
        frontier = len(self.prompt) + len(self.output) - 1
        tokens = (self.output[-1], *proposals, *branch)
        count = len(proposals)
        parents = (*range(count), at, *range(count + 1, count + len(branch))) if branch else ()
        return BlockRow(self.residency, frontier, len(self.output), tokens, parents)

    def release(self) -> list[int]:
        """Gives everything back; the output."""
        self.blocks.target.state.release(self.residency)
        return self.output[: self.new_tokens]


def law_of(row: BlockRow) -> Law:
    """Point masses, of a tree over candidates that siblings share."""
    tokens = torch.tensor(row.token_ids[1:])
    siblings: dict[int, list[int]] = {}
    for line, parent in enumerate(row.parents):
        siblings.setdefault(parent, []).append(line)
    ids = torch.stack([tokens, torch.zeros_like(tokens)], 1)
    for lines in siblings.values():
        if len(lines) > 1:
            ids[lines] = tokens[lines]
    mass = (ids == tokens[:, None]).float()
    # an id that stands there twice counts once
    mass[:, 1] *= mass[:, 0] == 0
    return Law(ids.int(), mass) if row.parents else POINT_MASSES


def plain_run(
    blocks: Blocks,
    prompt: Sequence[int],
    sampling: Sampling,
    new_tokens: int,
    chunk: int,
) -> list[int]:
    """Output of one prompt, one token a round."""
    with torch.inference_mode(), blocks.replays.stream():
        resident = Resident(blocks, prompt, sampling, new_tokens, chunk)
        while not resident.done:
            block = blocks.verify([resident.row(())])
            (licensed,) = blocks.accept(block, [None])
            blocks.commit(block, [1])
            resident.output += licensed.token_ids
        return resident.release()


def load_blocks(
    target: Path,
    draft: Path,
    device: torch.device,
    *,
    rows: int,
    draft_tokens: int,
    tree_nodes: str = "off",
) -> tuple[Blocks, int]:
    """A geometry with drawn weights, and its prefill chunk."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    options = VerifierOptions(
        target=target,
        draft=draft,
        drafter="",
        device=device,
        dtype=dtype,
        load_format="random",
        draft_tokens=draft_tokens,
        draft_tree_nodes=tree_nodes,
        max_concurrency=rows,
        max_context=4096,
        prefill_chunk=PREFILL_CHUNK[device.type],
    )
    with (
        open_checkpoint(target, "random") as checkpoint,
        open_checkpoint(draft, "random") as draft_checkpoint,
    ):
        facts = TargetFacts.read(checkpoint)
        plan = Plan(
            options,
            TargetConfig.read(facts),
            facts,
            DraftFacts.load(draft_checkpoint, facts),
        )
        return plan.load_blocks(checkpoint, draft_checkpoint), options.prefill_chunk


@dataclass(frozen=True)
class Planted:
    """What a planted run gave."""

    outputs: list[list[int]]
    kept_counts: set[int]  # numbers of columns that were kept in some round
    rounds: int
    moved: int = 0  # columns that were followed off the chain


def planted_run(
    blocks: Blocks,
    prompts: Sequence[Sequence[int]],
    foretold: Sequence[Sequence[int]],
    draft_tokens: int,
    sampling: Sampling,
    new_tokens: int,
    chunk: int,
    *,
    branches: bool = False,
) -> Planted:
    """All prompts side by side, against proposals of ``foretold`` with errors planted."""
    kept_counts: set[int] = set()
    moved = 0
    with torch.inference_mode(), blocks.replays.stream():
        residents = [Resident(blocks, p, sampling, new_tokens, chunk) for p in prompts]
        rounds = 0
        while active := [(i, r) for i, r in enumerate(residents) if not r.done]:
            rows = []
            for index, resident in active:
                at = len(resident.output)
                proposals = list(foretold[index][at : at + draft_tokens])
                right = tuple(proposals)
                wrong = (rounds + 3 * index) % (draft_tokens + 1)
                if wrong < len(proposals):
                    proposals[wrong] = (proposals[wrong] + 1) % blocks.tables.public_vocab
                # a tree's chain is whole
                grows = branches and (rounds + index) % 2 == 0 and len(right) == draft_tokens
                branch = right[wrong:] if grows else ()
                rows.append(resident.row(proposals, branch, wrong))
            block = blocks.verify(rows)
            kept = []
            for (_, resident), licensed in zip(
                active,
                blocks.accept(block, [None] * len(rows), [law_of(row) for row in rows]),
                strict=True,
            ):
                assert licensed.finite
                resident.output += licensed.token_ids
                kept.append(len(licensed.token_ids))
                moved += sum(c > draft_tokens for c in licensed.columns)
            blocks.commit(block, kept)
            kept_counts.update(kept)
            rounds += 1
        outputs = [resident.release() for resident in residents]
        return Planted(outputs, kept_counts, rounds, moved)


def _request(prompt: tuple[int, ...], sampling: Sampling, new_tokens: int) -> Request:
    return Request(
        request_id="planted",
        sample_index=0,
        prompt_ids=prompt,
        sampling=sampling,
        max_tokens=new_tokens,
        min_tokens=0,
        stop=(),
        stop_token_ids=frozenset(),
        logprobs=None,
        draft_tokens=0,
        return_rounds=False,
        arrival_ns=0,
        deadline_ns=None,
    )
