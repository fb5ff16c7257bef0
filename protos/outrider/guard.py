"""What stands before every call of both services: tokens, streams per peer, malformed messages.

One rule book for a synchronous server and an asyncio one, as interceptors. Health is exempt: probes
carry no token, and hold no thread.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from outrider import faults
from outrider.faults import FaultError

# live calls that one peer may have, unless a flag says otherwise
STREAMS_PER_PEER = 256
PEER_RETRY_MS = 1000

_EXEMPT = "/grpc.health.v1.Health/"
_AUTHORIZATION = "authorization"
_SCHEME = "bearer "

_KINDS: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class Tokens:
    """Bearer tokens that are accepted, compared in constant time."""

    def __init__(self, tokens: Sequence[str]) -> None:
        # digests have one length, so that the comparison tells nothing about that of a token
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    @classmethod
    def read(cls, path: Path) -> Tokens:
        """Tokens of a file, one a line; see `read_tokens`."""
        return cls(read_tokens(path))

    def accept(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        """Whether a call's metadata carries one of them; looks at all of them, whichever fits."""
        offered = [value for name, value in metadata if name == _AUTHORIZATION]
        if len(offered) != 1 or not isinstance(offered[0], str):
            return False
        header = offered[0]
        if header[: len(_SCHEME)].lower() != _SCHEME:
            return False
        digest = hashlib.sha256(header[len(_SCHEME) :].strip().encode()).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found


def read_tokens(path: Path) -> list[str]:
    """The tokens of a file: one a line, blank lines and lines that begin with # apart.

    Raises:
        ValueError: The file cannot be read, or has no token, or one that no header can carry. No
            message contains a token.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"token file: expected a readable one, got {path} ({type(error).__name__})"
        ) from None
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise ValueError(f"token file: expected at least one token in {path}, got 0")
    for number, token in enumerate(tokens, 1):
        if not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError(
                f"token file: expected printable ASCII without blanks in {path}, got token {number}"
            )
    return tokens


def bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata by which a client presents a token; nothing for None."""
    return () if token is None else ((_AUTHORIZATION, f"Bearer {token}"),)


class _Malformed:
    """In place of a message whose bytes are none."""


class Guard:
    """The rules; `Guard.sync` and `Guard.asynchronous` apply them.

    Args:
        tokens: Accepted tokens; None accepts every caller.
        streams_per_peer: Most live calls of one peer, by its host.

    Attributes:
        on_refusal: Told the method and the fault of every call that the rules end.
    """

    def __init__(
        self, tokens: Tokens | None = None, streams_per_peer: int = STREAMS_PER_PEER
    ) -> None:
        self._tokens = tokens
        self._most = streams_per_peer
        self._live: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.on_refusal: Callable[[str, FaultError], None] = lambda method, fault: None

    def sync(self) -> grpc.ServerInterceptor:
        """For `grpc.server`."""
        return _SyncGuard(self)

    def asynchronous(self) -> grpc.aio.ServerInterceptor:
        """For `grpc.aio.server`."""
        return _AsyncGuard(self)

    def refusal(self, details: grpc.HandlerCallDetails) -> FaultError | None:
        """Why a call may not even be read; None lets it in."""
        if self._tokens is None or self._tokens.accept(details.invocation_metadata or ()):
            return None
        return FaultError("TOKEN_INVALID", "authorization: expected a known bearer token")

    @contextmanager
    def entered(self, peer: str) -> Iterator[None]:
        """Counts a call of a peer while it lives.

        Raises:
            FaultError: PEER_LIMIT when the peer has as many as it may.
        """
        host = host_of(peer)
        with self._lock:
            if self._live[host] >= self._most:
                raise FaultError(
                    "PEER_LIMIT",
                    f"peer: expected at most {self._most} calls at once",
                    expected=self._most,
                    retry_after_ms=PEER_RETRY_MS,
                )
            self._live[host] += 1
        try:
            yield
        finally:
            with self._lock:
                self._live[host] -= 1
                if not self._live[host]:
                    del self._live[host]

    @contextmanager
    def admitted(self, method: str, request: object, peer: str) -> Iterator[None]:
        """A call whose message could be read, counted while it lives.

        Raises:
            FaultError: REQUEST_INVALID for bytes that are no message; PEER_LIMIT.
        """
        with ExitStack() as stack:
            try:
                if isinstance(request, _Malformed):
                    raise _malformed()
                stack.enter_context(self.entered(peer))
            except FaultError as fault:
                self.on_refusal(method, fault)
                raise
            yield


