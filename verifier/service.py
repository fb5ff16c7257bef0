"""The public service: unpacks a message, calls validation and engine, packs what comes back.

One event loop answers all calls. Long tokenizing goes to a worker thread; nothing here touches
tensors. The engine publishes from its own thread into a queue of the call's.
"""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc.aio
import structlog
from google.protobuf.message import Message

import outrider
from outrider import serving
from outrider.faults import FaultError, abort_async
from outrider.guard import Guard
from outrider.tracing import X_REQUEST_ID, Trail, is_header
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import generation_service_pb2_grpc as pb_grpc
from verifier import validation
from verifier.metrics import VerifierMetrics
from verifier.request import (
    Delta,
    Finish,
    FinishReason,
    Request,
    Sink,
    TokenLogprobs,
    TokenOrigin,
    Usage,
)
from verifier.text import Text
from verifier.validation import Chat, ChatTurn, Checked, Limits, RequestFields, SamplingFields

if TYPE_CHECKING:
    from verifier.scheduler import EngineStatus

log = structlog.get_logger("outrider.service")

# longer messages are checked and tokenized off the event loop; shorter ones cost less than a thread
_INLINE_BYTES = 8192
# one thread for all of them: side by side they would starve the engine and multiply their memory
_LONG_TEXTS = ThreadPoolExecutor(1, thread_name_prefix="long-texts")
_TIMER_SLACK_S = 0.01  # by which gRPC may cancel before a deadline
# a deadline further away than this is none, seconds
_FAR = 10 * 365 * 86400.0

M = TypeVar("M", bound=Message)
R = TypeVar("R")


class Engine(Protocol):
    """What the service asks of the engine; safe to call from the event loop."""

    def submit(self, requests: Sequence[Request], sinks: Sequence[Sink]) -> None:
        """Queues the samples of one request, all or none; raises FaultError."""

    def cancel(self, request_id: str, sinks: Sequence[Sink] | None = None) -> bool:
        """Ends every sample of a request, or those that publish to ``sinks``, soon. Idempotent.

        False when none is running.
        """

    def wake(self) -> None:
        """Makes the engine look at its samples' sinks again."""

    def status(self) -> EngineStatus:
        """What runs and waits now."""

    def positions(self) -> tuple[int, int]:
        """Positions in the pages that running samples hold, and in all pages."""

    def forget_prefixes(self) -> Future[bool]:
        """Drops every checkpoint soon; False, and nothing is dropped, if samples run or wait."""


@dataclass(frozen=True)
class ModelFacts:
    """What GetModelInfo tells of the loaded pair."""

    model_name: str
    architecture: str
    vocab_size: int
    public_vocab: int
    max_context: int
    eos_token_ids: frozenset[int]
    layer_count: int
    hidden_size: int
    draft_format: str  # "dflash" or "dflash2"
    draft_tokens: int  # K
    target_layer_ids: tuple[int, ...]


@dataclass(frozen=True)
class ServerFacts:
    """What GetServerInfo tells of the process, beside the engine's status."""

    max_concurrency: int  # B
    max_queue: int
    device: str
    dtype: str
    load_format: str = "auto"  # or "random": weights are drawn and the output is noise


@dataclass(frozen=True)
class Backend:
    """Everything that exists once the weights are loaded."""

    engine: Engine
    text: Text
    model: ModelFacts
    server: ServerFacts
    limits: Limits
    ready_ns: int
    reader_timeout_ns: int = 30_000_000_000  # longest pause for a reader that is behind

    @classmethod
    def of(
        cls,
        engine: Engine,
        text: Text,
        model: ModelFacts,
        server: ServerFacts,
        *,
        max_prompt_bytes: int | None = None,
        generation_config: dict[str, Any] | None = None,
        reader_timeout_ms: int = 30_000,
        keeps_prefixes: bool = False,
    ) -> Backend:
        """A backend that is ready now.

        Args:
            engine: Runs requests.
            text: The target's tokenizer and template.
            model: Facts of the pair.
            server: Facts of the process.
            max_prompt_bytes: Largest prompt text; None chooses by the context.
            generation_config: Gives absent sampling fields their values; None leaves them neutral.
            reader_timeout_ms: Longest pause for a reader that is behind.
            keeps_prefixes: Whether prefixes of prompts are kept.
        """
        limits = Limits(
            vocab_size=model.vocab_size,
            public_vocab=model.public_vocab,
            max_context=model.max_context,
            draft_tokens=model.draft_tokens,
            eos_token_ids=model.eos_token_ids,
            max_prompt_bytes=max_prompt_bytes or validation.default_prompt_bytes(model.max_context),
            keeps_prefixes=keeps_prefixes,
            defaults=validation.model_defaults(generation_config or {}),
        )
        ready_ns, timeout_ns = time.monotonic_ns(), reader_timeout_ms * 1_000_000
        return cls(engine, text, model, server, limits, ready_ns, timeout_ns)


