"""DraftService: calls in, one engine thread, replies out.

gRPC's threads never touch the model. Each stream has a reader, which hands events to the engine's
inbox in order, and its handler, which sends what the engine answers. The engine thread owns the
model and every context; what goes wrong in one stream ends that stream alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import structlog
import torch

from drafter.checkpoints import FULL_RETRY_MS, CheckpointSlots, CheckpointTable, CheckpointTables
from drafter.config import MOST_CONCURRENCY, DraftConfig
from drafter.graphs import DraftGraphs
from drafter.metrics import DrafterMetrics, StreamRecord
from drafter.rounds import DraftRounds, TreeLimits, invalid
from outrider import PROTOCOL_REVISION, __version__, faults, pair
from outrider.faults import FaultError
from outrider.serving import MESSAGE_LIMIT
from outrider.shared_memory import OfferedMemory, step_aside
from outrider.tracing import Tracer, Trail
from outrider.tree_nodes import LEAST_PATHS, MOST_PATHS
from outrider.v1 import draft_service_pb2 as wire
from outrider.v1 import draft_service_pb2_grpc

log = structlog.get_logger("outrider.drafter")

# events of one stream that may wait for the engine or for gRPC to take their answer; a verifier
# that keeps to the protocol has far fewer on the way
STREAM_CREDITS = 64
# a stream holds a thread of the server's, so one that says nothing must end
HELLO_SECONDS = 10.0


@dataclass(frozen=True)
class Posted:
    """An event of a stream on its way to the engine; the end of the stream without a request."""

    stream: Stream
    request: wire.DraftRoundsRequest | None = None
    received_ns: int = 0
    in_memory: bool = False  # where its answer belongs too


class Stream:
    """One DraftRounds call, between gRPC's threads and the engine's."""

    def __init__(self) -> None:
        self.rounds: DraftRounds | None = None  # from Hello on
        self.memory: OfferedMemory | None = None  # likewise, where it is shared
        self.event_count = 0  # of the events that came by the call, those that were applied
        self.checkpoints: CheckpointTable | None = None  # likewise
        self.verifier_id = b""
        self.max_concurrency = 0  # B that its Hello reserved
        self.record = StreamRecord(Tracer("outrider-drafter"))  # the engine's from Hello on
        self.ended = False
        self._heard = False  # whether anything came
        self._outbox: queue.SimpleQueue[wire.DraftRoundsResponse | FaultError | None]
        self._outbox = queue.SimpleQueue()
        self._credits = threading.Semaphore(STREAM_CREDITS)

    def read(self, requests: Iterator[wire.DraftRoundsRequest], engine: Engine) -> None:
        """Hands every event to the engine, then the end; the reader thread runs this."""
        try:
            for request in requests:
                received_ns = time.monotonic_ns()
                engine.counters["bytes_received"] += request.ByteSize()
                self._heard = True
                self._credits.acquire()
                if self.ended:
                    return
                engine.post(self, request, received_ns)
        except grpc.RpcError:
            log.info("stream_lost", verifier_id=self.verifier_id.hex())
        finally:
            engine.hang_up(self)

    def replies(self) -> Iterator[wire.DraftRoundsResponse]:
        """What to send, in order, until the stream ends.

        Raises:
            FaultError: What ended it, if it was not the verifier's own wish.
        """
        patience: float | None = HELLO_SECONDS
        while True:
            try:
                answer = self._outbox.get(timeout=patience)
            except queue.Empty:
                if not self._heard:
                    raise invalid(
                        "first event", f"hello within {HELLO_SECONDS:g} s", "none"
                    ) from None
                patience = None
                continue
            patience = None
            if answer is None:
                return
            if isinstance(answer, FaultError):
                raise answer
            yield answer
            self._credits.release()

    def answer(self, reply: wire.DraftRoundsResponse | None) -> None:
        """Takes the outcome of one event of the call; None when it has no answer."""
        if reply is None:
            self._credits.release()
        else:
            self._outbox.put(reply)

    def answer_in_memory(self, reply: wire.DraftRoundsResponse) -> None:
        """Takes the outcome of a Round that was left in memory."""
        assert self.memory is not None
        if not self.memory.post_reply(reply.round_reply.round_index, reply):
            self._credits.acquire(blocking=False)  # which sending it gives back
            self._outbox.put(reply)

    def round_in_memory(self) -> wire.DraftRoundsRequest | None:
        """The next Round, if it lies in memory and all events before it have been applied.

        Raises:
            FaultError: What lies there is no message.
        """
        if self.memory is None or self.rounds is None:
            return None
        return self.memory.take_round(self.rounds.round_index + 1, self.event_count)

    def end(self, fault: FaultError | None) -> None:
        """Ends the call after everything answered so far."""
        self.ended = True
        self._outbox.put(fault)
        self._credits.release()  # wakes a reader that waits for one


class Engine:
    """The thread that owns the model and applies the events of all streams, one at a time."""

    def __init__(
        self,
        config: DraftConfig,
        geometry: wire.DraftGeometry,
        graphs: DraftGraphs,
        metrics: DrafterMetrics | None = None,
        tracer: Tracer | None = None,
        *,
        spin_ns: int = 0,
    ) -> None:
        """Starts the thread.

        Args:
            config: Pair, widths, memory.
            geometry: What verifiers are compared with.
            graphs: The model and all contexts.
            metrics: Counts what happens here.
            tracer: Makes spans.
            spin_ns: How long after a Round the thread looks for the next one in shared memory
                rather than sleep; 0 has every Round come by its stream.
        """
        self.config = config
        self.geometry = geometry
        self.counters: Counter[str] = Counter()
        self._graphs = graphs
        slots = CheckpointSlots(graphs.memory, config.checkpoint_host_bytes)
        self._checkpoints = CheckpointTables(slots, config.checkpoint_grace, self.counters)
        self.metrics = metrics or DrafterMetrics()
        self._tracer = tracer or Tracer("outrider-drafter")
        self._streams: dict[Stream, None] = {}  # after their Hello
        self._inbox: queue.SimpleQueue[Posted | None] = queue.SimpleQueue()
        self._spin_ns = spin_ns
        self._looks_until = 0
        self.metrics.watch(self)
        self._thread = threading.Thread(target=self._run, name="draft-engine", daemon=True)
        self._thread.start()

    def post(self, stream: Stream, request: wire.DraftRoundsRequest, received_ns: int) -> None:
        """Queues one event."""
        self._inbox.put(Posted(stream, request, received_ns))

    def hang_up(self, stream: Stream) -> None:
        """Queues the end of a stream: whatever it holds is released. Idempotent."""
        self._inbox.put(Posted(stream))

    def drain(self) -> None:
        """Has every stream, now and from now on, end with DRAINING; events queued so far apply."""
        self._inbox.put(None)

    def close(self) -> None:
        """Ends the thread, once no call is left that could wait for it."""
        self._inbox.put(None)
        self._thread.join()

    def stream_count(self) -> float:
        """Live streams of verifiers."""
        return len(self._streams)

    def occupancy(self) -> dict[str, float]:
        """Contexts, used and free."""
        free, most = self._graphs.memory.free_count, self.config.max_concurrency
        return {"used": most - free, "free": free}

    def describe(self) -> wire.GetDraftInfoResponse:
        """What GetDraftInfo answers; callable from any thread."""
        config, streams = self.config, list(self._streams)
        reserved = sum(stream.max_concurrency for stream in streams)
        return wire.GetDraftInfoResponse(
            version=__version__,
            protocol_revision=PROTOCOL_REVISION,
            geometry=self.geometry,
            draft_tokens=config.draft_tokens,
            max_concurrency=config.max_concurrency,
            free_sequences=config.max_concurrency - reserved,
            checkpoint_slots=self._checkpoints.planned,
            max_context=config.max_context,
            device=str(config.device),
            stream_count=len(streams),
            layer_causal=config.draft.layer_causal,
            counters=dict(self.counters),
            tree_nodes=config.tree_nodes,
        )

    def _run(self) -> None:
        with torch.inference_mode(), self._graphs.stream():
            while (posted := self._next()) is not None:
                self._apply(posted)
        for stream in list(self._streams):
            self._end(stream, draining())
        # late calls must hear of it, so that no handler waits for an answer for ever
        while (posted := self._inbox.get()) is not None:
            if not posted.stream.ended:
                self._end(posted.stream, draining())

    def _next(self) -> Posted | None:
        """The next event: looked for while Rounds may be left in memory, else waited for."""
        if self._looks_until:
            while time.monotonic_ns() < self._looks_until:
                if (posted := self._look()) is not None:
                    return posted
                if not self._inbox.empty():
                    return self._inbox.get()
                step_aside()
            self._looks_until = 0
            self._say_whether_it_looks()
        # a Round may have been left before that was seen
        return self._look() or self._inbox.get()

    def _look(self) -> Posted | None:
        """A Round that was left in memory, if there is one."""
        for stream in self._streams:
            if stream.memory is None:
                continue
            try:
                request = stream.round_in_memory()
            except FaultError as fault:
                self._end(stream, fault)
                return None
            if request is not None:
                return Posted(stream, request, time.monotonic_ns(), in_memory=True)
        return None

    def _look_on(self) -> None:
        """Begins to look, or goes on: another Round will follow the one that was applied."""
        if self._spin_ns:
            began = not self._looks_until
            self._looks_until = time.monotonic_ns() + self._spin_ns
            if began:
                self._say_whether_it_looks()

    def _say_whether_it_looks(self) -> None:
        for stream in self._streams:
            if stream.memory is not None:
                stream.memory.look(bool(self._looks_until))

    def _apply(self, posted: Posted) -> None:
        stream, request = posted.stream, posted.request
        if stream.ended:
            return
        if request is None:
            self._end(stream, None)
            return
        stream.event_count += not posted.in_memory
        try:
            reply = (
                self._welcome(stream, request)
                if stream.rounds is None
                else stream.rounds.apply(request)
            )
            if request.HasField("round"):
                self._look_on()
        except FaultError as fault:
            self._end(stream, fault)
            return
        except Exception as error:
            # the edge: whatever a round raised must reach its verifier and no other
            log.exception("engine_failed", verifier_id=stream.verifier_id.hex())
            self._end(stream, FaultError("INTERNAL", f"drafter: {type(error).__name__}: {error}"))
            return
        if reply is not None and reply.WhichOneof("event") == "round_reply":
            reply.round_reply.service_ns = time.monotonic_ns() - posted.received_ns
        if posted.in_memory and reply is not None:
            stream.answer_in_memory(reply)
        else:
            stream.answer(reply)
        self._record(stream, request, reply)

    def _record(
        self,
        stream: Stream,
        request: wire.DraftRoundsRequest,
        reply: wire.DraftRoundsResponse | None,
    ) -> None:
        """Counts and logs an event, after its answer is on its way."""
        if reply is not None:
            self.counters["bytes_sent"] += reply.ByteSize()
        event = request.WhichOneof("event")
        if event in ("open", "restore", "fork"):
            begun = getattr(request, event)
            trail = Trail(
                request_id=begun.trail.request_id,
                x_request_id=begun.trail.x_request_id,
                traceparent=begun.trail.traceparent,
            )
            stream.record.begun(begun.sequence_id, begun.epoch, trail, event)
        elif event == "release":
            stream.record.released(request.release.sequence_id)
        elif event == "round" and reply is not None:
            answer = reply.round_reply
            self.metrics.round_ended(answer.materialize_ns, answer.draft_ns, answer.service_ns)
            stream.record.round_ended(
                answer.round_index,
                [(row.sequence_id, len(row.proposal.token_ids)) for row in answer.rows],
                materialize_ns=answer.materialize_ns,
                draft_ns=answer.draft_ns,
                service_ns=answer.service_ns,
            )

    def _welcome(
        self, stream: Stream, request: wire.DraftRoundsRequest
    ) -> wire.DraftRoundsResponse:
        """Admits a verifier, or refuses it with what it got wrong."""
        first = request.WhichOneof("event")
        if first != "hello":
            raise invalid("first event", "hello", first or "none known")
        hello = request.hello
        expect_fitting(self.config, self.geometry, hello)
        for older in [each for each in self._streams if each.verifier_id == hello.verifier_id]:
            self._end(older, FaultError("REQUEST_CANCELLED", "stream: replaced by a newer one"))
        self._expect_room(hello)
        stream.checkpoints = self._checkpoints.claim(hello.verifier_id, hello.checkpoint_slots)
        stream.verifier_id = hello.verifier_id
        stream.record = StreamRecord(self._tracer)
        stream.max_concurrency = hello.max_concurrency
        stream.memory = shared = self._shared_memory(hello)
        if shared is not None:
            shared.look(bool(self._looks_until))
        stream.rounds = DraftRounds(
            self.config,
            self._graphs,
            hello.max_concurrency,
            stream.checkpoints,
            self.counters,
            shared,
            TreeLimits(hello.tree_nodes, hello.tree_paths),
        )
        self._streams[stream] = None
        self.counters["streams"] += 1
        log.info(
            "stream_welcomed",
            verifier_id=hello.verifier_id.hex(),
            max_concurrency=hello.max_concurrency,
            max_context=hello.max_context,
            shares_memory=shared is not None,
        )
        return wire.DraftRoundsResponse(
            welcome=wire.Welcome(
                max_context=self.config.max_context,
                max_message_bytes=MESSAGE_LIMIT,
                checkpoint_ids=stream.checkpoints.ids,
                version=__version__,
                shares_memory=shared is not None,
            )
        )

    def _shared_memory(self, hello: wire.Hello) -> OfferedMemory | None:
        """What the verifier offers to share, if it can be had here."""
        if not hello.HasField("shared_memory"):
            return None
        row_bytes = self.config.feature_width * self.config.profile.activation.itemsize
        return OfferedMemory.open(hello.shared_memory, row_bytes)

    def _expect_room(self, hello: wire.Hello) -> None:
        reserved = sum(stream.max_concurrency for stream in self._streams)
        left = self.config.max_concurrency - reserved
        if hello.max_concurrency > left:
            raise FaultError(
                "DRAFTER_FULL",
                f"max_concurrency: expected at most {left}, got {hello.max_concurrency}",
                field="max_concurrency",
                expected=left,
                actual=hello.max_concurrency,
                retry_after_ms=FULL_RETRY_MS,
            )

    def _end(self, stream: Stream, fault: FaultError | None) -> None:
        if stream.rounds is not None:
            stream.rounds.close()
        if stream.checkpoints is not None:
            self._checkpoints.leave(stream.checkpoints)
        stream.record.closed()
        self._streams.pop(stream, None)
        if fault is not None:
            self.counters[f"ended_{fault.reason.lower()}"] += 1
        log.info(
            "stream_ended",
            verifier_id=stream.verifier_id.hex(),
            reason=None if fault is None else fault.reason,
            message=None if fault is None else fault.message,
        )
        stream.end(fault)


class DraftService(draft_service_pb2_grpc.DraftServiceServicer):
    """The servicer: connects calls to the engine once there is one."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._draining = False

    def register(self, server: grpc.Server) -> None:
        """Adds the service to a server that has not started."""
        register = draft_service_pb2_grpc.add_DraftServiceServicer_to_server
        register(self, server)  # type: ignore[no-untyped-call]

    def attach(self, engine: Engine) -> None:
        """Starts to serve; until then every call is refused with LOADING."""
        self._engine = engine

    def drain(self) -> None:
        """Ends every stream and refuses new ones."""
        self._draining = True
        if self._engine is not None:
            self._engine.drain()

    def close(self) -> None:
        """Ends the engine, after the server has stopped."""
        if self._engine is not None:
            self._engine.close()

    def DraftRounds(
        self,
        request_iterator: Iterator[wire.DraftRoundsRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[wire.DraftRoundsResponse]:
        """Serves one verifier's stream; see the proto."""
        stream = Stream()
        try:
            engine = self._ready_engine()
            if not context.add_callback(lambda: engine.hang_up(stream)):
                return
            threading.Thread(
                target=stream.read,
                args=(request_iterator, engine),
                name="draft-reader",
                daemon=True,
            ).start()
            yield from stream.replies()
        except FaultError as fault:
            faults.abort(context, fault)

    def GetDraftInfo(
        self, request: wire.GetDraftInfoRequest, context: grpc.ServicerContext
    ) -> wire.GetDraftInfoResponse:
        """Describes the drafter; see the proto."""
        try:
            return self._ready_engine().describe()
        except FaultError as fault:
            faults.abort(context, fault)

    def _ready_engine(self) -> Engine:
        if self._draining:
            raise draining()
        if self._engine is None:
            raise FaultError("LOADING", "drafter: expected loaded weights, still loading")
        return self._engine


def expect_fitting(config: DraftConfig, geometry: wire.DraftGeometry, hello: wire.Hello) -> None:
    """Checks that a verifier runs the same pair and plans the same widths.

    Raises:
        FaultError: EVENT_INVALID for a malformed Hello, MODEL_MISMATCH with every field that
            differs, what the drafter expects and what the verifier said.
    """
    if len(hello.verifier_id) != 16:
        raise invalid("verifier_id", "16 bytes", len(hello.verifier_id))
    if not 1 <= hello.max_concurrency <= MOST_CONCURRENCY:
        raise invalid("max_concurrency", f"1..{MOST_CONCURRENCY}", hello.max_concurrency)
    differing = [
        (name, str(expected), str(actual))
        for name, expected, actual in (
            ("protocol_revision", PROTOCOL_REVISION, hello.protocol_revision),
            ("draft_tokens", config.draft_tokens, hello.draft_tokens),
        )
        if expected != actual
    ]
    differing += _tree_mismatches(config, hello)
    differing += pair.mismatches(geometry, hello.geometry)
    row_bytes = config.feature_width * config.profile.activation.itemsize
    round_bytes = hello.max_concurrency * config.width * row_bytes
    message_limit = min(MESSAGE_LIMIT, hello.max_message_bytes)
    if round_bytes > message_limit:
        differing.append(("max_message_bytes", f"at least {round_bytes}", str(message_limit)))
    if differing:
        raise FaultError(
            "MODEL_MISMATCH",
            "; ".join(f"{name}: expected {want}, got {got}" for name, want, got in differing),
            **{f"expected_{name}": want for name, want, _ in differing},
            **{f"actual_{name}": got for name, _, got in differing},
        )


def _tree_mismatches(config: DraftConfig, hello: wire.Hello) -> list[tuple[str, str, str]]:
    """What a verifier wants of trees that this drafter does not grow."""
    if not hello.tree_nodes and not hello.tree_paths:
        return []
    found = []
    least = config.draft_tokens + 2
    if not least <= hello.tree_nodes <= config.tree_nodes:
        grown = f"0 or {least}..{config.tree_nodes}" if config.tree_nodes else "0"
        found.append(("tree_nodes", grown, str(hello.tree_nodes)))
    if not (config.tree_nodes and LEAST_PATHS <= hello.tree_paths <= MOST_PATHS):
        allowed = f"{LEAST_PATHS}..{MOST_PATHS}" if config.tree_nodes else "0"
        found.append(("tree_paths", allowed, str(hello.tree_paths)))
    return found


def draining() -> FaultError:
    """The fault of a drafter that is about to stop."""
    return FaultError("DRAINING", "drafter: expected a serving one, it is stopping")
