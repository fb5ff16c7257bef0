"""Features through shared memory: taken where it can be had, and no difference where it cannot."""

from __future__ import annotations

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
    monkeypatch.setattr(OfferedMemory, "open", lambda offer, width, dtype: None)
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
    pair.drafter._service._engine._end(
        next(iter(pair.drafter._service._engine._streams)), FaultError("DRAINING", "a test")
    )
    while link._stream is None or link._stream.memory is first:
        assert generate(client, 12).token_ids
    assert shares(pair)
    assert generate(client, 40).usage.proposed > 0


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
        dtype = config.profile.activation
        made = FeatureMemory(
            row_bytes=config.feature_width * dtype.itemsize,
            round_rows=36,
            message_rows=64,
            messages=1,
        )
        memory = OfferedMemory.open(made.offer(), config.feature_width, dtype)
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
