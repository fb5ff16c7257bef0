"""Room for one message in memory that two processes map: one of them writes, the other reads.

A message has a turn, a number that grows; a reader asks for the one it expects. A checksum covers
all of it, so that what is half written, or seen in another order than it was written in, is not
taken for a message: no order of memory accesses between the processes is relied on.
"""

from __future__ import annotations

import struct
import zlib

_HEADER = struct.Struct("<QQII")  # turn, after, payload bytes, checksum
_FACTS = struct.Struct("<QQI")  # what the checksum covers beside the payload


class MessageBox:
    """One message at a time.

    Args:
        memory: The room, zeroed before its first use; a header and the payload go there.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._room = len(memory) - _HEADER.size

    def put(self, turn: int, after: int, payload: bytes) -> bool:
        """Replaces what was there; False where it has no room.

        Args:
            turn: The message's number, at least 1.
            after: A second number, for what the two sides agree on.
            payload: The message.
        """
        if len(payload) > self._room:
            return False
        checksum = zlib.crc32(payload, zlib.crc32(_FACTS.pack(turn, after, len(payload))))
        self._memory[_HEADER.size : _HEADER.size + len(payload)] = payload
        _HEADER.pack_into(self._memory, 0, turn, after, len(payload), checksum)
        return True

    def take(self, turn: int) -> tuple[int, bytes] | None:
        """``after`` and payload of the message of that turn; None while it is not there."""
        found, after, size, checksum = _HEADER.unpack_from(self._memory)
        if found != turn or size > self._room:
            return None
        payload = bytes(self._memory[_HEADER.size : _HEADER.size + size])
        if zlib.crc32(payload, zlib.crc32(_FACTS.pack(turn, after, size))) != checksum:
            return None
        return after, payload
