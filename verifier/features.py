"""Projected feature rows of one sequence in host memory: what the drafter may yet have to hear.

Rows are kept while they are unsent, and the last S of them beyond that, so that a draft context can
be built again when the drafter was lost. What was written is never written again, so forks and
checkpoints share rows by reference.
"""

from __future__ import annotations

from collections import deque

import torch

_BLOCK_ROWS = 64  # that few rows at a time are gathered into


class FeatureRows:
    """The rows of positions [first, end), contiguous, in pieces.

    The few rows of a round are copied into blocks, so that what they came in, often pinned memory,
    is free again at once; a piece of a whole block or more is kept as it came.
    """

    def __init__(self) -> None:
        self._pieces: deque[torch.Tensor] = deque()
        # the last piece is block[begun:filled] of a block that this object alone goes on to fill
        self._block: torch.Tensor | None = None
        self._begun = self._filled = 0
        self.first = self.end = 0

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def byte_count(self) -> int:
        """Bytes of the rows; those that are shared count for every holder."""
        pieces = self._pieces
        row = pieces[0][:1] if pieces else None
        return 0 if row is None else len(self) * row.shape[1] * row.element_size()

    def append(self, first_position: int, rows: torch.Tensor) -> None:
        """Adds rows [n, H] at [first_position, first_position + n).

        Rows that are there already are skipped; after a gap only the new ones are kept.
        """
        skipped = max(0, self.end - first_position) if self._pieces else 0
        rows = rows[skipped:]
        if not len(rows):
            return
        first = first_position + skipped
        if first != self.end or not self._pieces:
            self._pieces.clear()
            self._block = None
            self.first = first
        self.end = first + len(rows)
        if len(rows) >= _BLOCK_ROWS:
            self._pieces.append(rows)
            self._block = None
        else:
            self._gather(rows)

    def _gather(self, rows: torch.Tensor) -> None:
        while len(rows):
            if self._block is None or self._filled == _BLOCK_ROWS:
                self._block = torch.empty(_BLOCK_ROWS, rows.shape[1], dtype=rows.dtype)
                self._begun = self._filled = 0
                self._pieces.append(self._block[:0])
            part = rows[: _BLOCK_ROWS - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            self._pieces[-1] = self._block[self._begun : self._filled]
            rows = rows[len(part) :]

    def read(self, first: int, end: int) -> torch.Tensor:
        """The rows of [first, end), which must be non-empty and among those kept."""
        assert self.first <= first < end <= self.end
        parts, position = [], self.first
        for piece in self._pieces:
            begins, position = position, position + len(piece)
            if position <= first:
                continue
            if begins >= end:
                break
            parts.append(piece[max(0, first - begins) : end - begins])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def trim(self, first: int) -> None:
        """Lets go of the rows before ``first``; their memory goes with the last of a piece."""
        while self._pieces and self.first < first:
            piece = self._pieces[0]
            gone = min(len(piece), first - self.first)
            self.first += gone
            if gone == len(piece):
                self._pieces.popleft()
                continue
            self._pieces[0] = piece[gone:]
            if len(self._pieces) == 1 and self._block is not None:
                self._begun += gone
        if not self._pieces:
            self._block = None

    def tail(self, row_count: int) -> FeatureRows:
        """The last ``row_count`` rows by reference; what either adds later is its own."""
        copy = FeatureRows()
        copy._pieces = deque(self._pieces)
        copy.first, copy.end = self.first, self.end
        copy.trim(self.end - row_count)
        return copy
