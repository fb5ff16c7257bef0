"""What is counted of calls that never came to an answer, and what their callers are told."""

from __future__ import annotations

import threading

import grpc
import pytest

from outrider.client import Client, ClientError, DeadlineExceededError
from outrider.security import ServerSecurity
from tests.processes import until
from tests.system.conftest import prompt
from verifier.target import Target

GENERATE = "/outrider.v1.GenerationService/Generate"
LONG = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def held(monkeypatch):
    """Rounds wait until the test lets go."""
    go_on = threading.Event()
    verify = Target.verify

    def waits(*arguments, **options):
        assert go_on.wait(30)
        return verify(*arguments, **options)

    monkeypatch.setattr(Target, "verify", waits)
    yield go_on
    go_on.set()


def counted(pair) -> dict[str, int]:
    return {code: count for code, count in pair.verifier.metrics.calls.items() if count}


def test_a_deadline_that_grpc_enforces_is_counted_as_one(dense, serve, held):
    """The engine, in a round, has no chance to say so first."""
    pair, client = serve(dense, "dflash2", draft_tokens=3)
    with pytest.raises(DeadlineExceededError):
        client.generate(prompt_ids=prompt(9), timeout=0.3, **LONG)
    until(lambda: counted(pair), "the call counted")
    assert counted(pair) == {"DEADLINE_EXCEEDED": 1}
    held.set()
    pair.expect_idle()


def test_a_client_that_leaves_before_its_deadline_is_counted_as_cancelled(dense, serve, held):
    pair, client = serve(dense, "dflash2", draft_tokens=3)
    stream = client.stream(prompt_ids=prompt(9), timeout=60, **LONG)
    until(lambda: pair.verifier.engine.states()["running"], "it runs")
    stream.cancel()
    until(lambda: counted(pair), "the call counted")
    assert counted(pair) == {"CANCELLED": 1}
    held.set()
    pair.expect_idle()


def test_calls_that_the_guard_refuses_are_counted(dense, serve, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("right-token-0123456789\n")
    security = ServerSecurity(token_file=tokens, streams_per_peer=1)
    pair, stranger = serve(dense, "dflash2", draft_tokens=3, security=security)
    with pytest.raises(ClientError, match="TOKEN_INVALID"):
        stranger.generate(prompt_ids=prompt(5), max_tokens=2)
    with pytest.raises(ClientError, match="TOKEN_INVALID"):
        stranger.model_info()
    assert counted(pair) == {"UNAUTHENTICATED": 1}, "calls of Generate alone"
    with Client(pair.address, token="right-token-0123456789") as client:
        stream = client.stream(prompt_ids=prompt(5), **LONG)
        next(stream)
        with pytest.raises(ClientError, match="PEER_LIMIT"):
            client.generate(prompt_ids=prompt(5), max_tokens=2)
        list(stream)
    metadata = (("authorization", "Bearer right-token-0123456789"),)
    with grpc.insecure_channel(pair.address) as channel:
        call = channel.unary_stream(GENERATE)
        with pytest.raises(grpc.RpcError, match="expected a protobuf"):
            list(call(b"\xff\xff\xff", metadata=metadata))
    until(lambda: counted(pair).get("OK"), "the stream counted")
    assert counted(pair) == {
        "UNAUTHENTICATED": 1,
        "RESOURCE_EXHAUSTED": 1,
        "INVALID_ARGUMENT": 1,
        "OK": 1,
    }


def test_what_the_end_of_the_grace_cuts_off_hears_when_to_try_again(dense, serve):
    pair, client = serve(dense, "dflash2", draft_tokens=3, max_context=4096)
    stream = client.stream(prompt_ids=prompt(9), **LONG | {"max_tokens": 4000})
    next(stream)
    stopping = threading.Thread(target=pair.verifier.stop, args=(0,))
    stopping.start()
    with pytest.raises(ClientError) as cut:
        list(stream)
    stopping.join(30)
    assert (cut.value.reason, cut.value.retry_after) == ("DRAINING", 1.0)
