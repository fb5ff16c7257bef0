"""Load on a server and what came of it: closed and open loops, and their figures.

A closed loop keeps a number of requests running: each reader asks again when its answer ends. An
open loop asks at random moments of a fixed rate, whatever is still running, and counts from the
moment a request was due, so that a server that falls behind cannot hide it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from outrider.client import AsyncClient, ClientError, GenerateOptions, Usage

PERCENTILES = (50, 90, 99)

# a request: its prompt, unless the options have one, and its options
Ask = tuple[str | None, GenerateOptions]
# the n-th request of a load
Asks = Callable[[int], Ask]


@dataclass
class Answer:
    """One request: when it was due, when tokens came, how it ended. Times are of one clock, s."""

    due_at: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (when, how many tokens)
    ended_at: float = 0.0
    usage: Usage | None = None
    fault: str | None = None  # reason, where it failed


@dataclass(frozen=True)
class Spread:
    """A figure over many requests or tokens, ms."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread | None:
        """None where there is nothing to rank."""
        ranked = sorted(seconds)
        if not ranked:
            return None
        return cls(*(percentile(ranked, q) * 1000 for q in PERCENTILES))


@dataclass(frozen=True)
class Point:
    """What one load brought.

    Attributes:
        loop: "closed" or "open".
        load: Requests at once, or requests a second.
        drafting: Whether the drafter was asked.
        seconds: From the first request to the end of the last one.
        finished: Requests that ended well.
        errors: The others, by reason.
        output_tokens: Of those that ended well.
        tokens_per_round: Accept length over all of them; None where no round ran.
        ttft: From due to the first token.
        inter_token: Time a token, where the tokens of one message share the wait for it.
        gap: Waits between messages, as a reader sees them.
    """

    loop: str
    load: float
    drafting: bool
    seconds: float
    finished: int
    errors: dict[str, int]
    output_tokens: int
    tokens_per_round: float | None
    ttft: Spread | None
    inter_token: Spread | None
    gap: Spread | None

    @property
    def requests_per_second(self) -> float:
        """Requests that ended well."""
        return self.finished / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of requests that ended well."""
        return self.output_tokens / self.seconds if self.seconds else 0.0


def percentile(ranked: Sequence[float], q: float) -> float:
    """The value below which q percent of an ascending sequence lie, interpolated linearly."""
    place = (len(ranked) - 1) * q / 100
    below = int(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)


async def closed_loop(
    client: AsyncClient, asks: Asks, readers: int, seconds: float
) -> list[Answer]:
    """Keeps ``readers`` requests running for some seconds, and waits for the last ones."""
    answers: list[Answer] = []
    end = time.perf_counter() + seconds

    async def read() -> None:
        while not answers or time.perf_counter() < end:
            answer = Answer(due_at=time.perf_counter())
            answers.append(answer)
            await _ask(client, asks(len(answers) - 1), answer)
            if answer.fault is not None:
                # a server that refuses at once is not asked thousands of times a second
                await asyncio.sleep(0.05)

    await asyncio.gather(*(read() for _ in range(readers)))
    return answers


async def open_loop(
    client: AsyncClient, asks: Asks, rate: float, seconds: float, seed: int
) -> list[Answer]:
    """Asks ``rate`` times a second on average (a Poisson process), and waits for all answers."""
    draw = random.Random(seed)
    start = time.perf_counter()
    offset, answers, running = 0.0, [], []
    while offset < seconds:
        await asyncio.sleep(max(0.0, start + offset - time.perf_counter()))
        answer = Answer(due_at=start + offset)
        answers.append(answer)
        running.append(asyncio.create_task(_ask(client, asks(len(answers) - 1), answer)))
        offset += draw.expovariate(rate)
    await asyncio.gather(*running)
    return answers


async def _ask(client: AsyncClient, ask: Ask, answer: Answer) -> None:
    prompt, options = ask
    try:
        async with client.stream(prompt, **options) as stream:
            async for delta in stream:
                now = time.perf_counter()
                if delta.token_ids:
                    answer.arrivals.append((now, len(delta.token_ids)))
                if delta.finish is not None:
                    answer.usage = delta.finish.usage
        if answer.usage is None:
            answer.fault = "INTERNAL"
    except ClientError as error:
        answer.fault = error.reason
    answer.ended_at = time.perf_counter()


def summarise(loop: str, load: float, drafting: bool, answers: Sequence[Answer]) -> Point:
    """The figures of one load."""
    well = [answer for answer in answers if answer.fault is None and answer.usage is not None]
    usages = [answer.usage for answer in well if answer.usage is not None]
    rounds = sum(usage.rounds for usage in usages)
    # prefill chooses the first token of each
    by_rounds = sum(max(0, usage.output_tokens - 1) for usage in usages)
    gaps = [gap for answer in well for gap in _gaps(answer)]
    return Point(
        loop=loop,
        load=load,
        drafting=drafting,
        seconds=max(a.ended_at for a in answers) - min(a.due_at for a in answers),
        finished=len(well),
        errors=dict(Counter(answer.fault for answer in answers if answer.fault is not None)),
        output_tokens=sum(usage.output_tokens for usage in usages),
        tokens_per_round=by_rounds / rounds if rounds else None,
        ttft=Spread.of(a.arrivals[0][0] - a.due_at for a in well if a.arrivals),
        inter_token=Spread.of(wait / count for wait, count in gaps for _ in range(count)),
        gap=Spread.of(wait for wait, _ in gaps),
    )


def _gaps(answer: Answer) -> list[tuple[float, int]]:
    """The wait for each message but the first, and how many tokens it brought."""
    pairs = zip(answer.arrivals, answer.arrivals[1:], strict=False)
    return [(now - before, count) for (before, _), (now, count) in pairs]
