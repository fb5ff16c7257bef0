"""Numbers for Prometheus: counted in plain Python where they arise, put into words when scraped.

A round may add some dozens of numbers, so that adding one must cost next to nothing: no lock, no
label look-up. Each counter and histogram is written by one thread; a scrape reads them as they
stand, and derives every total from what it read. Only a scrape needs prometheus_client.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

# upper ends of the buckets of every time, seconds
SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0),
)

Reading = Mapping[str, float] | float


class MetricsError(ValueError):
    """An address for metrics that cannot be listened on."""


class Histogram:
    """Counts of values by bucket. Written by one thread.

    Args:
        ends: Upper ends of the buckets, ascending, each included; one without an end follows.
    """

    __slots__ = ("counts", "ends", "total")

    def __init__(self, ends: Sequence[float]) -> None:
        self.ends = ends
        self.counts = [0] * (len(ends) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Adds a value, as often as it occurred."""
        self.counts[bisect_left(self.ends, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper end, as Prometheus wants them."""
        names = (*(f"{end:g}" for end in self.ends), "+Inf")
        return list(zip(names, map(float, accumulate(list(self.counts))), strict=True))


class Metrics:
    """The metrics of one process, under one prefix; a collector as prometheus_client knows them.

    Args:
        prefix: Of every name, such as "outrider_verifier".
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._families: list[Callable[[], Metric]] = []

    def counter(self, name: str, meaning: str, label: str) -> Counter[str]:
        """Counts by the values of one label; add to it as to any Counter."""
        counts: Counter[str] = Counter()
        self.reading("counter", name, meaning, lambda: dict(counts), label)
        return counts

    def histogram(
        self,
        name: str,
        meaning: str,
        ends: Sequence[float] = SECONDS,
        label: str | None = None,
        values: Sequence[str] = ("",),
    ) -> dict[str, Histogram]:
        """Histograms by the values of a label; without a label there is one, under ""."""
        histograms = {value: Histogram(ends) for value in values}
        labels = [] if label is None else [label]

        def family() -> Metric:
            from prometheus_client.metrics_core import HistogramMetricFamily

            made = HistogramMetricFamily(f"{self._prefix}_{name}", meaning, labels=labels)
            for value, histogram in histograms.items():
                key = [] if label is None else [value]
                made.add_metric(key, histogram.buckets(), histogram.total)
            return made

        self._families.append(family)
        return histograms

    def reading(
        self,
        kind: str,
        name: str,
        meaning: str,
        read: Callable[[], Reading],
        label: str | None = None,
    ) -> None:
        """A counter or gauge whose value is read when it is scraped.

        Args:
            kind: "counter" or "gauge".
            name: Without prefix; a counter's gets "_total" when it is shown.
            meaning: For people.
            read: Its value, or values by the label's; called on the scraping thread.
            label: The label's name, for a read that gives several values.
        """

        def family() -> Metric:
            from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

            make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            made = make(f"{self._prefix}_{name}", meaning, labels=[] if label is None else [label])
            values = read()
            if isinstance(values, Mapping):
                for value, number in values.items():
                    made.add_metric([value], number)
            else:
                made.add_metric([], values)
            return made

        self._families.append(family)

    def collect(self) -> Iterator[Metric]:
        """All families as they stand."""
        for family in self._families:
            yield family()

    def text(self) -> str:
        """What a scrape answers."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry).decode()


class Endpoint:
    """Serves metrics at http://ADDRESS/metrics, and what the interpreter and the process take.

    Args:
        metrics: What to serve.
        address: HOST:PORT, or PORT for loopback; port 0 takes a free one.

    Attributes:
        address: Where it listens, with the real port.

    Raises:
        MetricsError: The address is taken or is none, or prometheus-client is not installed.
    """

    def __init__(self, metrics: Metrics, address: str) -> None:
        try:
            from prometheus_client import (
                CollectorRegistry,
                GCCollector,
                PlatformCollector,
                ProcessCollector,
                start_http_server,
            )
        except ImportError:
            raise MetricsError(
                "--metrics-listen: expected prometheus-client, of the extra outrider[serve], got "
                "none installed"
            ) from None

        registry = CollectorRegistry(auto_describe=False)
        registry.register(metrics)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        host, _, port = address.rpartition(":")
        host = host.strip("[]") or "127.0.0.1"
        try:
            self._server, self._thread = start_http_server(int(port), host, registry)
        except (OSError, OverflowError, ValueError) as error:
            raise MetricsError(
                f"--metrics-listen: expected a free HOST:PORT, got {address!r} ({error})"
            ) from None
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._server.server_port}"

    def close(self) -> None:
        """Closes the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def add_metrics_argument(parser: Any, flag: str = "--metrics-listen", who: str = "") -> None:
    """Where a service shows its metrics."""
    parser.add_argument(
        flag,
        metavar="ADDRESS",
        default=None,
        help=f"HOST:PORT, or PORT on loopback, for Prometheus metrics{who} (default: none)",
    )