Handler = Callable[["GenerationService", M, grpc.aio.ServicerContext[Any, Any]], Awaitable[R]]


def _edge(method: Handler[M, R]) -> Handler[M, R]:
    """The one place where what went wrong becomes a status."""

    @functools.wraps(method)
    async def handler(
        self: GenerationService, message: M, context: grpc.aio.ServicerContext[Any, Any]
    ) -> R:
        ending = "CANCELLED"
        try:
            answer = await method(self, message, context)
            ending = "OK"
            return answer
        except FaultError as error:
            fault = error
            ending = fault.code.name
        except grpc.aio.InternalError:
            # core could not hand a message over: the client has gone
            raise asyncio.CancelledError from None
        except Exception:
            if context.done():
                # the client left while a message was on its way to it
                raise
            ending = "INTERNAL"
            error_id = uuid.uuid4().hex[:12]
            log.exception("call_failed", method=method.__name__, error_id=error_id)
            fault = FaultError(
                "INTERNAL",
                f"{method.__name__}: failed unexpectedly; the log has it under {error_id}",
                error_id=error_id,
            )
        finally:
            if method.__name__ == "Generate":
                if ending == "CANCELLED" and _out_of_time(context):
                    ending = "DEADLINE_EXCEEDED"
                self.metrics.calls[ending] += 1
        await abort_async(context, fault)

    return handler


