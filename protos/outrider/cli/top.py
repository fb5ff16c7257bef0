"""`outrider top`: a live view of both services, from their metrics.

Rates and averages are of the time between two scrapes; where nothing happened in it, of all time
since the start, marked with `~`.
"""

from __future__ import annotations

import argparse
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.cli import VerbError, require_serve_extra, wrong_use

VERIFIER_METRICS = "127.0.0.1:9464"
DRAFTER_METRICS = "127.0.0.1:9465"
TIMEOUT = 2.0  # seconds, of a scrape
LEAST_INTERVAL = 0.1  # seconds

V, D = "outrider_verifier", "outrider_drafter"
Lines = list[tuple[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the metrics are, and how often to look."""
    parser.add_argument(
        "--metrics",
        metavar="ADDRESS",
        default=VERIFIER_METRICS,
        help="the verifier's --metrics-listen (default: %(default)s)",
    )
    parser.add_argument(
        "--drafter-metrics",
        metavar="ADDRESS",
        default=DRAFTER_METRICS,
        help="the drafter's (default: %(default)s)",
    )
    parser.add_argument(
        "--interval",
        type=float,
        metavar="SECONDS",
        default=1.0,
        help="between two looks (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="print one look and end")


def run(options: argparse.Namespace) -> int:
    """Shows both services until interrupted."""
    require_serve_extra("prometheus_client")
    if not options.interval >= LEAST_INTERVAL:
        wrong_use(f"--interval: expected at least {LEAST_INTERVAL}, got {options.interval}")
    looks = _looks((options.metrics, options.drafter_metrics), options.interval)
    if options.once:
        next(looks)
        _print(next(looks))
        return 0
    from rich.live import Live

    with Live(auto_refresh=False, screen=True) as live:
        for panels in looks:
            live.update(_drawn(panels), refresh=True)
    return 0


# --- scrapes


@dataclass(frozen=True)
class Scrape:
    """One service's metrics at one time: values by name and label value."""

    at: float = 0.0  # seconds, monotonic
    values: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    buckets: Mapping[str, Mapping[str, Mapping[float, float]]] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str, at: float) -> Scrape:
        """From what /metrics answers. Every family here has one label at most, beside `le`."""
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[str, dict[str, float]] = {}
        buckets: dict[str, dict[str, dict[float, float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = dict(sample.labels)
                end = labels.pop("le", None)
                label = next(iter(labels.values()), "")
                if end is None:
                    values.setdefault(sample.name, {})[label] = sample.value
                else:
                    name = sample.name.removesuffix("_bucket")
                    buckets.setdefault(name, {}).setdefault(label, {})[float(end)] = sample.value
        return cls(at, values, buckets)

    def value(self, name: str, label: str = "") -> float:
        """One value; 0 where there is none."""
        return self.values.get(name, {}).get(label, 0.0)


@dataclass(frozen=True)
class Change:
    """What happened between two scrapes of one process."""

    before: Scrape
    after: Scrape

    def per_second(self, name: str, label: str = "") -> float:
        """A counter's rate; 0 after a restart."""
        seconds = self.after.at - self.before.at
        grown = self.after.value(name, label) - self.before.value(name, label)
        return max(0.0, grown) / seconds if seconds > 0 else 0.0

    def mean(self, name: str, label: str = "") -> str:
        """A histogram's mean, as text."""
        for before, mark in ((self.before, ""), (Scrape(), "~")):
            count = self.after.value(f"{name}_count", label) - before.value(f"{name}_count", label)
            total = self.after.value(f"{name}_sum", label) - before.value(f"{name}_sum", label)
            if count > 0:
                return f"{mark}{_short(total / count, name)}"
        return "-"

    def quantiles(self, name: str, *shares: float) -> str:
        """Some quantiles of a histogram, as text, each within its bucket."""
        for before, mark in ((self.before, ""), (Scrape(), "~")):
            earlier = before.buckets.get(name, {}).get("", {})
            counts = [
                (end, count - earlier.get(end, 0.0))
                for end, count in sorted(self.after.buckets.get(name, {}).get("", {}).items())
            ]
            if counts and counts[-1][1] > 0:
                found = [_short(quantile(counts, share), name) for share in shares]
                return mark + " / ".join(found)
        return "-"

    def share(self, part: str, whole: str, label: str = "") -> str:
        """Of two counters, as a percentage."""
        for before, mark in ((self.before, ""), (Scrape(), "~")):
            wholes = self.after.value(whole, label) - before.value(whole, label)
            parts = self.after.value(part, label) - before.value(part, label)
            if wholes > 0:
                return f"{mark}{parts / wholes:.0%}"
        return "-"


def quantile(counts: list[tuple[float, float]], share: float) -> float:
    """A quantile of cumulative counts by upper end, linear within its bucket.

    In the last bucket, which has no end, it is the end of the one before.
    """
    wanted = share * counts[-1][1]
    low_end = low_count = 0.0
    for end, count in counts:
        if count >= wanted and count > low_count:
            if end == float("inf"):
                return low_end
            return low_end + (end - low_end) * (wanted - low_count) / (count - low_count)
        low_end, low_count = end, count
    return low_end


def _short(value: float, name: str) -> str:
    if not name.endswith("_seconds"):
        return f"{value:.2f}"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def scrape(address: str) -> Scrape:
    """One look at a service.

    Raises:
        OSError: Nobody answers there.
    """
    at = time.monotonic()
    # a proxy from the environment is for the web
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{address}/metrics", timeout=TIMEOUT) as answer:
        return Scrape.read(answer.read().decode(), at)


# --- the view


def verifier_lines(change: Change) -> Lines:
    """The verifier's half."""
    now = change.after
    rows: Lines = [
        ("samples", f"{now.value(f'{V}_samples', 'running'):.0f} running, "
                    f"{now.value(f'{V}_samples', 'waiting'):.0f} waiting"),
        ("lanes, slots, pages", ", ".join(_used(now, f"{V}_{n}") for n in
                                          ("lanes", "state_slots", "pages"))),
        ("tokens out", f"{change.per_second(f'{V}_output_tokens_total'):.1f} /s"),
        ("ended", _rates(change, f"{V}_requests_total") or "-"),
        ("queue p50 / p95", change.quantiles(f"{V}_queue_seconds", 0.5, 0.95)),
        ("first token p50 / p95", change.quantiles(f"{V}_ttft_seconds", 0.5, 0.95)),
        ("between tokens p50 / p95", change.quantiles(f"{V}_inter_token_seconds", 0.5, 0.95)),
        ("accept length", change.mean(f"{V}_accept_length")),
        ("accepted of proposed", change.share(f"{V}_accepted_tokens_total",
                                              f"{V}_proposed_tokens_total")),
        ("accepted by position", _positions(change)),
        ("proposals a round (P)", change.mean(f"{V}_live_proposals")),
        ("samples a round", change.mean(f"{V}_round_rows")),
        ("round", _phases(change, f"{V}_round_seconds",
                          ("total", "draft", "wire", "verify", "host"))),
        ("plain rounds", _rates(change, f"{V}_plain_rounds_total") or "none"),
        ("drafter", "connected" if now.value(f"{V}_drafter_connected") else "away"),
        ("link since start", _events(now, f"{V}_link_events_total",
                                     ("losses", "round_timeouts", "reseeds", "backlog_reopens"))),
        ("wire", _traffic(change, f"{V}_wire_bytes_total")),
        ("prefix hits", change.share(f"{V}_cached_tokens_total", f"{V}_prompt_tokens_total")
                        + " of prompt tokens"),
    ]  # fmt: skip
    return rows


def drafter_lines(change: Change) -> Lines:
    """The drafter's half."""
    now = change.after
    events = f"{D}_events_total"
    faults = {
        name: count
        for name, count in now.values.get(events, {}).items()
        if name.startswith(("fault_", "ended_"))
    }
    return [
        ("verifiers", f"{now.value(f'{D}_streams'):.0f}"),
        ("contexts", _used(now, f"{D}_sequences")),
        ("rounds", f"{change.per_second(events, 'rounds'):.1f} /s"),
        ("proposals", f"{change.per_second(events, 'proposals'):.1f} /s"),
        ("feature rows", f"{change.per_second(events, 'feature_rows'):.1f} /s"),
        ("round", _phases(change, f"{D}_round_seconds", ("total", "materialize", "draft"))),
        ("wire", _traffic(change, f"{D}_wire_bytes_total")),
        ("faults since start", _named(faults) or "none"),
    ]


def _used(now: Scrape, name: str) -> str:
    used, free = now.value(name, "used"), now.value(name, "free")
    return f"{used:.0f} of {used + free:.0f}"


def _rates(change: Change, name: str) -> str:
    rates = {label: change.per_second(name, label) for label in change.after.values.get(name, {})}
    return ", ".join(f"{label} {rate:.1f} /s" for label, rate in rates.items() if rate)


def _positions(change: Change) -> str:
    parts, wholes = f"{V}_accepted_at_position_total", f"{V}_proposed_at_position_total"
    labels = sorted(change.after.values.get(wholes, {}), key=int)
    return ", ".join(change.share(parts, wholes, label) for label in labels) or "-"


def _phases(change: Change, name: str, phases: tuple[str, ...]) -> str:
    return ", ".join(f"{phase} {change.mean(name, phase)}" for phase in phases)


def _events(now: Scrape, name: str, events: tuple[str, ...]) -> str:
    return _named({event: now.value(name, event) for event in events})


def _named(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count:.0f}" for name, count in counts.items())


def _traffic(change: Change, name: str) -> str:
    ways = ((way, change.per_second(name, way) / 1e6) for way in ("sent", "received"))
    return ", ".join(f"{way} {rate:.2f} MB/s" for way, rate in ways)


# --- on the terminal


@dataclass(frozen=True)
class Panel:
    """One service's lines, or why there are none."""

    title: str
    lines: Lines
    problem: str = ""


def _looks(addresses: tuple[str, str], interval: float) -> Iterator[tuple[Panel, Panel]]:
    """Both services, again and again.

    Raises:
        VerbError: At the first look, when neither answers.
    """
    before: list[Scrape | None] = [None, None]
    first = True
    while True:
        panels = []
        for index, (name, lines) in enumerate(
            (("verifier", verifier_lines), ("drafter", drafter_lines))
        ):
            title = f"{name} {addresses[index]}"
            try:
                now = scrape(addresses[index])
            except (OSError, ValueError) as error:
                before[index] = None
                panels.append(Panel(title, [], f"no metrics there: {error}"))
                continue
            panels.append(Panel(title, lines(Change(before[index] or now, now))))
            before[index] = now
        if first and all(panel.problem for panel in panels):
            raise VerbError(
                f"{panels[0].title}: {panels[0].problem} (a service shows metrics with "
                "--metrics-listen)"
            )
        first = False
        yield panels[0], panels[1]
        time.sleep(interval)


def _drawn(panels: tuple[Panel, Panel]) -> Any:
    from rich import box
    from rich.console import Group
    from rich.panel import Panel as Frame
    from rich.table import Table
    from rich.text import Text

    frames = []
    for panel in panels:
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        for name, value in panel.lines:
            table.add_row(name, value)
        body: Any = Text(panel.problem, style="red") if panel.problem else table
        frames.append(Frame(body, title=panel.title, title_align="left", box=box.ROUNDED))
    return Group(*frames, "[dim]~ since the start; Ctrl-C ends[/]")


def _print(panels: tuple[Panel, Panel]) -> None:
    for panel in panels:
        print(panel.title)
        if panel.problem:
            print(f"  {panel.problem}")
        for name, value in panel.lines:
            print(f"  {name:<26}{value}")
