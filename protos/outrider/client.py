"""The SDK: `Client` and `AsyncClient` for a verifier's public service. Needs grpcio and protobuf.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=64, temperature=0).text)
        for delta in client.stream("Once upon a time", max_tokens=64):
            print(delta.text, end="", flush=True)

Every failed call raises a subclass of `ClientError` that carries the server's reason, message,
metadata and, where the server gave one, `retry_after` in seconds.
"""

from __future__ import annotations

import asyncio
import codecs
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import grpc
import grpc.aio

from outrider.faults import FaultError, from_rpc_error
from outrider.guard import bearer
from outrider.serving import CHANNEL_OPTIONS
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import generation_service_pb2_grpc as pb_grpc

# how often `wait_ready` asks again, seconds
_POLL = 0.1

T = TypeVar("T")


# --- errors


class ClientError(FaultError):
    """A call that failed; the base of all below."""


class InvalidRequestError(ClientError):
    """The request is wrong and would be wrong again: change it."""


class UnsupportedError(ClientError):
    """The server cannot do this at all, such as image input."""


class UnauthenticatedError(ClientError):
    """The server wants a bearer token that it knows."""


class OverloadedError(ClientError):
    """The server is busy; `retry_after` may say when to try again."""


class UnavailableError(ClientError):
    """Nobody serves at the address now: not reachable, loading, or draining."""


class DeadlineExceededError(ClientError, TimeoutError):
    """The call's timeout passed; the server dropped the request."""


class CancelledError(ClientError):
    """The call was cancelled."""


class ServerError(ClientError):
    """The server failed; its log says more."""


_KINDS: Mapping[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.ALREADY_EXISTS: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: InvalidRequestError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CancelledError,
}


def _error(error: grpc.RpcError) -> ClientError:
    fault = from_rpc_error(error)
    kind = _KINDS.get(fault.code, ServerError)
    if fault.reason == "MESSAGE_TOO_LARGE":
        kind = InvalidRequestError
    return kind.received(fault.reason, fault.message, fault.code, fault.metadata)


# --- what comes back


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability (natural) of a token under the raw target law, and the best alternatives."""

    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True)
class RoundTrace:
    """What one round did."""

    frontier: int
    proposed: tuple[int, ...]
    accepted: int
    committed: int
    parents: tuple[int, ...] = ()  # of a tree, the column that each proposed token continues
    columns: tuple[int, ...] = ()  # of a tree, those of the accepted tokens


@dataclass(frozen=True)
class Usage:
    """Counts and times (ns) of one sample."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    plain_rounds: int = 0
    undrafted_rounds: int = 0
    tree_rounds: int = 0
    side_accepted: int = 0
    tree_columns: int = 0
    seed: int = 0
    ttft_ns: int = 0
    queue_ns: int = 0
    prefill_ns: int = 0
    draft_ns: int = 0
    verify_ns: int = 0
    wire_ns: int = 0
    total_ns: int = 0


@dataclass(frozen=True)
class Finish:
    """How a sample ended."""

    reason: str  # "stop", "length" or "aborted"
    matched: int | str | None  # the stop id or stop string
    usage: Usage


@dataclass(frozen=True)
class Delta:
    """Tokens published together. token_ids, text_ends, origins (and logprobs) are parallel."""

    sample_index: int
    token_ids: tuple[int, ...]
    text: str
    text_ends: tuple[int, ...]  # bytes of text (UTF-8) before each token's end
    origins: tuple[str, ...]  # "target", "accepted", "correction" or "bonus"
    logprobs: tuple[TokenLogprobs, ...] = ()
    rounds: tuple[RoundTrace, ...] = ()
    finish: Finish | None = None

    def pieces(self) -> Iterator[tuple[int, str, str]]:
        """(token id, origin, text) of each token; a split character goes to its last token."""
        raw = self.text.encode()
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        first = 0
        for token_id, origin, end in zip(self.token_ids, self.origins, self.text_ends, strict=True):
            yield token_id, origin, decoder.decode(raw[first:end])
            first = max(first, end)