class GenerationService(pb_grpc.GenerationServiceServicer):
    """outrider.v1.GenerationService. Answers LOADING until `open`."""

    def __init__(self, metrics: VerifierMetrics | None = None) -> None:
        self.metrics = metrics or VerifierMetrics()
        self._backend: Backend | None = None
        self.health: serving.AsyncHealth | None = None

    def open(self, backend: Backend) -> None:
        """Begins to serve; call it on the server's loop."""
        self._backend = backend
        if self.health is not None:
            self.health.set_ready(True)

    def drafter_connected(self, connected: bool) -> None:
        """Says in health whether the drafter is there; call it on the server's loop."""
        if self.health is not None:
            self.health.set_peer(serving.DRAFT_SERVICE, connected)

    def close(self) -> None:
        """Turns readiness off and ends health watches, so that the server can drain."""
        if self.health is not None:
            self.health.close()

    def refused(self, method: str, fault: FaultError) -> None:
        """Counts a call that the guard ended before it came here."""
        if method.rpartition("/")[2] == "Generate":
            self.metrics.calls[fault.code.name] += 1

    @property
    def ready(self) -> bool:
        """Whether new requests are taken: not while weights load, nor while it drains."""
        return self.health is not None and self.health.ready

    @property
    def backend(self) -> Backend:
        """What serves; a FaultError LOADING before `open`."""
        if self._backend is None:
            raise FaultError("LOADING", "server: still loading weights", retry_after_ms=1000)
        return self._backend

    @_edge
    async def Generate(
        self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Streams the samples of one request."""
        arrival_ns = time.monotonic_ns()
        deadline_ns = _deadline_ns(context, arrival_ns)
        backend = self.backend
        trail = Trail.of(context.invocation_metadata())
        checked, prompt_ids, boundary = await _off_loop(_check, backend, message)
        requests = checked.requests(
            prompt_ids,
            backend.limits,
            arrival_ns=arrival_ns,
            deadline_ns=deadline_ns,
            trail=trail,
            boundary=boundary,
        )
        call = _Call(len(requests), backend.reader_timeout_ns, backend.engine.wake)
        backend.engine.submit(requests, call.sinks)
        shown = trail.x_request_id or checked.request_id
        try:
            if is_header(shown):
                await context.send_initial_metadata(((X_REQUEST_ID, shown),))
            while call.live_count:
                index, event = await call.next()
                await context.write(_pack_event(checked.request_id, index, event))
                call.written()
        except asyncio.CancelledError:
            call.raise_overdue()
            raise
        finally:
            if call.live_count:
                call.gone = True
                backend.engine.cancel(checked.request_id, call.sinks)

    @_edge
    async def Abort(
        self, message: pb.AbortRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.AbortResponse:
        """Ends a request; its samples finish as aborted."""
        return pb.AbortResponse(found=self.backend.engine.cancel(message.request_id))

    @_edge
    async def GetModelInfo(
        self, message: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetModelInfoResponse:
        """Describes the pair."""
        model = self.backend.model
        return pb.GetModelInfoResponse(
            model_name=model.model_name,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            public_vocab=model.public_vocab,
            max_context=model.max_context,
            eos_token_ids=sorted(model.eos_token_ids),
            layer_count=model.layer_count,
            hidden_size=model.hidden_size,
            draft_format=model.draft_format,
            draft_tokens=model.draft_tokens,
            target_layer_ids=model.target_layer_ids,
            has_chat_template=self.backend.text.has_template,
        )

    @_edge
    async def GetServerInfo(
        self, message: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.GetServerInfoResponse:
        """Describes the process and what it does now."""
        backend = self.backend
        server, status = backend.server, backend.engine.status()
        return pb.GetServerInfoResponse(
            version=outrider.__version__,
            protocol_revision=outrider.PROTOCOL_REVISION,
            max_concurrency=server.max_concurrency,
            max_queue=server.max_queue,
            max_message_bytes=serving.MESSAGE_LIMIT,
            max_prompt_bytes=backend.limits.max_prompt_bytes,
            device=server.device,
            dtype=server.dtype,
            load_format=server.load_format,
            drafter_state=_DRAFTER_STATES[status.drafter_state],
            drafter_address=status.drafter_address,
            drafter_detail=status.drafter_detail,
            resident_requests=status.resident,
            queued_requests=status.queued,
            counters=status.counters,
            uptime_seconds=(time.monotonic_ns() - backend.ready_ns) / 1e9,
        )

    @_edge
    async def Tokenize(
        self, message: pb.TokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.TokenizeResponse:
        """Text or messages to ids."""
        return await _off_loop(_tokenize, self.backend, message)

    @_edge
    async def Detokenize(
        self, message: pb.DetokenizeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DetokenizeResponse:
        """Ids to text."""
        return await _off_loop(_detokenize, self.backend, message)


def build_server(
    service: GenerationService,
    options: Sequence[tuple[str, int]] = serving.SERVER_OPTIONS,
    *,
    further: Mapping[str, Callable[[grpc.aio.Server, GenerationService], None]] | None = None,
    guard: Guard | None = None,
) -> grpc.aio.Server:
    """The server with the service, health and reflection; not bound and not started.

    Call it on the loop that will run it.

    Args:
        service: The public service.
        options: Channel arguments.
        further: Full names of services that translate to `service`, and what adds each.
        guard: The rules that every call must pass; None lets all callers in.
    """
    guard = guard or Guard()
    guard.on_refusal = service.refused
    interceptor = guard.asynchronous()
    server = grpc.aio.server(options=list(options), interceptors=(interceptor,))
    pb_grpc.add_GenerationServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    names = [serving.GENERATION_SERVICE]
    for name, add_to_server in (further or {}).items():
        add_to_server(server, service)
        names.append(name)
    service.health = serving.AsyncHealth(server, *names, peers=(serving.DRAFT_SERVICE,))
    serving.add_reflection(server, *names)
    return server


# --- one call's way from the engine thread to the loop


class _Call:
    """The bounded queue of one Generate call, between the engine thread and the loop.

    The engine publishes without waiting, so the bound works by asking: once `MOST_UNREAD` messages
    wait to be written, the call is full and its samples pause, until half of them are written. A
    call that stays paused for longer than its timeout is overdue, and ends with READER_TOO_SLOW at
    once: what waits is dropped, and the write in progress abandoned.

    Args:
        sample_count: Samples that will end.
        timeout_ns: Longest pause.
        wake: Makes the engine look again, when a pause ended.
    """

    MOST_UNREAD = 64

    def __init__(self, sample_count: int, timeout_ns: int, wake: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._handler = asyncio.current_task()
        self._queue: asyncio.Queue[tuple[int, Delta | Finish | FaultError]] = asyncio.Queue()
        self._timeout_ns = timeout_ns
        self._wake = wake
        # each is written by one thread alone: the engine's, the loop's
        self._put_count = 0
        self._written_count = 0
        self._paused_at_ns: int | None = None  # the engine's thread alone
        self._overdue: FaultError | None = None
        self.live_count = sample_count
        self.gone = False
        self.sinks = [_SampleSink(self, index) for index in range(sample_count)]

    # ---- engine thread

    def put(self, index: int, event: Delta | Finish | FaultError) -> None:
        """Hands over."""
        if self.gone:
            return
        self._put_count += 1
        try:
            if event is self._overdue:
                self._loop.call_soon_threadsafe(self._abandon)
            else:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, event))
        except RuntimeError:
            # the loop was closed, and the client with it
            self.gone = True

    @property
    def full(self) -> bool:
        """Whether the samples pause now."""
        unread = self._put_count - self._written_count
        if self._paused_at_ns is None and unread >= self.MOST_UNREAD:
            self._paused_at_ns = time.monotonic_ns()
        elif self._paused_at_ns is not None and unread <= self.MOST_UNREAD // 2:
            self._paused_at_ns = None
        return self._paused_at_ns is not None

    @property
    def overdue(self) -> FaultError | None:
        """The fault of a call that was paused for too long."""
        if self._overdue is None and self.full:
            assert self._paused_at_ns is not None
            waited_ns = time.monotonic_ns() - self._paused_at_ns
            if waited_ns > self._timeout_ns:
                limit_ms, waited_ms = self._timeout_ns // 1_000_000, waited_ns // 1_000_000
                self._overdue = FaultError(
                    "READER_TOO_SLOW",
                    f"reader: expected half of {self.MOST_UNREAD} messages read within {limit_ms} "
                    f"ms, waited {waited_ms} ms",
                    limit_ms=limit_ms,
                    waited_ms=waited_ms,
                )
        return self._overdue

    # ---- the loop

    async def next(self) -> tuple[int, Delta | Finish]:
        """The next event; raises the fault of a sample that failed."""
        index, event = await self._queue.get()
        if isinstance(event, FaultError):
            self.live_count -= 1
            raise event
        if isinstance(event, Finish):
            self.live_count -= 1
        return index, event

    def written(self) -> None:
        """Says that the event of the last `next` has left."""
        self._written_count += 1
        if self._put_count - self._written_count == self.MOST_UNREAD // 2:
            self._wake()

    def _abandon(self) -> None:
        """Interrupts the handler, wherever it waits: flow control may hold a write for ever."""
        if self.gone:  # it left meanwhile, or another sample was overdue before
            return
        self.gone = True
        self._queue = asyncio.Queue()
        if self._handler is not None:
            self._handler.cancel()

    def raise_overdue(self) -> None:
        """Raises the fault for which the handler was interrupted, if it was."""
        if self._overdue is not None and self.gone:
            assert self._handler is not None
            self._handler.uncancel()
            raise self._overdue


class _SampleSink:
    """One sample's `Sink`."""

    def __init__(self, call: _Call, index: int) -> None:
        self._call = call
        self._index = index

    def delta(self, delta: Delta) -> None:
        """Takes tokens."""
        self._call.put(self._index, delta)

    def finish(self, finish: Finish) -> None:
        """Takes the end."""
        self._call.put(self._index, finish)

    def fail(self, fault: FaultError) -> None:
        """Takes an error instead of an end."""
        self._call.put(self._index, fault)

    @property
    def gone(self) -> bool:
        """Whether the client left."""
        return self._call.gone

    @property
    def full(self) -> bool:
        """Whether the reader is behind."""
        return self._call.full

    @property
    def overdue(self) -> FaultError | None:
        """Whether it was behind for too long."""
        return self._call.overdue


async def _off_loop(function: Callable[[Backend, M], R], backend: Backend, message: M) -> R:
    """Calls, in the worker thread when the message is long."""
    if message.ByteSize() <= _INLINE_BYTES:
        return function(backend, message)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_LONG_TEXTS, function, backend, message)