def host_of(peer: str) -> str:
    """Who a gRPC peer is, without the port of its connection: "ipv4:10.0.0.1:5" to "ipv4:10.0.0.1".

    All callers of a Unix socket are one.
    """
    kind = peer.partition(":")[0]
    return kind if kind == "unix" else peer.rpartition(":")[0]


def _malformed() -> FaultError:
    return FaultError("REQUEST_INVALID", "message: expected a protobuf of the method's request")


def _forgiving(handler: grpc.RpcMethodHandler[Any, Any]) -> Callable[[bytes], Any]:
    """A deserializer that never raises.

    A malformed message of a stream becomes an empty one, which sets no arm of its oneof: services
    refuse that as they refuse any other wrong event, with their own bookkeeping.
    """
    deserialize = handler.request_deserializer
    streaming = handler.request_streaming

    def deserialized(raw: bytes) -> Any:
        if deserialize is None:
            return raw
        try:
            return deserialize(raw)
        except DecodeError:
            return deserialize(b"") if streaming else _Malformed()

    return deserialized


def _rebuilt(
    handler: grpc.RpcMethodHandler[Any, Any],
    behaviour: Callable[..., Any],
    deserializer: Callable[[bytes], Any] | None,
) -> grpc.RpcMethodHandler[Any, Any]:
    kind = _KINDS[bool(handler.request_streaming), bool(handler.response_streaming)]
    return kind(
        behaviour,
        request_deserializer=deserializer,
        response_serializer=handler.response_serializer,
    )


def _behaviour(handler: grpc.RpcMethodHandler[Any, Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    return found


class _SyncGuard(grpc.ServerInterceptor):  # type: ignore[misc]
    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = continuation(details)
        if handler is None or details.method.startswith(_EXEMPT):
            return handler
        refusal = self._guard.refusal(details)
        if refusal is not None:

            def refuse(request: Any, context: grpc.ServicerContext) -> NoReturn:
                self._guard.on_refusal(details.method, refusal)
                faults.abort(context, refusal)

            # unread: what a stranger sends is not worth parsing
            return _rebuilt(handler, refuse, None)
        behaviour, guard = _behaviour(handler), self._guard

        def one(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                with guard.admitted(details.method, request, context.peer()):
                    return behaviour(request, context)
            except FaultError as fault:
                faults.abort(context, fault)

        def many(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                with guard.admitted(details.method, request, context.peer()):
                    yield from behaviour(request, context)
            except FaultError as fault:
                faults.abort(context, fault)

        return _rebuilt(handler, many if handler.response_streaming else one, _forgiving(handler))


class _AsyncGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(_EXEMPT):
            return handler
        refusal = self._guard.refusal(details)
        if refusal is not None:

            async def refuse(request: Any, context: Any) -> None:
                self._guard.on_refusal(details.method, refusal)
                await faults.abort_async(context, refusal)

            return _rebuilt(handler, refuse, None)
        behaviour, guard = _behaviour(handler), self._guard

        async def awaited(request: Any, context: Any) -> Any:
            try:
                with guard.admitted(details.method, request, context.peer()):
                    return await behaviour(request, context)
            except FaultError as fault:
                await faults.abort_async(context, fault)

        async def iterated(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                with guard.admitted(details.method, request, context.peer()):
                    async for response in behaviour(request, context):
                        yield response
            except FaultError as fault:
                await faults.abort_async(context, fault)

        generates = inspect.isasyncgenfunction(behaviour)
        return _rebuilt(handler, iterated if generates else awaited, _forgiving(handler))
