"""One verifier's stream, event by event: the drafter's part of a speculative round.

A round admits its rows, materializes the pending features of all of them, runs one masked block
for those that asked, and replies. Each step takes what the step before returned. A row that goes
wrong carries its fault to the reply and touches no other row; only a message that no correct
verifier sends raises.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drafter.checkpoints import CheckpointTable
from drafter.config import DraftConfig
from drafter.context import Context, SequenceTable, expect_once
from drafter.graphs import DraftGraphs, Span
from drafter.model import ProposalAsk
from drafter.selector import Offers, Proposals, not_finite
from outrider import faults, tensors
from outrider.faults import FaultError
from outrider.shared_memory import OfferedMemory
from outrider.tensors import RowBytes
from outrider.tree_nodes import LEAST_PATHS
from outrider.v1 import draft_service_pb2 as wire
from outrider.v1 import status_pb2, tensor_pb2

FEATURE_ROWS_LIMIT = 64  # of one message


@dataclass(frozen=True)
class TreeLimits:
    """What a verifier's Hello allows a tree of its rounds; 0 without trees."""

    nodes: int = 0
    paths: int = 0


@dataclass(slots=True)
class Row:
    """One row of a round on its way from request to reply; each step fills in what it finds."""

    request: wire.RoundRow
    features: RowBytes | None  # None when nothing is pending
    context: Context | None = None
    ask: ProposalAsk | None = None
    fault: FaultError | None = None

    @property
    def feature_count(self) -> int:
        """Pending rows that came along."""
        return 0 if self.features is None else self.features.shape[0]


@dataclass(frozen=True)
class Admitted:
    """Rows whose features fit where their contexts end, and faulted ones."""

    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Materialized:
    """Rows whose contexts have caught up, with what may be drafted for them."""

    rows: tuple[Row, ...]
    span: Span | None  # None where there was nothing to write


@dataclass(frozen=True)
class Drafted:
    """Rows, and the proposals of those that ask, in their order, on the host."""

    rows: tuple[Row, ...]
    materializing: Span | None
    proposals: Proposals | None = None
    span: Span | None = None