def _check(backend: Backend, message: pb.GenerateRequest) -> tuple[Checked, tuple[int, ...], int]:
    text, limits = backend.text, backend.limits
    checked = validation.check(_unpack_request(message), limits, has_tokenizer=text.has_tokenizer)
    prompt = _unpack_prompt(message)
    ids = validation.prompt_ids(text, prompt, limits)
    return checked, ids, validation.prompt_boundary(text, prompt, ids, limits)


def _tokenize(backend: Backend, message: pb.TokenizeRequest) -> pb.TokenizeResponse:
    prompt = _unpack_input(message, "input")
    text = validation.prompt_text(backend.text, prompt, backend.limits)
    ids = backend.text.encode(text, rendered=isinstance(prompt, Chat))
    return pb.TokenizeResponse(token_ids=ids, text=text)


def _detokenize(backend: Backend, message: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
    validation.check_public_ids("token_ids", message.token_ids, backend.limits)
    ids, skip = message.token_ids, message.skip_special_tokens
    # before the text is made: a few bytes of ids may stand for a hundred times as many
    _require_fitting(backend.text.decoded_bytes(ids, skip_special_tokens=skip))
    text = backend.text.decode(ids, skip_special_tokens=skip)
    _require_fitting(len(text.encode()))
    return pb.DetokenizeResponse(text=text)


def _require_fitting(size: int) -> None:
    limit = serving.MESSAGE_LIMIT - 64
    if size > limit:
        raise FaultError(
            "MESSAGE_TOO_LARGE",
            f"text: expected at most {limit} bytes, got {size}",
            limit=limit,
            actual=size,
        )


def _out_of_time(context: grpc.aio.ServicerContext[Any, Any]) -> bool:
    """Whether a call that was cancelled has come to its deadline, where gRPC cancels it itself."""
    remaining = context.time_remaining()
    return remaining is not None and remaining <= _TIMER_SLACK_S


def _deadline_ns(context: grpc.aio.ServicerContext[Any, Any], now_ns: int) -> int | None:
    remaining = context.time_remaining()
    if remaining is None or remaining > _FAR:
        return None
    return now_ns + int(remaining * 1e9)


# --- messages to values


def _optional(message: Any, name: str) -> Any:
    """A field's value, or None where the client left it out."""
    return getattr(message, name) if message.HasField(name) else None


def _unpack_request(message: pb.GenerateRequest) -> RequestFields:
    return RequestFields(
        request_id=message.request_id or uuid.uuid4().hex,
        sampling=_unpack_sampling(message.sampling),
        max_tokens=_optional(message, "max_tokens"),
        min_tokens=_optional(message, "min_tokens"),
        stop=tuple(message.stop),
        stop_token_ids=message.stop_token_ids,
        ignore_eos=message.ignore_eos,
        n=_optional(message, "n"),
        logprobs=_optional(message, "logprobs"),
        draft_tokens=_optional(message, "draft_tokens"),
        return_rounds=message.return_rounds,
        draft_trees=_optional(message, "draft_trees"),
    )


def _unpack_sampling(message: pb.Sampling) -> SamplingFields:
    return SamplingFields(
        temperature=_optional(message, "temperature"),
        top_p=_optional(message, "top_p"),
        top_k=_optional(message, "top_k"),
        min_p=_optional(message, "min_p"),
        presence_penalty=_optional(message, "presence_penalty"),
        frequency_penalty=_optional(message, "frequency_penalty"),
        repetition_penalty=_optional(message, "repetition_penalty"),
        logit_bias=dict(message.logit_bias),
        seed=_optional(message, "seed"),
    )


def _unpack_prompt(message: pb.GenerateRequest) -> str | Sequence[int] | Chat | None:
    if message.WhichOneof("prompt") == "token_ids":
        ids: Sequence[int] = message.token_ids.ids
        return ids
    return _unpack_input(message, "prompt")


def _unpack_input(
    message: pb.GenerateRequest | pb.TokenizeRequest, oneof: str
) -> str | Chat | None:
    arm = message.WhichOneof(oneof)
    if arm == "text":
        text: str = message.text
        return text
    if arm == "chat":
        return _unpack_chat(message.chat)
    return None


def _unpack_chat(message: pb.Chat) -> Chat:
    return Chat(
        turns=tuple(
            ChatTurn(turn.role, turn.content, turn.reasoning_content, len(turn.media))
            for turn in message.messages
        ),
        tools=tuple(message.tools_json),
        enable_thinking=_optional(message, "enable_thinking"),
        add_generation_prompt=_optional(message, "add_generation_prompt"),
    )


# --- values to messages

_ORIGINS = {
    TokenOrigin.TARGET: pb.TOKEN_ORIGIN_TARGET,
    TokenOrigin.ACCEPTED: pb.TOKEN_ORIGIN_ACCEPTED,
    TokenOrigin.CORRECTION: pb.TOKEN_ORIGIN_CORRECTION,
    TokenOrigin.BONUS: pb.TOKEN_ORIGIN_BONUS,
}
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: pb.FINISH_REASON_ABORTED,
}
_DRAFTER_STATES = {
    "connected": pb.DRAFTER_STATE_CONNECTED,
    "connecting": pb.DRAFTER_STATE_CONNECTING,
    "refused": pb.DRAFTER_STATE_REFUSED,
}


