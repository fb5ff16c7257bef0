"""Feature rows in shared memory: the same bytes on both sides, and nothing that was not offered."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from outrider import shared_memory
from outrider.faults import FaultError
from outrider.shared_memory import FeatureMemory, OfferedMemory, on_this_host
from outrider.tensors import RowBytes
from outrider.v1 import draft_service_pb2 as wire

WIDTH = 24


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A folder of memory files of the test's own."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def memory():
    made = FeatureMemory(row_bytes=WIDTH, round_rows=6, message_rows=4, messages=3)
    yield made
    made.unlink()


def opened(memory: FeatureMemory, **changes: object) -> OfferedMemory | None:
    offer = memory.offer()
    for name, value in changes.items():
        setattr(offer, name, value)
    return OfferedMemory.open(offer, WIDTH)


def rows(count: int, seed: int = 0) -> RowBytes:
    return np.random.default_rng(seed).integers(256, size=(count, WIDTH), dtype=np.uint8)


def test_what_one_side_puts_the_other_sees(memory):
    other = opened(memory)
    memory.begin_round()
    first, second = rows(4, 1), rows(2, 2)
    places = [memory.put_round_rows(first), memory.put_round_rows(second)]
    assert np.array_equal(other.rows(places[0]), first)
    assert np.array_equal(other.rows(places[1]), second)
    message = rows(3, 3)
    assert np.array_equal(other.rows(memory.put_message(message)), message)
    # the next round takes the place of the one before, and of no message
    memory.begin_round()
    third = rows(6, 4)
    assert np.array_equal(other.rows(memory.put_round_rows(third)), third)


def test_strided_rows_and_a_view_of_one_row_are_written_as_they_read(memory):
    other = opened(memory)
    wide = np.tile(rows(3), 2)
    assert np.array_equal(other.rows(memory.put_message(wide[:, WIDTH:])), wide[:, WIDTH:])
    alike = np.broadcast_to(rows(1), (4, WIDTH))
    assert np.array_equal(other.rows(memory.put_message(alike)), alike)


def test_as_many_messages_as_may_be_unanswered_stand_side_by_side(memory):
    other = opened(memory)
    memory.begin_round()
    held = rows(6, 9)
    round_place = memory.put_round_rows(held)
    for turn in range(3):
        sent = [rows(4, 10 * turn + index) for index in range(3)]
        places = [memory.put_message(each) for each in sent]
        for place, each in zip(places, sent, strict=True):
            assert np.array_equal(other.rows(place), each)
    assert np.array_equal(other.rows(round_place), held)


def test_rows_outlive_the_name_and_nothing_is_left_behind(memory):
    path = shared_memory.FOLDER / memory.offer().name
    assert path.stat().st_mode & 0o777 == 0o600
    other = opened(memory)
    memory.unlink()
    memory.unlink()
    assert not path.exists()
    assert opened(memory) is None
    assert np.array_equal(other.rows(memory.put_message(rows(4))), rows(4))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "outrider-" + "0" * 32},
        {"name": "../../etc/passwd"},
        {"name": ""},
        {"key": b"0" * 16},
        {"key": b""},
        {"row_count": 17},
        {"row_count": 0},
        {"row_count": 2**63},
    ],
    ids=["missing", "outside", "unnamed", "other key", "no key", "longer", "empty", "huge"],
)
def test_a_file_that_is_not_the_one_offered_is_not_mapped(memory, changes):
    assert opened(memory) is not None
    assert opened(memory, **changes) is None


def test_a_link_is_not_followed(memory, tmp_path: Path):
    name = f"outrider-{'f' * 32}"
    link = shared_memory.FOLDER / name
    os.symlink(shared_memory.FOLDER / memory.offer().name, link)
    try:
        assert opened(memory, name=name) is None
    finally:
        link.unlink()


@pytest.mark.parametrize(("first", "count"), [(0, 0), (17, 2), (18, 1), (2**40, 1), (0, 19)])
def test_rows_outside_are_a_fault(memory, first, count):
    other = opened(memory)
    assert len(other.rows(wire.SharedRows(first_row=17, row_count=1))) == 1
    with pytest.raises(FaultError, match=r"shared rows: expected rows within \[0, 18\)"):
        other.rows(wire.SharedRows(first_row=first, row_count=count))


def test_more_memory_than_there_is_is_an_error_at_once_and_leaves_no_file(folder):
    with pytest.raises(OSError):
        FeatureMemory(row_bytes=1 << 40, round_rows=1 << 10, message_rows=1, messages=1)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1:50052", True),
        ("127.1.2.3:1", True),
        ("localhost:50052", True),
        ("[::1]:50052", True),
        ("unix:/run/drafter", True),
        ("unix-abstract:drafter", True),
        ("ipv4:127.0.0.1:50052", True),
        ("dns:///localhost:50052", True),
        ("drafter:50052", False),
        ("10.0.0.7:50052", False),
        ("dns:///drafter.example:50052", False),
        ("1270.example:1", False),
        ("127.example.org:1", True),
    ],
)
def test_which_addresses_are_this_host(address, here):
    assert on_this_host(address) == here


def test_what_a_killed_verifier_left_behind_is_removed_by_the_next(folder):
    old, young, other = (
        folder / name for name in (f"outrider-{'0' * 32}", f"outrider-{'1' * 32}", "outrider-mine")
    )
    for path in (old, young, other):
        path.write_bytes(b"")
    for path in (old, other):
        os.utime(path, (1.0, 1.0))
    made = FeatureMemory(row_bytes=2, round_rows=1, message_rows=1, messages=1)
    assert not old.exists()
    assert young.exists()
    assert other.exists()
    made.unlink()


def round_event(index: int, rows: int = 1) -> wire.DraftRoundsRequest:
    content = [wire.RoundRow(sequence_id=row + 1, epoch=1) for row in range(rows)]
    return wire.DraftRoundsRequest(round=wire.Round(round_index=index, rows=content))


def test_a_round_is_left_only_while_the_drafter_looks(memory):
    other = opened(memory)
    assert not memory.post_round(1, 4, round_event(1))
    other.look(True)
    assert memory.post_round(1, 4, round_event(1))
    # the events before it come first
    assert other.take_round(1, 3) is None
    assert other.take_round(2, 4) is None
    assert other.take_round(1, 4) == round_event(1)
    other.look(False)
    assert not memory.post_round(2, 4, round_event(2))


def test_a_reply_is_found_by_its_round(memory):
    other = opened(memory)
    reply = wire.DraftRoundsResponse(round_reply=wire.RoundReply(round_index=5))
    assert memory.take_reply(5) is None
    assert other.post_reply(5, reply)
    assert memory.take_reply(4) is None
    assert memory.take_reply(5) == reply


def test_what_is_too_large_for_a_box_goes_by_the_stream(memory):
    other = opened(memory)
    other.look(True)
    assert not memory.post_round(1, 0, round_event(1, rows=30_000))


def test_rows_are_not_touched_by_messages(memory):
    other = opened(memory)
    other.look(True)
    memory.begin_round()
    held = rows(6, 9)
    place = memory.put_round_rows(held)
    assert memory.post_round(1, 0, round_event(1, rows=5000))
    assert other.post_reply(1, wire.DraftRoundsResponse(round_reply=wire.RoundReply()))
    assert np.array_equal(other.rows(place), held)


def test_bytes_that_are_no_message_are_a_fault(memory):
    other = opened(memory)
    other.look(True)
    memory._rounds.put(1, 0, b"\xff\xff\xff")
    with pytest.raises(FaultError) as raised:
        other.take_round(1, 0)
    assert raised.value.reason == "EVENT_INVALID"
    other._replies.put(1, 0, b"\xff\xff\xff")
    with pytest.raises(FaultError):
        memory.take_reply(1)


def test_an_event_that_is_no_round_is_a_fault(memory):
    other = opened(memory)
    other.look(True)
    release = wire.DraftRoundsRequest(release=wire.Release(sequence_id=1, epoch=1))
    assert memory.post_round(1, 0, release)
    with pytest.raises(FaultError, match="expected a Round"):
        other.take_round(1, 0)
