"""The fault table and the way of a fault through gRPC."""

import asyncio
import copy
import pickle
from concurrent import futures

import grpc
import pytest
from google.rpc import error_details_pb2
from google.rpc import status_pb2 as standard_status_pb2
from grpc_status import rpc_status
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import faults
from outrider.faults import FaultError
from outrider.v1 import status_pb2

METHOD = "/test.Service/Call"
CODES = {
    "MODEL_MISMATCH": "FAILED_PRECONDITION",
    "TENSOR_SHAPE": "INVALID_ARGUMENT",
    "EVENT_INVALID": "INVALID_ARGUMENT",
    "SEQUENCE_NOT_FOUND": "NOT_FOUND",
    "FEATURES_DUPLICATE": "ALREADY_EXISTS",
    "FEATURES_GAP": "OUT_OF_RANGE",
    "FRONTIER_MISMATCH": "ABORTED",
    "RING_CAPACITY": "RESOURCE_EXHAUSTED",
    "CHECKPOINT_NOT_FOUND": "NOT_FOUND",
    "CHECKPOINT_CAPACITY": "RESOURCE_EXHAUSTED",
    "PROPOSAL_NOT_FINITE": "INTERNAL",
    "PROPOSAL_INVALID": "INTERNAL",
    "DRAFTER_FULL": "RESOURCE_EXHAUSTED",
    "DRAINING": "UNAVAILABLE",
    "LOADING": "UNAVAILABLE",
    "PROMPT_EMPTY": "INVALID_ARGUMENT",
    "PROMPT_TOO_LONG": "INVALID_ARGUMENT",
    "PROMPT_TOO_LARGE": "INVALID_ARGUMENT",
    "TOKEN_OUT_OF_RANGE": "INVALID_ARGUMENT",
    "SAMPLING_INVALID": "INVALID_ARGUMENT",
    "STOP_INVALID": "INVALID_ARGUMENT",
    "REQUEST_INVALID": "INVALID_ARGUMENT",
    "TOKEN_INVALID": "UNAUTHENTICATED",
    "PEER_LIMIT": "RESOURCE_EXHAUSTED",
    "REQUEST_ID_TAKEN": "ALREADY_EXISTS",
    "TEMPLATE_FAILED": "INVALID_ARGUMENT",
    "MEDIA_UNSUPPORTED": "UNIMPLEMENTED",
    "FEATURE_UNSUPPORTED": "UNIMPLEMENTED",
    "QUEUE_FULL": "RESOURCE_EXHAUSTED",
    "QUEUE_TIMEOUT": "RESOURCE_EXHAUSTED",
    "READER_TOO_SLOW": "RESOURCE_EXHAUSTED",
    "DEADLINE_EXPIRED": "DEADLINE_EXCEEDED",
    "REQUEST_CANCELLED": "CANCELLED",
    "KV_CAPACITY": "RESOURCE_EXHAUSTED",
    "LOGITS_NOT_FINITE": "INTERNAL",
    "INTERNAL": "INTERNAL",
    "UNREACHABLE": "UNAVAILABLE",
    "MESSAGE_TOO_LARGE": "RESOURCE_EXHAUSTED",
}


class Handler(grpc.GenericRpcHandler):
    """One method that ends with whatever `handle` does."""

    def __init__(self, handle):
        self.handle = handle

    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(self.handle)