def _pack_event(request_id: str, index: int, event: Delta | Finish) -> pb.GenerateResponse:
    if isinstance(event, Finish):
        return pb.GenerateResponse(
            request_id=request_id, sample_index=index, finish=_pack_finish(event, index)
        )
    return pb.GenerateResponse(
        request_id=request_id,
        sample_index=index,
        token_ids=event.token_ids,
        text=event.text,
        text_ends=event.text_ends,
        origins=[_ORIGINS[origin] for origin in event.origins],
        logprobs=[_pack_logprobs(entry) for entry in event.logprobs],
        rounds=[
            pb.RoundTrace(
                frontier=trace.frontier,
                proposed=trace.proposed,
                accepted=trace.accepted,
                committed=trace.committed,
                parents=trace.parents,
                columns=trace.columns,
            )
            for trace in event.rounds
        ],
    )


def _pack_logprobs(entry: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=entry.logprob,
        top_token_ids=entry.top_token_ids,
        top_logprobs=entry.top_logprobs,
    )


def _pack_finish(finish: Finish, index: int) -> pb.Finish:
    packed = pb.Finish(reason=_REASONS[finish.reason], usage=_pack_usage(finish.usage, index))
    if isinstance(finish.matched, str):
        packed.stop_string = finish.matched
    elif finish.matched is not None:
        packed.stop_token_id = finish.matched
    return packed


def _pack_usage(usage: Usage, index: int) -> pb.Usage:
    return pb.Usage(
        # the samples share one prompt
        prompt_tokens=usage.prompt_tokens if index == 0 else 0,
        cached_tokens=usage.cached_tokens if index == 0 else 0,
        output_tokens=usage.output_tokens,
        rounds=usage.rounds,
        proposed=usage.proposed,
        accepted=usage.accepted,
        accepted_per_position=usage.accepted_per_position,
        plain_rounds=usage.plain_rounds,
        undrafted_rounds=usage.undrafted_rounds,
        tree_rounds=usage.tree_rounds,
        side_accepted=usage.side_accepted,
        tree_columns=usage.tree_columns,
        seed=usage.seed,
        ttft_ns=usage.ttft_ns,
        queue_ns=usage.queue_ns,
        prefill_ns=usage.prefill_ns,
        draft_ns=usage.draft_ns,
        verify_ns=usage.verify_ns,
        wire_ns=usage.wire_ns,
        total_ns=usage.total_ns,
    )