@dataclass(frozen=True)
class Completion:
    """A whole sample."""

    request_id: str
    sample_index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str  # "stop", "length" or "aborted"
    matched: int | str | None
    usage: Usage
    origins: tuple[str, ...]
    rounds: tuple[RoundTrace, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class Tokens:
    """Text or messages as the server would see them."""

    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class ModelInfo:
    """The loaded pair."""

    model_name: str
    architecture: str
    vocab_size: int
    public_vocab: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    layer_count: int
    hidden_size: int
    draft_format: str
    draft_tokens: int
    target_layer_ids: tuple[int, ...]
    has_chat_template: bool


@dataclass(frozen=True)
class ServerInfo:
    """The running server."""

    version: str
    protocol_revision: int
    max_concurrency: int
    max_queue: int
    max_message_bytes: int
    max_prompt_bytes: int
    device: str
    dtype: str
    drafter_state: str  # "connected", "connecting" or "refused"
    drafter_address: str
    drafter_detail: str
    resident_requests: int
    queued_requests: int
    counters: Mapping[str, int]
    uptime_seconds: float
    load_format: str = "auto"  # "random": the weights are drawn and the output is noise


# --- what goes out


class Message(TypedDict, total=False):
    """One chat message; role and content are needed."""

    role: str
    content: str
    reasoning_content: str
    media: Sequence[str]


class GenerateOptions(TypedDict, total=False):
    """Keywords of `generate` and `stream`. What is left out is neutral; 0 is a value.

    One of the positional prompt, prompt_ids and messages is given. The others mean what the field
    of the same name in generation_service.proto means; timeout is in seconds. x_request_id and
    traceparent (W3C) go along as metadata, into the logs and traces of both services.
    """

    prompt_ids: Iterable[int] | None
    messages: Sequence[Message] | None
    tools_json: Sequence[str]
    enable_thinking: bool | None
    add_generation_prompt: bool | None
    request_id: str | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str]
    stop_token_ids: Iterable[int]
    ignore_eos: bool | None
    n: int | None
    logprobs: int | None
    draft_tokens: int | None
    return_rounds: bool | None
    draft_trees: bool | None
    timeout: float | None
    x_request_id: str | None
    traceparent: str | None


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
_PLAIN = (
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "n",
    "logprobs",
    "draft_tokens",
    "return_rounds",
    "draft_trees",
)
_OPTIONS = frozenset(GenerateOptions.__annotations__)


