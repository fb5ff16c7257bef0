"""How wide the next round's trees are: the automatic choice by what rounds have cost and brought.

A wider tree is accepted further and takes longer to verify. What it takes depends on how many rows
share the round and on how long their contexts are, so times are kept by both: medians of the last
rounds. What it brings is learned for all widths at once, because the first columns of a tree are
the narrower tree: the accepted columns below a width are what that width would have accepted.
The width with the most tokens per second is chosen, the chain among them. The others are measured
again now and then, ever more rarely while that changes nothing, so that the choice follows the load
and the text at a bounded price. Only earlier rounds count: a choice knows nothing of its own round.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verifier.trees import accepted_within, main_chain

CHAIN = 0
_SAMPLES = 5  # rounds whose times are remembered, for each width
_LEAST_SAMPLES = 3  # before a median is believed, and rounds of a trial: most of what is remembered
_WEIGHT = 0.02  # of the newest round in a running mean, once there have been many
_MARGIN = 1.01  # by which another width must be ahead: switching is not free
# a width of nearly the best speed is tried for longer: what it brings varies more than its times,
# and trying it costs next to nothing
_NEARLY, _LONG_TRIAL = 0.95, 24
FIRST_TRIAL, LAST_TRIAL = 32, 1024  # rounds between trials of other widths
SHORTEST, GROWTH = 2048, 4  # positions of the shortest contexts' bucket, and from one to the next


class Mean:
    """A running mean, plain at first and then of the last rounds."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Takes one more."""
        self.count += 1
        self.value += max(_WEIGHT, 1 / self.count) * (value - self.value)


@dataclass
class _Load:
    """What is known of rounds with so many rows and such contexts."""

    times_ns: dict[int, deque[int]] = field(default_factory=dict)
    choice: int = CHAIN
    since: int = 0  # rounds since the last trial
    trial: int = FIRST_TRIAL
    trying: int = CHAIN
    left: int = 0  # rounds of the trial
    turn: int = 0  # whose trial is next

    def median(self, width: int) -> float | None:
        known = self.times_ns.get(width, ())
        return statistics.median(known) if len(known) >= _LEAST_SAMPLES else None

    def try_out(self, width: int, rounds: int = _LEAST_SAMPLES) -> int:
        self.trying, self.left, self.since = width, rounds, 0
        return width


class TreePolicy:
    """One engine's choice, round by round. Used by the engine thread, but for `choices`.

    Args:
        widths: Columns that trees may have, ascending.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        self._options = (CHAIN, *self.widths)
        self._loads: dict[tuple[int, int], _Load] = {}
        self._chain = Mean()  # proposals accepted by chains
        self._further = {width: Mean() for width in self.widths}  # what trees add to that

    def columns(self, row_count: int, frontier: int) -> int:
        """See `verifier.trees.Trees`."""
        load = self._load(row_count, frontier)
        if load.left:
            return load.trying
        # the widest first: it measures what the others would have brought
        unknown = next((w for w in reversed(self._options) if load.median(w) is None), None)
        if unknown is not None:
            return load.try_out(unknown)
        self._choose(load)
        if load.since < load.trial:
            return load.choice
        load.turn = (load.turn + 1) % len(self._options)
        if self._options[load.turn] == load.choice:
            load.turn = (load.turn + 1) % len(self._options)
        other = self._options[load.turn]
        is_near = self._speed(load, other) > _NEARLY * self._speed(load, load.choice)
        return load.try_out(other, _LONG_TRIAL if is_near else _LEAST_SAMPLES)

    def round_ended(self, row_count: int, frontier: int, columns: int, elapsed_ns: int) -> None:
        """See `verifier.trees.Trees`."""
        load = self._load(row_count, frontier)
        load.times_ns.setdefault(columns, deque(maxlen=_SAMPLES)).append(elapsed_ns)
        load.since += 1
        if not load.left or columns != load.trying:
            return
        load.left -= 1
        if not load.left and all(load.median(width) is not None for width in self._options):
            before = load.choice
            self._choose(load)
            # until a trial changes something, the next comes later
            same = load.choice == before
            load.trial = min(2 * load.trial, LAST_TRIAL) if same else FIRST_TRIAL

    def committed(self, nodes: int, columns: Sequence[int]) -> None:
        """See `verifier.trees.Trees`."""
        chain = main_chain(columns)
        self._chain.add(chain)
        for width in self.widths:
            if width <= nodes:
                self._further[width].add(accepted_within(columns, width) - chain)

    def choices(self) -> Mapping[str, float]:
        """The columns last chosen by load; callable from any thread."""
        return {
            f"{rows} rows below {end}": float(load.choice)
            for (rows, end), load in list(self._loads.items())
        }

    def tokens(self, width: int) -> float:
        """Tokens that a row's round of this width is expected to commit."""
        further = 0.0 if width == CHAIN else self._further[width].value
        return 1.0 + self._chain.value + further

    def _speed(self, load: _Load, width: int) -> float:
        median = load.median(width)
        return self.tokens(width) / median if median else 0.0

    def _choose(self, load: _Load) -> None:
        best = max(self._options, key=lambda width: self._speed(load, width))
        if self._speed(load, best) > self._speed(load, load.choice) * _MARGIN:
            load.choice = best

    def _load(self, row_count: int, frontier: int) -> _Load:
        end = SHORTEST
        while frontier >= end:
            end *= GROWTH
        return self._loads.setdefault((row_count, end), _Load())
