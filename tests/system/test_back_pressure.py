"""Readers that are behind, and deadlines that pass, through a whole verifier."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from outrider.client import Client, DeadlineExceededError, OverloadedError, UnavailableError
from tests.system.conftest import greedy, prompt
from verifier.target import Target

LONG = {"temperature": 0, "ignore_eos": True, "max_tokens": 900}
# about two kilobytes a token, in a window that does not grow
WORDY = {"logprobs": 20, "return_rounds": True}
NARROW = [("grpc.http2.lookahead_bytes", 16384), ("grpc.http2.bdp_probe", 0)]


def wait_until(condition, patience: float = 20) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def sequence_of(pair, request_id: str):
    """The resident sample of a request, or None."""
    resident = list(pair.verifier.engine._resident)
    return next((s for s in resident if s.request.request_id == request_id), None)


def test_a_slow_reader_pauses_alone_and_reads_the_same_in_the_end(dense, serve, oracle):
    pair, client = serve(
        dense, "dflash2", draft_tokens=3, max_context=1024, reader_timeout_ms=60_000
    )
    with Client(pair.address, options=NARROW) as behind:
        stream = behind.stream(prompt_ids=prompt(9), request_id="slow", **LONG, **WORDY)
        first = next(stream)
        wait_until(lambda: (s := sequence_of(pair, "slow")) and s.ticket.sink.full)
        paused = sequence_of(pair, "slow")
        time.sleep(0.2)  # the round that filled it is over
        stood = paused.frontier
        assert paused.ticket.sink.full and stood < 900
        with ThreadPoolExecutor(3) as pool:
            runs = list(
                pool.map(
                    lambda seed: client.generate(
                        prompt_ids=prompt(9, seed=seed), **LONG | {"max_tokens": 60}
                    ),
                    range(3),
                )
            )
        for seed, run in enumerate(runs):
            assert list(run.token_ids) == greedy(oracle, prompt(9, seed=seed), 60)
            assert run.usage.proposed > 0, "others draft on"
        assert paused.frontier == stood, "it stood still meanwhile"
        rest = [token for delta in stream for token in delta.token_ids]
        assert [*first.token_ids, *rest] == greedy(oracle, prompt(9), 900)
    pair.expect_idle()


def test_a_reader_that_stops_loses_its_lane_and_hears_why(dense, serve):
    pair, client = serve(
        dense,
        "dflash2",
        draft_tokens=3,
        max_concurrency=1,
        max_context=1024,
        reader_timeout_ms=300,
    )
    with Client(pair.address, options=NARROW) as behind:
        stream = behind.stream(prompt_ids=prompt(9), request_id="stuck", **LONG, **WORDY)
        next(stream)
        # the only lane: the next one is admitted because the stuck one ended
        waited = client.generate(prompt_ids=prompt(8), **LONG | {"max_tokens": 5})
        assert len(waited.token_ids) == 5
        pair.expect_idle()
        with pytest.raises(OverloadedError) as ended:
            list(stream)
        assert ended.value.reason == "READER_TOO_SLOW"
        assert ended.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_expired_deadline_starts_no_chunk_and_no_round(dense, serve, monkeypatch):
    pair, client = serve(dense, "dflash2", draft_tokens=3, max_concurrency=1)
    begun: list[int] = []
    go_on = threading.Event()
    prefill, verify = Target.prefill, Target.verify

    def prefilled(self, residency, token_ids, first, *, want_logits):
        begun.append(int(token_ids[0]))
        return prefill(self, residency, token_ids, first, want_logits=want_logits)

    def verified(self, *arguments, **keywords):
        go_on.wait(10)
        begun.append(-1)
        return verify(self, *arguments, **keywords)

    monkeypatch.setattr(Target, "prefill", prefilled)
    monkeypatch.setattr(Target, "verify", verified)
    running = client.stream(prompt_ids=[7, 8], timeout=1.0, **LONG)
    next(running)
    with pytest.raises(DeadlineExceededError):
        client.generate(prompt_ids=[9, 8], timeout=0.5, **LONG)
    with pytest.raises(DeadlineExceededError):
        list(running)
    wait_until(lambda: all(t.cancellation() for t in pair.verifier.engine._live.values()))
    go_on.set()  # the round in which the deadline passed goes on, and is the last
    pair.expect_idle()
    assert begun == [7, -1], "the waiting one never began, the running one ended with its round"


def test_a_draining_verifier_says_when_to_try_again(dense, serve):
    pair, client = serve(dense, "dflash2", draft_tokens=3)
    stream = client.stream(prompt_ids=prompt(9), **LONG | {"max_tokens": 400})
    next(stream)
    draining = threading.Thread(target=pair.verifier.stop, args=(20,))
    draining.start()
    wait_until(lambda: pair.verifier.engine._draining)
    with pytest.raises(UnavailableError) as refused:
        client.generate(prompt_ids=prompt(5))
    assert (refused.value.reason, refused.value.retry_after) == ("DRAINING", 1.0)
    (whole,) = stream.completions()
    assert (len(whole.token_ids), whole.finish_reason) == (400, "length"), "residents finish"
    draining.join(20)
    assert not draining.is_alive()
