"""The story: how a prompt becomes published tokens.

A prompt is prefilled in chunks; then rounds of draft, verify, accept, preview, commit, publish
follow until it ends. Each verb takes what the one before returned, so that committing what was
not verified, or publishing what was not committed, cannot be written.

F is a row's frontier (the target has processed [0, F)), a = x_F its anchor, K the configured
draft count, P the live proposals of a round, A the accepted ones, L = A + 1 what the target
licenses and N <= L what is committed and published.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import structlog
import torch

from outrider.faults import FaultError
from verifier.acceptance import LicensedRow, SamplingTables
from verifier.drafter_link import Ask, Drafted, DrafterLink
from verifier.preview import Preview
from verifier.request import Delta, Finish, FinishReason, RoundTrace, TokenOrigin
from verifier.sequence import Sequence
from verifier.target import Forward, Target

log = structlog.get_logger("outrider.rounds")


@dataclass(frozen=True)
class Proposal:
    """What the drafter offered, or nothing: one row a sequence, P_b live proposals in each."""

    rows: tuple[Sequence, ...]
    frontiers: torch.Tensor  # [B]
    live: torch.Tensor  # [B] P
    token_ids: torch.Tensor  # [B, K or 0]
    candidate_ids: torch.Tensor  # [B, K or 0, k]
    probabilities: torch.Tensor  # [B, K or 0, k] FP32
    drafted: tuple[Drafted | None, ...]


@dataclass(frozen=True)
class VerifiedBlock:
    """The target's view of [a, d_1..d_P]: logits, features and records, nothing adopted yet."""

    proposal: Proposal
    forward: Forward


@dataclass(frozen=True)
class PrefilledPrompt:
    """A prompt's last chunk: state and KV are adopted, its own first token is not chosen yet."""

    sequence: Sequence
    forward: Forward


@dataclass(frozen=True)
class LicensedBlock:
    """y for every row."""

    block: VerifiedBlock | PrefilledPrompt
    rows: tuple[Sequence, ...]
    licensed: tuple[LicensedRow, ...]
    drafted: tuple[Drafted | None, ...]


@dataclass(frozen=True)
class PreviewedBlock:
    """N for every row; an outcome instead where the row ends without publishing."""

    licensed: LicensedBlock
    previews: tuple[Preview | FinishReason | FaultError, ...]


@dataclass(frozen=True)
class CommittedBlock:
    """What was adopted, ready for the clients."""

    rows: tuple[Sequence, ...]
    deltas: tuple[Delta | None, ...]
    endings: tuple[Finish | FinishReason | FaultError | None, ...]


