"""Memory that both services map, where they run on one host: feature rows, and a Round's messages.

The verifier creates a memory file for a stream and offers it in Hello; a drafter that can map the
very same file says so in Welcome, and from then on messages say where rows lie instead of carrying
them. The file begins with a key that was drawn for it, so that a file of the same name on another
host, or in another container, is not mistaken for it. It has no name any more once both have it.

Rows are addressed by index. A region of its own belongs to the rows of Rounds, of which at most one
is unanswered, and slots in turn to Features messages, of which at most so many are: so nothing is
overwritten before the drafter has taken it.

Two boxes hold a Round and its reply, for as long as the drafter says that it looks. A thread that
looks sees a message as soon as it is there; one that sleeps on a stream is woken by way of six
others (ADR 0014 says what that costs).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import time
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from outrider.faults import FaultError
from outrider.message_box import MessageBox
from outrider.tensors import RowBytes
from outrider.v1 import draft_service_pb2 as wire

FOLDER = Path("/dev/shm")
KEY_BYTES = 16
# a reply of 8 sequences, 31 proposals each with 16 candidates, has 32 KiB; what is larger goes by
# the stream
BOX_BYTES = 1 << 16
_LOOKS = 64  # where the drafter says whether it looks
_BOXES = mmap.PAGESIZE
_HEADER_BYTES = _BOXES + 2 * BOX_BYTES  # rows begin on a page
_Message = TypeVar("_Message", wire.DraftRoundsRequest, wire.DraftRoundsResponse)
_NAME = re.compile(r"outrider-[0-9a-f]{32}")
# a file has a name from Hello to Welcome, seconds; one that is older lost its verifier in between
_STALE_SECONDS = 120.0


def _remove_stale() -> None:
    """Removes files of this user that a killed verifier left behind."""
    for path in FOLDER.glob("outrider-*"):
        with contextlib.suppress(OSError):
            facts = path.stat()
            old = time.time() - facts.st_mtime > _STALE_SECONDS
            if old and facts.st_uid == os.getuid() and _NAME.fullmatch(path.name):
                path.unlink()


class FeatureMemory:
    """The verifier's half: a new memory file.

    Args:
        row_bytes: Size of a feature row.
        round_rows: Most rows of all sequences in one Round.
        message_rows: Most rows of a Features message.
        messages: Features messages that may be unanswered.

    Raises:
        OSError: This host has no such memory, or not enough of it.
    """

    def __init__(
        self, *, row_bytes: int, round_rows: int, message_rows: int, messages: int
    ) -> None:
        self._row_bytes = row_bytes
        self._round_rows = round_rows
        self._message_rows = message_rows
        self._messages = messages
        self._row_count = round_rows + messages * message_rows
        self._key = secrets.token_bytes(KEY_BYTES)
        self._path = FOLDER / f"outrider-{secrets.token_hex(16)}"
        _remove_stale()
        size = _HEADER_BYTES + self._row_count * row_bytes
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # reserved now: to run out of it later would kill the process
            os.posix_fallocate(file, 0, size)
            memory = mmap.mmap(file, size)
        except BaseException:
            self.unlink()
            raise
        finally:
            os.close(file)
        memory[:KEY_BYTES] = self._key
        values = np.frombuffer(memory, dtype=np.uint8, offset=_HEADER_BYTES)
        self._rows = values.reshape(self._row_count, row_bytes)
        self._head = memoryview(memory)[:_HEADER_BYTES]
        self._rounds, self._replies = _boxes(self._head)
        self._round_end = 0
        self._turn = 0

    def offer(self) -> wire.SharedMemoryOffer:
        """What Hello says of it."""
        return wire.SharedMemoryOffer(
            name=self._path.name, key=self._key, row_count=self._row_count
        )

    def unlink(self) -> None:
        """Takes the file's name away; who mapped it keeps it. Idempotent."""
        with contextlib.suppress(OSError):
            self._path.unlink()

    def begin_round(self) -> None:
        """Forgets the rows of the Round before, which must have been answered."""
        self._round_end = 0

    def put_round_rows(self, rows: RowBytes) -> wire.SharedRows:
        """Adds one sequence's rows to the Round that is being made."""
        first, self._round_end = self._round_end, self._round_end + len(rows)
        assert self._round_end <= self._round_rows
        return self._put(first, rows)

    def put_message(self, rows: RowBytes) -> wire.SharedRows:
        """Writes the rows of the next Features message."""
        assert len(rows) <= self._message_rows
        first = self._round_rows + self._turn * self._message_rows
        self._turn = (self._turn + 1) % self._messages
        return self._put(first, rows)

    def post_round(self, index: int, after: int, event: wire.DraftRoundsRequest) -> bool:
        """Leaves a Round for the drafter, which the one before must not need any more.

        Args:
            index: The Round's.
            after: How many events the stream was handed before it.
            event: The Round.

        Returns:
            False where it must go by the stream: the drafter does not look, or it is too large.
        """
        if not self._head[_LOOKS]:
            return False
        return self._rounds.put(index, after, event.SerializeToString())

    def take_reply(self, index: int) -> wire.DraftRoundsResponse | None:
        """The answer to a Round that was left here, once it is there.

        Raises:
            FaultError: EVENT_INVALID, it is no message.
        """
        found = self._replies.take(index)
        return None if found is None else _parsed(wire.DraftRoundsResponse, found[1])

    def _put(self, first: int, rows: RowBytes) -> wire.SharedRows:
        count = len(rows)
        # a single byte would fill a row too
        assert rows.shape[1] == self._row_bytes
        self._rows[first : first + count] = rows
        return wire.SharedRows(first_row=first, row_count=count)