class DraftRounds:
    """Applies the events that follow a Hello, in stream order.

    Attributes:
        round_index: of the last Round.
    """

    def __init__(
        self,
        config: DraftConfig,
        graphs: DraftGraphs,
        max_concurrency: int,
        checkpoints: CheckpointTable,
        counters: Counter[str],
        shared: OfferedMemory | None = None,
        trees: TreeLimits | None = None,
    ) -> None:
        self._config = config
        self._graphs = graphs
        self._memory = graphs.memory
        self._row_limit = max_concurrency  # B of this stream
        self._sequences = SequenceTable(graphs.memory, max_concurrency)
        self._checkpoints = checkpoints
        self.round_index = 0
        self._shared = shared  # None: features come in messages
        self._trees = trees or TreeLimits()
        self._counters = counters

    def close(self) -> None:
        """Releases every sequence; checkpoints are the verifier's and stay."""
        self._sequences.release_all()

    def apply(self, request: wire.DraftRoundsRequest) -> wire.DraftRoundsResponse | None:
        """Applies one event; returns the answer it has, if any.

        Raises:
            FaultError: EVENT_INVALID or TENSOR_SHAPE for what no correct verifier sends.
        """
        event = request.WhichOneof("event")
        verbs: dict[str | None, Callable[[Any], wire.DraftRoundsResponse | None]] = {
            "round": self._round,
            "features": self._features,
            "open": self._open,
            "release": self._release,
            "fork": self._fork,
            "capture": self._capture,
            "restore": self._restore,
            "drop": self._drop,
            "look": _look,
        }
        if event not in verbs:
            raise invalid("event", "one that may follow Hello", event or "none known")
        return verbs[event](getattr(request, event))

    # a round, step by step

    def _round(self, round_: wire.Round) -> wire.DraftRoundsResponse:
        admitted = self._admit(round_)
        materialized = self._materialize(admitted)
        drafted = self._draft(materialized)
        return self._reply(round_.round_index, drafted)

    def _admit(self, round_: wire.Round) -> Admitted:
        if round_.round_index != self.round_index + 1:
            raise invalid("round_index", self.round_index + 1, round_.round_index)
        if len(round_.rows) > self._row_limit:
            raise invalid("rows", f"at most {self._row_limit}", len(round_.rows))
        # the whole message is checked before any row of it is applied
        rows = [self._decode_row(request) for request in round_.rows]
        self.round_index += 1
        seen: set[int] = set()
        for row in rows:
            self._admit_row(row, seen)
        return Admitted(tuple(rows))

    def _admit_row(self, row: Row, seen: set[int]) -> None:
        sequence_id, epoch = row.request.sequence_id, row.request.epoch
        self._counters["stale_events"] += self._sequences.is_stale(sequence_id, epoch)
        try:
            row.context = context = self._sequences.find(sequence_id, epoch)
            expect_once(sequence_id, seen)
            context.expect(row.request.first_position)
            self._memory.expect_room(context, row.feature_count)
        except FaultError as fault:
            row.fault = fault

    def _materialize(self, admitted: Admitted) -> Materialized:
        span = self._append(
            [
                (row.context, row.features)
                for row in admitted.rows
                if row.fault is None and row.context is not None and row.features is not None
            ]
        )
        for row in admitted.rows:
            self._ask(row)
        return Materialized(admitted.rows, span)

    def _append(self, pieces: Sequence[tuple[Context, RowBytes]]) -> Span | None:
        if not pieces:
            return None
        append = self._memory.append([(context, rows.shape[0]) for context, rows in pieces])
        span = self._graphs.materialize([rows for _, rows in pieces], append)
        append.commit()
        self._counters["feature_rows"] += append.destinations.shape[1]
        return span

    def _ask(self, row: Row) -> None:
        wanted, context = row.request.proposal, row.context
        if row.fault is not None or context is None or not row.request.HasField("proposal"):
            return
        try:
            context.expect_frontier(wanted.frontier)
            self._memory.expect_room(context, self._config.width)
        except FaultError as fault:
            row.fault = fault
            return
        row.ask = ProposalAsk(
            context,
            wanted.anchor,
            wanted.live,
            wanted.temperature,
            wanted.seed,
            wanted.tree_nodes,
            max(1, wanted.tree_paths),
        )

    def _draft(self, materialized: Materialized) -> Drafted:
        asks = [row.ask for row in materialized.rows if row.ask is not None]
        if not asks:
            return Drafted(materialized.rows, materialized.span)
        return Drafted(materialized.rows, materialized.span, *self._graphs.draft(asks))

    def _reply(self, round_index: int, drafted: Drafted) -> wire.DraftRoundsResponse:
        """The reply; filled in where it is, since messages that are put into others are copied."""
        response = wire.DraftRoundsResponse()
        reply = response.round_reply
        reply.round_index = round_index
        offers = None if drafted.proposals is None else drafted.proposals.offers()
        block_row = 0
        for row in drafted.rows:
            self._reply_row(reply.rows.add(), row, offers, block_row)
            block_row += row.ask is not None
        reply.materialize_ns = _elapsed_ns(drafted.materializing)
        reply.draft_ns = _elapsed_ns(drafted.span)
        self._counters["rounds"] += 1
        return response

    def _reply_row(
        self, reply: wire.RoundReplyRow, row: Row, offers: Offers | None, block_row: int
    ) -> None:
        reply.sequence_id, reply.epoch = row.request.sequence_id, row.request.epoch
        if row.context is not None:
            reply.context_frontier = row.context.frontier
        if row.fault is not None:
            reply.fault.CopyFrom(self._status(row.fault))
        elif row.ask is not None and offers is not None:
            if not offers.finite[block_row]:
                reply.fault.CopyFrom(self._status(not_finite(row.ask.context.frontier)))
                return
            _offer(reply.proposal, row.ask, offers, block_row)
            self._counters["proposals"] += 1
            if reply.proposal.parents:
                self._counters["trees"] += 1

    # events outside a round

    def _open(self, event: wire.Open) -> wire.DraftRoundsResponse | None:
        if event.coverage_first < 0:
            raise invalid("coverage_first", "at least 0", event.coverage_first)
        if not self._sequences.is_creatable(event.sequence_id, event.epoch):
            self._counters["stale_events"] += 1
            return None
        try:
            self._sequences.open(event.sequence_id, event.epoch, event.coverage_first)
        except FaultError as fault:
            return self._sequence_fault(event, fault)
        self._counters["opens"] += 1
        return None

    def _features(self, event: wire.Features) -> wire.DraftRoundsResponse | None:
        shared = event.HasField("shared_rows")
        features = self._decode_features(event.shared_rows if shared else event.rows)
        if self._sequences.is_stale(event.sequence_id, event.epoch):
            self._counters["stale_events"] += 1
            return None
        try:
            context = self._sequences.find(event.sequence_id, event.epoch)
            context.expect(event.first_position)
            self._memory.expect_room(context, features.shape[0])
        except FaultError as fault:
            return self._sequence_fault(event, fault)
        self._append([(context, features)])
        return None

    def _sequence_fault(
        self, event: wire.Open | wire.Features, fault: FaultError
    ) -> wire.DraftRoundsResponse:
        return wire.DraftRoundsResponse(
            sequence_fault=wire.SequenceFault(
                sequence_id=event.sequence_id, epoch=event.epoch, fault=self._status(fault)
            )
        )

    def _release(self, event: wire.Release) -> None:
        self._sequences.release(event.sequence_id, event.epoch)

    def _fork(self, event: wire.Fork) -> wire.DraftRoundsResponse:
        reply = wire.ForkReply(sequence_id=event.sequence_id, epoch=event.epoch)
        if event.sequence_id == event.source_sequence_id:
            raise invalid("sequence_id", "another one than the source's", event.sequence_id)
        try:
            source = self._sequences.find(event.source_sequence_id, event.source_epoch)
            source.expect_frontier(event.context_frontier)
            copy = self._sequences.fork(event.sequence_id, event.epoch, source)
            reply.coverage_first = copy.coverage_first
        except FaultError as fault:
            reply.fault.CopyFrom(self._status(fault))
        return wire.DraftRoundsResponse(fork_reply=reply)

    def _capture(self, event: wire.Capture) -> wire.DraftRoundsResponse:
        reply = wire.CaptureReply(checkpoint_id=event.checkpoint_id)
        try:
            source = self._sequences.find(event.sequence_id, event.epoch)
            source.expect_frontier(event.context_frontier)
            evicted = self._checkpoints.capture(event.checkpoint_id, source)
            reply.evicted_checkpoint_ids.extend(evicted)
        except FaultError as fault:
            if fault.reason == "EVENT_INVALID":
                raise
            reply.fault.CopyFrom(self._status(fault))
        return wire.DraftRoundsResponse(capture_reply=reply)

    def _restore(self, event: wire.Restore) -> wire.DraftRoundsResponse:
        reply = wire.RestoreReply(
            checkpoint_id=event.checkpoint_id, sequence_id=event.sequence_id, epoch=event.epoch
        )
        try:
            kept = self._checkpoints.find(event.checkpoint_id, event.context_frontier)
            copy = self._sequences.fork(event.sequence_id, event.epoch, kept.context, kept.cells)
            self._checkpoints.restored(kept)
            reply.coverage_first = copy.coverage_first
        except FaultError as fault:
            reply.fault.CopyFrom(self._status(fault))
        return wire.DraftRoundsResponse(restore_reply=reply)

    def _drop(self, event: wire.Drop) -> wire.DraftRoundsResponse:
        self._checkpoints.drop(event.checkpoint_id)
        return wire.DraftRoundsResponse(
            drop_reply=wire.DropReply(checkpoint_id=event.checkpoint_id)
        )

    # reading and writing messages

    def _decode_row(self, request: wire.RoundRow) -> Row:
        wanted, most = request.proposal, self._config.draft_tokens
        if request.HasField("proposal"):
            if not 1 <= wanted.live <= most:
                raise invalid("live", f"1..{most}", wanted.live)
            if not 0 <= wanted.anchor < self._config.target.vocab_size:
                raise invalid("anchor", f"below {self._config.target.vocab_size}", wanted.anchor)
            if not math.isfinite(wanted.temperature):
                raise invalid("temperature", "a finite number", wanted.temperature)
            self._expect_tree_fits(wanted)
        if request.HasField("shared_features"):
            return Row(request, self._decode_features(request.shared_features))
        if not request.HasField("features"):
            return Row(request, None)
        return Row(request, self._decode_features(request.features))

    def _expect_tree_fits(self, wanted: wire.ProposalRequest) -> None:
        if not wanted.tree_nodes:
            return
        most, limits = self._config.draft_tokens, self._trees
        if wanted.live != most:
            raise invalid("live", f"{most} with a tree", wanted.live)
        if not limits.nodes:
            raise invalid("tree_nodes", "0 without trees in Hello", wanted.tree_nodes)
        if not most + 2 <= wanted.tree_nodes <= limits.nodes:
            raise invalid("tree_nodes", f"0 or {most + 2}..{limits.nodes}", wanted.tree_nodes)
        if not LEAST_PATHS <= wanted.tree_paths <= limits.paths:
            raise invalid("tree_paths", f"{LEAST_PATHS}..{limits.paths}", wanted.tree_paths)

    def _decode_features(self, rows: tensor_pb2.Tensor | wire.SharedRows) -> RowBytes:
        """Feature rows as bytes, which is all that copying them takes."""
        if isinstance(rows, wire.SharedRows):
            if self._shared is None:
                raise invalid("shared rows", "none, as no memory is shared", rows.row_count)
            features = self._shared.rows(rows)
        else:
            shape = (None, self._config.feature_width)
            features = tensors.row_bytes(
                tensors.decode(rows, shape, self._config.profile.activation)
            )
        row_count = len(features)
        if not 1 <= row_count <= FEATURE_ROWS_LIMIT:
            raise invalid("rows", f"1..{FEATURE_ROWS_LIMIT}", row_count)
        return features

    def _status(self, fault: FaultError) -> status_pb2.Status:
        self._counters[f"fault_{fault.reason.lower()}"] += 1
        return faults.to_status(fault)


def _look(event: wire.Look) -> None:
    """It has woken the engine, which looks before it sleeps."""


def _elapsed_ns(span: Span | None) -> int:
    return 0 if span is None else span.elapsed_ns()


def _offer(proposal: wire.Proposal, ask: ProposalAsk, offers: Offers, block_row: int) -> None:
    """Fills in what one row is offered."""
    count = offers.count(block_row, ask.live)
    proposal.frontier = ask.context.frontier
    proposal.token_ids.extend(offers.tokens[block_row, :count].tolist())
    proposal.parents.extend(offers.branches(block_row, ask.live))
    if offers.candidate_ids is None or offers.probabilities is None:
        proposal.point_mass.SetInParent()
        return
    conditional = proposal.conditional
    tensors.put_array(conditional.candidate_ids, offers.candidate_ids[block_row, :count])
    tensors.put_array(conditional.probabilities, offers.probabilities[block_row, :count])


def invalid(name: str, expected: object, actual: object) -> FaultError:
    """The fault that ends a stream whose verifier sent what none should."""
    return FaultError(
        "EVENT_INVALID",
        f"{name}: expected {expected}, got {actual}",
        field=name,
        expected=expected,
        actual=actual,
    )
