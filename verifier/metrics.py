"""What the verifier counts, and what it tells of each sample: metrics, one log event, one span.

`VerifierMetrics` is written by the engine thread, but for `calls`, which is the server loop's. A
`SampleRecord` follows one sample from its submission to its one end, whatever that is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import structlog

import outrider
from outrider.faults import FaultError
from outrider.metrics import Metrics
from outrider.tracing import Span, Tracer
from verifier.request import FinishReason, Request, Usage

if TYPE_CHECKING:
    from verifier.scheduler import Engine

log = structlog.get_logger("outrider.engine")

PREFIX = "outrider_verifier"
PHASES = ("draft", "wire", "verify", "host", "total")
MOST_ROWS = 8
MOST_DRAFT_TOKENS = 15
# why a row ran without proposals
PLAIN_CAUSES = (
    "request",  # it wants none
    "budget",  # no token or position is left for one
    "policy",  # drafting would not pay
    "drafter_away",
    "out_of_range",  # beyond the drafter's context
    "closed",  # its context is not open, after a fault
    "backlog",  # its context has not caught up
    "no_proposal",  # asked for, and a fault or nothing came
)


class VerifierMetrics(Metrics):
    """Everything that /metrics of a verifier shows, under one prefix."""

    def __init__(self) -> None:
        super().__init__(PREFIX)
        self.reading(
            "gauge", "build_info", "Always 1.", lambda: {outrider.__version__: 1.0}, "version"
        )
        self.calls = self.counter("calls", "Calls of Generate that ended, by status.", "code")
        self.outcomes = self.counter("requests", "Samples that ended, by outcome.", "outcome")
        self._tokens: Counter[str] = Counter()
        for kind, meaning in (
            ("prompt", "Prompt tokens of samples that ended."),
            ("cached", "Of these, tokens that a prefix checkpoint held."),
            ("output", "Tokens published."),
            ("proposed", "Tokens that were proposed and verified."),
            ("accepted", "Of these, tokens that passed."),
            ("side_accepted", "Of these, tokens off the main chain of a tree."),
        ):
            self.reading("counter", f"{kind}_tokens", meaning, self._reader(kind))
        self.prefixes = self.counter(
            "prefix_cache", "Prompts that ended, by whether they continued a checkpoint.", "result"
        )
        seconds = self.histogram
        self.queue = seconds("queue_seconds", "From arrival to admission.")[""]
        self.ttft = seconds("ttft_seconds", "From arrival to the first token.")[""]
        self.gaps = seconds("inter_token_seconds", "Between tokens: a round's share of its gap.")[
            ""
        ]
        self.requests = seconds("request_seconds", "From arrival to the end of a sample.")[""]
        self.chunks = seconds("prefill_seconds", "A chunk of a prompt.")[""]
        self.rounds = seconds("round_seconds", "A round, by phase.", label="phase", values=PHASES)
        self.rows = self.histogram(
            "round_rows", "Samples in a round.", ends=range(1, MOST_ROWS + 1)
        )[""]
        self.live = self.histogram(
            "live_proposals", "P of a sample's round.", ends=range(MOST_DRAFT_TOKENS + 1)
        )[""]
        self.accept_length = self.histogram(
            "accept_length",
            "Tokens committed by a sample's round with proposals.",
            ends=range(1, MOST_DRAFT_TOKENS + 2),
        )[""]
        self.columns = self.counter(
            "round_columns",
            "Rounds with proposals, where trees are on, by the columns asked for; 0 for chains.",
            "columns",
        )
        self._proposed_at = [0] * (MOST_DRAFT_TOKENS + 1)
        self._accepted_at = [0] * (MOST_DRAFT_TOKENS + 1)
        for name, counts, meaning in (
            ("proposed", self._proposed_at, "Rounds with a proposal at this position."),
            ("accepted", self._accepted_at, "Of these, rounds in which it passed."),
        ):
            self.reading(
                "counter",
                f"{name}_at_position",
                meaning,
                self._positions(counts),
                "position",
            )
        self.plain = self.counter(
            "plain_rounds", "Rounds of samples without proposals, by cause.", "cause"
        )
        self.plain.update(dict.fromkeys(PLAIN_CAUSES, 0))

    def _reader(self, kind: str) -> Callable[[], float]:
        return lambda: float(self._tokens[kind])

    def _positions(self, counts: list[int]) -> Callable[[], dict[str, float]]:
        # those beyond K never have any
        return lambda: {
            str(position): float(counts[position])
            for position, proposed in enumerate(self._proposed_at)
            if proposed
        }

    def watch(self, engine: Engine) -> None:
        """Adds what is read off the engine when it is scraped."""
        self.reading("gauge", "samples", "Samples now, by state.", engine.states, "state")
        self.reading(
            "gauge",
            "drafter_connected",
            "Whether proposals flow.",
            lambda: float(engine.link.connected),
        )
        self.reading(
            "counter",
            "link_events",
            "What happened on the link to the drafter.",
            lambda: {
                name: float(count)
                for name, count in dict(engine.link.counters).items()
                if not name.startswith("bytes_")
            },
            "event",
        )
        self.reading(
            "counter",
            "wire_bytes",
            "Bytes of DraftRounds messages.",
            lambda: {
                way: float(engine.link.counters[f"bytes_{way}"]) for way in ("sent", "received")
            },
            "direction",
        )
        self.reading(
            "counter",
            "checkpoint_events",
            "What happened to prefix checkpoints.",
            lambda: {
                name: float(count) for name, count in dict(engine.checkpoints.counters).items()
            },
            "event",
        )
        self.reading(
            "gauge", "checkpoints", "Prefixes kept.", lambda: float(len(engine.checkpoints))
        )
        trees = engine.trees
        self.reading(
            "gauge",
            "tree_columns",
            "Columns of trees by the load that they are for; 0 for chains.",
            dict if trees is None else trees.choices,
            "load",
        )
        for name, meaning in (
            ("lanes", "Resident samples at most."),
            ("state_slots", "GDN states."),
            ("pages", "KV pages of 64 positions."),
        ):
            self.reading(
                "gauge",
                name,
                f"{meaning[:-1]}, used and free.",
                partial(_used_and_free, engine, name),
                "state",
            )

    # ---- from the rounds ----------------------------------------------------------------------

    def round_ended(
        self, rows: int, total_ns: int, draft_ns: int, wire_ns: int, verify_ns: int
    ) -> None:
        """One round over ``rows`` samples; what no phase claims is the host's."""
        host_ns = max(0, total_ns - draft_ns - wire_ns - verify_ns)
        for phase, spent_ns in zip(
            PHASES, (draft_ns, wire_ns, verify_ns, host_ns, total_ns), strict=True
        ):
            self.rounds[phase].observe(spent_ns / 1e9)
        self.rows.observe(rows)

    def row_committed(self, proposed: int, accepted: int, committed: int) -> None:
        """One sample's part of a round: P, A and N."""
        self.live.observe(proposed)
        if not proposed:
            return
        self.accept_length.observe(committed)
        self._tokens["proposed"] += proposed
        self._tokens["accepted"] += accepted
        for position in range(1, proposed + 1):
            self._proposed_at[position] += 1
        for position in range(1, accepted + 1):
            self._accepted_at[position] += 1

    def tree_committed(
        self, proposed: int, accepted: int, committed: int, side: int, depth: int
    ) -> None:
        """As `row_committed`, of a tree of N columns beside the anchor's and so many levels."""
        self.row_committed(depth, accepted, committed)
        self._tokens["proposed"] += proposed - depth
        self._tokens["side_accepted"] += side

    def chunk_ended(self, spent_ns: int) -> None:
        """One chunk of a prompt."""
        self.chunks.observe(spent_ns / 1e9)

    # ---- from the samples ---------------------------------------------------------------------

    def tokens_published(self, count: int, waited_ns: int, first: bool) -> None:
        """Tokens that reached a client together, after the wait for them."""
        self._tokens["output"] += count
        if first:
            self.ttft.observe(waited_ns / 1e9)
        else:
            self.gaps.observe(waited_ns / count / 1e9, count)

    def sample_ended(self, outcome: str, request: Request, usage: Usage, total_ns: int) -> None:
        """The one end of a sample."""
        self.outcomes[outcome] += 1
        # samples of one request share its prompt, which counts once
        self._tokens["prompt"] += usage.prompt_tokens
        self._tokens["cached"] += usage.cached_tokens
        if usage.prompt_tokens and usage.output_tokens:
            self.prefixes["hit" if usage.cached_tokens else "miss"] += 1
        self.requests.observe(total_ns / 1e9)


