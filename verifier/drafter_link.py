"""The verifier's end of DraftRounds: one stream to one drafter, paced, and allowed to fail.

Two threads. `Dialler` dials, says Hello and reads replies into an inbox on a thread of its own;
everything here runs on the engine thread, which never blocks on the stream: it waits for a
RoundReply only when it asked for a proposal, and never longer than the round's deadline. Losing the
drafter is a state, not an error: contexts close, and after a reconnection they open again and are
seeded with the last S feature rows, which stay in host memory for that.

Checkpoints: the link captures a context once every row before the wanted position has been sent,
and believes in a draft half only when the drafter has confirmed it. What is not there, whether
refused, evicted or lost with a stream, is no draft context, never an error.
"""

from __future__ import annotations

import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import grpc
import structlog

from outrider import faults, serving
from outrider.faults import FaultError
from outrider.shared_memory import FeatureMemory, step_aside
from outrider.tensors import RowBytes
from outrider.tracing import NO_TRAIL, Trail
from outrider.v1 import draft_service_pb2 as wire
from verifier.draft_context import Context
from verifier.drafter_stream import Arrived, Dialler, Stream
from verifier.features import FeatureRows
from verifier.proposals import NOTHING, Ask, Drafted, Exchange, Law, decode_proposal, laws_of

log = structlog.get_logger("outrider.drafter_link")

FEATURE_ROWS_PER_MESSAGE = 64
FEATURE_MESSAGE_BYTES = serving.MESSAGE_LIMIT - 4096  # room for the fields beside the rows
UNANSWERED_FEATURES = 8
FEATURE_ALLOWANCE_NS = 50_000_000  # added to a round's deadline for each Features message before it
# after one of these the drafter has no usable context under this epoch
REOPENING = frozenset(
    {"SEQUENCE_NOT_FOUND", "FEATURES_GAP", "FRONTIER_MISMATCH", "CHECKPOINT_NOT_FOUND"}
)
CAPACITY_RETRY_NS = 1_000_000_000
# an answer in memory is awaited on the core for so long; then the drafter is asked whether it looks
SPIN_NS = 10_000_000
RARELY_S = 0.0005  # between looks after that


