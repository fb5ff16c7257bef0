"""Whether the next round drafts: the automatic choice of P by what rounds have cost and brought.

The block's width is fixed, so a round costs the same whatever P between 1 and K is; the choice is
between P = 0 and as many as the request allows. A round with proposals pays if the tokens that it
commits per plain round's time exceed those of a plain round. What it costs is a ratio, since a
machine has moods: only rounds that follow each other are compared, where the choice changes, and
the median of the last such comparisons counts, for each number of rows apart. What a sample's
proposals bring is a running mean of its own rounds. The kind that is not chosen is tried for a
round now and then (a few, where the number of rows is new), drafting ever more rarely while it
disappoints, so that the choice follows the load and the text at a bounded price.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Protocol

_COMPARED = 3  # rounds of one kind that are compared with those of the other before or after them
_RATIOS = 2 * (_COMPARED + 1)  # that are remembered: a trial is compared at both of its ends
_WEIGHT, _TRIAL_WEIGHT = 0.25, 0.5  # of the newest round in a sample's running mean
_PRICE = 0.005  # of a plain round, that trials may add to one
_MARGIN = 1.02  # by which drafting must be ahead: switching is not free
_PROVEN = 8  # rounds of drafting in a row, after which its trials begin anew
FIRST_TRIAL, LAST_TRIAL = 16, 512  # rounds between trials of drafting, at first and at most
PLAIN_TRIAL = 128  # rounds between trials of plain rounds, which cost what drafting gains


class Drafting(Protocol):
    """What the policy remembers of a sample."""

    drafted_gain: float | None  # tokens that a round with proposals adds to one; None: none yet


@dataclass
class _Costs:
    """What rounds of one number of rows have cost."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_RATIOS))
    # the newest run of rounds of one kind, and what remains of the run before it, ns
    run: deque[int] = field(default_factory=lambda: deque(maxlen=_COMPARED))
    before: deque[int] = field(default_factory=deque)
    drafted: bool = False  # whether the newest run did
    run_length: int = 0
    last: int = 0  # when its newest round was, in rounds of any number of rows

    @property
    def ratio(self) -> float | None:
        """A drafted round's time by a plain one's; None before they were compared."""
        return statistics.median(self.ratios) if len(self.ratios) >= _COMPARED else None

    @property
    def can_be_tried(self) -> bool:
        """Whether there are plain rounds to compare a drafted one with."""
        return not self.drafted and self.run_length >= _COMPARED

    def ended(self, now: int, elapsed_ns: int, *, drafted: bool) -> None:
        """Compares a round with those of the other kind just before it."""
        if now - self.last > 2 * _COMPARED:
            self.run.clear()
            self.run_length = 0
        if drafted != self.drafted or not self.run_length:
            self.before = self.run
            self.run = deque(maxlen=_COMPARED)
            self.run_length = 0
        self.drafted, self.last = drafted, now
        self.run.append(elapsed_ns)
        self.run_length += 1
        if self.before and self.run_length <= _COMPARED:
            other_ns = statistics.median(self.before)
            pair = (elapsed_ns, other_ns) if drafted else (other_ns, elapsed_ns)
            self.ratios.append(pair[0] / max(1, pair[1]))


class DraftPolicy:
    """One engine's choice, round by round. Used by the engine thread alone."""

    def __init__(self) -> None:
        self._costs: dict[int, _Costs] = {}
        self._gain = 1.0  # of samples that have not drafted yet
        self._rounds = 0
        self._since_drafted = 0  # rounds
        self._since_plain = 0
        self._trial = FIRST_TRIAL
        self._trying = 0  # rounds left of a trial
        self._tried = False  # whether the last round was one
        self._chosen = 0  # rounds in a row that drafted because it pays
        self._unknown = True  # whether rounds of as many rows as the last were never compared

    @property
    def trial_is_next(self) -> bool:
        """Whether contexts should catch up now, because the next round will try drafting."""
        return self._trying > 0 or self._unknown or self._since_drafted + 2 >= self._trial

    def drafts(self, row_count: int, rows: Rows[Drafting]) -> bool:
        """Whether a round is to draft.

        Args:
            row_count: Samples in the round.
            rows: Those of them that may have proposals.
        """
        costs = self._costs.setdefault(row_count, _Costs())
        ratio = costs.ratio
        self._unknown = ratio is None
        if self._trying:
            return True
        if ratio is not None and 1.0 + self.gain(rows) / row_count > ratio * _MARGIN:
            return self._since_plain < PLAIN_TRIAL
        if ratio is None:
            self._trying = _COMPARED if costs.can_be_tried else 0
        elif self._since_drafted >= self._trial:
            self._trying = 1
        return self._trying > 0

    def gain(self, rows: Rows[Drafting]) -> float:
        """Tokens that the rows' proposals are expected to add to a round, all together."""
        return sum(self._gain if r.drafted_gain is None else r.drafted_gain for r in rows)

    def round_ended(self, row_count: int, elapsed_ns: int, *, drafted: bool) -> None:
        """Learns what a round cost."""
        self._rounds += 1
        self._since_drafted = 0 if drafted else self._since_drafted + 1
        self._since_plain = self._since_plain + 1 if drafted else 0
        self._costs.setdefault(row_count, _Costs()).ended(self._rounds, elapsed_ns, drafted=drafted)
        self._tried = drafted and self._trying > 0
        if self._tried:
            self._trying -= 1
            ratio = self._costs[row_count].ratio
            if ratio is not None and not self._trying:
                # until a trial pays, the next comes later, as late as its price asks for
                latest = min(LAST_TRIAL, max(FIRST_TRIAL, int((ratio - 1.0) / _PRICE)))
                self._trial = min(2 * self._trial, latest)
            return
        self._chosen = self._chosen + 1 if drafted else 0
        if self._chosen >= _PROVEN:
            self._trial = FIRST_TRIAL

    def committed(self, row: Drafting, accepted: int) -> None:
        """Learns what a sample's proposals brought; before the next round ends, if not this one."""
        before = self._gain if row.drafted_gain is None else row.drafted_gain
        # the first rounds of a sample, and those after a long pause, count for more
        first = row.drafted_gain is None or self._tried
        weight = _TRIAL_WEIGHT if first else _WEIGHT
        row.drafted_gain = before + weight * (accepted - before)
        self._gain += 0.05 * (accepted - self._gain)