def _request(prompt: str | None, options: GenerateOptions) -> pb.GenerateRequest:
    """The message of one call; fields left out or None stay absent.

    Raises:
        TypeError: For a keyword that does not exist.
        ValueError: For no prompt or several, or a value that its field cannot hold.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    unknown = given.keys() - _OPTIONS
    if unknown:
        raise TypeError(f"options: expected names of GenerateOptions, got {sorted(unknown)}")
    prompts = [prompt is not None, "prompt_ids" in given, "messages" in given]
    if sum(prompts) != 1:
        raise ValueError(
            f"prompt: expected one of prompt, prompt_ids and messages, got {sum(prompts)}"
        )
    request = pb.GenerateRequest(request_id=given.get("request_id") or uuid.uuid4().hex)
    for name in _PLAIN:
        if name in given:
            _set(request, name, given[name])
    for name in _SAMPLING:
        if name in given:
            _set(request.sampling, name, given[name])
    for token_id, bias in given.get("logit_bias", {}).items():
        request.sampling.logit_bias[token_id] = bias
    stop = given.get("stop", ())
    request.stop.extend([stop] if isinstance(stop, str) else stop)
    request.stop_token_ids.extend(given.get("stop_token_ids", ()))
    if prompt is not None:
        request.text = prompt
    elif "messages" in given:
        request.chat.CopyFrom(_chat(given["messages"], given))
    else:
        request.token_ids.SetInParent()
        _extend(request.token_ids.ids, "prompt_ids", given["prompt_ids"])
    return request


def _trail(options: GenerateOptions) -> Iterator[tuple[str, str]]:
    """The metadata by which a call is found again."""
    for name, value in (
        ("x-request-id", options.get("x_request_id")),
        ("traceparent", options.get("traceparent")),
    ):
        if value is not None:
            yield name, value


def _chat(messages: Sequence[Message], given: Mapping[str, Any]) -> pb.Chat:
    chat = pb.Chat(tools_json=given.get("tools_json", ()))
    for message in messages:
        chat.messages.add(**message)
    for name in ("enable_thinking", "add_generation_prompt"):
        if given.get(name) is not None:
            _set(chat, name, given[name])
    return chat


def _set(message: Any, name: str, value: object) -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: expected a value its field can hold, got {value!r}") from error


def _extend(ids: Any, name: str, values: Iterable[int]) -> None:
    for value in values:
        try:
            ids.append(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: expected 32-bit token ids, got {value!r}") from error


# --- messages to values


def _mirror(kind: type[T], message: Any, **special: object) -> T:
    """A dataclass from the fields of the same name; repeated ones become tuples, maps dicts."""
    values: dict[str, Any] = dict(special)
    for each in fields(kind):  # type: ignore[arg-type]
        if each.name not in values:
            value = getattr(message, each.name)
            if isinstance(value, Mapping):
                value = dict(value)
            elif isinstance(value, Sequence) and not isinstance(value, str):
                value = tuple(value)
            values[each.name] = value
    return kind(**values)


def _short(enum: Any, prefix: str, number: int) -> str:
    """An enum value without its prefix, lower case; "unknown" for one newer than this client."""
    if number not in enum.values():
        return "unknown"
    return str(enum.Name(number)).removeprefix(prefix).lower()


def _finish(message: pb.Finish) -> Finish:
    matched = message.WhichOneof("matched")
    return Finish(
        reason=_short(pb.FinishReason, "FINISH_REASON_", message.reason),
        matched=getattr(message, matched) if matched else None,
        usage=_mirror(Usage, message.usage),
    )


def _delta(message: pb.GenerateResponse) -> Delta:
    return Delta(
        sample_index=message.sample_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        text_ends=tuple(message.text_ends),
        origins=tuple(_short(pb.TokenOrigin, "TOKEN_ORIGIN_", each) for each in message.origins),
        logprobs=tuple(_mirror(TokenLogprobs, each) for each in message.logprobs),
        rounds=tuple(_mirror(RoundTrace, each) for each in message.rounds),
        finish=_finish(message.finish) if message.HasField("finish") else None,
    )


def _server_info(message: pb.GetServerInfoResponse) -> ServerInfo:
    state = _short(pb.DrafterState, "DRAFTER_STATE_", message.drafter_state)
    return _mirror(ServerInfo, message, drafter_state=state)


@dataclass
class _Sample:
    """One sample while its deltas arrive."""

    deltas: list[Delta] = field(default_factory=list)

    def completion(self, request_id: str, index: int) -> Completion:
        finish = self.deltas[-1].finish if self.deltas else None
        if finish is None:
            raise ServerError("INTERNAL", f"sample {index}: expected a finish, got the call's end")
        return Completion(
            request_id=request_id,
            sample_index=index,
            token_ids=tuple(each for delta in self.deltas for each in delta.token_ids),
            text="".join(delta.text for delta in self.deltas),
            finish_reason=finish.reason,
            matched=finish.matched,
            usage=finish.usage,
            origins=tuple(each for delta in self.deltas for each in delta.origins),
            rounds=tuple(each for delta in self.deltas for each in delta.rounds),
            logprobs=tuple(each for delta in self.deltas for each in delta.logprobs),
        )


class _Assembly:
    """Deltas of a call, sorted into its samples."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request_id = request.request_id
        self._count = max(1, request.n)  # any number: what it may be is the server's to say
        self._samples: defaultdict[int, _Sample] = defaultdict(_Sample)

    def add(self, delta: Delta) -> None:
        if delta.sample_index < self._count:
            self._samples[delta.sample_index].deltas.append(delta)

    def completions(self) -> list[Completion]:
        return [
            self._samples[index].completion(self._request_id, index) for index in range(self._count)
        ]


def _one(prompt: str | None, options: GenerateOptions) -> pb.GenerateRequest:
    """The request of a call that returns one completion: with its rounds unless declined."""
    if options.get("n") not in (None, 1):
        raise ValueError(f"n: expected 1, got {options['n']}; `samples` returns several")
    return _request(prompt, {"return_rounds": True, **options})