class DrafterLink:
    """Owns the contexts of all sequences and the pacing rules of the protocol.

    Args:
        address: gRPC target of the drafter; several, separated by commas, are dialled in turn.
        hello: First message of every stream.
        row_bytes: Size of one feature row.
        window: S, or 0 when the draft has no local layer.
        timeout_ns: Longest wait for a RoundReply.
        backlog_rows: Unsent feature rows that one sequence may hold.
        on_event: Called from the dialler's thread when something arrived; must not block.
        on_connection: Called from the engine thread with whether the drafter is there, when that
            changed; must not block.
        credentials: Channel credentials; None is plain text.
        share_memory: Whether features go through shared memory where the drafter is on this host.
        metadata: Sent with every dial.
    """

    def __init__(
        self,
        address: str,
        hello: wire.Hello,
        *,
        row_bytes: int,
        window: int,
        all_local: bool,
        timeout_ns: int,
        backlog_rows: int,
        on_event: Callable[[], None],
        on_connection: Callable[[bool], None] = lambda connected: None,
        credentials: grpc.ChannelCredentials | None = None,
        share_memory: bool = True,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.address = address
        self.counters: Counter[str] = Counter()
        self.state = "connecting"  # or "connected", "refused"
        self.detail = "not connected yet"
        self._hello = hello
        self._width = hello.draft_tokens + 1
        self._message_rows = min(FEATURE_ROWS_PER_MESSAGE, FEATURE_MESSAGE_BYTES // row_bytes)
        self._row_bytes = row_bytes
        self._window = window
        self._all_local = all_local
        self._timeout_ns = timeout_ns
        self._backlog_rows = backlog_rows
        self._on_connection = on_connection
        self._dialler = Dialler(
            address,
            hello,
            on_event=on_event,
            on_failure=self._unreachable,
            make_memory=self._feature_memory if share_memory else None,
            counters=self.counters,
            credentials=credentials,
            metadata=metadata,
        )
        self._stream: Stream | None = None  # the one that was welcomed, until it is lost
        self._contexts: dict[int, Context] = {}
        self._held: set[int] = set()  # checkpoints whose draft half the drafter confirmed
        self._capturing: set[int] = set()  # Captures sent and not answered
        self._next_sequence_id = 1
        self._round_index = 0
        self._unanswered_round: tuple[int, int] | None = None  # index, deadline
        self._round_in_memory = False  # where the unanswered one is, and its answer will be
        self._features_sent = 0  # messages, in this stream
        self._features_answered = 0  # of these, before the last answered Round
        self._features_at_round = 0  # sent before the unanswered Round
        self._drafter_max_context = 0

    # ---- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts dialling; rounds are plain until the drafter answers."""
        self._dialler.start()

    def stop(self) -> None:
        """Closes the stream, which releases every sequence on it."""
        self._dialler.stop()

    @property
    def all_local(self) -> bool:
        """Whether the draft sees the last S positions alone."""
        return self._all_local

    @property
    def connected(self) -> bool:
        """Whether proposals flow."""
        return self._stream is not None

    def drafts_at(self, frontier: int) -> bool:
        """Whether the drafter's context can hold a whole block at ``frontier``."""
        return self.connected and frontier + self._width <= self._drafter_max_context

    # ---- contexts -----------------------------------------------------------------------------

    def context(self, trail: Trail = NO_TRAIL) -> Context:
        """A new draft half, not open yet, under a sequence id of its own."""
        context = Context(self._next_sequence_id, trail)
        self._next_sequence_id += 1
        self._contexts[context.sequence_id] = context
        return context

    def ensure_open(self, context: Context, frontier: int, needed: int) -> None:
        """Opens ``context`` if it is not, where the features that are there or still come begin.

        A draft of local layers alone needs nothing before needed - S, so a long prompt sends S
        rows; with a full layer every row that exists or will exist is wanted. Beyond the drafter's
        range the context is given back: that sequence drafts no more.

        Args:
            context: The draft half to open.
            frontier: Where the target stands.
            needed: First position at which this sequence drafts or is captured.
        """
        if not self.connected or time.monotonic_ns() < context.retry_at_ns:
            return
        if not self.drafts_at(max(frontier, needed)):
            if not context.out_of_range:
                context.out_of_range = True
                self.counters["sequences_out_of_range"] += 1
                self._give_back(context)
            return
        if not context.is_open:
            seeded = len(context.rows) > 0 and context.rows.end == frontier
            first = context.rows.first if seeded else frontier
            if self._all_local:
                first = max(first, max(frontier, needed) - self._window)
            self._open(context, first)
            if context.unsent_rows:
                self.counters["reseeds"] += 1

    def wanted_from(self, context: Context, needed: int) -> int | None:
        """First position whose feature row is still to come and worth keeping; None for none."""
        if context.out_of_range:
            return None
        if context.is_open:
            return max(context.sent_frontier, context.rows.end)
        return max(0, needed - self._window)

    def _open(self, context: Context, first: int) -> None:
        assert self._stream is not None
        context.open(first, first)
        self.counters["opens"] += 1
        self._stream.send_open(context)

    def extend(self, context: Context, first_position: int, rows: RowBytes) -> None:
        """Takes committed feature rows at [first_position, first_position + n).

        The rows must be the link's own. A sequence whose unsent rows would exceed its share opens
        again at most S rows back: memory stays bounded whatever the drafter's speed, and the
        shorter coverage is told honestly.
        """
        if context.is_open:
            # a long prompt's rows before the coverage are of no use
            skipped = max(0, context.sent_frontier - first_position)
            rows, first_position = rows[skipped:], first_position + skipped
        context.rows.append(first_position, rows)
        if context.unsent_rows > self._backlog_rows:
            # not the whole share: what follows must not overflow it again at once
            kept = min(self._window or self._backlog_rows, 3 * self._backlog_rows // 4)
            self.counters["backlog_reopens"] += 1
            self.counters["captures_skipped"] += len(context.captures)
            context.close()
            self._open(context, context.rows.end - kept)
        context.trim(self._window)

    def release(self, context: Context) -> None:
        """Frees the drafter's half. Idempotent.

        Captures that wait are made first where the protocol leaves room for the rows before them;
        otherwise the checkpoint goes without its draft half.
        """
        if self._contexts.pop(context.sequence_id, None) is None:
            return
        while context.captures and self._may_send_features():
            self._send_features(context)
        self.counters["captures_skipped"] += len(context.captures)
        self._give_back(context)

    def _give_back(self, context: Context) -> None:
        # also when a fault closed it: the drafter may still hold what it could not extend
        if context.epoch and self._stream is not None:
            self._stream.send_release(context)
        context.close()

    def plain_cause(self, context: Context, frontier: int) -> str:
        """Why a row that could be drafted for was not."""
        if not self.connected:
            return "drafter_away"
        if context.out_of_range or not self.drafts_at(frontier):
            return "out_of_range"
        if not context.is_open:
            return "closed"
        return "backlog" if self.has_backlog(context) else "no_proposal"

    def has_backlog(self, context: Context) -> bool:
        """Whether rows must go before the next Round: more than it carries, or up to a capture."""
        return context.is_open and (context.unsent_rows > self._width or bool(context.captures))

    @property
    def has_whole_messages(self) -> bool:
        """Whether unsent rows of some sequence fill a Features message."""
        return any(c.unsent_rows >= FEATURE_ROWS_PER_MESSAGE for c in self._contexts.values())

    @property
    def feature_bytes(self) -> int:
        """Host memory that the feature rows of live sequences hold now."""
        return sum(context.rows.byte_count for context in list(self._contexts.values()))

    # ---- checkpoints --------------------------------------------------------------------------

    def holds(self, checkpoint_id: int) -> bool:
        """Whether the drafter has confirmed this draft half, and has not said that it is gone."""
        return self.connected and checkpoint_id in self._held

    def keeps(self, checkpoint_id: int) -> bool:
        """Whether this draft half is there, or may yet come to be."""
        queued = (c for context in self._contexts.values() for _, c in context.captures)
        known = checkpoint_id in self._held or checkpoint_id in self._capturing
        return known or checkpoint_id in queued

    def continues(
        self, checkpoint_id: int, frontier: int, rows: FeatureRows, coverage_first: int
    ) -> bool:
        """Whether a context can go on from a checkpoint as if the sequence had never ended.

        Args:
            checkpoint_id: The checkpoint.
            frontier: Where it stands.
            rows: Its feature rows, which end there; maybe none.
            coverage_first: Where its context began.
        """
        held = self.holds(checkpoint_id)
        if held and self._capturing:
            return False  # an unanswered Capture may have evicted it already
        if not self._all_local:
            return held and coverage_first == 0
        seen = max(0, frontier - self._window)  # nothing before it reaches a proposal
        return (held and coverage_first <= seen) or (len(rows) > 0 and rows.first <= seen)

    def tail(self, context: Context) -> FeatureRows:
        """The last S rows of a context, by reference."""
        return context.rows.tail(self._window)

    def capture(self, context: Context, checkpoint_id: int, position: int) -> bool:
        """Keeps the context as it will stand once every row before ``position`` is in.

        Returns:
            False when there will be no draft half: no open context, or not all of the rows. Else
            it exists from the drafter's reply on, see `holds`.
        """
        covered = context.sent_frontier <= position == context.rows.end
        if not context.is_open or not self.connected or not covered:
            return False
        context.captures.append((position, checkpoint_id))
        if not context.unsent_rows:
            self._capture_where_due(context)
        return True

    def _capture_where_due(self, context: Context) -> None:
        assert self._stream is not None
        while context.captures and context.captures[0][0] == context.sent_frontier:
            position, checkpoint_id = context.captures.popleft()
            self._capturing.add(checkpoint_id)
            self.counters["captures"] += 1
            self._stream.send_capture(context, checkpoint_id, position)

    def restore(
        self,
        context: Context,
        checkpoint_id: int,
        rows: FeatureRows,
        coverage_first: int,
        needed: int,
    ) -> None:
        """Lets ``context`` continue a checkpoint; rows for it may follow at once.

        Nothing is restored where a draft of local layers has left the checkpoint behind by the time
        it is needed.

        Args:
            context: A closed one.
            checkpoint_id: Whose draft half to restore, if it is held.
            rows: The last rows before the checkpoint's frontier, to seed from where it is not.
            coverage_first: Where the captured context began.
            needed: As in `ensure_open`.
        """
        context.rows = rows.tail(self._window)
        left_behind = self._all_local and needed - self._window > rows.end
        if left_behind or not self.holds(checkpoint_id):
            return
        assert self._stream is not None
        context.open(coverage_first, rows.end)
        self.counters["restores"] += 1
        self._stream.send_restore(context, checkpoint_id)

    def fork(self, source: Context, trail: Trail = NO_TRAIL) -> Context:
        """A context that continues ``source`` from where it stands, unsent rows included."""
        context = self.context(trail)
        context.rows = source.rows.tail(len(source.rows))
        context.out_of_range = source.out_of_range
        if source.is_open and self._stream is not None:
            context.open(source.coverage_first, source.sent_frontier)
            self.counters["forks"] += 1
            self._stream.send_fork(source, context)
        return context

    def drop(self, checkpoint_id: int) -> None:
        """Forgets a checkpoint's draft half, wherever it has got to."""
        for context in self._contexts.values():
            context.captures = deque(c for c in context.captures if c[1] != checkpoint_id)
        known = checkpoint_id in self._held or checkpoint_id in self._capturing
        self._held.discard(checkpoint_id)
        self._capturing.discard(checkpoint_id)
        if known and self._stream is not None:
            self._send_drop(checkpoint_id)

    def _send_drop(self, checkpoint_id: int) -> None:
        assert self._stream is not None
        self.counters["drops"] += 1
        self._stream.send_drop(checkpoint_id)

    # ---- pacing -------------------------------------------------------------------------------

    def pump(self, drafting: bool, least_rows: int = 0) -> None:
        """Sends backlog within the limits, and a barrier Round when they are spent.

        Args:
            drafting: Whether some row will draft this round; then one message at most.
            least_rows: Contexts with fewer unsent rows may wait, captures aside.
        """
        self.poll()
        budget = 1 if drafting else UNANSWERED_FEATURES
        for context in self._contexts.values():
            while self.has_backlog(context) and self._stream is not None:
                if context.unsent_rows < least_rows and not context.captures:
                    break
                if not self._may_send_features():
                    if self._unanswered_round is None and not drafting:
                        self._send_round(self._stream.begin_round())
                    return
                if budget == 0:
                    return
                self._send_features(context)
                budget -= 1

    def _may_send_features(self) -> bool:
        return self._features_sent - self._features_answered < UNANSWERED_FEATURES

    def _send_features(self, context: Context) -> None:
        """Sends one message's rows, which end at the next capture, and what is due there."""
        assert self._stream is not None
        first = context.sent_frontier
        end = context.captures[0][0] if context.captures else context.rows.end
        rows = context.take(min(self._message_rows, end - first))
        assert rows is not None
        self._features_sent += 1
        self.counters["feature_rows"] += len(rows)
        self._stream.send_features(context, first, rows)
        context.trim(self._window)
        self._capture_where_due(context)

    def exchange(
        self, asks: Sequence[Ask], meanwhile: Callable[[], None] = lambda: None
    ) -> Exchange:
        """Sends one Round with every row that has caught up; waits if a proposal was asked for.

        Rows whose context is closed or behind get no proposal. Never raises: a lost, slow or
        confused drafter yields fewer proposals.

        Args:
            asks: The rows.
            meanwhile: Called once the Round is on its way, before the wait.
        """
        started = time.monotonic_ns()
        self.poll()
        wants = any(ask.live for ask in asks if self._can_ask(ask))
        if self._unanswered_round is not None:
            if not wants:
                return NOTHING
            self._wait_for_reply()
        if self._stream is None:
            return NOTHING
        request = self._stream.begin_round()
        wants = False
        for ask in asks:
            if self._is_current(ask.context):
                wants |= self._add_row(request.round, ask)
        if not request.round.rows:
            return NOTHING
        self._send_round(request, awaited=wants)
        if not wants:
            return NOTHING
        meanwhile()
        by_id = {ask.context.sequence_id: ask for ask in asks}
        reply = self._wait_for_reply()
        if reply is None:
            self.counters["rounds_without_reply"] += 1
            return Exchange({}, 0, time.monotonic_ns() - started)
        proposals = {}
        for row in reply.rows:
            asked = by_id.get(row.sequence_id)
            drafted = self._proposal_of(asked, row) if asked is not None else None
            if drafted is not None:
                proposals[row.sequence_id] = drafted
        waited = time.monotonic_ns() - started
        draft_ns = min(waited, reply.service_ns)
        return Exchange(proposals, draft_ns, waited - draft_ns)

    def _is_current(self, context: Context) -> bool:
        return context.is_open and not self.has_backlog(context)

    def _can_ask(self, ask: Ask) -> bool:
        return self._is_current(ask.context) and self.drafts_at(ask.frontier)

    def _add_row(self, round_: wire.Round, ask: Ask) -> bool:
        """Adds what there is to say of a row, if anything; whether a proposal is wanted for it."""
        assert self._stream is not None
        context = ask.context
        first = context.sent_frontier
        rows = context.take(context.unsent_rows)
        wants = (
            ask.live > 0 and self.drafts_at(ask.frontier) and context.sent_frontier == ask.frontier
        )
        if rows is None and not wants:
            return False
        row = self._stream.add_row(round_, context, first, rows)
        if rows is not None:
            self.counters["feature_rows"] += len(rows)
            context.trim(self._window)
        if wants:
            wanted = row.proposal
            wanted.frontier = ask.frontier
            wanted.anchor = ask.anchor
            wanted.live = ask.live
            wanted.temperature = ask.temperature
            wanted.seed = ask.seed
            if ask.tree is not None:
                wanted.tree_nodes, wanted.tree_paths = ask.tree.nodes, ask.tree.paths
        return wants

    def _send_round(self, request: wire.DraftRoundsRequest, *, awaited: bool = False) -> None:
        assert self._stream is not None
        self._round_index += 1
        request.round.round_index = self._round_index
        self._features_at_round = self._features_sent
        allowance = (self._features_sent - self._features_answered) * FEATURE_ALLOWANCE_NS
        deadline = time.monotonic_ns() + self._timeout_ns + allowance
        self._unanswered_round = (self._round_index, deadline)
        self.counters["rounds"] += 1
        self._round_in_memory = self._stream.send_round(request, awaited=awaited)

    # ---- what arrives -------------------------------------------------------------------------

    def poll(self) -> None:
        """Applies everything that has arrived and checks the unanswered round's deadline."""
        while True:
            try:
                arrived = self._dialler.inbox.get_nowait()
            except queue.Empty:
                break
            self._apply(arrived)
        if self._unanswered_round is not None and time.monotonic_ns() > self._unanswered_round[1]:
            self._expire()

    def _wait_for_reply(self) -> wire.RoundReply | None:
        """The reply to the unanswered round; None when the drafter is lost before it comes."""
        while self._unanswered_round is not None:
            index, deadline = self._unanswered_round
            arrived = self._next_arrived(index, deadline)
            if arrived is None:
                self._expire()
                return None
            reply = self._apply(arrived)
            if reply is not None and reply.round_index == index:
                return reply
        return None

    def _next_arrived(self, index: int, deadline: int) -> Arrived | None:
        """What arrives next while a Round is unanswered; None when its deadline has passed."""
        inbox = self._dialler.inbox
        if not self._round_in_memory:
            try:
                return inbox.get(timeout=max(0.0, (deadline - time.monotonic_ns()) / 1e9))
            except queue.Empty:
                return None
        assert self._stream is not None
        spins_until, asked = time.monotonic_ns() + SPIN_NS, False
        while (now := time.monotonic_ns()) < deadline:
            try:
                reply = self._stream.take_reply(index)
            except FaultError as fault:
                return Arrived(self._stream, ended=fault.message)
            if reply is not None:
                return Arrived(self._stream, reply)
            if not inbox.empty():
                return inbox.get()
            if now > spins_until and not asked:
                self._stream.send_look()
                asked = True
            if asked:
                time.sleep(RARELY_S)
            else:
                step_aside()
        return None

    def _expire(self) -> None:
        assert self._stream is not None
        self.counters["round_timeouts"] += 1
        self._lose(self._stream, "no answer to a round within its deadline")

    def _apply(self, arrived: Arrived) -> wire.RoundReply | None:
        """Applies one inbox entry; returns a RoundReply that answers the unanswered round."""
        message = arrived.message
        event = message.WhichOneof("event") if message is not None else None
        if message is not None and event == "welcome" and not arrived.stream.closed_ns:
            self._connect(arrived.stream, message.welcome)
        elif arrived.stream is not self._stream:
            self.counters["stale_messages"] += message is not None
        elif message is None:
            self._lose(arrived.stream, arrived.ended)
        elif event == "round_reply":
            return self._answer(message.round_reply)
        elif event == "sequence_fault":
            fault = message.sequence_fault
            self._fault(fault.sequence_id, fault.epoch, fault.fault)
        elif event == "capture_reply":
            self._captured(message.capture_reply)
        elif event in ("restore_reply", "fork_reply"):
            self._created(message)
        elif event != "drop_reply":
            self.counters["unexpected_messages"] += 1
        return None

    def _captured(self, reply: wire.CaptureReply) -> None:
        self._held.difference_update(reply.evicted_checkpoint_ids)
        if reply.HasField("fault"):
            fault = faults.from_status(reply.fault)
            self.counters[f"fault_{fault.reason.lower()}"] += 1
        elif reply.checkpoint_id in self._capturing:
            self._held.add(reply.checkpoint_id)
        self._capturing.discard(reply.checkpoint_id)

    def _created(self, message: wire.DraftRoundsResponse) -> None:
        """A Restore or Fork was applied, with the coverage that came of it, or refused."""
        reply: wire.RestoreReply | wire.ForkReply = message.fork_reply
        if message.WhichOneof("event") == "restore_reply":
            reply = message.restore_reply
        if reply.HasField("fault"):
            if (
                isinstance(reply, wire.RestoreReply)
                and faults.from_status(reply.fault).reason == "CHECKPOINT_NOT_FOUND"
            ):
                self._held.discard(reply.checkpoint_id)
            self._fault(reply.sequence_id, reply.epoch, reply.fault)
            return
        context = self._contexts.get(reply.sequence_id)
        if context is not None and context.is_open and context.epoch == reply.epoch:
            context.coverage_first = reply.coverage_first

    def _answer(self, reply: wire.RoundReply) -> wire.RoundReply | None:
        if self._unanswered_round is None or reply.round_index != self._unanswered_round[0]:
            self.counters["stale_messages"] += 1
            return None
        self._unanswered_round = None
        # the stream is ordered: every Features message before the Round has been applied
        self._features_answered = self._features_at_round
        for row in reply.rows:
            if row.WhichOneof("outcome") == "fault":
                self._fault(row.sequence_id, row.epoch, row.fault)
        return reply

    def _proposal_of(self, ask: Ask, row: wire.RoundReplyRow) -> Drafted | None:
        if row.WhichOneof("outcome") != "proposal":
            return None
        if row.epoch != ask.context.epoch or row.proposal.frontier != ask.frontier:
            self.counters["stale_rows"] += 1
            return None
        try:
            return decode_proposal(row.proposal, ask, self._hello.geometry.public_vocab)
        except FaultError as fault:
            self._drop(fault)
            return None

    def laws(self, drafted: Sequence[Drafted | None]) -> list[Law | None]:
        """What each proposal was drawn from; None where it may not be accepted, or there is none.

        A round calls this while the target works on the proposals.
        """
        laws: list[Law | None] = []
        for law in laws_of(drafted, self._hello.geometry.public_vocab):
            if isinstance(law, FaultError):
                self._drop(law)
            laws.append(law if isinstance(law, Law) else None)
        return laws

    def _drop(self, fault: FaultError) -> None:
        self.counters[f"fault_{fault.reason.lower()}"] += 1
        log.warning("proposal_dropped", reason=fault.message)

    def _fault(self, sequence_id: int, epoch: int, status: object) -> None:
        fault = faults.from_status(status)  # type: ignore[arg-type]
        self.counters[f"fault_{fault.reason.lower()}"] += 1
        context = self._contexts.get(sequence_id)
        if context is None or not context.is_open or epoch != context.epoch:
            self.counters["stale_rows"] += 1
            return
        log.warning("draft_fault", sequence_id=sequence_id, reason=fault.reason)
        if fault.reason in REOPENING:
            context.close()
        elif fault.reason == "RING_CAPACITY":
            context.close()
            context.retry_at_ns = time.monotonic_ns() + CAPACITY_RETRY_NS

    # ---- connection ---------------------------------------------------------------------------

    def _connect(self, stream: Stream, welcome: wire.Welcome) -> None:
        if self._dialler.stopping:
            return
        self._stream = stream
        if not welcome.shares_memory:
            stream.memory = None
        self._drafter_max_context = welcome.max_context
        self._round_index = 0  # it counts within a stream
        self._unanswered_round = None
        self._features_sent = self._features_answered = self._features_at_round = 0
        self.state, self.detail = "connected", ""
        self.counters["connections"] += 1
        held = set(welcome.checkpoint_ids)
        self._held &= held
        for checkpoint_id in held - self._held:
            self._send_drop(checkpoint_id)
        self._on_connection(True)
        log.info(
            "drafter_connected",
            address=stream.address,
            version=welcome.version,
            shares_memory=welcome.shares_memory,
        )

    def _lose(self, stream: Stream, detail: str) -> None:
        stream.close()
        # at once: what else holds a stream that was lost goes in its own time
        stream.memory = None
        self._stream = None
        self._unanswered_round = None
        self.state, self.detail = "connecting", detail
        self.counters["losses"] += 1
        self._capturing.clear()
        for context in self._contexts.values():
            context.close()
        self._on_connection(False)
        log.warning("drafter_lost", address=self.address, detail=detail)

    def _unreachable(self, address: str, detail: str, refused: bool) -> None:
        """A dial came to nothing. Called from the dialler's thread."""
        # once a cause, not once a dial
        if detail != self.detail:
            log.warning("drafter_unreachable", address=address, detail=detail)
        # whoever sees the state may ask why
        self.detail = detail
        self.state = "refused" if refused else "connecting"

    def _feature_memory(self) -> FeatureMemory:
        """Memory for all that may be unanswered at once."""
        return FeatureMemory(
            row_bytes=self._row_bytes,
            round_rows=self._hello.max_concurrency * self._width,
            message_rows=self._message_rows,
            messages=UNANSWERED_FEATURES,
        )
