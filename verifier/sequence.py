"""One resident sample: what it has published, where its target stands, what it holds."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from outrider.faults import FaultError
from outrider.tracing import Trail
from verifier.draft_context import Context
from verifier.host_images import HostImage
from verifier.metrics import SampleRecord
from verifier.preview import OutputSession
from verifier.request import Delta, Finish, FinishReason, Request, Sink, Usage
from verifier.state import Residency


class Ticket:
    """A submitted sample from arrival to end; the only part other threads touch."""

    def __init__(self, request: Request, sink: Sink, record: SampleRecord) -> None:
        self.request = request
        self.sink = sink
        self.record = record
        self.overtaken = 0  # samples that were admitted before it and came after
        self._aborted = threading.Event()

    @property
    def trail(self) -> Trail:
        """What work done for the sample elsewhere carries on."""
        return Trail(
            request_id=self.request.request_id,
            x_request_id=self.request.trail.x_request_id,
            traceparent=self.record.span.traceparent,
        )

    def abort(self) -> None:
        """Asks for an early end; takes effect at the next place cancellation is looked at."""
        self._aborted.set()

    def cancellation(self) -> FinishReason | FaultError | None:
        """Why the sample must end now, if it must."""
        deadline = self.request.deadline_ns
        # before the client's leaving: gRPC cancels a call whose deadline passes
        if deadline is not None and time.monotonic_ns() >= deadline:
            return FaultError("DEADLINE_EXPIRED", "request: its deadline passed")
        if self._aborted.is_set() or self.sink.gone:
            return FinishReason.ABORTED
        return self.sink.overdue

    def publish(self, delta: Delta | None, finish: Finish | None) -> None:
        """Hands the client tokens, the end or both; one that left gets nothing."""
        if delta is not None and not self.sink.gone:
            self.record.published(len(delta.token_ids))
            self.sink.delta(delta)
        if finish is not None:
            self.record.ended(finish.reason, finish.usage, left=self.sink.gone)
            if not self.sink.gone:
                self.sink.finish(finish)

    def end(self, outcome: FinishReason | FaultError, usage: Usage) -> None:
        """Tells the client how an unfinished sample ended, unless it left."""
        self.record.ended(outcome, usage, left=self.sink.gone)
        if self.sink.gone:
            return
        if isinstance(outcome, FaultError):
            self.sink.fail(outcome)
        else:
            usage.total_ns = time.monotonic_ns() - self.request.arrival_ns
            self.sink.finish(Finish(outcome, None, usage))


@dataclass(eq=False)
class Sequence:
    """State of one admitted sample; mutated by the engine thread alone.

    The target has processed [0, frontier); while decoding, ``tokens`` has frontier + 1 entries and
    the last one is the anchor: chosen, published, not processed. A sample that was paused without
    its state goes through its tokens again: nothing of that is chosen or published anew.
    """

    ticket: Ticket
    residency: Residency
    session: OutputSession
    context: Context | None  # draft half; None when the request wants no proposals
    usage: Usage
    tokens: list[int]
    order: int  # of admission: the youngest has the largest
    captures: tuple[int, ...] = ()  # positions of the prompt to keep as checkpoints, ascending
    frontier: int = 0
    finished: bool = False
    completed: bool = False  # ended of itself: by a stop or its budget
    leader: Sequence | None = None  # the sample of the same request that prefills for this one
    drafted_gain: float | None = None  # what `DraftPolicy` remembers
    snapshot: HostImage | None = None  # of a paused sample; without one it is replayed

    def end(self, outcome: FinishReason | FaultError) -> None:
        """Tells its client that it ended early: an abort still publishes what was held back."""
        sink = self.ticket.sink
        if not isinstance(outcome, FaultError) and not sink.gone:
            held = self.session.flush()
            if held is not None:
                self.ticket.publish(held, None)
        self.ticket.end(outcome, self.usage)

    @property
    def request(self) -> Request:
        """What was asked for."""
        return self.ticket.request

    @property
    def prompt_end(self) -> int:
        """n: positions of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def prefilled(self) -> bool:
        """Whether only the anchor is left to process: the next thing is a round."""
        return self.frontier == len(self.tokens) - 1 >= self.prompt_end

    @property
    def replaying(self) -> bool:
        """Whether generated tokens are to be processed that were published before a pause."""
        return self.prompt_end <= self.frontier < len(self.tokens) - 1

    @property
    def needed(self) -> int:
        """First position at which it drafts or is captured."""
        if self.output_count:
            return len(self.tokens) - 1
        return next((p for p in self.captures if p > self.frontier), self.prompt_end)

    @property
    def position_limit(self) -> int:
        """See `Request`."""
        return self.request.position_limit

    @property
    def anchor(self) -> int:
        """a = x_F."""
        return self.tokens[self.frontier]

    @property
    def output_count(self) -> int:
        """Tokens published."""
        return len(self.tokens) - self.prompt_end