def _tokenize_request(
    text: str | None, messages: Sequence[Message] | None, options: Mapping[str, Any]
) -> pb.TokenizeRequest:
    if (text is None) == (messages is None):
        raise ValueError("text: expected one of text and messages, got both or neither")
    if messages is not None:
        return pb.TokenizeRequest(chat=_chat(messages, options))
    return pb.TokenizeRequest(text=text)


# --- the clients


class Stream(Iterator[Delta]):
    """Deltas of a running call. Leaving its `with` block, or `cancel`, frees the server."""

    def __init__(self, call: Any, request: pb.GenerateRequest) -> None:
        self._call = call
        self._assembly = _Assembly(request)
        self.request_id = request.request_id

    def __next__(self) -> Delta:
        try:
            delta = _delta(next(self._call))
        except grpc.RpcError as error:
            raise _error(error) from None
        except BaseException:
            self._call.cancel()  # nobody reads on, whether an interrupt or the plain end
            raise
        self._assembly.add(delta)
        return delta

    def cancel(self) -> None:
        """Cancels the request; a later `next` raises CancelledError. Callable from any thread."""
        self._call.cancel()

    def completions(self) -> list[Completion]:
        """Reads to the end and returns every sample."""
        for _ in self:
            pass
        return self._assembly.completions()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._call.cancel()


