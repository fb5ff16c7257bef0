"""Features through shared memory: taken where it can be had, and no difference where it cannot."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from pathlib import Path

import pytest

from drafter.rounds import DraftRounds
from outrider import shared_memory
from outrider.faults import FaultError
from outrider.shared_memory import FeatureMemory, OfferedMemory
from outrider.v1 import draft_service_pb2 as wire
from tests.system.conftest import greedy, prompt


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A folder of memory files that no other pair of this host uses."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    return tmp_path


def shares(pair) -> bool:
    stream = pair.verifier.engine._link._stream
    return stream is not None and stream.memory is not None


def generate(client, length: int):
    return client.generate(
        prompt_ids=prompt(length), max_tokens=24, temperature=0, ignore_eos=True, return_rounds=True
    )


def test_a_pair_on_one_host_shares_and_proposes_as_one_that_does_not(dense, serve, oracle, folder):
    runs = []
    for wanted in (True, False):
        pair, client = serve(dense, draft_tokens=7, prefill_chunk=64, shared_memory=wanted)
        assert shares(pair) == wanted
        # longer than a window, a message and a chunk: rows come both ways
        runs.append([generate(client, length) for length in (5, 130)])
    for one, other in zip(*runs, strict=True):
        assert one.token_ids == other.token_ids
        assert [r.proposed for r in one.rounds] == [r.proposed for r in other.rounds]
    assert list(runs[0][1].token_ids) == greedy(oracle, prompt(130), 24)
    # no file has a name any more
    assert not list(folder.iterdir())


def test_rounds_go_through_memory_while_the_drafter_looks(dense, serve, oracle):
    _, by_stream = serve(dense, draft_tokens=7, prefill_chunk=64)
    pair, client = serve(dense, draft_tokens=7, prefill_chunk=64, spin_ms=2000)
    counters = pair.verifier.engine._link.counters
    for length in (5, 130):
        one, other = generate(by_stream, length), generate(client, length)
        assert one.token_ids == other.token_ids
        assert [r.proposed for r in one.rounds] == [r.proposed for r in other.rounds]
    assert list(other.token_ids) == greedy(oracle, prompt(130), 24)
    # the first of a pause finds it asleep, and one that brings features alone waits for nobody
    assert counters["rounds_in_memory"] > counters["rounds"] // 2
    assert counters["stale_messages"] == counters["round_timeouts"] == 0


def test_a_drafter_that_sleeps_is_sent_rounds_by_the_stream(dense, serve):
    pair, client = serve(dense, draft_tokens=7, spin_ms=1)
    engine = pair.drafter._service._engine
    counters = pair.verifier.engine._link.counters
    for _ in range(3):
        before = counters["rounds"], counters["rounds_in_memory"]
        assert generate(client, 12).usage.proposed > 0
        while engine._looks_until:
            pass
        assert counters["rounds"] - before[0] > counters["rounds_in_memory"] - before[1]
    assert not any(stream.memory._head[64] for stream in engine._streams)


def test_a_round_left_with_one_that_sleeps_is_looked_for(dense, serve, monkeypatch):
    """The verifier saw a drafter that looked, and it went to sleep at that moment."""
    looked = OfferedMemory.look
    monkeypatch.setattr(OfferedMemory, "look", lambda memory, looks: looked(memory, True))
    pair, client = serve(dense, draft_tokens=7, spin_ms=1)
    pair.drafter._service._engine._look_on()
    for length in (12, 70):
        done = generate(client, length)
        assert done.usage.proposed > 0
        assert not done.usage.plain_rounds
    assert pair.verifier.engine._link.counters["round_timeouts"] == 0


def test_a_reply_too_large_for_its_box_goes_by_the_stream(dense, serve, monkeypatch):
    monkeypatch.setattr(OfferedMemory, "post_reply", lambda memory, index, event: False)
    pair, client = serve(dense, draft_tokens=7, spin_ms=2000)
    assert generate(client, 40).usage.proposed > 0
    counters = pair.verifier.engine._link.counters
    assert counters["rounds_in_memory"] > 2
    assert counters["round_timeouts"] == counters["losses"] == 0


def test_what_is_no_message_ends_that_stream_alone(dense, serve, monkeypatch, oracle):
    pair, client = serve(dense, draft_tokens=7, spin_ms=2000)
    counters = pair.verifier.engine._link.counters
    assert generate(client, 12).usage.proposed > 0
    put = FeatureMemory.post_round
    spoiled = []

    def spoil(memory, index, after, event):
        if spoiled or not put(memory, index, after, event):
            return put(memory, index, after, event)
        spoiled.append(index)
        return memory._rounds.put(index, after, b"\xff\xff")

    monkeypatch.setattr(FeatureMemory, "post_round", spoil)
    done = generate(client, 40)
    assert list(done.token_ids) == greedy(oracle, prompt(40), 24)
    assert spoiled
    assert counters["losses"] == 1
    pair.wait_for_drafter()
    assert generate(client, 50).usage.proposed > 0


def test_several_sequences_of_a_round_lie_side_by_side(dense, serve):
    from concurrent.futures import ThreadPoolExecutor

    lengths = (9, 20, 33, 50)
    _, alone = serve(dense, draft_tokens=7, shared_memory=False)
    expected = [generate(alone, length).token_ids for length in lengths]
    pair, client = serve(dense, draft_tokens=7, max_concurrency=4)
    assert shares(pair)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda length: generate(client, length), lengths))
    assert [done.token_ids for done in together] == expected
    assert all(done.usage.proposed for done in together)


def test_a_drafter_that_cannot_map_it_takes_rows_in_messages(dense, serve, monkeypatch, folder):
    monkeypatch.setattr(OfferedMemory, "open", lambda offer, row_bytes: None)
    pair, client = serve(dense, draft_tokens=7)
    assert not shares(pair)
    assert generate(client, 40).usage.proposed > 0
    assert not list(folder.iterdir())


def test_a_host_without_memory_to_share_serves_all_the_same(dense, serve, monkeypatch):
    monkeypatch.setattr(shared_memory, "FOLDER", Path("/nowhere"))
    pair, client = serve(dense, draft_tokens=7)
    assert not shares(pair)
    assert generate(client, 40).usage.proposed > 0


def test_a_drafter_that_comes_back_is_offered_memory_anew(dense, serve):
    pair, client = serve(dense, draft_tokens=7)
    link = pair.verifier.engine._link
    first = link._stream.memory
    mapped = weakref.ref(first)
    pair.drafter._service._engine._end(
        next(iter(pair.drafter._service._engine._streams)), FaultError("DRAINING", "a test")
    )
    while link._stream is None or link._stream.memory is first:
        assert generate(client, 12).token_ids
    assert shares(pair)
    assert generate(client, 40).usage.proposed > 0
    del first
    assert mapped() is None, "what a lost stream mapped is let go at once"


@pytest.mark.parametrize("how", ["it hangs up", "it stands still"])
def test_losing_a_drafter_while_its_answer_is_looked_for(dense, serve, how):
    pair, client = serve(dense, draft_tokens=7, spin_ms=2000, draft_timeout_ms=200)
    wanted = {"prompt_ids": prompt(20), "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    plain = client.generate(**wanted, draft_tokens=0)
    engine = pair.drafter._service._engine
    counters = pair.verifier.engine._link.counters
    look = engine._look

    def stand_still():
        engine._look = look
        time.sleep(0.5)

    published, struck = [], False
    with client.stream(**wanted, timeout=60) as stream:
        for delta in stream:
            published += delta.token_ids
            if len(published) > 20 and not struck:
                struck = True
                if how == "it hangs up":
                    engine.hang_up(next(iter(engine._streams)))
                else:
                    engine._look = stand_still
    assert published == list(plain.token_ids)
    assert counters["losses"] >= 1


@pytest.mark.parametrize(
    ("shared", "where", "reason"),
    [
        (False, wire.SharedRows(first_row=0, row_count=1), "EVENT_INVALID"),
        (True, wire.SharedRows(first_row=99, row_count=2), "TENSOR_SHAPE"),
        (True, wire.SharedRows(first_row=0, row_count=0), "TENSOR_SHAPE"),
        (True, wire.SharedRows(first_row=0, row_count=65), "EVENT_INVALID"),
    ],
    ids=["none shared", "outside", "none", "too many"],
)
def test_rows_that_are_nowhere_end_the_stream(dense, serve, shared, where, reason):
    pair, _ = serve(dense, draft_tokens=7)
    engine = pair.drafter._service._engine
    config = engine.config
    memory = None
    if shared:
        row_bytes = config.feature_width * config.profile.activation.itemsize
        made = FeatureMemory(
            row_bytes=row_bytes,
            round_rows=36,
            message_rows=64,
            messages=1,
        )
        memory = OfferedMemory.open(made.offer(), row_bytes)
        made.unlink()
    checkpoints = engine._checkpoints.claim(bytes(16), 0)
    rounds = DraftRounds(config, engine._graphs, 1, checkpoints, Counter(), memory)
    row = wire.RoundRow(sequence_id=1, epoch=1, shared_features=where)
    for event in (
        {"features": wire.Features(sequence_id=1, epoch=1, shared_rows=where)},
        {"round": wire.Round(round_index=1, rows=[row])},
    ):
        with pytest.raises(FaultError) as raised:
            rounds.apply(wire.DraftRoundsRequest(**event))
        assert raised.value.reason == reason
