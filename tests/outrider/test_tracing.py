"""Ids that travel, and spans from them."""

from __future__ import annotations

import time

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outrider.tracing import Tracer, TracingError, Trail, valid_traceparent

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (TRACEPARENT, True),
        (f"00-{TRACE}-{PARENT}-00", True),
        (f"cc-{TRACE}-{PARENT}-01-what-comes", True),
        ("", False),
        (f"ff-{TRACE}-{PARENT}-01", False),
        (f"00-{TRACE}-{PARENT}-01-more", False),
        (f"00-{TRACE.upper()}-{PARENT}-01", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE}-{PARENT}", False),
        (f"cc-{TRACE}-{PARENT}-01-{'x' * 200}", False),
    ],
)
def test_a_traceparent_is_as_w3c_wants_it(text, valid):
    assert valid_traceparent(text) is valid


def test_a_trail_comes_from_metadata_and_leaves_out_what_is_malformed():
    metadata = (("x-request-id", "abc"), ("traceparent", TRACEPARENT), ("user-agent", "x"))
    trail = Trail.of(metadata)
    assert (trail.x_request_id, trail.traceparent, trail.trace_id) == ("abc", TRACEPARENT, TRACE)
    assert trail.fields() == {"x_request_id": "abc", "trace_id": TRACE}
    for wrong in (
        (("x-request-id", "a" * 129),),
        (("x-request-id", "a\nb"),),
        (("x-request-id", ""),),
        (("x-request-id", b"bytes"),),
        (("traceparent", "00-1-2-3"),),
        (),
        None,
    ):
        assert Trail.of(wrong) == Trail() and Trail.of(wrong).fields() == {}


def test_without_an_exporter_a_span_passes_its_trail_on():
    tracer = Tracer("outrider-test")
    span = tracer.start("work", TRACEPARENT, time.monotonic_ns())
    assert span.traceparent == TRACEPARENT
    span.child("part", 0, 1)
    span.end({"a": 1})
    tracer.close()


def test_spans_hang_below_the_caller_s_and_keep_their_times():
    exporter = InMemorySpanExporter()
    tracer = Tracer("outrider-test", exporter)
    started = time.monotonic_ns() - 5_000_000_000
    span = tracer.start("work", TRACEPARENT, started, {"size": 3})
    assert span.traceparent[3:35] == TRACE and span.traceparent[36:52] != PARENT
    span.child("part", started + 1_000_000_000, started + 3_000_000_000, {"rows": 2})
    span.end({"outcome": "stop"}, error="broken")
    tracer.close()
    part, work = exporter.get_finished_spans()
    assert f"{work.context.trace_id:032x}" == TRACE
    assert f"{work.parent.span_id:016x}" == PARENT
    assert part.parent.span_id == work.context.span_id
    assert dict(work.attributes) == {"size": 3, "outcome": "stop"}
    assert (work.status.is_ok, work.status.description) == (False, "broken")
    assert part.end_time - part.start_time == pytest.approx(2e9, abs=1e7)
    assert abs(work.start_time - (time.time_ns() - 5e9)) < 2e9
    assert work.resource.attributes["service.name"] == "outrider-test"


def test_a_span_without_a_caller_begins_a_trace():
    exporter = InMemorySpanExporter()
    tracer = Tracer("outrider-test", exporter)
    span = tracer.start("work", "", time.monotonic_ns())
    assert valid_traceparent(span.traceparent)
    span.end()
    tracer.close()
    (work,) = exporter.get_finished_spans()
    assert work.parent is None


def test_spans_without_the_extra_are_refused_by_name(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracingError, match=r"--tracing otlp: expected the extra outrider\[otel\]"):
        Tracer.chosen("outrider-test", "otlp")
    assert Tracer.chosen("outrider-test", "off").start("a", "", 0).traceparent == ""