class Rounds:
    """Runs prefill chunks and rounds on the engine thread.

    Args:
        target: The target model and its state.
        tables: Sampling parameters and counts by lane.
        link: The drafter; may be away.
        draft_tokens: K.
        max_context: Most positions of a sequence.
        chunk: Prefill chunk; chunks end at absolute multiples of it, whatever the load.
    """

    def __init__(
        self,
        target: Target,
        tables: SamplingTables,
        link: DrafterLink,
        *,
        draft_tokens: int,
        max_context: int,
        chunk: int,
    ) -> None:
        self.target = target
        self.tables = tables
        self.link = link
        self.draft_tokens = draft_tokens
        self.max_context = max_context
        self.chunk = chunk

    # ---- prefill ------------------------------------------------------------------------------

    def prefill(self, sequence: Sequence) -> None:
        """Processes one chunk of the prompt; after the last one, publishes the first token."""
        started = time.monotonic_ns()
        first = sequence.frontier
        end = self.chunk_end(sequence)
        if sequence.context is not None:
            self.link.ensure_open(sequence.context, first, sequence.prompt_end)
        forward = self.target.prefill(
            sequence.residency,
            torch.tensor(sequence.tokens[first:end]),
            first,
            want_logits=end == sequence.prompt_end,
        )
        sequence.frontier = end
        if sequence.context is not None:
            self.link.extend(sequence.context, first, forward.features[0])
        sequence.usage.prefill_ns += time.monotonic_ns() - started
        if end == sequence.prompt_end:
            licensed = self.accept(PrefilledPrompt(sequence, forward))
            self.publish(self.commit(self.preview(licensed)))

    def chunk_end(self, sequence: Sequence) -> int:
        """Where the next prefill chunk ends: a multiple of the chunk, or the prompt's end."""
        return min(sequence.prompt_end, (sequence.frontier // self.chunk + 1) * self.chunk)

    # ---- a round ------------------------------------------------------------------------------

    def run(self, rows: Rows[Sequence]) -> None:
        """One round over prefilled ``rows``, at most B."""
        proposal = self.draft(tuple(rows))
        block = self.verify(proposal)
        licensed = self.accept(block)
        previewed = self.preview(licensed)
        committed = self.commit(previewed)
        self.publish(committed)

    def wanted(self, sequence: Sequence) -> int:
        """P that this round could verify for the row: what K, request, budget and context leave."""
        if sequence.context is None:
            return 0
        request = sequence.request
        budget = request.max_tokens - sequence.output_count
        room = self.max_context - sequence.frontier - 1
        return max(0, min(self.draft_tokens, request.draft_tokens, budget - 1, room))

    def draft(self, rows: tuple[Sequence, ...]) -> Proposal:
        """Sends pending features and collects proposals; rows without one run at P = 0."""
        asks = []
        for row in rows:
            if row.context is not None:
                self.link.ensure_open(row.context, row.frontier, row.prompt_end)
                sampling = row.request.sampling
                asks.append(
                    Ask(
                        row.context,
                        live=self.wanted(row),
                        frontier=row.frontier,
                        anchor=row.anchor,
                        temperature=sampling.temperature,
                        seed=sampling.seed,
                    )
                )
        exchange = self.link.exchange(asks)
        for row in rows:
            row.usage.draft_ns += exchange.draft_ns
            row.usage.wire_ns += exchange.wire_ns
        drafted = tuple(
            exchange.proposals.get(row.context.sequence_id) if row.context is not None else None
            for row in rows
        )
        return propose(rows, drafted, self.draft_tokens)

    def verify(self, proposal: Proposal) -> VerifiedBlock:
        """Runs the target causally over [a, d_1..d_P]; its GDN state is not touched."""
        started = time.monotonic_ns()
        anchors = torch.tensor([[row.anchor] for row in proposal.rows])
        # dead columns carry the anchor: any valid id will do, they have no effect
        columns = torch.arange(proposal.token_ids.shape[1])
        proposed = torch.where(columns < proposal.live[:, None], proposal.token_ids, anchors)
        forward = self.target.verify(
            [row.residency for row in proposal.rows],
            torch.cat([anchors, proposed], dim=1),
            proposal.frontiers,
            proposal.live + 1,
        )
        _spend(proposal.rows, started)
        return VerifiedBlock(proposal, forward)

    def accept(self, block: VerifiedBlock | PrefilledPrompt) -> LicensedBlock:
        """Compares proposals with p, column by column; the target alone decides."""
        started = time.monotonic_ns()
        if isinstance(block, PrefilledPrompt):
            # the prompt's last column is a plain step at F = n - 1
            proposal = propose((block.sequence,), (None,), 0, frontier_shift=-1)
        else:
            proposal = block.proposal
        rows = proposal.rows
        logits = block.forward.logits
        assert logits is not None  # only a prompt's inner chunks have none
        licensed = self.tables.accept(
            logits,
            torch.tensor([row.residency.lane for row in rows]),
            proposal.frontiers,
            torch.tensor([row.output_count for row in rows]),
            proposal.token_ids,
            proposal.live,
            proposal.candidate_ids,
            proposal.probabilities,
            [row.request.logprobs for row in rows],
        )
        _spend(rows, started)
        return LicensedBlock(block, rows, tuple(licensed), proposal.drafted)

    def preview(self, licensed: LicensedBlock) -> PreviewedBlock:
        """Chooses N of L for every row, changing nothing: stops, budget, cancellation."""
        previews: list[Preview | FinishReason | FaultError] = []
        for row, allowed in zip(licensed.rows, licensed.licensed, strict=True):
            outcome = row.ticket.cancellation()
            if outcome is not None:
                previews.append(outcome)
            elif not allowed.finite:
                previews.append(
                    FaultError(
                        "LOGITS_NOT_FINITE",
                        f"target: logits at position {row.frontier} are not finite",
                        frontier=row.frontier,
                    )
                )
            else:
                previews.append(row.session.preview(allowed.token_ids))
        return PreviewedBlock(licensed, tuple(previews))

    def commit(self, previewed: PreviewedBlock) -> CommittedBlock:
        """Adopts N input rows of every row at once: KV, fold, counts, frontier, anchor."""
        licensed = previewed.licensed
        block = licensed.block
        rows = licensed.rows
        # last look at cancellation; after this nothing is undone
        decisions = [
            (row.ticket.cancellation() or preview) if isinstance(preview, Preview) else preview
            for row, preview in zip(rows, previewed.previews, strict=True)
        ]
        counts = [d.count if isinstance(d, Preview) else 0 for d in decisions]
        if isinstance(block, VerifiedBlock):
            self.target.commit([row.residency for row in rows], block.forward, torch.tensor(counts))
        deltas: list[Delta | None] = []
        endings: list[Finish | FinishReason | FaultError | None] = []
        for index, (row, preview) in enumerate(zip(rows, decisions, strict=True)):
            if not isinstance(preview, Preview):
                deltas.append(None)
                endings.append(preview)
                continue
            delta = self._adopt(licensed, index, preview)
            deltas.append(delta)
            endings.append(
                Finish(preview.reason, preview.matched, row.usage) if preview.reason else None
            )
        return CommittedBlock(rows, tuple(deltas), tuple(endings))

    def _adopt(self, licensed: LicensedBlock, index: int, preview: Preview) -> Delta | None:
        """The host's half of commit for one row."""
        row, allowed = licensed.rows[index], licensed.licensed[index]
        drafted = licensed.drafted[index]
        kept = preview.count
        token_ids = allowed.token_ids[:kept]
        first = row.frontier
        plain = drafted is None and self.wanted(row) > 0
        if isinstance(licensed.block, VerifiedBlock):
            row.frontier += kept
            if row.context is not None:
                features = licensed.block.forward.features[index, :kept]
                self.link.extend(row.context, first, features)
            row.usage.plain_rounds += plain
            trace = self._account(row, drafted, min(allowed.accepted, kept), kept, first)
        else:
            trace = None
        row.tokens.extend(token_ids)
        self.tables.count(row.residency.lane, token_ids)
        row.usage.output_tokens = row.output_count
        return row.session.commit(
            preview,
            origins=origins_of(drafted, allowed.accepted)[:kept],
            logprobs=allowed.logprobs[:kept],
            round_trace=trace,
        )

    def _account(
        self, row: Sequence, drafted: Drafted | None, accepted: int, kept: int, first: int
    ) -> RoundTrace | None:
        usage = row.usage
        proposed = drafted.token_ids if drafted is not None else ()
        usage.rounds += 1
        usage.proposed += len(proposed)
        usage.accepted += accepted
        for position in range(accepted):
            usage.accepted_per_position[position] += 1
        log.debug(
            "round_committed",
            request_id=row.request.request_id,
            sample=row.request.sample_index,
            frontier=first,
            proposed=len(proposed),
            accepted=accepted,
            committed=kept,
        )
        if not row.request.return_rounds:
            return None
        return RoundTrace(first, proposed, accepted, kept)

    def publish(self, committed: CommittedBlock) -> None:
        """Sends what was committed; a client that left gets nothing."""
        now = time.monotonic_ns()
        for row, delta, ending in zip(
            committed.rows, committed.deltas, committed.endings, strict=True
        ):
            ticket = row.ticket
            if row.usage.output_tokens and not row.usage.ttft_ns:
                row.usage.ttft_ns = now - ticket.request.arrival_ns
            if delta is not None and not ticket.sink.gone:
                ticket.sink.delta(delta)
            if ending is None:
                continue
            row.finished = True
            if isinstance(ending, Finish):
                row.usage.total_ns = now - ticket.request.arrival_ns
                if not ticket.sink.gone:
                    ticket.sink.finish(ending)
            else:
                row.end(ending)


def propose(
    rows: tuple[Sequence, ...],
    drafted: tuple[Drafted | None, ...],
    draft_tokens: int,
    frontier_shift: int = 0,
) -> Proposal:
    """Packs proposals into a batch of width K, or 0 when no row has one.

    A point mass is written as a law with one candidate of probability 1, so that acceptance has one
    form.
    """
    width = draft_tokens if any(d is not None for d in drafted) else 0
    supports = [d.candidate_ids.shape[1] for d in drafted if d and d.candidate_ids is not None]
    support = max(supports, default=1)
    token_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    candidate_ids = torch.zeros(len(rows), width, support, dtype=torch.int64)
    probabilities = torch.zeros(len(rows), width, support)
    for index, d in enumerate(drafted):
        if d is None:
            continue
        live = len(d.token_ids)
        token_ids[index, :live] = torch.tensor(d.token_ids)
        if d.candidate_ids is None or d.probabilities is None:
            candidate_ids[index, :live, 0] = token_ids[index, :live]
            probabilities[index, :live, 0] = 1.0
        else:
            candidate_ids[index, :live, : d.candidate_ids.shape[1]] = d.candidate_ids
            probabilities[index, :live, : d.probabilities.shape[1]] = d.probabilities
    return Proposal(
        rows,
        torch.tensor([row.frontier + frontier_shift for row in rows]),
        torch.tensor([len(d.token_ids) if d else 0 for d in drafted]),
        token_ids,
        candidate_ids,
        probabilities,
        drafted,
    )


def origins_of(drafted: Drafted | None, accepted: int) -> tuple[TokenOrigin, ...]:
    """Where each of the L licensed tokens came from."""
    if drafted is None:
        return (TokenOrigin.TARGET,)
    all_accepted = accepted == len(drafted.token_ids)
    terminal = TokenOrigin.BONUS if all_accepted else TokenOrigin.CORRECTION
    return (TokenOrigin.ACCEPTED,) * accepted + (terminal,)


def _spend(rows: tuple[Sequence, ...], started_ns: int) -> None:
    elapsed = time.monotonic_ns() - started_ns
    for row in rows:
        row.usage.verify_ns += elapsed