def _used_and_free(engine: Engine, name: str) -> dict[str, float]:
    used, free = engine.occupancy()[name]
    return {"used": used, "free": free}


class SampleRecord:
    """Follows one sample. Called by the engine thread, but for its creation."""

    def __init__(self, request: Request, metrics: VerifierMetrics, tracer: Tracer) -> None:
        self._request = request
        self._metrics = metrics
        self._published_ns = 0
        self._admitted_ns = 0
        self._ended = False
        self.span: Span = tracer.start(
            "generate",
            request.trail.traceparent,
            request.arrival_ns,
            {
                "outrider.request_id": request.request_id,
                "outrider.sample": request.sample_index,
                "gen_ai.usage.input_tokens": len(request.prompt_ids),
            },
        )

    def admitted(self, queue_ns: int) -> None:
        """It has a lane."""
        self._admitted_ns = self._request.arrival_ns + queue_ns
        self._metrics.queue.observe(queue_ns / 1e9)

    def published(self, count: int) -> None:
        """Tokens of it were handed to its client."""
        if not count:
            return
        now = time.monotonic_ns()
        first = not self._published_ns
        since = self._request.arrival_ns if first else self._published_ns
        if first:
            self._mark_prefill(now)
        self._published_ns = now
        self._metrics.tokens_published(count, now - since, first)

    def _mark_prefill(self, now: int) -> None:
        admitted = self._admitted_ns or self._request.arrival_ns
        self.span.child("queue", self._request.arrival_ns, admitted)
        self.span.child("prefill", admitted, now)

    def ended(self, outcome: FinishReason | FaultError, usage: Usage, *, left: bool) -> None:
        """It ended: for its client, or because that left. Idempotent."""
        if self._ended:
            return
        self._ended = True
        request, now = self._request, time.monotonic_ns()
        total_ns = now - request.arrival_ns
        name = outcome.reason.lower() if isinstance(outcome, FaultError) else outcome.value
        if left and not isinstance(outcome, FaultError):
            name = "left"
        self._metrics.sample_ended(name, request, usage, total_ns)
        log.info(
            "request_ended",
            request_id=request.request_id,
            sample=request.sample_index,
            **request.trail.fields(),
            outcome=name,
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            rounds=usage.rounds,
            plain_rounds=usage.plain_rounds,
            proposed=usage.proposed,
            accepted=usage.accepted,
            tree_rounds=usage.tree_rounds,
            side_accepted=usage.side_accepted,
            queue_ms=usage.queue_ns // 1_000_000,
            ttft_ms=usage.ttft_ns // 1_000_000,
            total_ms=total_ns // 1_000_000,
        )
        if self._published_ns:
            first_ns = request.arrival_ns + usage.ttft_ns
            self.span.child(
                "decode",
                first_ns,
                now,
                {
                    "outrider.rounds": usage.rounds,
                    "outrider.proposed": usage.proposed,
                    "outrider.accepted": usage.accepted,
                    "outrider.draft_ms": usage.draft_ns // 1_000_000,
                    "outrider.wire_ms": usage.wire_ns // 1_000_000,
                    "outrider.verify_ms": usage.verify_ns // 1_000_000,
                },
            )
        self.span.end(
            {"outrider.outcome": name, "gen_ai.usage.output_tokens": usage.output_tokens},
            error=name if isinstance(outcome, FaultError) else "",
        )
