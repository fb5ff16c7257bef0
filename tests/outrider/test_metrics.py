"""Counting, and what a scrape gets to read."""

from __future__ import annotations

import math
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.cli.top import Change, Scrape, quantile
from outrider.metrics import SECONDS, Endpoint, Histogram, Metrics, MetricsError


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Values by sample name and labels."""
    found = {}
    for family in text_string_to_metric_families(metrics.text()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[sample.name, labels] = sample.value
    return found


def test_a_value_falls_into_the_bucket_whose_end_it_equals_or_precedes():
    histogram = Histogram((1, 2, 5))
    for value, times in ((0.5, 1), (1, 1), (1.5, 2), (5, 1), (9, 3)):
        histogram.observe(value, times)
    assert histogram.buckets() == [("1", 2.0), ("2", 4.0), ("5", 5.0), ("+Inf", 8.0)]
    assert histogram.total == 0.5 + 1 + 3 + 5 + 27


def test_buckets_of_times_ascend():
    assert list(SECONDS) == sorted(set(SECONDS))


def test_everything_is_shown_as_prometheus_reads_it():
    metrics = Metrics("p")
    ended = metrics.counter("ended", "Ends.", "how")
    ended["well"] += 2
    times = metrics.histogram("seconds", "Times.", (1, 2), label="phase", values=("a", "b"))
    times["a"].observe(1.5)
    alone = metrics.histogram("alone", "One.", (1,))[""]
    alone.observe(3, 2)
    metrics.reading("gauge", "now", "Now.", lambda: {"up": 1, "down": 0}, "state")
    metrics.reading("counter", "bytes", "Bytes.", lambda: 7.0)
    assert samples(metrics) == {
        ("p_ended_total", "how=well"): 2,
        ("p_seconds_bucket", "le=1,phase=a"): 0,
        ("p_seconds_bucket", "le=2,phase=a"): 1,
        ("p_seconds_bucket", "le=+Inf,phase=a"): 1,
        ("p_seconds_count", "phase=a"): 1,
        ("p_seconds_sum", "phase=a"): 1.5,
        ("p_seconds_bucket", "le=1,phase=b"): 0,
        ("p_seconds_bucket", "le=2,phase=b"): 0,
        ("p_seconds_bucket", "le=+Inf,phase=b"): 0,
        ("p_seconds_count", "phase=b"): 0,
        ("p_seconds_sum", "phase=b"): 0,
        ("p_alone_bucket", "le=1"): 0,
        ("p_alone_bucket", "le=+Inf"): 2,
        ("p_alone_count", ""): 2,
        ("p_alone_sum", ""): 6,
        ("p_now", "state=up"): 1,
        ("p_now", "state=down"): 0,
        ("p_bytes_total", ""): 7,
    }


def test_counting_needs_no_prometheus_client():
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from drafter.metrics import DrafterMetrics\n"
        "from verifier.metrics import VerifierMetrics\n"
        "metrics = VerifierMetrics(); metrics.row_committed(3, 2, 3)\n"
        "metrics.round_ended(1, 5, 1, 1, 1); DrafterMetrics().round_ended(1, 1, 3)\n"
        "print(metrics.live.total)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("3.0\n", "")


def get(address: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("address", ["0", "127.0.0.1:0", "[::1]:0"])
def test_a_port_alone_is_on_loopback(address):
    metrics = Metrics("p")
    metrics.reading("gauge", "one", "One.", lambda: 1.0)
    endpoint = Endpoint(metrics, address)
    try:
        host = endpoint.address.rpartition(":")[0]
        assert host == ("[::1]" if "::1" in address else "127.0.0.1")
        text = get(endpoint.address)
        assert "\np_one 1.0\n" in text
        assert "process_resident_memory_bytes" in text
    finally:
        endpoint.close()
    with pytest.raises(urllib.error.URLError):
        get(endpoint.address)


def test_a_port_without_prometheus_client_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MetricsError, match=r"expected prometheus-client, of the extra outrider"):
        Endpoint(Metrics("p"), "0")


def test_a_taken_port_and_what_is_no_address_are_refused():
    endpoint = Endpoint(Metrics("p"), "127.0.0.1:0")
    try:
        for address in (endpoint.address, "here", "127.0.0.1:99999", "300.0.0.1:0"):
            with pytest.raises(MetricsError, match="--metrics-listen: expected a free HOST:PORT"):
                Endpoint(Metrics("p"), address)
    finally:
        endpoint.close()


# --- what `outrider top` makes of it


def test_a_quantile_is_linear_within_its_bucket():
    counts = [(1.0, 0.0), (2.0, 10.0), (4.0, 20.0), (math.inf, 20.0)]
    assert quantile(counts, 0.5) == 2.0
    assert quantile(counts, 0.25) == 1.5
    assert quantile(counts, 0.75) == 3.0
    assert quantile(counts, 1.0) == 4.0
    assert quantile([(1.0, 0.0), (math.inf, 4.0)], 0.5) == 1.0


def test_rates_and_means_are_of_the_time_between_two_scrapes():
    metrics = Metrics("p")
    ended = metrics.counter("ended", "Ends.", "how")
    times = metrics.histogram("work_seconds", "Times.", (1, 2))[""]
    ended["well"] += 5
    times.observe(1.9, 10)
    before = Scrape.read(metrics.text(), at=100.0)
    ended["well"] += 4
    times.observe(0.25, 2)
    change = Change(before, Scrape.read(metrics.text(), at=102.0))
    assert change.per_second("p_ended_total", "well") == 2.0
    assert change.mean("p_work_seconds") == "250.0 ms"
    assert change.quantiles("p_work_seconds", 0.5) == "500.0 ms"
    quiet = Change(change.after, Scrape.read(metrics.text(), at=103.0))
    assert quiet.per_second("p_ended_total", "well") == 0.0
    assert quiet.mean("p_work_seconds").startswith("~1.6"), "of all time, where nothing happened"
    assert Change(Scrape(), Scrape()).mean("p_work_seconds") == "-"
