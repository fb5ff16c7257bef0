"""What travels between the public service and the engine: requests in, deltas and outcomes out.

Requests are validated before they become these values; the engine trusts them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from outrider.faults import FaultError
from outrider.tracing import NO_TRAIL, Trail


class FinishReason(Enum):
    """Why a sample ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


class TokenOrigin(Enum):
    """Where a published token came from."""

    TARGET = "target"  # nothing was proposed: prefill or a plain step
    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; every field is set, neutral unless the request said otherwise."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # uint64
    seed_given: bool = False  # whether the client chose it, and so may compare runs

    @property
    def greedy(self) -> bool:
        """Whether p is one-hot."""
        return self.temperature <= 0.0


@dataclass(frozen=True)
class Request:
    """One sample of one client request."""

    request_id: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int  # >= 1, already capped by the context
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]  # the checkpoint's EOS set too, unless ignored
    logprobs: int | None  # alternatives a token; None reports nothing
    draft_tokens: int  # 0..K
    return_rounds: bool
    arrival_ns: int  # time.monotonic_ns
    deadline_ns: int | None  # time.monotonic_ns; None never expires
    draft_trees: bool = True  # whether its rounds may verify trees
    trail: Trail = NO_TRAIL  # what it came with, to be found again in logs and traces
    # position at which the next turn's prompt may leave this one; 0 for none
    boundary: int = 0

    @property
    def position_limit(self) -> int:
        """Positions that it may ever process; the last token is published and never processed."""
        return len(self.prompt_ids) + self.max_tokens - 1


@dataclass(frozen=True)
class TokenLogprobs:
    """Raw log-probability of a published token and the best alternatives, best first."""

    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True)
class RoundTrace:
    """What one round did for one sample."""

    frontier: int
    proposed: tuple[int, ...]
    accepted: int
    committed: int
    parents: tuple[int, ...] = ()  # of a tree, what columns 1..N continue
    columns: tuple[int, ...] = ()  # of a tree, those of the accepted proposals


@dataclass(frozen=True)
class Delta:
    """Tokens published together; the four tuples are parallel (logprobs may be empty)."""

    token_ids: tuple[int, ...]
    text: str
    text_ends: tuple[int, ...]  # UTF-8 bytes of text before each token's end
    origins: tuple[TokenOrigin, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    rounds: tuple[RoundTrace, ...] = ()


@dataclass
class Usage:
    """Counts and times (ns) of one sample; grows while it runs."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    plain_rounds: int = 0
    undrafted_rounds: int = 0
    tree_rounds: int = 0
    side_accepted: int = 0  # of accepted, off the main chain
    tree_columns: int = 0  # of the trees verified, anchors included
    seed: int = 0
    ttft_ns: int = 0
    queue_ns: int = 0
    prefill_ns: int = 0
    draft_ns: int = 0
    verify_ns: int = 0
    wire_ns: int = 0
    total_ns: int = 0


@dataclass(frozen=True)
class Finish:
    """The end of a sample."""

    reason: FinishReason
    matched: int | str | None  # the id or string that stopped it
    usage: Usage


class Sink(Protocol):
    """Where the engine publishes one sample. Called on the engine thread; must not block."""

    def delta(self, delta: Delta) -> None:
        """Takes tokens, in order."""

    def finish(self, finish: Finish) -> None:
        """Takes the end; nothing follows."""

    def fail(self, fault: FaultError) -> None:
        """Takes an error instead of an end; nothing follows."""

    @property
    def gone(self) -> bool:
        """Whether the client left; nothing is published to it any more."""

    @property
    def full(self) -> bool:
        """Whether the reader is so far behind that the sample must pause."""

    @property
    def overdue(self) -> FaultError | None:
        """Why the sample ends because of its reader: it has been paused for too long."""
