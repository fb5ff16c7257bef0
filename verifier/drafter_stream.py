"""Streams to the drafter, one after the other, and the thread that keeps them coming.

`Dialler` dials, says Hello, offers shared memory, reads what comes into an inbox, and dials again
when a stream has ended; it knows nothing of sequences and rounds. `Stream` is one DraftRounds call,
which turns what `DrafterLink` decides into messages.
"""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import grpc
import structlog

from outrider import faults, serving, tensors
from outrider.shared_memory import FeatureMemory, on_this_host
from outrider.tensors import RowBytes
from outrider.tracing import NO_TRAIL, Trail
from outrider.v1 import draft_service_pb2 as wire
from outrider.v1 import draft_service_pb2_grpc, tensor_pb2
from verifier.draft_context import Context

log = structlog.get_logger("outrider.drafter_stream")

WELCOME_TIMEOUT_S = 10.0
ABANDON_S = 2.0  # a call that has not ended so long after its cancellation is left behind
# connections of its own for each dial: one that hangs must not be handed to the next
DIAL_OPTIONS = (*serving.CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
FIRST_BACKOFF_S, LAST_BACKOFF_S, REFUSED_BACKOFF_S = 0.1, 5.0, 30.0


def _packed(trail: Trail) -> wire.Trail | None:
    if trail == NO_TRAIL:
        return None
    return wire.Trail(
        request_id=trail.request_id,
        x_request_id=trail.x_request_id,
        traceparent=trail.traceparent,
    )


class Stream:
    """One DraftRounds call: an outgoing queue and the call that drains it.

    Sending never blocks. A message of a context says what the context says when it is sent, so the
    context is changed first.

    ``memory`` holds the features of its messages, once Welcome has said so; until then it is what
    Hello offers.
    """

    def __init__(
        self,
        stub: draft_service_pb2_grpc.DraftServiceStub,
        address: str,
        memory: FeatureMemory | None,
        row_type: tensor_pb2.DType,
        metadata: tuple[tuple[str, str], ...],
        counters: Counter[str],
    ) -> None:
        self.address = address
        self.memory = memory
        self._row_type = row_type
        self.closed_ns = 0  # when it was closed from here, if it was
        self._counters = counters
        self._outgoing: queue.SimpleQueue[wire.DraftRoundsRequest | None] = queue.SimpleQueue()
        self._queued = 0  # events handed to the stream
        self.call = stub.DraftRounds(self._requests(), metadata=metadata)

    def _requests(self) -> Iterator[wire.DraftRoundsRequest]:
        while (message := self._outgoing.get()) is not None:
            self._counters["bytes_sent"] += message.ByteSize()
            yield message

    def send(self, **event: object) -> None:
        """Queues one message, named as an arm of ``event``."""
        self._queue(wire.DraftRoundsRequest(**event))  # type: ignore[arg-type]

    def _queue(self, request: wire.DraftRoundsRequest) -> None:
        self._queued += 1
        self._outgoing.put(request)

    def send_hello(self, hello: wire.Hello) -> None:
        """Says Hello, which offers this stream's memory where it has some."""
        if self.memory is not None:
            offering = wire.Hello()
            offering.CopyFrom(hello)
            offering.shared_memory.CopyFrom(self.memory.offer())
            hello = offering
        self.send(hello=hello)

    def send_open(self, context: Context) -> None:
        """Starts an empty context under its epoch."""
        self.send(
            open=wire.Open(
                sequence_id=context.sequence_id,
                epoch=context.epoch,
                coverage_first=context.coverage_first,
                trail=_packed(context.trail),
            )
        )

    def send_release(self, context: Context) -> None:
        """Frees what the drafter holds of a context."""
        self.send(release=wire.Release(sequence_id=context.sequence_id, epoch=context.epoch))

    def send_features(self, context: Context, first: int, rows: RowBytes) -> None:
        """Sends feature rows of positions [first, first + n)."""
        message = wire.Features(
            sequence_id=context.sequence_id, epoch=context.epoch, first_position=first
        )
        if self.memory is None:
            message.rows.CopyFrom(tensors.encode_rows(rows, self._row_type))
        else:
            message.shared_rows.CopyFrom(self.memory.put_message(rows))
        self.send(features=message)

    def begin_round(self) -> wire.DraftRoundsRequest:
        """A Round without rows, which is a barrier; the one before must have been answered.

        It is filled in where it is, since messages that are put into others are copied.
        """
        if self.memory is not None:
            self.memory.begin_round()
        request = wire.DraftRoundsRequest()
        request.round.SetInParent()
        return request

    def add_row(
        self, round_: wire.Round, context: Context, first: int, rows: RowBytes | None
    ) -> wire.RoundRow:
        """Adds a row to the Round that was begun, with feature rows of [first, first + n)."""
        row: wire.RoundRow = round_.rows.add()
        row.sequence_id, row.epoch = context.sequence_id, context.epoch
        row.first_position = first
        if rows is not None and self.memory is None:
            row.features.CopyFrom(tensors.encode_rows(rows, self._row_type))
        elif rows is not None and self.memory is not None:
            row.shared_features.CopyFrom(self.memory.put_round_rows(rows))
        return row

    def send_round(self, request: wire.DraftRoundsRequest, *, awaited: bool) -> bool:
        """Sends the Round that was begun.

        Args:
            request: The Round, numbered.
            awaited: Whether nothing else will be sent before it is answered.

        Returns:
            Whether it was left in memory, for `take_reply` to find the answer there.
        """
        if awaited and self.memory is not None:
            index = request.round.round_index
            if self.memory.post_round(index, self._queued, request):
                self._counters["rounds_in_memory"] += 1
                return True
        self._queue(request)
        return False

    def take_reply(self, round_index: int) -> wire.DraftRoundsResponse | None:
        """The answer to a Round that was left in memory, once it is there.

        Raises:
            FaultError: It is no message.
        """
        return None if self.memory is None else self.memory.take_reply(round_index)

    def send_look(self) -> None:
        """Has a drafter that sleeps look for what was left in memory."""
        self.send(look=wire.Look())

    def send_capture(self, context: Context, checkpoint_id: int, position: int) -> None:
        """Keeps a context, which stands at ``position``, under an id."""
        self.send(
            capture=wire.Capture(
                checkpoint_id=checkpoint_id,
                sequence_id=context.sequence_id,
                epoch=context.epoch,
                context_frontier=position,
            )
        )

    def send_restore(self, context: Context, checkpoint_id: int) -> None:
        """Starts a context from what is kept under an id."""
        self.send(
            restore=wire.Restore(
                checkpoint_id=checkpoint_id,
                sequence_id=context.sequence_id,
                epoch=context.epoch,
                context_frontier=context.sent_frontier,
                trail=_packed(context.trail),
            )
        )

    def send_fork(self, source: Context, context: Context) -> None:
        """Starts a context as a copy of another where that stands."""
        self.send(
            fork=wire.Fork(
                source_sequence_id=source.sequence_id,
                source_epoch=source.epoch,
                sequence_id=context.sequence_id,
                epoch=context.epoch,
                context_frontier=context.sent_frontier,
                trail=_packed(context.trail),
            )
        )

    def send_drop(self, checkpoint_id: int) -> None:
        """Lets go of what is kept under an id."""
        self.send(drop=wire.Drop(checkpoint_id=checkpoint_id))

    def close(self) -> None:
        """Ends the call, which releases every sequence on it. Idempotent, from any thread."""
        self.closed_ns = self.closed_ns or time.monotonic_ns()
        self._outgoing.put(None)
        self.call.cancel()


@dataclass(frozen=True)
class Arrived:
    """An inbox entry: a message of a stream, its Welcome, or its end."""

    stream: Stream
    message: wire.DraftRoundsResponse | None = None
    ended: str = ""


@dataclass(eq=False)
class _Call:
    """How a call goes, which its reader writes and the thread that dials reads."""

    stream: Stream
    channel: grpc.Channel
    silence: threading.Timer  # closes the stream unless something arrives before
    welcomed: bool = False
    refused: bool = False
    detail: str = "the stream ended"
    ended: threading.Event = field(default_factory=threading.Event)


class Dialler:
    """Keeps a stream to the drafter, on a thread of its own, for as long as it runs.

    Args:
        address: gRPC targets, separated by commas, which are dialled in turn.
        hello: First message of every stream.
        on_event: Called from this thread when ``inbox`` has grown; must not block.
        on_failure: Called from this thread with the address, the cause and whether it was a
            refusal, when a stream ended before its Welcome; must not block.
        make_memory: Makes the memory to offer to a drafter on this host; None offers none.
        counters: Where bytes and abandoned calls are counted.
        credentials: Channel credentials; None is plain text.
        metadata: Sent with every dial.

    Attributes:
        inbox: What has arrived, in order: the messages of a stream and then its end, which a
            stream without a Welcome does not have.
    """

    def __init__(
        self,
        address: str,
        hello: wire.Hello,
        *,
        on_event: Callable[[], None],
        on_failure: Callable[[str, str, bool], None],
        make_memory: Callable[[], FeatureMemory] | None,
        counters: Counter[str],
        credentials: grpc.ChannelCredentials | None,
        metadata: Sequence[tuple[str, str]],
    ) -> None:
        self.inbox: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        self._addresses = itertools.cycle(address.split(","))
        self._hello = hello
        self._on_event = on_event
        self._on_failure = on_failure
        self._make_memory = make_memory
        self._offered: FeatureMemory | None = None  # made, and not taken by any drafter yet
        self._counters = counters
        self._credentials = credentials
        self._metadata = tuple(metadata)
        self._stopping = threading.Event()
        self._stream: Stream | None = None  # the last that was dialled
        self._thread = threading.Thread(target=self._run, name="drafter-link", daemon=True)

    def start(self) -> None:
        """Starts dialling."""
        self._thread.start()

    def stop(self) -> None:
        """Closes the stream, which releases every sequence on it, and dials no more."""
        self._stopping.set()
        if self._stream is not None:
            self._stream.close()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop; a Welcome that arrives after that is too late."""
        return self._stopping.is_set()

    def _run(self) -> None:
        """Dial, Hello, read to the end, back off, again."""
        backoff = FIRST_BACKOFF_S
        while not self.stopping:
            address = next(self._addresses)
            call = self._dial(address)
            if self.stopping:
                break
            if call.welcomed:
                backoff = FIRST_BACKOFF_S
                self._deliver(Arrived(call.stream, ended=call.detail))
            else:
                self._on_failure(address, call.detail, call.refused)
            pause = REFUSED_BACKOFF_S if call.refused else backoff
            self._stopping.wait(pause * random.uniform(0.8, 1.2))
            backoff = min(LAST_BACKOFF_S, backoff * 2)
        self._withdraw_memory()

    def _dial(self, address: str) -> _Call:
        """One stream from its dial to its end, or until its call is left behind."""
        channel = self._channel(address)
        stub = draft_service_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
        memory = self._memory_to_offer(address)
        stream = Stream(
            stub,
            address,
            memory,
            self._hello.geometry.activation_dtype,
            self._metadata,
            self._counters,
        )
        self._stream = stream
        # a peer that takes the call and says nothing would hold the dial for ever
        silence = threading.Timer(WELCOME_TIMEOUT_S, stream.close)
        silence.daemon = True
        silence.start()
        call = _Call(stream, channel, silence)
        # a thread of its own: a call may outlive its cancellation, and must not hold the dial
        reader = threading.Thread(
            target=self._read, args=(call,), name="drafter-reader", daemon=True
        )
        reader.start()
        while not call.ended.wait(ABANDON_S):
            if stream.closed_ns and time.monotonic_ns() - stream.closed_ns > ABANDON_S * 1e9:
                self._counters["abandoned_calls"] += 1
                break
        silence.cancel()
        # a call that was left behind may yet say otherwise
        return replace(call)

    def _read(self, call: _Call) -> None:
        """Says Hello and delivers what comes, until the call ends."""
        try:
            call.stream.send_hello(self._hello)
            for message in call.stream.call:
                self._counters["bytes_received"] += message.ByteSize()
                call.silence.cancel()
                if not call.welcomed:
                    # whether it was taken or not, nobody will look for it any more
                    self._withdraw_memory()
                call.welcomed = True
                self._deliver(Arrived(call.stream, message))
        except grpc.RpcError as error:
            fault = faults.from_rpc_error(error)
            call.detail = f"{fault.reason}: {fault.message}"
            call.refused = fault.reason == "MODEL_MISMATCH"
        finally:
            call.ended.set()
            call.stream.close()
            call.channel.close()

    def _memory_to_offer(self, address: str) -> FeatureMemory | None:
        """Memory that no drafter has taken yet; None where there is none to share."""
        if not on_this_host(address):
            return None
        if self._make_memory is not None and self._offered is None:
            try:
                self._offered = self._make_memory()
            except OSError as error:
                self._make_memory = None
                log.warning("no_shared_memory", reason=str(error))
        return self._offered

    def _withdraw_memory(self) -> None:
        if self._offered is not None:
            self._offered.unlink()
            self._offered = None

    def _channel(self, address: str) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(address, options=DIAL_OPTIONS)
        return grpc.secure_channel(address, self._credentials, options=DIAL_OPTIONS)

    def _deliver(self, arrived: Arrived) -> None:
        self.inbox.put(arrived)
        self._on_event()
