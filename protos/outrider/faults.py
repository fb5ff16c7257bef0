"""The one fault table, and faults on their way through gRPC.

A fault is a reason out of `REASONS`, a sentence that says what, expected and actual, and every
number or name of that sentence as metadata. In-band it travels as a `Status` message; when it ends
a call, the same Status rides in the `grpc-status-details-bin` trailer, where any client that knows
google.rpc.Status decodes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError

from outrider.v1 import status_pb2

if TYPE_CHECKING:
    import grpc.aio

DOMAIN = "outrider"
DETAILS_TRAILER = "grpc-status-details-bin"
# metadata key that becomes a RetryInfo: milliseconds from now
RETRY_AFTER_MS = "retry_after_ms"

_ERROR_INFO_URL = "type.googleapis.com/google.rpc.ErrorInfo"
_RETRY_INFO_URL = "type.googleapis.com/google.rpc.RetryInfo"
# HTTP/2 stacks refuse a header block beyond 8 KiB by default, and the message travels twice in it:
# percent-encoded (up to three bytes each) in grpc-message and once more inside the trailer
_MESSAGE_BYTES = 1024
_METADATA_VALUE_BYTES = 256
_METADATA_BYTES = 1024


@dataclass(frozen=True)
class Reason:
    """One row of the table: the gRPC code and what the caller does about it."""

    code: grpc.StatusCode
    action: str


_C = grpc.StatusCode

REASONS: Mapping[str, Reason] = MappingProxyType(
    {
        # between verifier and drafter
        "MODEL_MISMATCH": Reason(_C.FAILED_PRECONDITION, "stop; fix the deployment"),
        "TENSOR_SHAPE": Reason(_C.INVALID_ARGUMENT, "a bug of the sender; report it"),
        "EVENT_INVALID": Reason(_C.INVALID_ARGUMENT, "a bug of the sender; report it"),
        "SEQUENCE_NOT_FOUND": Reason(
            _C.NOT_FOUND, "decode plainly; open again with the next epoch, once"
        ),
        "FEATURES_DUPLICATE": Reason(_C.ALREADY_EXISTS, "ignore"),
        "FEATURES_GAP": Reason(
            _C.OUT_OF_RANGE, "decode plainly; open again with the next epoch, once"
        ),
        "FRONTIER_MISMATCH": Reason(
            _C.ABORTED, "decode plainly; open again with the next epoch, once"
        ),
        "RING_CAPACITY": Reason(_C.RESOURCE_EXHAUSTED, "decode plainly; open again later"),
        "CHECKPOINT_NOT_FOUND": Reason(_C.NOT_FOUND, "treat the draft half as absent"),
        "CHECKPOINT_CAPACITY": Reason(_C.RESOURCE_EXHAUSTED, "keep the target half alone"),
        "PROPOSAL_NOT_FINITE": Reason(_C.INTERNAL, "decode this row plainly; count it"),
        "PROPOSAL_INVALID": Reason(_C.INTERNAL, "drop the proposal, decode plainly; count it"),
        "DRAFTER_FULL": Reason(_C.RESOURCE_EXHAUSTED, "reconnect with back-off; decode plainly"),
        # of a request
        "PROMPT_EMPTY": Reason(_C.INVALID_ARGUMENT, "send a prompt of at least one token"),
        "PROMPT_TOO_LONG": Reason(_C.INVALID_ARGUMENT, "shorten the prompt to fit the context"),
        "PROMPT_TOO_LARGE": Reason(_C.INVALID_ARGUMENT, "shorten the prompt text"),
        "TOKEN_OUT_OF_RANGE": Reason(_C.INVALID_ARGUMENT, "send ids of this model's vocabulary"),
        "SAMPLING_INVALID": Reason(_C.INVALID_ARGUMENT, "correct the sampling field"),
        "STOP_INVALID": Reason(_C.INVALID_ARGUMENT, "correct the stop strings or ids"),
        "REQUEST_INVALID": Reason(_C.INVALID_ARGUMENT, "correct the named field"),
        "TOKEN_INVALID": Reason(_C.UNAUTHENTICATED, "send a bearer token that the server knows"),
        "PEER_LIMIT": Reason(_C.RESOURCE_EXHAUSTED, "end some calls first, or try again later"),
        "REQUEST_ID_TAKEN": Reason(_C.ALREADY_EXISTS, "choose another request id"),
        "TEMPLATE_FAILED": Reason(
            _C.INVALID_ARGUMENT, "send messages that the chat template accepts, or a text prompt"
        ),
        "MEDIA_UNSUPPORTED": Reason(_C.UNIMPLEMENTED, "send text only"),
        "FEATURE_UNSUPPORTED": Reason(_C.UNIMPLEMENTED, "leave out what the message names"),
        "QUEUE_FULL": Reason(_C.RESOURCE_EXHAUSTED, "try again later or elsewhere"),
        "QUEUE_TIMEOUT": Reason(_C.RESOURCE_EXHAUSTED, "try again later or elsewhere"),
        "READER_TOO_SLOW": Reason(_C.RESOURCE_EXHAUSTED, "read faster, or ask for less at once"),
        "DEADLINE_EXPIRED": Reason(_C.DEADLINE_EXCEEDED, "allow more time or fewer tokens"),
        "REQUEST_CANCELLED": Reason(_C.CANCELLED, "nothing; the caller left"),
        "KV_CAPACITY": Reason(
            _C.RESOURCE_EXHAUSTED, "shorten the request, or serve with more KV pages"
        ),
        "LOGITS_NOT_FINITE": Reason(_C.INTERNAL, "check the weights; report it if they are sound"),
        # of a server
        "LOADING": Reason(_C.UNAVAILABLE, "try again when the weights are loaded"),
        "DRAINING": Reason(_C.UNAVAILABLE, "reconnect with back-off, or go elsewhere"),
        "INTERNAL": Reason(_C.INTERNAL, "report it with the message and the server's log"),
        # found by the caller's own side of the connection
        "UNREACHABLE": Reason(_C.UNAVAILABLE, "check the address; retry with back-off"),
        "MESSAGE_TOO_LARGE": Reason(_C.RESOURCE_EXHAUSTED, "send or ask for less at once"),
    }
)

_CODES: Mapping[int, grpc.StatusCode] = MappingProxyType(
    {int(code.value[0]): code for code in grpc.StatusCode}
)
# what a call's bare code means when the peer attached no Status: gRPC itself ended the call
_BARE: Mapping[grpc.StatusCode, str] = MappingProxyType(
    {
        _C.UNAVAILABLE: "UNREACHABLE",
        _C.CANCELLED: "REQUEST_CANCELLED",
        _C.DEADLINE_EXCEEDED: "DEADLINE_EXPIRED",
        _C.RESOURCE_EXHAUSTED: "MESSAGE_TOO_LARGE",
        _C.INTERNAL: "INTERNAL",
    }
)


class FaultError(Exception):
    """A fault that a peer or client must act on.

    Attributes:
        reason: UPPER_SNAKE key of `REASONS`; a received fault may carry one that is newer.
        message: What, expected and actual, for people.
        metadata: The same facts by name, as text.
        code: The gRPC status code.
    """

    def __init__(self, reason: str, message: str, /, **metadata: object) -> None:
        if reason not in REASONS:
            raise ValueError(f"reason: expected a key of the fault table, got {reason!r}")
        super().__init__(reason, message)
        self.reason = reason
        self.message = message
        self.metadata: dict[str, str] = {name: str(value) for name, value in metadata.items()}
        self.code: grpc.StatusCode = REASONS[reason].code

    @classmethod
    def received(
        cls, reason: str, message: str, code: grpc.StatusCode, metadata: Mapping[str, str]
    ) -> Self:
        """A peer's fault as it came, whether or not this version knows the reason."""
        fault = cls("INTERNAL", message)
        fault.args = (reason, message)
        fault.reason = reason
        fault.metadata = dict(metadata)
        fault.code = code
        return fault

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self).received, (self.reason, self.message, self.code, self.metadata))

    @property
    def action(self) -> str:
        """What a caller does about it; empty for a reason this version does not know."""
        row = REASONS.get(self.reason)
        return row.action if row else ""

    @property
    def retry_after(self) -> float | None:
        """Seconds until a retry may help, where the peer said so."""
        text = self.metadata.get(RETRY_AFTER_MS)
        try:
            return None if text is None else float(text) / 1000.0
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


