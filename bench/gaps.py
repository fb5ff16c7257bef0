"""The largest gap between the tokens of seven streams, and what the engine did meanwhile.

``bench.state --parts gaps`` calls `measure`: seven streams decode, alone and beside a prompt of
many chunks. The verifier under measurement is the real one; its engine notes when it delivered
whose tokens, and when each chunk and each part of a round began and ended (``python -m bench.gaps
--events FILE VERIFIER-FLAGS`` in the place of ``python -m verifier``). So a gap is known where the
server publishes and where the client reads, and the largest one says what filled it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import verifier.__main__ as verifier_main
from bench.pair import services
from outrider.client import Client
from verifier.request import Delta, Finish
from verifier.rounds import Rounds
from verifier.scheduler import Engine
from verifier.sequence import Ticket

STREAMS = 7
FEW_IDS = 150  # that prompts are made of: every vocabulary has more
ALONE_S = 4.0  # how long the streams run with nothing beside them

# --- in the verifier


class Events:
    """Spans of the engine thread, kept in memory until the end."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def span(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its calls noted as (kind, from, until)."""

        @wraps(function)
        def noted(*arguments: Any, **options: Any) -> Any:
            started = time.monotonic_ns()
            try:
                return function(*arguments, **options)
            finally:
                self.lines.append((kind, started, time.monotonic_ns()))

        return noted

    def collected(self, phase: str, _: dict[str, int]) -> None:
        """For `gc.callbacks`."""
        if phase == "start":
            self._collecting = time.monotonic_ns()
        else:
            self.lines.append(("collection", self._collecting, time.monotonic_ns()))

    def write(self, path: Path) -> None:
        """One line of JSON each."""
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))


def install(events: Events) -> None:
    """Puts noting parts in the place of those that `verifier.__main__` builds with."""

    class NotingRounds(Rounds):
        pass

    publish = Ticket.publish

    def published(ticket: Ticket, delta: Delta | None, finish: Finish | None) -> None:
        publish(ticket, delta, finish)
        if delta is not None and delta.token_ids:
            request_id = ticket.request.request_id
            events.lines.append(("delivered", time.monotonic_ns(), request_id))

    class NotingEngine(Engine):
        _keep_prompt = events.span("checkpoint", Engine._keep_prompt)
        _send_backlog = events.span("backlog", Engine._send_backlog)

    for name in ("prefill", "draft", "verify", "accept", "commit"):
        setattr(NotingRounds, name, events.span(name, getattr(Rounds, name)))
    Ticket.publish = published  # type: ignore[method-assign]
    verifier_main.Rounds = NotingRounds  # type: ignore[misc]
    verifier_main.Engine = NotingEngine  # type: ignore[misc]
    gc.callbacks.append(events.collected)


# --- what they say


@dataclass(frozen=True)
class Gap:
    """Between two deliveries of one stream, ns of the monotonic clock."""

    first: int
    end: int

    @property
    def ms(self) -> float:
        """How long."""
        return (self.end - self.first) / 1e6


@dataclass(frozen=True)
class Noted:
    """The events of one verifier."""

    spans: list[tuple[str, int, int]]
    delivered: dict[str, list[int]]  # by request id, ascending

    @classmethod
    def read(cls, path: Path) -> Noted:
        """What `Events.write` wrote."""
        noted = cls([], {})
        for line in path.read_text().splitlines():
            kind, at, *rest = json.loads(line)
            if kind == "delivered":
                noted.delivered.setdefault(rest[0], []).append(at)
            else:
                noted.spans.append((kind, at, rest[0]))
        return noted

    def gaps(self, prefix: str, first: int, end: int) -> list[Gap]:
        """Gaps of the streams whose ids begin so, from one time to another."""
        return [
            Gap(a, b)
            for request_id, times in self.delivered.items()
            if request_id.startswith(prefix)
            for a, b in pairwise(times)
            if a >= first and b <= end
        ]

    def filled(self, gap: Gap) -> dict[str, float]:
        """Milliseconds of a gap by what the engine did; the rest is `other`."""
        parts: dict[str, float] = {}
        for kind, started, ended in self.spans:
            overlap = min(ended, gap.end) - max(started, gap.first)
            if overlap > 0:
                parts[kind] = parts.get(kind, 0.0) + overlap / 1e6
        collected = parts.pop("collection", 0.0)  # within one of the others
        parts["other"] = gap.ms - sum(parts.values())
        if collected:
            parts["of these collecting"] = collected
        return {kind: round(ms, 1) for kind, ms in parts.items()}

    def last_chunks_ms(self, first: int, end: int) -> float:
        """A chunk at the end of a prompt that was alone: median of the last five.

        From the start of one to the next one's, since a device may still compute when the call has
        returned; the host is never ahead by more than one. Later chunks look back further and take
        longer.
        """
        starts = sorted(s for kind, s, _ in self.spans if kind == "prefill" and first <= s <= end)
        return statistics.median([b - a for a, b in pairwise(starts)][-5:]) / 1e6

    def longest_run(self, first: int, end: int) -> int:
        """Most chunks in a row without a round of the residents between them."""
        longest = run = 0
        for kind, started, _ in sorted(self.spans, key=lambda span: span[1]):
            if first <= started <= end and kind in ("prefill", "verify"):
                run = run + 1 if kind == "prefill" else 0
                longest = max(longest, run)
        return longest


# --- the client


