"""Messages in memory: whole and expected, or not there."""

from __future__ import annotations

import mmap
import random

import pytest

from outrider.message_box import MessageBox

ROOM = 256


@pytest.fixture
def memory() -> memoryview:
    return memoryview(bytearray(ROOM))


def test_a_message_is_taken_by_its_turn_alone(memory):
    writer, reader = MessageBox(memory), MessageBox(memory)
    assert reader.take(1) is None
    assert writer.put(1, 7, b"one")
    assert reader.take(2) is None
    assert reader.take(1) == (7, b"one")
    assert writer.put(2, 9, b"")
    assert reader.take(1) is None
    assert reader.take(2) == (9, b"")


def test_zeroed_memory_holds_no_message(memory):
    assert all(MessageBox(memory).take(turn) is None for turn in range(1, 4))


def test_what_has_no_room_is_refused_and_changes_nothing(memory):
    box = MessageBox(memory)
    room = next(n for n in range(ROOM, 0, -1) if MessageBox(memory).put(1, 0, bytes(n)))
    assert room > ROOM - 40
    assert box.put(1, 3, b"kept")
    assert not box.put(2, 4, bytes(room + 1))
    assert box.take(1) == (3, b"kept")


def test_any_byte_that_is_not_written_yet_hides_the_message(memory):
    source = random.Random(5)
    before, after = source.randbytes(40), source.randbytes(40)
    box = MessageBox(memory)
    box.put(1, 2, before)
    old = bytes(memory)
    box.put(2, 3, after)
    new = bytes(memory)
    differing = [place for place in range(ROOM) if old[place] != new[place]]
    assert len(differing) > 30
    for place in differing:
        memory[place] = old[place]
        # a torn message is neither the old nor the new one
        assert box.take(1) is None
        assert box.take(2) is None
        memory[place] = new[place]
    assert box.take(2) == (3, after)


def test_a_length_beyond_the_room_is_no_message(memory):
    box = MessageBox(memory)
    box.put(1, 0, b"short")
    memory[16:20] = (1 << 20).to_bytes(4, "little")
    assert box.take(1) is None


def test_processes_hand_over_thousands(tmp_path):
    """A writer and a reader that race on the same pages; every message arrives as it was sent."""
    import os

    path = tmp_path / "box"
    path.write_bytes(bytes(mmap.PAGESIZE))
    file = os.open(path, os.O_RDWR)
    there, back = (
        MessageBox(memoryview(mmap.mmap(file, mmap.PAGESIZE))[start : start + 1024])
        for start in (0, 2048)
    )
    count = 2000
    child = os.fork()
    if not child:
        turn = 1
        while turn <= count:
            if (found := there.take(turn)) is not None:
                back.put(turn, found[0] + 1, found[1][::-1])
                turn += 1
        os._exit(0)
    source = random.Random(1)
    for turn in range(1, count + 1):
        sent = source.randbytes(source.randrange(200))
        there.put(turn, turn * 3, sent)
        while (found := back.take(turn)) is None:
            pass
        assert found == (turn * 3 + 1, sent[::-1])
    assert os.waitpid(child, 0)[1] == 0