def call_failing(handle):
    """The error a client of a synchronous server sees."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Handler(handle),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with (
            grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
            pytest.raises(grpc.RpcError) as caught,
        ):
            channel.unary_unary(METHOD)(b"", timeout=10)
        return caught.value
    finally:
        server.stop(None)


def call_failing_async(handle):
    """The error a client of an asyncio server sees."""

    async def run():
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((Handler(handle),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                with pytest.raises(grpc.RpcError) as caught:
                    await channel.unary_unary(METHOD)(b"", timeout=10)
                return caught.value
        finally:
            await server.stop(None)

    return asyncio.run(run())


def sync_abort(fault):
    return lambda request, context: faults.abort(context, fault)


def async_abort(fault):
    async def handle(request, context):
        await faults.abort_async(context, fault)

    return handle


FAULT = ("FEATURES_GAP", "features: expected first position 20, got 21")


def a_fault():
    return FaultError(*FAULT, expected=20, actual=21)


def test_the_table_says_which_code_and_what_to_do_for_every_reason():
    assert {reason: row.code.name for reason, row in faults.REASONS.items()} == CODES
    assert all(row.action for row in faults.REASONS.values())


def test_a_fault_carries_reason_code_message_and_facts_as_text():
    fault = a_fault()
    assert (fault.reason, fault.code) == ("FEATURES_GAP", grpc.StatusCode.OUT_OF_RANGE)
    assert fault.metadata == {"expected": "20", "actual": "21"}
    assert str(fault) == "FEATURES_GAP: features: expected first position 20, got 21"


def test_a_reason_outside_the_table_cannot_be_raised():
    with pytest.raises(ValueError, match="expected a key of the fault table, got 'NO_SUCH'"):
        FaultError("NO_SUCH", "text")


def test_reason_and_message_are_names_that_metadata_may_use():
    fault = FaultError("INTERNAL", "text", reason="x", message="y")
    assert fault.metadata == {"reason": "x", "message": "y"}


@settings(max_examples=50, deadline=None)
@given(
    reason=st.sampled_from(sorted(CODES)),
    message=st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=100),
    metadata=st.dictionaries(
        st.from_regex(r"[a-z][a-z_]{0,15}", fullmatch=True),
        st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=50),
        max_size=5,
    ),
    retry_after_ms=st.none() | st.integers(0, 10**6),
)
def test_a_status_gives_back_the_fault(reason, message, metadata, retry_after_ms):
    metadata.pop("retry_after_ms", None)
    if retry_after_ms is not None:
        metadata["retry_after_ms"] = str(retry_after_ms)
    fault = FaultError.received(reason, message, faults.REASONS[reason].code, metadata)
    back = faults.from_status(faults.to_status(fault))
    printable = "".join(char if char.isprintable() else " " for char in message)
    assert (back.reason, back.message, back.code) == (reason, printable, fault.code)
    assert back.retry_after == (None if retry_after_ms is None else retry_after_ms / 1000)
    assert back.metadata.keys() == fault.metadata.keys()


def test_a_fault_can_be_copied_and_pickled():
    for twin in (pickle.loads(pickle.dumps(a_fault())), copy.copy(a_fault())):
        assert (twin.reason, twin.message, twin.metadata, twin.code) == (
            *FAULT,
            a_fault().metadata,
            a_fault().code,
        )


@pytest.mark.parametrize(
    "error",
    [
        lambda: call_failing(sync_abort(a_fault())),
        lambda: call_failing_async(async_abort(a_fault())),
    ],
    ids=["sync", "async"],
)
def test_an_aborted_call_gives_back_the_fault(error):
    fault = faults.from_rpc_error(error())
    assert (fault.reason, fault.message) == FAULT
    assert fault.metadata == {"expected": "20", "actual": "21"}
    assert fault.code is grpc.StatusCode.OUT_OF_RANGE


@pytest.mark.parametrize("call", ["sync", "async"])
def test_grpcio_status_decodes_the_trailer_as_the_standard_types(call):
    fault = FaultError(
        "QUEUE_FULL", "queue: expected fewer than 64, got 64", limit=64, retry_after_ms=1500
    )
    error = (
        call_failing(sync_abort(fault))
        if call == "sync"
        else call_failing_async(async_abort(fault))
    )
    if call == "sync":
        status = rpc_status.from_call(error)
    else:  # its asyncio form wants a call in progress; the type is the same
        trailers = dict(error.trailing_metadata())
        status = standard_status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert status.message == "queue: expected fewer than 64, got 64"
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, info.metadata["limit"]) == ("QUEUE_FULL", "outrider", "64")
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


@pytest.mark.parametrize("text", ["x" * 100_000, "€" * 100_000, "line\nbreak\0nul" * 10_000])
def test_a_long_message_is_cut_and_still_arrives_whole_as_a_fault(text):
    fault = FaultError("MODEL_MISMATCH", text, **{f"name_{n}": text for n in range(50)})
    back = faults.from_rpc_error(call_failing(sync_abort(fault)))
    assert back.reason == "MODEL_MISMATCH"
    assert back.message.startswith(text[:4])
    assert back.message.endswith("...")
    assert back.metadata


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, "UNREACHABLE"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXPIRED"),
        (grpc.StatusCode.CANCELLED, "REQUEST_CANCELLED"),
        (grpc.StatusCode.UNKNOWN, "UNKNOWN"),
        (grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED"),
    ],
)
def test_a_bare_code_gets_the_reason_gRPC_itself_had(code, reason):
    fault = faults.from_rpc_error(
        call_failing(lambda request, context: context.abort(code, "said so"))
    )
    assert (fault.reason, fault.code, fault.message) == (reason, code, "said so")


def test_a_reason_newer_than_this_version_is_kept():
    status = faults.to_status(FaultError.received("FROM_V9", "text", grpc.StatusCode.ABORTED, {}))
    fault = faults.from_status(status)
    assert (fault.reason, fault.code, fault.action) == ("FROM_V9", grpc.StatusCode.ABORTED, "")


def test_details_of_other_types_are_skipped():
    status = faults.to_status(a_fault())
    status.details.add(type_url="type.googleapis.com/google.rpc.Help", value=b"\xff")
    assert faults.from_status(status).metadata == {"expected": "20", "actual": "21"}


def test_details_that_cannot_be_read_are_skipped():
    status = faults.to_status(a_fault())
    for detail in status.details:
        detail.value = b"\xff\xff\xff"
    fault = faults.from_status(status)
    assert (fault.message, fault.metadata) == (a_fault().message, {})


@pytest.mark.parametrize(
    "trailer",
    [b"\xff\xff\xff", status_pb2.Status(code=5, message="another").SerializeToString(), b""],
    ids=["unreadable", "another code", "empty"],
)
def test_a_trailer_that_is_not_this_calls_word_is_ignored(trailer):
    def handle(request, context):
        context.set_trailing_metadata(((faults.DETAILS_TRAILER, trailer),))
        context.abort(grpc.StatusCode.UNKNOWN, "bare")

    fault = faults.from_rpc_error(call_failing(handle))
    assert (fault.reason, fault.message) == ("UNKNOWN", "bare")
