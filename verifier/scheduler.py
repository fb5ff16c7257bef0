"""Admission and the engine thread: who is resident, and whose turn it is.

Waiting samples are admitted first in, first out. Each turn of the loop runs at most one prefill
chunk and one decode round, so a long prompt never holds residents up for more than a chunk.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import structlog
import torch

from outrider.faults import FaultError
from outrider.tracing import Tracer
from verifier.drafter_link import DrafterLink
from verifier.metrics import SampleRecord
from verifier.preview import OutputSession
from verifier.request import Request, Sink, Usage
from verifier.rounds import Rounds
from verifier.sequence import Sequence, Ticket
from verifier.state import TargetState
from verifier.text import Text

log = structlog.get_logger("outrider.engine")


@dataclass(frozen=True)
class EngineStatus:
    """A snapshot for GetServerInfo."""

    drafter_state: str  # "connected", "connecting" or "refused"
    drafter_address: str
    drafter_detail: str
    resident: int
    queued: int
    counters: dict[str, int]


class Engine:
    """Owns the engine thread. Submit, cancel and status may be called from any thread.

    Args:
        rounds: The story to run.
        state: The target's memory, for admission.
        text: Tokenizer, for the output sessions.
        lanes: B, samples that run at once.
        max_queue: Samples that may wait beside them.
        queue_timeout_ns: Longest wait for admission.
        tracer: Makes spans of samples; None makes none.
    """

    def __init__(
        self,
        rounds: Rounds,
        state: TargetState,
        text: Text,
        *,
        lanes: int,
        max_queue: int,
        queue_timeout_ns: int,
        tracer: Tracer | None = None,
    ) -> None:
        self._rounds = rounds
        self._link: DrafterLink = rounds.link
        self.metrics = rounds.metrics
        self._tracer = tracer or Tracer("outrider-verifier")
        self._state = state
        self._text = text
        self._most_live = lanes + max_queue
        self._queue_timeout_ns = queue_timeout_ns
        self._lock = threading.Lock()
        self._waiting: deque[Ticket] = deque()
        self._live: dict[tuple[str, int], Ticket] = {}
        self._resident: list[Sequence] = []
        self._wake = threading.Event()
        self._draining = False
        self._stopping = False
        self._counters: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self.metrics.watch(self)

    # ---- any thread ---------------------------------------------------------------------------

    def wake(self) -> None:
        """Makes the loop look again; for submissions, cancellations and the drafter's messages."""
        self._wake.set()

    def start(self) -> None:
        """Starts dialling the drafter and the engine thread."""
        self._link.start()
        self._thread.start()

    def submit(self, requests: Rows[Request], sinks: Rows[Sink]) -> None:
        """Queues the samples of one client request, all or none.

        Raises:
            FaultError: DRAINING, QUEUE_FULL or REQUEST_ID_TAKEN.
        """
        with self._lock:
            if self._draining:
                raise FaultError(
                    "DRAINING", "server: draining, takes no new requests", retry_after_ms=1000
                )
            if any((r.request_id, r.sample_index) in self._live for r in requests):
                taken = requests[0].request_id
                raise FaultError(
                    "REQUEST_ID_TAKEN",
                    f"request_id: expected one that is not running, got {taken!r}",
                    request_id=taken,
                )
            most = self._most_live
            if len(self._live) + len(requests) > most:
                raise FaultError(
                    "QUEUE_FULL",
                    f"queue: expected at most {most} samples running and waiting, "
                    f"got {len(self._live)} and {len(requests)} more",
                    expected=most,
                    actual=len(self._live) + len(requests),
                    retry_after_ms=1000,
                )
            tickets = [
                Ticket(request, sink, SampleRecord(request, self.metrics, self._tracer))
                for request, sink in zip(requests, sinks, strict=True)
            ]
            self._waiting.extend(tickets)
            for ticket in tickets:
                self._live[ticket.request.request_id, ticket.request.sample_index] = ticket
            self._counters["requests"] += len(tickets)
        self.wake()

    def cancel(self, request_id: str, sinks: Rows[Sink] | None = None) -> bool:
        """Ends every sample of a request soon. Idempotent; False when none is running.

        With ``sinks`` only the samples that publish there: an id may be in use again by the time
        that its first user leaves.
        """
        with self._lock:
            tickets = [
                ticket
                for (name, _), ticket in self._live.items()
                if name == request_id and (sinks is None or ticket.sink in sinks)
            ]
        for ticket in tickets:
            ticket.abort()
        self.wake()
        return bool(tickets)

    def status(self) -> EngineStatus:
        """What runs and waits now."""
        with self._lock:
            queued, resident = len(self._waiting), len(self._resident)
            counters = dict(self._counters)
        counters.update({f"drafter_{k}": v for k, v in dict(self._link.counters).items()})
        counters["drafter_feature_bytes"] = self._link.feature_bytes
        return EngineStatus(
            self._link.state, self._link.address, self._link.detail, resident, queued, counters
        )

    @property
    def link(self) -> DrafterLink:
        """The drafter's end, for metrics."""
        return self._link

    def states(self) -> dict[str, float]:
        """Samples by state."""
        with self._lock:
            return {"waiting": len(self._waiting), "running": len(self._resident)}

    def occupancy(self) -> dict[str, tuple[int, int]]:
        """Used and free lanes, state slots and pages."""
        return self._state.occupancy()

    def drain(self, grace_s: float) -> bool:
        """Takes no new requests and waits for the live ones; True when all ended in time."""
        with self._lock:
            self._draining = True
        self.wake()
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline:
            with self._lock:
                if not self._live:
                    return True
            time.sleep(0.02)
        return False

    def stop(self) -> None:
        """Ends what still runs with UNAVAILABLE and stops both threads."""
        with self._lock:
            self._draining = True
        self._stopping = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=30)
        self._link.stop()

    # ---- engine thread ------------------------------------------------------------------------

    def _loop(self) -> None:
        with torch.inference_mode(), self._rounds.blocks.replays.stream():
            while not self._stopping:
                self._wake.clear()
                try:
                    ran = self._turn()
                except Exception:  # the engine's edge: a broken turn must not strand its clients
                    log.exception("turn_failed")
                    self._count("failed_turns")
                    self._end_all(FaultError("INTERNAL", "engine: a turn failed; see the log"))
                    continue
                if not ran:
                    self._rounds.deliver()
                    # a timeout, not only the event: deadlines pass without one
                    self._wake.wait(0.05 if self._live else 1.0)
            self._end_all(FaultError("DRAINING", "server: stopped before the request ended"))

    def _turn(self) -> bool:
        """One chunk and one round at most; False when there was nothing to run."""
        self._link.poll()
        self._drop_cancelled()
        self._admit()
        prefilled = self._prefill()
        # a reader that is behind pauses its own samples, and nobody else's
        decoding = [s for s in self._resident if s.prefilled and not s.ticket.sink.full]
        self._link.pump(drafting=any(self._drafts(s) for s in decoding))
        ready = [s for s in decoding if not self._must_wait(s)]
        if ready:
            self._run(ready, "round")
        return prefilled or bool(ready)

    def _prefill(self) -> bool:
        """At most one chunk's worth of prompt tokens; False when no prompt waits for any.

        Several short prompts may share it, so that a burst of them is not admitted one a round.
        """
        budget = self._rounds.chunk
        while budget > 0:
            prefilling = next(
                (s for s in self._resident if not s.prefilled and not self._must_wait(s)), None
            )
            if prefilling is None:
                break
            size = self._rounds.chunk_end(prefilling) - prefilling.frontier
            if size > budget:
                break
            # to the back of the line: prompts take turns, chunk by chunk
            self._resident.remove(prefilling)
            self._resident.append(prefilling)
            self._run([prefilling], "prefill")
            budget -= size
        return budget < self._rounds.chunk

    def _drafts(self, sequence: Sequence) -> bool:
        context = sequence.context
        return (
            context is not None
            and context.is_open
            and not self._link.has_backlog(context)
            and self._link.drafts_at(sequence.frontier)
            and self._rounds.wanted(sequence) > 0
        )

    def _must_wait(self, sequence: Sequence) -> bool:
        """Whether a seeded sample's context lags: its proposals must depend on the request alone.

        A prompt that went on would overflow its backlog, and lose coverage, only beside neighbours.
        """
        sampling = sequence.request.sampling
        return (
            sampling.seed_given
            and not sampling.greedy
            and sequence.context is not None
            and self._link.has_backlog(sequence.context)
        )

    def _run(self, rows: list[Sequence], phase: str) -> None:
        """Runs a chunk or a round; whatever goes wrong ends these rows and nobody else."""
        try:
            if phase == "prefill":
                self._rounds.prefill(rows[0])
            else:
                self._rounds.run(rows)
        except Exception as error:  # the engine's edge: the loop must outlive any row
            log.exception("round_failed", phase=phase, rows=len(rows))
            self._count("failed_rounds")
            fault = FaultError("INTERNAL", f"engine: {phase} failed: {type(error).__name__}")
            for row in rows:
                if not row.finished:
                    self._rounds.end(row, fault)
        for row in rows:
            if row.finished:
                self._release(row)

    def _admit(self) -> None:
        while self._waiting:
            with self._lock:
                ticket = self._waiting[0]
            request = ticket.request
            # the last token is published but never processed
            positions = len(request.prompt_ids) + request.max_tokens - 1
            residency = self._state.acquire(positions)
            if residency is None:
                return
            with self._lock:
                self._waiting.popleft()
            usage = Usage(
                prompt_tokens=len(request.prompt_ids) if request.sample_index == 0 else 0,
                accepted_per_position=[0] * self._rounds.draft_tokens,
                seed=request.sampling.seed,
                queue_ns=time.monotonic_ns() - request.arrival_ns,
            )
            ticket.record.admitted(usage.queue_ns)
            self._rounds.blocks.tables.admit(residency.lane, request)
            sequence = Sequence(
                ticket=ticket,
                residency=residency,
                session=OutputSession(self._text, request),
                context=self._link.context(ticket.trail) if request.draft_tokens else None,
                usage=usage,
                tokens=list(request.prompt_ids),
            )
            with self._lock:
                self._resident.append(sequence)

    def _drop_cancelled(self) -> None:
        """Ends waiting and prefilling samples that were cancelled; rounds look for themselves."""
        for ticket in list(self._waiting):
            outcome = ticket.cancellation() or self._waited_too_long(ticket)
            if outcome is not None:
                with self._lock:
                    self._waiting.remove(ticket)
                self._forget(ticket)
                ticket.end(outcome, Usage(seed=ticket.request.sampling.seed))
        for sequence in list(self._resident):
            ending = sequence.ticket.cancellation()
            if ending is not None:
                self._rounds.end(sequence, ending)
                self._release(sequence)

    def _waited_too_long(self, ticket: Ticket) -> FaultError | None:
        waited_ns = time.monotonic_ns() - ticket.request.arrival_ns
        if waited_ns <= self._queue_timeout_ns:
            return None
        limit_ms, waited_ms = self._queue_timeout_ns // 1_000_000, waited_ns // 1_000_000
        return FaultError(
            "QUEUE_TIMEOUT",
            f"queue: expected admission within {limit_ms} ms, waited {waited_ms} ms",
            limit_ms=limit_ms,
            waited_ms=waited_ms,
            retry_after_ms=limit_ms,
        )

    def _release(self, sequence: Sequence) -> None:
        """Frees lane, slot, pages and the drafter's half."""
        with self._lock:
            self._resident.remove(sequence)
        self._state.release(sequence.residency)
        if sequence.context is not None:
            self._link.release(sequence.context)
        usage = sequence.usage
        with self._lock:
            self._counters.update(
                output_tokens=usage.output_tokens,
                rounds=usage.rounds,
                plain_rounds=usage.plain_rounds,
                proposed=usage.proposed,
                accepted=usage.accepted,
            )
        self._forget(sequence.ticket)

    def _forget(self, ticket: Ticket) -> None:
        request = ticket.request
        with self._lock:
            self._live.pop((request.request_id, request.sample_index), None)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counters[name] += 1

    def _end_all(self, fault: FaultError) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
        for ticket in waiting:
            self._forget(ticket)
            ticket.end(fault, Usage())
        for sequence in list(self._resident):
            self._rounds.end(sequence, fault)
            self._release(sequence)
        self._rounds.deliver()