def measure(
    device: str, pair_flags: Sequence[str], chunk: int, chunks: int, *, longer: bool
) -> list[dict[str, Any]]:
    """Rows of the bench: seven streams alone, and beside a prompt of so many chunks.

    Args:
        device: Where both services run.
        pair_flags: Which pair; none for the bundled one.
        chunk: Positions of a chunk.
        chunks: Of the long prompt.
        longer: Whether the bundled pair has to be told that it may take so long a prompt.
    """
    max_context = chunk * chunks + 2048
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-bench-")))
        if longer:
            pair_flags = [*pair_flags, *_stretched(folder, max_context)]
        events = folder / "events.jsonl"
        common = (f"--device={device}", "--max-concurrency=8", f"--max-context={max_context}")
        with (
            services(
                [*common, *pair_flags, "--log-level=warning"],
                [f"--prefill-chunk={chunk}"],
                command=("bench.gaps", f"--events={events}"),
            ) as running,
            Client(running.address) as client,
        ):
            generator = torch.Generator().manual_seed(1)
            prompt = torch.randint(1, FEW_IDS, (chunk * chunks,), generator=generator).tolist()
            # once for the memory and the kernels that come with the first
            client.generate(prompt_ids=prompt[: 2 * chunk], max_tokens=1, temperature=0)
            first = time.monotonic_ns()
            client.generate(prompt_ids=prompt, max_tokens=1, temperature=0)
            alone = (first, time.monotonic_ns())
            periods = {
                "7 streams": _streams(client, "alone", max_context, None),
                f"the same beside a prompt of {chunks} chunks": _streams(
                    client, "beside", max_context, prompt
                ),
            }
        noted = Noted.read(events)
    chunk_ms = noted.last_chunks_ms(*alone)
    return [
        _row(f"{name} of {chunk}" if "beside" in name else name, noted, period, chunk_ms)
        for name, period in periods.items()
    ]


@dataclass(frozen=True)
class Period:
    """When seven streams ran, and what their clients saw."""

    prefix: str  # of their ids
    first: int
    end: int
    client_gaps_ms: list[float]


def _row(name: str, noted: Noted, period: Period, chunk_ms: float) -> dict[str, Any]:
    gaps = noted.gaps(f"{period.prefix}-", period.first, period.end)
    largest = max(gaps, key=lambda gap: gap.ms)
    lengths = sorted(gap.ms for gap in gaps)
    return {
        "row": name,
        "largest_gap_ms": round(largest.ms, 1),
        "p99_gap_ms": round(lengths[len(lengths) * 99 // 100], 1),
        "median_gap_ms": round(statistics.median(lengths), 1),
        "client_largest_gap_ms": round(max(period.client_gaps_ms), 1),
        "two_chunks_ms": round(2 * chunk_ms, 1),
        "below_two_chunks": largest.ms < 2 * chunk_ms,
        "chunks_in_a_row": noted.longest_run(period.first, period.end),
        "largest_filled_ms": noted.filled(largest),
    }


def _streams(client: Client, prefix: str, max_context: int, prompt: Sequence[int] | None) -> Period:
    """Seven streams that decode, while the prompt is prefilled or for a while."""
    started, stop = threading.Barrier(STREAMS + 1), threading.Event()
    gaps: list[float] = []

    def read(number: int) -> None:
        ids = list(range(1 + number, 41 + number))
        with client.stream(
            prompt_ids=ids,
            request_id=f"{prefix}-{number}",
            max_tokens=max_context - 64,  # they are cancelled long before
            temperature=0,
            ignore_eos=True,
        ) as stream:
            next(stream)
            started.wait()
            last = time.perf_counter()
            for _ in stream:
                now = time.perf_counter()
                gaps.append((now - last) * 1e3)
                last = now
                if stop.is_set():
                    return

    with ThreadPoolExecutor(STREAMS) as pool:
        readers = [pool.submit(read, number) for number in range(STREAMS)]
        started.wait()
        first = time.monotonic_ns()
        if prompt is None:
            time.sleep(ALONE_S)
        else:
            client.generate(prompt_ids=prompt, max_tokens=1, temperature=0)
        end = time.monotonic_ns()
        if any(reader.done() for reader in readers):
            raise RuntimeError("a stream ended before the prompt beside it was prefilled")
        stop.set()
        for reader in readers:
            reader.result()
    return Period(prefix, first, end, gaps)


def _stretched(folder: Path, positions: int) -> list[str]:
    """Flags of the bundled pair with another limit in its config; its output is then noise."""
    from outrider.checkpoint import bundled

    flags = []
    for name, kind in (("target", "target"), ("draft", "dflash2")):
        source, copy = bundled(kind), folder / name
        shutil.copytree(source, copy)
        path = copy / "config.json"
        config = json.loads(path.read_text())
        config["max_position_embeddings"] = max(positions, config["max_position_embeddings"])
        path.write_text(json.dumps(config))
        flags.append(f"--{name}={copy}")
    return flags


@contextlib.contextmanager
def _kept(events: Events, path: Path) -> Iterator[None]:
    try:
        yield
    finally:
        gc.callbacks.remove(events.collected)
        events.write(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal, then writes the events."""
    parser = argparse.ArgumentParser(prog="python -m bench.gaps", description=__doc__)
    parser.add_argument("--events", type=Path, required=True, help="JSON lines are written here")
    own, flags = parser.parse_known_args(argv)
    events = Events()
    install(events)
    with _kept(events, own.events):
        return verifier_main.main(flags)


if __name__ == "__main__":
    sys.exit(main())
