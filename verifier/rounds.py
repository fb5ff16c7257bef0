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

from outrider.faults import FaultError
from verifier.acceptance import LicensedRow
from verifier.blocks import Block, BlockRow, Blocks, HostRows
from verifier.draft_policy import DraftPolicy
from verifier.drafter_link import FEATURE_ROWS_PER_MESSAGE, DrafterLink
from verifier.metrics import VerifierMetrics
from verifier.outbox import Kept, Outbox
from verifier.preview import Preview
from verifier.proposals import Ask, Drafted, Law
from verifier.request import Finish, FinishReason
from verifier.sequence import Sequence
from verifier.trees import TreeAsk, Trees

_ANSWER_S = 0.0005  # between looks for the drafter's answer to a barrier


@dataclass(frozen=True)
class Proposal:
    """What the drafter offered each row, or nothing."""

    rows: tuple[Sequence, ...]
    drafted: tuple[Drafted | None, ...]
    draft_ns: int  # of the wait for it, the drafter's own
    wire_ns: int  # and the rest

    @property
    def columns(self) -> int:
        """Columns that the widest tree among them might have had; 0 where all are chains."""
        return max((each.nodes for each in self.drafted if each is not None), default=0)


@dataclass(frozen=True)
class VerifiedBlock:
    """The target's view of [a, d_1..d_P], or of a tree: nothing of it is adopted yet."""

    proposal: Proposal
    block: Block


@dataclass(frozen=True)
class PrefilledPrompt:
    """A prompt's last chunk: state and KV are adopted, its own first token is not chosen yet."""

    sequence: Sequence
    block: Block


@dataclass(frozen=True)
class LicensedBlock:
    """y for every row."""

    source: VerifiedBlock | PrefilledPrompt
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
    kept: tuple[Kept | None, ...]
    endings: tuple[Finish | FinishReason | FaultError | None, ...]


