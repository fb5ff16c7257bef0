"""Projected feature rows of one sequence in host memory: what the drafter may yet have to hear.

Rows are kept while they are unsent, and the last S of them beyond that, so that a draft context can
be built again when the drafter was lost. Pieces are never written to again, so forks and
checkpoints share them by reference.
"""

from __future__ import annotations

from collections import deque

import torch


class FeatureRows:
    """The rows of positions [first, end), contiguous, in the pieces that they came in."""

    def __init__(self) -> None:
        self._pieces: deque[torch.Tensor] = deque()
        self.first = self.end = 0
        self.byte_count = 0  # those of shared pieces count for every holder

    def __len__(self) -> int:
        return self.end - self.first

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
            self.first, self.byte_count = first, 0
        self._pieces.append(rows)
        self.byte_count += rows.numel() * rows.element_size()
        self.end = first + len(rows)

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
        """Lets go of the pieces that lie wholly before ``first``."""
        while self._pieces and self.first + len(self._pieces[0]) <= first:
            piece = self._pieces.popleft()
            self.first += len(piece)
            self.byte_count -= piece.numel() * piece.element_size()

    def tail(self, row_count: int) -> FeatureRows:
        """The last ``row_count`` rows, and what shares a piece with them, by reference."""
        copy = FeatureRows()
        copy._pieces = deque(self._pieces)
        copy.first, copy.end, copy.byte_count = self.first, self.end, self.byte_count
        copy.trim(self.end - row_count)
        return copy