class OfferedMemory:
    """The drafter's half: of a file that a verifier offered, rows to read, and the boxes."""

    def __init__(self, memory: mmap.mmap, row_count: int, row_bytes: int) -> None:
        values = np.frombuffer(memory, dtype=np.uint8, offset=_HEADER_BYTES)
        self._rows = values.reshape(row_count, row_bytes)
        self._head = memoryview(memory)[:_HEADER_BYTES]
        self._rounds, self._replies = _boxes(self._head)

    @classmethod
    def open(cls, offer: wire.SharedMemoryOffer, row_bytes: int) -> Self | None:
        """Maps what was offered; None where it cannot be had, for whatever reason."""
        if not _NAME.fullmatch(offer.name) or len(offer.key) != KEY_BYTES:
            return None
        size = _HEADER_BYTES + offer.row_count * row_bytes
        try:
            file = os.open(FOLDER / offer.name, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            if not offer.row_count or os.fstat(file).st_size != size:
                return None
            memory = mmap.mmap(file, size)
        except (OSError, ValueError, OverflowError):
            return None
        finally:
            os.close(file)
        if memory[:KEY_BYTES] != offer.key:
            return None
        return cls(memory, offer.row_count, row_bytes)

    def rows(self, where: wire.SharedRows) -> RowBytes:
        """The rows that a message points to; copy them before it is answered.

        Raises:
            FaultError: TENSOR_SHAPE, they lie outside.
        """
        first, count = where.first_row, where.row_count
        end = first + count
        if not 0 < count <= end <= len(self._rows):
            raise FaultError(
                "TENSOR_SHAPE",
                f"shared rows: expected rows within [0, {len(self._rows)}), got [{first}, {end})",
                field="shared rows",
                expected=f"within [0, {len(self._rows)})",
                actual=f"[{first}, {end})",
            )
        return self._rows[first:end]

    def look(self, looks: bool) -> None:
        """Says whether Rounds may be left here: somebody calls `take_round` again and again."""
        self._head[_LOOKS] = looks

    def take_round(self, index: int, after: int) -> wire.DraftRoundsRequest | None:
        """The Round of that index, once it is there and its turn has come.

        Args:
            index: The Round's.
            after: How many events of the stream have been applied; it waits for those before it.

        Raises:
            FaultError: EVENT_INVALID, it is no message, or not a Round.
        """
        found = self._rounds.take(index)
        if found is None or found[0] > after:
            return None
        request = _parsed(wire.DraftRoundsRequest, found[1])
        if not request.HasField("round"):
            # it would lie there for ever, and be taken again and again
            raise FaultError("EVENT_INVALID", "memory: expected a Round, got another event")
        return request

    def post_reply(self, index: int, event: wire.DraftRoundsResponse) -> bool:
        """Leaves the answer to a Round that was left here; False where it must go by the stream."""
        return self._replies.put(index, 0, event.SerializeToString())


def _boxes(head: memoryview) -> tuple[MessageBox, MessageBox]:
    """For Rounds and for replies."""
    rounds = head[_BOXES : _BOXES + BOX_BYTES]
    return MessageBox(rounds), MessageBox(head[_BOXES + BOX_BYTES :])


def _parsed(kind: type[_Message], payload: bytes) -> _Message:
    message = kind()
    try:
        message.ParseFromString(payload)
    except DecodeError:
        raise FaultError(
            "EVENT_INVALID",
            f"memory: expected a {kind.__name__}, got {len(payload)} bytes of something else",
        ) from None
    return message


# gives up the interpreter's lock and not the core; a sleep of 0 takes as long as a timer's slack
step_aside = getattr(os, "sched_yield", partial(time.sleep, 0))


def on_this_host(address: str) -> bool:
    """Whether an address that is dialled names this host whatever the network is."""
    scheme, _, rest = address.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return True
    host = (rest if scheme in ("ipv4", "ipv6", "dns") else address).rpartition(":")[0]
    return host.strip("/") in ("localhost", "[::1]") or host.startswith("127.")
