"""The draft half of one sequence, as the verifier keeps it.

What the drafter was sent, what it has yet to be sent, and where it is to be captured. Nothing here
talks to the drafter: `DrafterLink` decides what is sent and when, and keeps this in step with it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from outrider.tensors import RowBytes
from outrider.tracing import NO_TRAIL, Trail
from verifier.features import FeatureRows


@dataclass(eq=False)
class Context:
    """The draft half of one sequence as the verifier sees it.

    The drafter's context covers [coverage_first, sent_frontier) once it has applied all that was
    sent; ``rows`` holds the feature rows from there on, and the last S before the end.
    """

    sequence_id: int
    trail: Trail = NO_TRAIL  # for the drafter's logs and spans
    epoch: int = 0
    is_open: bool = False
    coverage_first: int = 0
    sent_frontier: int = 0
    rows: FeatureRows = field(default_factory=FeatureRows)
    # positions at which to capture, with checkpoint ids; ascending, none below sent_frontier
    captures: deque[tuple[int, int]] = field(default_factory=deque)
    retry_at_ns: int = 0  # not opened again before this time
    out_of_range: bool = False  # its frontier passed the drafter's max context

    @property
    def unsent_rows(self) -> int:
        """Rows that the drafter has not been sent and is to have."""
        return max(0, self.rows.end - self.sent_frontier) if self.is_open else 0

    def take(self, row_count: int) -> RowBytes | None:
        """The oldest ``row_count`` unsent rows, which count as sent; None for 0."""
        if not row_count:
            return None
        first = self.sent_frontier
        self.sent_frontier += row_count
        return self.rows.read(first, self.sent_frontier)

    def open(self, coverage_first: int, sent_frontier: int) -> None:
        """Begins the next epoch with a context that covers [coverage_first, sent_frontier)."""
        self.epoch += 1
        self.is_open = True
        self.coverage_first, self.sent_frontier = coverage_first, sent_frontier

    def trim(self, window: int) -> None:
        """Lets go of rows that are neither unsent nor among the last ``window``."""
        first = self.rows.end - window
        self.rows.trim(min(first, self.sent_frontier) if self.is_open else first)

    def close(self) -> None:
        """Nothing more is sent until it is opened again; captures that wait do not happen."""
        self.is_open = False
        self.captures.clear()
