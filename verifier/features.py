"""Projected feature rows of one sequence in host memory: what the drafter may yet have to hear.

Rows are kept while they are unsent, and the last S of them beyond that, so that a draft context can
be built again when the drafter was lost. What was written is never written again, so forks and
checkpoints share rows by reference.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from outrider.tensors import RowBytes

_BLOCK_ROWS = 64  # that few rows at a time are gathered into


class FeatureRows:
    """The rows of positions [first, end), contiguous, in pieces.

    The few rows of a round are copied into blocks, so that what they came in is free again at once;
    a piece of a whole block or more is kept as it came. A piece ends where the next one begins, the
    last one at ``end``, and is let go once ``first`` has passed it.
    """

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, RowBytes]] = deque()  # with the first row's position
        self._fills_last = False  # whether the last piece is a block that this object alone fills
        self.first = self.end = 0

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def byte_count(self) -> int:
        """Bytes of the rows; those that are shared count for every holder."""
        if not self._pieces:
            return 0
        width: int = self._pieces[-1][1].shape[1]
        return len(self) * width

    def append(self, first_position: int, rows: RowBytes) -> None:
        """Adds rows at [first_position, first_position + n).

        Rows that are there already are skipped; after a gap only the new ones are kept. Fewer than
        a block may change their content once this has returned.
        """
        skipped = max(0, self.end - first_position) if self._pieces else 0
        if skipped >= len(rows):
            return
        if skipped:
            rows = rows[skipped:]
            first_position += skipped
        if first_position != self.end or not self._pieces:
            self._clear(first_position)
        if len(rows) >= _BLOCK_ROWS:
            self._pieces.append((self.end, rows))
            self.end += len(rows)
            self._fills_last = False
        else:
            self._gather(rows)

    def _gather(self, rows: RowBytes) -> None:
        begun, count = 0, len(rows)
        while begun < count:
            if not self._fills_last or self.end - self._pieces[-1][0] == _BLOCK_ROWS:
                block = np.empty((_BLOCK_ROWS, rows.shape[1]), dtype=np.uint8)
                self._pieces.append((self.end, block))
                self._fills_last = True
            first, block = self._pieces[-1]
            filled = self.end - first
            part = min(count - begun, _BLOCK_ROWS - filled)
            block[filled : filled + part] = rows[begun : begun + part]
            begun += part
            self.end += part

    def read(self, first: int, end: int) -> RowBytes:
        """The rows of [first, end), which must be non-empty and among those kept."""
        assert self.first <= first < end <= self.end
        parts: list[RowBytes] = []
        ends = self.end
        # from the newest on: what is read is mostly what was just added
        for begins, piece in reversed(self._pieces):
            if begins < end:
                parts.append(piece[max(first, begins) - begins : min(end, ends) - begins])
            if begins <= first:
                break
            ends = begins
        return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])

    def trim(self, first: int) -> None:
        """Lets go of the rows before ``first``; their memory goes with the last of a piece."""
        if first >= self.end:
            self._clear(self.end)
        elif first > self.first:
            self.first = first
            while len(self._pieces) > 1 and self._pieces[1][0] <= first:
                self._pieces.popleft()

    def tail(self, row_count: int) -> FeatureRows:
        """The last ``row_count`` rows by reference; what either adds later is its own."""
        copy = FeatureRows()
        copy._pieces = self._pieces.copy()
        copy.first, copy.end = self.first, self.end
        copy.trim(self.end - row_count)
        return copy

    def _clear(self, position: int) -> None:
        self._pieces.clear()
        self._fills_last = False
        self.first = self.end = position