class Rounds:
    """Runs prefill chunks and rounds on the engine thread.

    Args:
        blocks: The target, its state and sampling tables, block by block.
        link: The drafter; may be away.
        draft_tokens: K.
        max_context: Most positions of a sequence.
        chunk: Prefill chunk; chunks end at absolute multiples of it, whatever the load.
        policy: Chooses between P = 0 and drafting by the load; None always drafts.
        trees: Chooses how wide trees are; None drafts chains alone.
        tree_paths: Most leaves of a tree.
        metrics: Counts what happens here.
    """

    def __init__(
        self,
        blocks: Blocks,
        link: DrafterLink,
        *,
        draft_tokens: int,
        max_context: int,
        chunk: int,
        policy: DraftPolicy | None = None,
        trees: Trees | None = None,
        tree_paths: int = 0,
        metrics: VerifierMetrics | None = None,
    ) -> None:
        self.blocks = blocks
        self.metrics = metrics or VerifierMetrics()
        self.link = link
        self.draft_tokens = draft_tokens
        self.max_context = max_context
        self.chunk = chunk
        self.policy = policy
        self.trees = trees
        self._tree_paths = tree_paths
        self._undrafted = False  # whether the policy has chosen P = 0 for the next round
        self._outbox = Outbox(self.metrics, draft_tokens)
        # feature rows of prompts that are still being copied to the host
        self._arriving: list[tuple[Sequence, HostRows]] = []

    # ---- prefill ------------------------------------------------------------------------------

    def prefill(self, sequence: Sequence) -> None:
        """Processes one chunk of the prompt; after the last one, publishes the first token.

        A prompt that was restored whole has its first token drawn from the kept hidden state.
        """
        # what the round before has published need not wait for a chunk
        self.deliver()
        started = time.monotonic_ns()
        first = sequence.frontier
        end = self.chunk_end(sequence)
        if sequence.context is not None:
            self.link.ensure_open(sequence.context, first, sequence.needed)
        block: Block | None
        if first == end:
            block = self.blocks.first_token(sequence.residency, sequence.tokens[end - 1], end)
        else:
            block, features = self.blocks.prefill(
                sequence.residency,
                sequence.tokens[first:end],
                first,
                # one that was paused has its first token
                last=end == sequence.prompt_end and not sequence.output_count,
                features_from=self._wanted_from(sequence),
            )
            sequence.frontier = end
            # the rows of earlier chunks were copied while this one was being launched
            self.take_arrived()
            self._arriving.append((sequence, features))
            self._send_while_busy(features)
        spent_ns = time.monotonic_ns() - started
        sequence.usage.prefill_ns += spent_ns
        self.metrics.chunk_ended(spent_ns)
        if block is not None:
            self.take_arrived()
            licensed = self.accept(PrefilledPrompt(sequence, block))
            self.publish(self.commit(self.preview(licensed)))

    def _send_while_busy(self, features: HostRows) -> None:
        """Sends what earlier chunks left while the device works on this one, and no longer.

        A turn sends no more than may be unanswered, which is less than a chunk brings.
        """
        while self.link.has_whole_messages and self.link.connected and not features.are_there:
            self.link.pump(drafting=False, least_rows=FEATURE_ROWS_PER_MESSAGE)
            time.sleep(_ANSWER_S)

    def replay(self, sequence: Sequence) -> None:
        """Processes up to W published tokens of a sample again, on the path that decoded them.

        Nothing is chosen, published or counted anew.
        """
        self.take_arrived()
        first = sequence.frontier
        end = self.replay_end(sequence)
        if sequence.context is not None:
            self.link.ensure_open(sequence.context, first, sequence.needed)
        rows = self.blocks.replay(sequence.residency, sequence.tokens[first:end], first)
        sequence.frontier = end
        if sequence.context is not None:
            wanted = self._wanted_from(sequence)
            skipped = end - first if wanted is None else max(0, min(end, wanted) - first)
            self.link.extend(sequence.context, first + skipped, rows[skipped:])

    def replay_end(self, sequence: Sequence) -> int:
        """Where the next block of a replay ends: the anchor itself is left to the next round."""
        return min(len(sequence.tokens) - 1, sequence.frontier + self.draft_tokens + 1)

    def _wanted_from(self, sequence: Sequence) -> int | None:
        context = sequence.context
        return None if context is None else self.link.wanted_from(context, sequence.needed)

    def take_arrived(self) -> None:
        """Hands prompts' feature rows to the link, in order."""
        for sequence, features in self._arriving:
            rows = features.arrived()
            if sequence.context is not None and not sequence.finished and len(rows):
                self.link.extend(sequence.context, features.first, rows)
        self._arriving.clear()

    def chunk_end(self, sequence: Sequence) -> int:
        """Where the next prefill chunk ends: at a multiple of the chunk, a capture or the end."""
        capture = next((p for p in sequence.captures if p > sequence.frontier), sequence.prompt_end)
        whole = (sequence.frontier // self.chunk + 1) * self.chunk
        return min(sequence.prompt_end, capture, whole)

    # ---- a round ------------------------------------------------------------------------------

    def run(self, rows: Rows[Sequence]) -> None:
        """One round over prefilled ``rows``, at most B."""
        started = time.monotonic_ns()
        self.take_arrived()
        proposal = self.draft(tuple(rows))
        furthest = max(row.frontier for row in rows)
        block = self.verify(proposal)
        licensed = self.accept(block)
        previewed = self.preview(licensed)
        committed = self.commit(previewed)
        self.publish(committed)
        elapsed_ns = time.monotonic_ns() - started
        drafted = any(each is not None for each in proposal.drafted)
        # a round that was to draft and did not says nothing
        if self.policy is not None and (drafted or self._undrafted):
            self.policy.round_ended(len(rows), elapsed_ns, drafted=drafted)
        if self.trees is not None and drafted:
            self.trees.round_ended(len(rows), furthest, proposal.columns, elapsed_ns)
            self.metrics.columns[str(proposal.columns)] += 1
        self._outbox.round_ended(
            len(rows),
            elapsed_ns,
            proposal.draft_ns,
            proposal.wire_ns,
            self.blocks.times.verify_ns,
        )

    def plan(self, rows: Rows[Sequence]) -> bool:
        """Lets the policy choose for the next round over ``rows``; whether it will draft."""
        may_draft = [row for row in rows if self.allowed(row) and self.link.connected]
        self._undrafted = bool(
            may_draft and self.policy is not None and not self.policy.drafts(len(rows), may_draft)
        )
        return not self._undrafted

    def wanted(self, sequence: Sequence) -> int:
        """P that this round is to verify for the row."""
        return 0 if self._undrafted else self.allowed(sequence)

    def allowed(self, sequence: Sequence) -> int:
        """P that a round could verify for the row: what K, request, budget and context leave."""
        if sequence.context is None:
            return 0
        request = sequence.request
        budget = request.max_tokens - sequence.output_count
        room = self.max_context - sequence.frontier - 1
        return max(0, min(self.draft_tokens, request.draft_tokens, budget - 1, room))

    def tree_end(self, sequence: Sequence, columns: int) -> int:
        """Positions that a tree of the row would write to; 0 where the row verifies no tree.

        Its whole main chain must fit, and its columns the pages that the sample may come to need:
        whether a row verifies a tree depends on nobody else.
        """
        end = sequence.frontier + columns
        page_size = self.blocks.target.state.page_size
        room = -(-sequence.position_limit // page_size) * page_size
        fits = (
            columns > 0
            and sequence.request.draft_trees
            and self.allowed(sequence) == self.draft_tokens
            and end <= min(room, self.max_context)
        )
        return end if fits else 0

    @property
    def most_columns(self) -> int:
        """Columns of the widest round."""
        return max([self.draft_tokens + 1, *(self.trees.widths if self.trees is not None else ())])

    def reach(self, sequence: Sequence) -> int:
        """Positions that the row's next round may write to."""
        end = min(sequence.frontier + self.draft_tokens + 1, sequence.position_limit)
        if self.trees is None:
            return end
        return max([end, *(self.tree_end(sequence, width) for width in self.trees.widths)])

    def draft(self, rows: tuple[Sequence, ...]) -> Proposal:
        """Sends pending features and collects proposals; rows without one run at P = 0."""
        asks, columns = [], 0
        if self.trees is not None and not self._undrafted:
            columns = self.trees.columns(len(rows), max(row.frontier for row in rows))
        for row in rows:
            if row.context is not None and not self._undrafted:
                self.link.ensure_open(row.context, row.frontier, row.frontier)
                sampling = row.request.sampling
                asks.append(
                    Ask(
                        row.context,
                        live=self.wanted(row),
                        frontier=row.frontier,
                        anchor=row.anchor,
                        temperature=sampling.temperature,
                        seed=sampling.seed,
                        tree=self._tree_of(row, columns),
                    )
                )
        # on a device the clients hear of it later, under verify: here it would hold up the Round
        meanwhile = _nothing if self.blocks.runs_beside_host else self.deliver
        exchange = self.link.exchange(asks, meanwhile=meanwhile)
        drafted = tuple(
            exchange.proposals.get(row.context.sequence_id) if row.context is not None else None
            for row in rows
        )
        return Proposal(rows, drafted, exchange.draft_ns, exchange.wire_ns)

    def _tree_of(self, row: Sequence, columns: int) -> TreeAsk | None:
        return TreeAsk(columns, self._tree_paths) if self.tree_end(row, columns) else None

    def _plain_cause(self, row: Sequence) -> str:
        """Why a row of this round has no proposals."""
        context = row.context
        if context is None:
            return "request"
        if self.allowed(row) == 0:
            return "budget"
        if self._undrafted:
            return "policy"
        return self.link.plain_cause(context, row.frontier)

    def verify(self, proposal: Proposal) -> VerifiedBlock:
        """Runs the target over [a, d_1..d_P] or a tree; its GDN state is not touched."""
        block = self.blocks.verify(
            [block_row(r, d) for r, d in zip(proposal.rows, proposal.drafted, strict=True)]
        )
        for row in proposal.rows:
            row.usage.draft_ns += proposal.draft_ns
            row.usage.wire_ns += proposal.wire_ns
        self.deliver()
        return VerifiedBlock(proposal, block)

    def accept(self, source: VerifiedBlock | PrefilledPrompt) -> LicensedBlock:
        """Compares proposals with p, column by column; the target alone decides."""
        if isinstance(source, PrefilledPrompt):
            rows: tuple[Sequence, ...] = (source.sequence,)
            drafted: tuple[Drafted | None, ...] = (None,)
            laws: list[Law | None] = [None]
        else:
            rows = source.proposal.rows
            laws = self.link.laws(source.proposal.drafted)
            drafted = tuple(
                each if law is not None else None
                for each, law in zip(source.proposal.drafted, laws, strict=True)
            )
        licensed = self.blocks.accept(source.block, [row.request.logprobs for row in rows], laws)
        for row in rows:
            row.usage.verify_ns += self.blocks.times.verify_ns
        return LicensedBlock(source, rows, tuple(licensed), drafted)

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
        rows = licensed.rows
        # last look at cancellation; after this nothing is undone
        decisions = [
            (row.ticket.cancellation() or preview) if isinstance(preview, Preview) else preview
            for row, preview in zip(rows, previewed.previews, strict=True)
        ]
        counts = [d.count if isinstance(d, Preview) else 0 for d in decisions]
        self.blocks.commit(licensed.source.block, counts)
        kept: list[Kept | None] = []
        endings: list[Finish | FinishReason | FaultError | None] = []
        for index, (row, preview) in enumerate(zip(rows, decisions, strict=True)):
            if not isinstance(preview, Preview):
                kept.append(None)
                endings.append(preview)
                continue
            kept.append(self._adopt(licensed, index, preview))
            endings.append(
                Finish(preview.reason, preview.matched, row.usage) if preview.reason else None
            )
        return CommittedBlock(rows, tuple(kept), tuple(endings))

    def _adopt(self, licensed: LicensedBlock, index: int, preview: Preview) -> Kept:
        """The host's half of commit for one row."""
        row, allowed = licensed.rows[index], licensed.licensed[index]
        drafted, first = licensed.drafted[index], row.frontier
        is_round = isinstance(licensed.source, VerifiedBlock)
        kept = Kept(preview, first, allowed, drafted, is_round)
        if is_round:
            if drafted is None:
                self.metrics.plain[self._plain_cause(row)] += 1
                row.usage.plain_rounds += self.wanted(row) > 0
            row.usage.undrafted_rounds += self._undrafted and self.allowed(row) > 0
            row.frontier += preview.count
            if row.context is not None:
                features = self.blocks.features(licensed.source.block, index, preview.count)
                self.link.extend(row.context, first, features)
            # what chooses for the next round learns at once
            if self.policy is not None and drafted is not None:
                self.policy.committed(row, kept.accepted)
            if self.trees is not None and drafted is not None:
                self.trees.committed(drafted.nodes, allowed.branch)
        row.tokens.extend(preview.token_ids)
        row.usage.output_tokens = row.output_count
        return kept

    def publish(self, committed: CommittedBlock) -> None:
        """Publishes what was committed; it reaches the clients with the next `deliver`."""
        now = time.monotonic_ns()
        for row, kept, ending in zip(
            committed.rows, committed.kept, committed.endings, strict=True
        ):
            if row.usage.output_tokens and not row.usage.ttft_ns:
                row.usage.ttft_ns = now - row.request.arrival_ns
            if isinstance(ending, Finish):
                row.finished = row.completed = True
                row.usage.total_ns = now - row.request.arrival_ns
            finish = ending if isinstance(ending, Finish) else None
            if kept is not None:
                self._outbox.kept(row, kept, finish)
            if ending is not None and not isinstance(ending, Finish):
                self.end(row, ending)

    def end(self, row: Sequence, outcome: FinishReason | FaultError) -> None:
        """Ends a row before its time; its client hears of it after everything published before."""
        row.finished = True
        self._outbox.ended(row, outcome)

    def deliver(self) -> None:
        """Tells the clients what was published and what ended.

        Called where the engine waits anyway, for the drafter or the device, and before anything is
        previewed again.
        """
        self._outbox.deliver()


def _nothing() -> None:
    """Nobody waits."""


def block_row(row: Sequence, drafted: Drafted | None) -> BlockRow:
    """A row's part of a verify block: its anchor and what was proposed after it."""
    if drafted is None:
        return BlockRow(row.residency, row.frontier, row.output_count, (row.anchor,))
    return BlockRow(
        row.residency,
        row.frontier,
        row.output_count,
        (row.anchor, *drafted.token_ids),
        drafted.parents,
    )
