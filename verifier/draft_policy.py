"""Whether the next round drafts: the automatic choice of P by what rounds have cost and brought.

The block's width is fixed, so a round costs the same whatever P between 1 and K is; the choice is
between P = 0 and as many as the request allows. A round with proposals pays if the tokens that it
commits per plain round's time exceed those of a plain round. Both costs are medians of the last
rounds with as many rows, because a round's time depends on its rows; what a sample's proposals
bring is a running mean of its own rounds. The kind that is not chosen is tried for a few rounds now
and then, ever more rarely while it disappoints, so that the choice follows the load and the text at
a bounded price.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence as Rows
from typing import Protocol

_SAMPLES = 5  # rounds whose times are remembered, for each number of rows
_LEAST_SAMPLES = 3  # before a median is believed, and rounds of a trial: most of what is remembered
_WEIGHT = 0.25  # of the newest round in a sample's running mean
_MARGIN = 1.02  # by which drafting must be ahead: switching is not free
FIRST_TRIAL, LAST_TRIAL = 16, 512  # rounds between trials of drafting
PLAIN_TRIAL = 128  # rounds between trials of plain rounds, which cost what drafting gains


class Drafting(Protocol):
    """What the policy remembers of a sample."""

    drafted_gain: float | None  # tokens that a round with proposals adds to one; None: none yet


class DraftPolicy:
    """One engine's choice, round by round. Used by the engine thread alone."""

    def __init__(self) -> None:
        self._plain_ns: dict[int, deque[int]] = {}
        self._drafted_ns: dict[int, deque[int]] = {}
        self._gain = 1.0  # of samples that have not drafted yet
        self._since_drafted = 0  # rounds
        self._since_plain = 0
        self._trial = FIRST_TRIAL
        self._trying = 0  # rounds left of a trial

    @property
    def trial_is_next(self) -> bool:
        """Whether contexts should catch up now, because the next round will try drafting."""
        return self._trying > 0 or self._since_drafted + 2 >= self._trial

    def drafts(self, row_count: int, rows: Rows[Drafting]) -> bool:
        """Whether a round is to draft.

        Args:
            row_count: Samples in the round.
            rows: Those of them that may have proposals.
        """
        plain = self._median(self._plain_ns, row_count)
        drafted = self._median(self._drafted_ns, row_count)
        if drafted is None or self._trying:
            return True
        if plain is None or self._since_plain >= PLAIN_TRIAL:
            return False
        if (1.0 + self.gain(rows) / row_count) * plain > drafted * _MARGIN:
            return True
        if self._since_drafted >= self._trial:
            self._trying = _LEAST_SAMPLES
        return self._trying > 0

    def gain(self, rows: Rows[Drafting]) -> float:
        """Tokens that the rows' proposals are expected to add to a round, all together."""
        return sum(self._gain if r.drafted_gain is None else r.drafted_gain for r in rows)

    def round_ended(self, row_count: int, elapsed_ns: int, *, drafted: bool) -> None:
        """Learns what a round cost."""
        self._since_drafted = 0 if drafted else self._since_drafted + 1
        self._since_plain = self._since_plain + 1 if drafted else 0
        times = self._drafted_ns if drafted else self._plain_ns
        times.setdefault(row_count, deque(maxlen=_SAMPLES)).append(elapsed_ns)
        if drafted and self._trying:
            self._trying -= 1
            # until a trial pays, the next comes later
            self._trial = self._trial if self._trying else min(2 * self._trial, LAST_TRIAL)
        elif drafted:
            self._trial = FIRST_TRIAL

    def committed(self, row: Drafting, accepted: int) -> None:
        """Learns what a sample's proposals brought."""
        before = self._gain if row.drafted_gain is None else row.drafted_gain
        # the first rounds of a sample count for more
        weight = 0.5 if row.drafted_gain is None else _WEIGHT
        row.drafted_gain = before + weight * (accepted - before)
        self._gain += 0.05 * (accepted - self._gain)

    @staticmethod
    def _median(times: dict[int, deque[int]], row_count: int) -> float | None:
        known = times.get(row_count, ())
        return statistics.median(known) if len(known) >= _LEAST_SAMPLES else None