def to_status(fault: FaultError) -> status_pb2.Status:
    """The Status message of a fault: an ErrorInfo always, a RetryInfo where a retry can help.

    Over-long text is cut, so that the Status always fits a header block.
    """
    entries: dict[str, str] = {}
    room = _METADATA_BYTES
    for name, value in fault.metadata.items():
        short = _cut(value, _METADATA_VALUE_BYTES)
        room -= len(name.encode()) + len(short.encode())
        if room < 0:
            break
        entries[name] = short
    info = status_pb2.ErrorInfo(reason=fault.reason, domain=DOMAIN, metadata=entries)
    status = status_pb2.Status(
        code=int(fault.code.value[0]),
        message=_cut(fault.message, _MESSAGE_BYTES),
        details=[any_pb2.Any(type_url=_ERROR_INFO_URL, value=info.SerializeToString())],
    )
    if fault.retry_after is not None:
        retry = status_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(max(0, round(fault.retry_after * 1000)))
        status.details.append(
            any_pb2.Any(type_url=_RETRY_INFO_URL, value=retry.SerializeToString())
        )
    return status


def from_status(status: status_pb2.Status) -> FaultError:
    """The fault a Status describes. Details of other types, and broken ones, are skipped."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    reason = _BARE.get(code, code.name)
    metadata: dict[str, str] = {}
    for detail in status.details:
        try:
            if detail.type_url == _ERROR_INFO_URL:
                info = status_pb2.ErrorInfo.FromString(detail.value)
                reason = info.reason or reason
                metadata = dict(info.metadata) | metadata
            elif detail.type_url == _RETRY_INFO_URL:
                retry = status_pb2.RetryInfo.FromString(detail.value)
                metadata[RETRY_AFTER_MS] = str(retry.retry_delay.ToMilliseconds())
        except DecodeError:
            # a Status comes in-band too, where a broken peer must not break its reader
            continue
    return FaultError.received(reason, status.message, code, metadata)


def from_rpc_error(error: grpc.RpcError) -> FaultError:
    """The fault that ended a call, from its trailer or else from its bare code.

    Takes what sync and aio calls raise. A Status whose code differs from the call's is not the
    peer's word on this call, and is ignored.
    """
    code, details, trailers = _ending(error)
    for name, value in trailers:
        if name != DETAILS_TRAILER or not isinstance(value, bytes):
            continue
        try:
            status = status_pb2.Status.FromString(value)
            if status.code == code.value[0]:
                return from_status(status)
        except DecodeError:
            break
    return FaultError.received(_BARE.get(code, code.name), details, code, {})


def abort(context: grpc.ServicerContext, fault: FaultError) -> NoReturn:
    """Ends a synchronous server's call with a fault: code, message and the details trailer.

    Raises:
        Exception: Always; gRPC's way to leave the handler.
    """
    status = to_status(fault)
    context.set_trailing_metadata(((DETAILS_TRAILER, status.SerializeToString()),))
    context.abort(fault.code, status.message)
    raise AssertionError("context.abort returned")


async def abort_async(context: grpc.aio.ServicerContext[Any, Any], fault: FaultError) -> NoReturn:
    """`abort` for an asyncio server.

    Raises:
        grpc.aio.AbortError: Always; gRPC's way to leave the handler.
    """
    status = to_status(fault)
    trailers = ((DETAILS_TRAILER, status.SerializeToString()),)
    await context.abort(fault.code, status.message, trailers)
    raise AssertionError("context.abort returned")


def _cut(text: str, limit: int) -> str:
    """Text of at most `limit` bytes of UTF-8; control characters would not survive a header."""
    text = "".join(char if char.isprintable() else " " for char in text)
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limit:
        return raw.decode()
    return raw[: limit - 3].decode("utf-8", "ignore") + "..."


def _ending(error: Any) -> tuple[grpc.StatusCode, str, list[tuple[str, str | bytes]]]:
    """Code, details and trailing metadata of what a sync or an aio call raised."""
    code = error.code() if hasattr(error, "code") else None
    details = error.details() if hasattr(error, "details") else None
    trailers = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    return code or grpc.StatusCode.UNKNOWN, details or str(error), list(trailers or ())