class Client:
    """A verifier at an address, over one channel; safe to share between threads.

    Args:
        address: "host:port" or "unix:path".
        options: Further channel arguments of gRPC.
        credentials: For a server with TLS, such as `grpc.ssl_channel_credentials(ca)`; None is
            plain text.
        token: Bearer token for a server that wants one.
    """

    def __init__(
        self,
        address: str,
        *,
        options: Sequence[tuple[str, Any]] = (),
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
    ) -> None:
        self.address = address
        arguments = (*CHANNEL_OPTIONS, *options)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=arguments)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=arguments)
        self._metadata = bearer(token)
        self._stub = pb_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Stream:
        """Starts a request and iterates its deltas as they arrive.

        Raises:
            ValueError: For no prompt or several, or a value that its field cannot hold.
            ClientError: From the iteration, by kind.
        """
        request = _request(prompt, options)
        return Stream(self._start(request, options), request)

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """One whole completion; raises as `stream` does."""
        request = _one(prompt, options)
        with Stream(self._start(request, options), request) as stream:
            return stream.completions()[0]

    def samples(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """n whole completions of one prompt; raises as `stream` does."""
        with self.stream(prompt, **options) as stream:
            return stream.completions()

    def chat(
        self, messages: Sequence[Message], /, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """The next assistant turn, rendered by the server's chat template."""
        options["messages"] = messages
        return self.generate(**options)

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        timeout: float | None = None,
        **template: Any,
    ) -> Tokens:
        """Token ids exactly as `generate` would see them."""
        request = _tokenize_request(text, messages, template)
        return _mirror(Tokens, self._call(self._stub.Tokenize, request, timeout))

    def detokenize(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Text of token ids."""
        request = pb.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
        _extend(request.token_ids, "token_ids", token_ids)
        return str(self._call(self._stub.Detokenize, request, timeout).text)

    def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """Cancels a request by id, whoever started it; says whether one was live."""
        request = pb.AbortRequest(request_id=request_id)
        return bool(self._call(self._stub.Abort, request, timeout).found)

    def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """The loaded pair."""
        reply = self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout)
        return _mirror(ModelInfo, reply)

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Limits, drafter state and counters."""
        reply = self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout)
        return _server_info(reply)

    def wait_ready(self, timeout: float = 60.0) -> ServerInfo:
        """Asks until the server answers.

        Raises:
            UnavailableError: When `timeout` seconds passed without an answer.
        """
        end = time.monotonic() + timeout
        while True:
            try:
                return self.server_info(timeout=max(_POLL, end - time.monotonic()))
            except UnavailableError:
                if time.monotonic() >= end:
                    raise
            time.sleep(_POLL)

    def close(self) -> None:
        """Closes the channel; running calls are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, request: pb.GenerateRequest, options: GenerateOptions) -> Any:
        metadata = (*self._metadata, *_trail(options))
        return self._stub.Generate(request, timeout=options.get("timeout"), metadata=metadata)

    def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            return method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _error(error) from None


class AsyncStream(AsyncIterator[Delta]):
    """`Stream` for asyncio."""

    def __init__(self, call: Any, request: pb.GenerateRequest) -> None:
        self._call = call
        self._messages = call.__aiter__()
        self._assembly = _Assembly(request)
        self.request_id = request.request_id

    async def __anext__(self) -> Delta:
        try:
            delta = _delta(await anext(self._messages))
        except grpc.RpcError as error:
            raise _error(error) from None
        except asyncio.CancelledError:
            if self._call.cancelled() and not _task_cancelled():
                raise CancelledError("REQUEST_CANCELLED", "the call was cancelled") from None
            self._call.cancel()
            raise
        self._assembly.add(delta)
        return delta

    def cancel(self) -> None:
        """Cancels the request; the iteration then raises CancelledError."""
        self._call.cancel()

    async def completions(self) -> list[Completion]:
        """Reads to the end and returns every sample."""
        async for _ in self:
            pass
        return self._assembly.completions()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._call.cancel()


def _task_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncClient:
    """`Client` for asyncio. Belongs to the event loop of its first call."""

    def __init__(
        self,
        address: str,
        *,
        options: Sequence[tuple[str, Any]] = (),
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
    ) -> None:
        self.address = address
        self._options = (*CHANNEL_OPTIONS, *options)
        self._credentials = credentials
        self._metadata = bearer(token)
        self._channel: grpc.aio.Channel | None = None
        self._bound: Any = None

    @property
    def _stub(self) -> Any:
        # a channel takes the loop that runs when it is made
        if self._bound is None:
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(self.address, options=self._options)
            else:
                channel = grpc.aio.secure_channel(
                    self.address, self._credentials, options=self._options
                )
            self._channel = channel
            self._bound = pb_grpc.GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]
        return self._bound

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """As `Client.stream`; call it on the loop."""
        request = _request(prompt, options)
        return AsyncStream(self._start(request, options), request)

    async def generate(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """As `Client.generate`."""
        request = _one(prompt, options)
        call = self._start(request, options)
        async with AsyncStream(call, request) as stream:
            return (await stream.completions())[0]

    async def samples(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> list[Completion]:
        """As `Client.samples`."""
        async with self.stream(prompt, **options) as stream:
            return await stream.completions()

    async def chat(
        self, messages: Sequence[Message], /, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """As `Client.chat`."""
        options["messages"] = messages
        return await self.generate(**options)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        timeout: float | None = None,
        **template: Any,
    ) -> Tokens:
        """As `Client.tokenize`."""
        request = _tokenize_request(text, messages, template)
        return _mirror(Tokens, await self._call(self._stub.Tokenize, request, timeout))

    async def detokenize(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """As `Client.detokenize`."""
        request = pb.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
        _extend(request.token_ids, "token_ids", token_ids)
        return str((await self._call(self._stub.Detokenize, request, timeout)).text)

    async def abort(self, request_id: str, *, timeout: float | None = None) -> bool:
        """As `Client.abort`."""
        request = pb.AbortRequest(request_id=request_id)
        return bool((await self._call(self._stub.Abort, request, timeout)).found)

    async def model_info(self, *, timeout: float | None = None) -> ModelInfo:
        """As `Client.model_info`."""
        reply = await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout)
        return _mirror(ModelInfo, reply)

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """As `Client.server_info`."""
        reply = await self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout)
        return _server_info(reply)

    async def wait_ready(self, timeout: float = 60.0) -> ServerInfo:
        """As `Client.wait_ready`."""
        end = time.monotonic() + timeout
        while True:
            try:
                return await self.server_info(timeout=max(_POLL, end - time.monotonic()))
            except UnavailableError:
                if time.monotonic() >= end:
                    raise
            await asyncio.sleep(_POLL)

    async def close(self) -> None:
        """Closes the channel; running calls are cancelled."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = self._bound = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _start(self, request: pb.GenerateRequest, options: GenerateOptions) -> Any:
        metadata = (*self._metadata, *_trail(options))
        return self._stub.Generate(request, timeout=options.get("timeout"), metadata=metadata)

    async def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        try:
            return await method(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _error(error) from None
