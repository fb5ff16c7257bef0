"""What the drafter counts, and what it tells of each sequence: metrics, log events, spans.

Written by the engine thread; a scrape reads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

import outrider
from outrider.metrics import Metrics
from outrider.tracing import NO_TRAIL, Span, Tracer, Trail

if TYPE_CHECKING:
    from drafter.service import Engine

log = structlog.get_logger("outrider.drafter")

PREFIX = "outrider_drafter"
PHASES = ("materialize", "draft", "total")
_BYTES = "bytes_"


class DrafterMetrics(Metrics):
    """Everything that /metrics of a drafter shows, under one prefix."""

    def __init__(self) -> None:
        super().__init__(PREFIX)
        self.reading(
            "gauge", "build_info", "Always 1.", lambda: {outrider.__version__: 1.0}, "version"
        )
        self.rounds = self.histogram(
            "round_seconds",
            "A round as the drafter saw it, by phase.",
            label="phase",
            values=PHASES,
        )

    def watch(self, engine: Engine) -> None:
        """Adds what is read off the engine when it is scraped."""
        counters = engine.counters
        self.reading(
            "counter",
            "events",
            "What happened, over all streams.",
            lambda: {
                name: float(count)
                for name, count in dict(counters).items()
                if not name.startswith(_BYTES)
            },
            "event",
        )
        self.reading(
            "counter",
            "wire_bytes",
            "Bytes of DraftRounds messages.",
            lambda: {way: float(counters[f"{_BYTES}{way}"]) for way in ("sent", "received")},
            "direction",
        )
        self.reading("gauge", "streams", "Live streams of verifiers.", engine.stream_count)
        self.reading("gauge", "sequences", "Contexts, used and free.", engine.occupancy, "state")

    def round_ended(self, materialize_ns: int, draft_ns: int, total_ns: int) -> None:
        """One round, barriers included."""
        for phase, spent_ns in zip(PHASES, (materialize_ns, draft_ns, total_ns), strict=True):
            self.rounds[phase].observe(spent_ns / 1e9)


@dataclass
class _Followed:
    """One sequence on its way."""

    trail: Trail
    span: Span
    rounds: int = 0
    proposed: int = 0


class StreamRecord:
    """Follows the sequences of one stream by the trails that their verifier gave them."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._followed: dict[int, _Followed] = {}

    def begun(self, sequence_id: int, epoch: int, trail: Trail, how: str) -> None:
        """A sequence has a context: how is the event that gave it one."""
        self.released(sequence_id)
        span = self._tracer.start(
            "draft",
            trail.traceparent,
            time.monotonic_ns(),
            {"outrider.request_id": trail.request_id, "outrider.epoch": epoch},
        )
        self._followed[sequence_id] = _Followed(trail, span)
        log.debug("context_begun", sequence_id=sequence_id, epoch=epoch, how=how, **trail.fields())

    def round_ended(
        self, round_index: int, proposed: Sequence[tuple[int, int]], **times_ns: int
    ) -> None:
        """A round over sequences, with the proposals that each got."""
        for sequence_id, count in proposed:
            followed = self._followed.get(sequence_id)
            if followed is not None:
                followed.rounds += 1
                followed.proposed += count
        log.debug(
            "round_drafted",
            round_index=round_index,
            rows=len(proposed),
            request_ids=[self.trail(sequence_id).request_id for sequence_id, _ in proposed],
            proposed=sum(count for _, count in proposed),
            **times_ns,
        )

    def trail(self, sequence_id: int) -> Trail:
        """Whom a sequence is for, as far as its verifier said."""
        followed = self._followed.get(sequence_id)
        return NO_TRAIL if followed is None else followed.trail

    def released(self, sequence_id: int) -> None:
        """A sequence is over. Idempotent."""
        followed = self._followed.pop(sequence_id, None)
        if followed is not None:
            followed.span.end(
                {"outrider.rounds": followed.rounds, "outrider.proposed": followed.proposed}
            )

    def closed(self) -> None:
        """The stream is over, and all its sequences with it."""
        for sequence_id in list(self._followed):
            self.released(sequence_id)
