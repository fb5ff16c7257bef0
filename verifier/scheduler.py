"""Admission and the engine thread: who is resident, and whose turn it is.

Waiting samples are admitted first in, first out; one that lacks pages may be overtaken, a bounded
number of times. Each turn of the loop runs at most one prefill chunk and one decode round, so a
long prompt never holds residents up for more than a chunk.

Residents take KV pages as they go. Under pressure checkpoints give way first, and then the youngest
resident is paused: its state moves to host memory, or is dropped and replayed later. Paused samples
come back, the oldest first, before anybody new. A prompt that begins like a checkpoint continues
it; the samples of one request share one prefill.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from dataclasses import dataclass

import structlog
import torch

from outrider.faults import FaultError
from outrider.tracing import Tracer
from verifier.checkpoints import Checkpoint, Checkpoints
from verifier.drafter_link import FEATURE_ROWS_PER_MESSAGE, DrafterLink
from verifier.host_images import HostImages
from verifier.metrics import SampleRecord
from verifier.preview import OutputSession
from verifier.request import Request, Sink, Usage
from verifier.rounds import Rounds
from verifier.sequence import Sequence, Ticket
from verifier.state import TargetState
from verifier.text import Text
from verifier.trees import Trees

log = structlog.get_logger("outrider.engine")

# calls in a turn whose columns make up less than a chunk: each reads all weights, however few they
# are, so one counts for this part of a chunk at least
_CALLS_PER_CHUNK = 4


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
        checkpoints: Kept prefixes.
        host: Room for the states of paused samples.
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
        checkpoints: Checkpoints,
        host: HostImages,
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
        self._checkpoints = checkpoints
        self._host = host
        self._text = text
        self._lanes = lanes
        self._most_live = lanes + max_queue
        self._queue_timeout_ns = queue_timeout_ns
        self._lock = threading.Lock()
        self._waiting: deque[Ticket] = deque()
        self._live: dict[tuple[str, int], Ticket] = {}
        self._resident: list[Sequence] = []
        self._paused: list[Sequence] = []
        self._forgettings: list[Future[bool]] = []  # asked for, not yet answered
        self._order = 0
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
            FaultError: DRAINING, QUEUE_FULL or REQUEST_ID_TAKEN; REQUEST_INVALID for more samples
                than could ever wait.
        """
        if len(requests) > self._most_live:
            raise FaultError(
                "REQUEST_INVALID",
                f"n: expected at most {self._most_live}, the samples that may run and wait, "
                f"got {len(requests)}",
                field="n",
                expected=self._most_live,
                actual=len(requests),
            )
        with self._lock:
            if self._draining:
                raise FaultError(
                    "DRAINING", "server: draining, takes no new requests", retry_after_ms=1000
                )
            taken = requests[0].request_id
            # by id alone: one sample of it may have ended while another runs
            if any(request_id == taken for request_id, _ in self._live):
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
            queued, resident = len(self._waiting) + len(self._paused), len(self._resident)
            counters = dict(self._counters)
        kept = dict(self._checkpoints.counters)
        counters.update({f"checkpoint_{name}": count for name, count in kept.items()})
        counters["checkpoints"] = len(self._checkpoints)
        counters["checkpoint_feature_bytes"] = self._checkpoints.feature_bytes
        counters.update({f"drafter_{k}": v for k, v in dict(self._link.counters).items()})
        counters["drafter_feature_bytes"] = self._link.feature_bytes
        return EngineStatus(
            self._link.state, self._link.address, self._link.detail, resident, queued, counters
        )

    @property
    def link(self) -> DrafterLink:
        """The drafter's end, for metrics."""
        return self._link

    @property
    def trees(self) -> Trees | None:
        """Who chooses how wide trees are, for metrics; None without trees."""
        return self._rounds.trees

    @property
    def checkpoints(self) -> Checkpoints:
        """Kept prefixes, for metrics."""
        return self._checkpoints

    def states(self) -> dict[str, float]:
        """Samples by state."""
        with self._lock:
            return {
                "waiting": len(self._waiting),
                "running": len(self._resident),
                "paused": len(self._paused),
            }

    def occupancy(self) -> dict[str, tuple[int, int]]:
        """Used and free lanes, state slots and pages."""
        return self._state.occupancy()

    def positions(self) -> tuple[int, int]:
        """Positions in the pages that running samples hold, and in all pages.

        What checkpoints alone hold counts as free, since they give way.
        """
        with self._lock:
            residents = list(self._resident)
        held = {page for s in residents for page in tuple(s.residency.pages)}
        return len(held) * self._state.page_size, self._state.page_count * self._state.page_size

    def forget_prefixes(self) -> Future[bool]:
        """Drops every checkpoint soon; False, and nothing is dropped, if samples run or wait."""
        asked: Future[bool] = Future()
        with self._lock:
            self._forgettings.append(asked)
        self.wake()
        return asked

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
            self._end_all(
                FaultError(
                    "DRAINING", "server: stopped before the request ended", retry_after_ms=1000
                )
            )

    def _turn(self) -> bool:
        """One chunk and one round at most; False when there was nothing to run."""
        self._link.poll()
        self._drop_cancelled()
        self._forget_if_asked()
        self._resume_paused()
        self._admit()
        prefilled = self._prefill()
        # a reader that is behind pauses its own samples, and nobody else's
        decoding = [s for s in self._resident if s.prefilled and not s.ticket.sink.full]
        ready = self._with_pages([s for s in decoding if not self._must_wait(s)])
        self._send_backlog(decoding, ready)
        ready = [s for s in ready if not self._must_wait(s)]
        if ready:
            self._run(ready, "round")
        return prefilled or bool(ready)

    def _prefill(self) -> bool:
        """At most one chunk's worth of known tokens; False when nobody waits for any.

        A few short prompts, or blocks of a replay, may share it, so that a burst of them is not
        admitted one a round.
        """
        budget = chunk = self._rounds.chunk
        while budget > 0:
            prefilling = next((s for s in self._resident if self._may_prefill(s)), None)
            if prefilling is None:
                break
            end = self._prefill_end(prefilling)
            columns = end - prefilling.frontier
            # a prompt that was restored whole costs one draw
            size = max(columns, chunk // _CALLS_PER_CHUNK) if columns else 1
            if size > budget:
                break
            # to the back of the line: prompts take turns, chunk by chunk
            self._resident.remove(prefilling)
            self._resident.append(prefilling)
            if not self._take_pages(prefilling, end):
                continue
            self._run([prefilling], "replay" if prefilling.replaying else "prefill")
            budget -= size
        return budget < self._rounds.chunk

    def _may_prefill(self, sequence: Sequence) -> bool:
        return not sequence.prefilled and sequence.leader is None and not self._must_wait(sequence)

    def _prefill_end(self, sequence: Sequence) -> int:
        if sequence.replaying:
            return self._rounds.replay_end(sequence)
        return self._rounds.chunk_end(sequence)

    def _send_backlog(self, decoding: list[Sequence], ready: list[Sequence]) -> None:
        """Sends rows that the drafter lacks; while no round drafts, only by whole messages."""
        policy = self._rounds.policy
        if policy is None or self._rounds.plan(ready):
            self._link.pump(drafting=any(self._drafts(s) for s in decoding))
        elif policy.trial_is_next:
            self._link.pump(drafting=False)
        else:
            self._link.pump(drafting=False, least_rows=FEATURE_ROWS_PER_MESSAGE)

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
        Where P is chosen by the load there is nothing to wait for.
        """
        if self._rounds.policy is not None:
            return False
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
                self._keep_prompt(rows[0])
            elif phase == "replay":
                self._rounds.replay(rows[0])
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

    # ---- checkpoints and forks ----------------------------------------------------------------

    def _keep_prompt(self, sequence: Sequence) -> None:
        """Keeps the prefix just processed if it is to be kept, and lets other samples go on."""
        frontier = sequence.frontier
        if frontier in sequence.captures:
            self._rounds.take_arrived()
            tokens = sequence.tokens[:frontier]
            self._checkpoints.capture(sequence.residency, tokens, sequence.context)
        if frontier == sequence.prompt_end:
            for follower in [s for s in self._resident if s.leader is sequence]:
                self._fork(sequence, follower)

    def _fork(self, leader: Sequence, follower: Sequence) -> None:
        """Lets another sample of the request start where its leader's prompt ends."""
        image = self._state.view(leader.residency, leader.prompt_end)
        tail = 1 if leader.prompt_end % self._state.page_size else 0
        if not self._checkpoints.reclaim(tail):
            self._stand_alone(follower)
            return
        resumed = self._state.resume(follower.residency, image, leader.prompt_end)
        assert resumed  # the page that the frontier cuts was all it needed
        follower.leader, follower.frontier = None, leader.prompt_end
        if leader.context is not None:
            follower.context = self._link.fork(leader.context, follower.ticket.trail)
        self._count("forks")

    def _dismiss_followers(self, leader: Sequence) -> None:
        """Lets those that waited for a prefill do it for themselves: it will not be done."""
        for follower in self._resident:
            if follower.leader is leader:
                self._stand_alone(follower)

    def _stand_alone(self, follower: Sequence) -> None:
        follower.leader = None
        if follower.request.draft_tokens:
            follower.context = self._link.context(follower.ticket.trail)

    def _continue_checkpoint(self, sequence: Sequence) -> None:
        """Lets a sample begin behind the longest kept prefix of its prompt."""
        prompt = sequence.request.prompt_ids
        checkpoint = self._checkpoints.find(prompt, lambda c: self._is_usable(sequence, c))
        if checkpoint is None:
            return
        with self._checkpoints.leased(checkpoint):
            if not self._checkpoints.resume(checkpoint, sequence.residency, checkpoint.frontier):
                return
            sequence.frontier = checkpoint.frontier
            if sequence.context is not None:
                self._link.restore(
                    sequence.context,
                    checkpoint.checkpoint_id,
                    checkpoint.rows,
                    checkpoint.coverage_first,
                    sequence.needed,
                )

    def _is_usable(self, sequence: Sequence, checkpoint: Checkpoint) -> bool:
        """A seeded sample must not propose otherwise than it would without the checkpoint."""
        sampling = sequence.request.sampling
        if sequence.context is None or sampling.greedy or not sampling.seed_given:
            return True
        return self._link.continues(
            checkpoint.checkpoint_id,
            checkpoint.frontier,
            checkpoint.rows,
            checkpoint.coverage_first,
        )

    # ---- pages --------------------------------------------------------------------------------

    def _with_pages(self, rows: list[Sequence]) -> list[Sequence]:
        """Those rows that have pages for a round, the oldest first served; others may be paused."""
        for row in sorted(rows, key=lambda s: s.order):
            if row in self._resident:
                self._take_pages(row, self._rounds.reach(row))
        return [row for row in rows if row in self._resident]

    def _take_pages(self, sequence: Sequence, position_count: int) -> bool:
        """Grows a resident; pauses the youngest ones, perhaps itself, until there are pages.

        Returns:
            False when it is not resident any more: it was paused, or ended because it alone needs
            more pages than there are.
        """
        state = self._state
        while not state.grow(sequence.residency, position_count):
            if self._checkpoints.reclaim(
                state.pages_of(position_count) - len(sequence.residency.pages)
            ):
                continue
            holders = [s for s in self._resident if s.residency.pages or s is sequence]
            # first those who run no rounds, because their reader is behind
            behind = [s for s in holders if s is not sequence and s.ticket.sink.full]
            youngest = max(behind or holders, key=lambda s: s.order)
            if len(holders) == 1:
                self._rounds.end(sequence, self._no_capacity(position_count))
                self._release(sequence)
                return False
            self._pause(youngest)
            if youngest is sequence:
                return False
        return True

    def _no_capacity(self, position_count: int) -> FaultError:
        page_size, pages = self._state.page_size, self._state.page_count
        return FaultError(
            "KV_CAPACITY",
            f"KV pages: expected at most {pages * page_size} positions, got {position_count}",
            expected=pages * page_size,
            actual=position_count,
        )

    def _pause(self, sequence: Sequence) -> None:
        """Takes a resident off the device, the drafter's half included."""
        self._rounds.take_arrived()
        with self._lock:
            self._resident.remove(sequence)
            self._paused.append(sequence)
            self._paused.sort(key=lambda s: s.order)
        self._dismiss_followers(sequence)
        if self._keeps_snapshot(sequence):
            image = self._state.view(sequence.residency, sequence.frontier)
            sequence.snapshot = self._checkpoints.store_snapshot(image)
        self._state.release(sequence.residency)
        if sequence.context is not None:
            rows = sequence.context.rows
            self._link.release(sequence.context)
            sequence.context = self._link.context(sequence.ticket.trail)
            if sequence.snapshot is not None:
                sequence.context.rows = rows
        if sequence.snapshot is None:
            sequence.frontier = 0
        self._count("pauses")
        log.info(
            "request_paused",
            request_id=sequence.request.request_id,
            sample=sequence.request.sample_index,
            snapshot=sequence.snapshot is not None,
        )

    def _keeps_snapshot(self, sequence: Sequence) -> bool:
        """Whether the state alone brings a sample back; a replay also rebuilds its draft context.

        A seeded sample must not propose otherwise than it would without the pause.
        """
        sampling = sequence.request.sampling
        seeded = sampling.seed_given and not sampling.greedy and sequence.context is not None
        return sequence.frontier > 0 and (self._link.all_local or not seeded)

    def _resume_paused(self) -> None:
        """Brings paused samples back, the oldest first, while there is room for them."""
        while sequence := next((s for s in self._paused if not s.ticket.sink.full), None):
            positions = len(sequence.tokens) - 1 + self._rounds.most_columns
            needed = self._state.pages_of(min(positions, sequence.position_limit))
            # a page for each resident, so that it is not paused again at once
            if not self._fits(needed + len(self._resident)) or not self._free(needed):
                return
            residency = self._state.acquire(0)
            if residency is None:
                return
            sequence.residency = residency
            snapshot, sequence.snapshot = sequence.snapshot, None
            if snapshot is not None:
                restored = self._host.load(snapshot, residency, snapshot.frontier)
                assert restored  # its pages have just been freed
                self._host.forget(snapshot)
            tables = self._rounds.blocks.tables
            tables.admit(residency.lane, sequence.request)
            if sequence.output_count:
                tables.recount(residency.lane, sequence.tokens[sequence.prompt_end :])
            if sequence.context is not None:
                # now, so that a seeded sample waits for its rows to be sent
                self._link.ensure_open(sequence.context, sequence.frontier, sequence.needed)
            with self._lock:
                self._paused.remove(sequence)
                self._resident.append(sequence)
            self._count("resumes")

    def _free(self, page_count: int) -> bool:
        """Frees pages of checkpoints, and then of samples that wait for their reader."""
        while not self._checkpoints.reclaim(page_count):
            behind = [s for s in self._resident if s.residency.pages and s.ticket.sink.full]
            if not behind:
                return False
            self._pause(max(behind, key=lambda s: s.order))
        return True

    def _fits(self, page_count: int) -> bool:
        """Whether pages could be had without pausing anybody, prompts on their way included."""
        # whoever waits for a reader gives its pages to others
        held = {
            page for s in self._resident if not s.ticket.sink.full for page in s.residency.pages
        }
        promised = sum(
            max(0, self._state.pages_of(s.prompt_end) - len(s.residency.pages))
            for s in self._resident
            if not s.prefilled
        )
        # a resident that is alone may take whatever there is
        return not self._resident or page_count + promised <= self._state.page_count - len(held)

    # ---- admission ----------------------------------------------------------------------------

    def _admit(self) -> None:
        """Admits waiting samples in order; one that lacks pages may be overtaken B times."""
        if any(not sequence.ticket.sink.full for sequence in self._paused):
            return
        skipped: list[Ticket] = []
        for ticket in list(self._waiting):
            if len(skipped) > self._lanes or any(t.overtaken >= self._lanes for t in skipped):
                return
            if not self._state.has_lane:
                return
            if not self._fits(self._pages_to_begin(ticket.request)):
                skipped.append(ticket)
                continue
            for each in skipped:
                each.overtaken += 1
            self._begin(ticket)

    def _pages_to_begin(self, request: Request) -> int:
        """Those of its prompt and one for the first round, unless it will never need that."""
        pages_of = self._state.pages_of
        return min(pages_of(len(request.prompt_ids)) + 1, pages_of(request.position_limit))

    def _begin(self, ticket: Ticket) -> None:
        request = ticket.request
        residency = self._state.acquire(0)
        assert residency is not None
        with self._lock:
            self._waiting.remove(ticket)
        usage = Usage(
            prompt_tokens=len(request.prompt_ids) if request.sample_index == 0 else 0,
            accepted_per_position=[0] * self._rounds.draft_tokens,
            seed=request.sampling.seed,
            queue_ns=time.monotonic_ns() - request.arrival_ns,
        )
        ticket.record.admitted(usage.queue_ns)
        self._rounds.blocks.tables.admit(residency.lane, request)
        leader = self._leader_of(request)
        drafts = request.draft_tokens > 0
        self._order += 1
        sequence = Sequence(
            ticket=ticket,
            residency=residency,
            session=OutputSession(self._text, request),
            context=self._link.context(ticket.trail) if drafts and leader is None else None,
            usage=usage,
            tokens=list(request.prompt_ids),
            order=self._order,
            captures=self._captures_of(request) if leader is None else (),
            leader=leader,
        )
        with self._lock:
            self._resident.append(sequence)
        if leader is None:
            self._continue_checkpoint(sequence)
            if request.sample_index == 0:
                usage.cached_tokens = sequence.frontier

    def _leader_of(self, request: Request) -> Sequence | None:
        """The sample of the same request whose prefill another one can share."""
        return next(
            (
                s
                for s in self._resident
                if s.request.request_id == request.request_id
                and s.request.prompt_ids == request.prompt_ids
                and s.leader is None
                and s.frontier < s.prompt_end
                and not s.output_count
            ),
            None,
        )

    def _captures_of(self, request: Request) -> tuple[int, ...]:
        if not self._checkpoints.enabled:
            return ()
        end = len(request.prompt_ids)
        return (request.boundary, end) if 0 < request.boundary < end else (end,)

    def _drop_cancelled(self) -> None:
        """Ends waiting and prefilling samples that were cancelled; rounds look for themselves."""
        for ticket in list(self._waiting):
            outcome = ticket.cancellation() or self._waited_too_long(ticket)
            if outcome is not None:
                with self._lock:
                    self._waiting.remove(ticket)
                self._forget(ticket)
                ticket.end(outcome, Usage(seed=ticket.request.sampling.seed))
        for sequence in [*self._resident, *self._paused]:
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
        """Frees lane, slot, pages and the drafter's half, of a paused sample its snapshot."""
        with self._lock:
            held = self._resident if sequence in self._resident else self._paused
            held.remove(sequence)
        self._dismiss_followers(sequence)
        if sequence.snapshot is not None:
            self._host.forget(sequence.snapshot)
        if sequence.completed:
            tokens = sequence.tokens[: sequence.frontier]
            self._checkpoints.capture(sequence.residency, tokens, sequence.context)
        self._state.release(sequence.residency)
        if sequence.context is not None:
            self._link.release(sequence.context)
        # its last round is accounted for as it is told
        self._rounds.deliver()
        usage = sequence.usage
        with self._lock:
            self._counters.update(
                output_tokens=usage.output_tokens,
                rounds=usage.rounds,
                plain_rounds=usage.plain_rounds,
                undrafted_rounds=usage.undrafted_rounds,
                tree_rounds=usage.tree_rounds,
                side_accepted=usage.side_accepted,
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

    def _forget_if_asked(self) -> None:
        with self._lock:
            asked, self._forgettings = self._forgettings, []
            idle = not self._live
        if asked and idle:
            self._checkpoints.clear()
        for each in asked:
            if each.set_running_or_notify_cancel():
                each.set_result(idle)

    def _end_all(self, fault: FaultError) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting), deque()
        for ticket in waiting:
            self._forget(ticket)
            ticket.end(fault, Usage())
        for sequence in [*self._resident, *self._paused]:
            self._rounds.end(sequence, fault)
            self._release(sequence)
        self._rounds.deliver()
