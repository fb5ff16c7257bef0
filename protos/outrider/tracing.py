"""What a call carries to be found again: x-request-id and W3C traceparent, and spans from them.

Ids travel always; spans are made where a service was told to, with the extra `otel`. Nothing here
sees a prompt or an output.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

X_REQUEST_ID = "x-request-id"
TRACEPARENT = "traceparent"

# version 00 in full; later versions may append fields, and are read as far as 00 goes
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_MOST_ID_BYTES = 128

Attribute = str | int | float | bool
NONE: Mapping[str, Attribute] = MappingProxyType({})


class TracingError(ValueError):
    """Spans were asked for and cannot be made."""


@dataclass(frozen=True)
class Trail:
    """The ids that a call came with, and its own; each may be empty."""

    request_id: str = ""  # the verifier's name for the request
    x_request_id: str = ""  # of whoever stands in front, printable ASCII
    traceparent: str = ""  # W3C Trace Context

    @classmethod
    def of(cls, metadata: Sequence[tuple[str, str | bytes]] | None) -> Trail:
        """From a call's metadata; what is malformed or too long counts as absent."""
        x_request_id = traceparent = ""
        for name, value in metadata or ():
            if not isinstance(value, str):
                continue
            if name == X_REQUEST_ID and 0 < len(value) <= _MOST_ID_BYTES and is_header(value):
                x_request_id = value
            elif name == TRACEPARENT and valid_traceparent(value):
                traceparent = value
        return cls(x_request_id=x_request_id, traceparent=traceparent)

    @property
    def trace_id(self) -> str:
        """The 32 hexadecimal digits that all spans of a trace share; empty without a trace."""
        return self.traceparent[3:35]

    def fields(self) -> dict[str, str]:
        """What log events carry of it."""
        named = {
            "request_id": self.request_id,
            "x_request_id": self.x_request_id,
            "trace_id": self.trace_id,
        }
        return {name: value for name, value in named.items() if value}


NO_TRAIL = Trail()


def is_header(text: str) -> bool:
    """Whether a text may be the value of a header."""
    return text.isascii() and text.isprintable()


def valid_traceparent(text: str) -> bool:
    """Whether a header is a traceparent whose ids are not all zero."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None or len(text) > _MOST_ID_BYTES:
        return False
    trace_id, parent_id, more = found.groups()
    if more is not None and text.startswith("00"):
        return False
    return bool(int(trace_id, 16) and int(parent_id, 16))


class Span:
    """One piece of work, from now until `end`; without a tracer it only remembers its trail."""

    def __init__(self, traceparent: str, span: Any = None, tracer: Tracer | None = None) -> None:
        self.traceparent = traceparent  # of this span, for whoever works for it
        self._span = span
        self._tracer = tracer

    def child(
        self,
        name: str,
        started_ns: int,
        ended_ns: int,
        attributes: Mapping[str, Attribute] = NONE,
    ) -> None:
        """Adds a piece that is over; times are of `time.monotonic_ns`."""
        if self._span is None or self._tracer is None:
            return
        child = self._tracer.start(name, self.traceparent, started_ns, attributes)
        child.end(ended_ns=ended_ns)

    def end(
        self,
        attributes: Mapping[str, Attribute] = NONE,
        *,
        error: str = "",
        ended_ns: int | None = None,
    ) -> None:
        """Ends it, now or then; `error` says why it failed."""
        if self._span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(dict(attributes))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(None if ended_ns is None else _wall_ns(ended_ns))


class Tracer:
    """Makes spans, or none.

    Args:
        service: The name that spans are filed under, such as "outrider-verifier".
        exporter: Takes finished spans; None makes none.
    """

    def __init__(self, service: str, exporter: Any = None) -> None:
        self._tracer: Any = None
        self._provider: Any = None
        if exporter is None:
            return
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": service})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("outrider")

    @classmethod
    def chosen(cls, service: str, choice: str) -> Tracer:
        """By flag: "off", or "otlp" with the endpoint from OpenTelemetry's own environment.

        Raises:
            TracingError: The extra `otel` is not installed.
        """
        if choice == "off":
            return cls(service)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise TracingError(
                "--tracing otlp: expected the extra outrider[otel], which is not installed "
                f"({error.name})"
            ) from None
        return cls(service, OTLPSpanExporter())

    def start(
        self,
        name: str,
        traceparent: str,
        started_ns: int,
        attributes: Mapping[str, Attribute] = NONE,
    ) -> Span:
        """Begins a span below a trail's; its own trail is what the work for it carries on."""
        if self._tracer is None:
            return Span(traceparent)
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        parent = propagator.extract({TRACEPARENT: traceparent} if traceparent else {})
        span = self._tracer.start_span(
            name,
            context=parent,
            kind=SpanKind.SERVER,
            attributes=dict(attributes),
            start_time=_wall_ns(started_ns),
        )
        context = span.get_span_context()
        own = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        return Span(own, span, self)

    def close(self) -> None:
        """Sends what has not been sent, for a few seconds at most."""
        if self._provider is not None:
            with suppress(Exception):  # a collector that is away must not fail a drain
                self._provider.force_flush(3000)
                self._provider.shutdown()


def add_tracing_argument(parser: Any) -> None:
    """Whether a service makes spans."""
    parser.add_argument(
        "--tracing",
        choices=("off", "otlp"),
        default="off",
        help="OpenTelemetry spans, by OTEL_EXPORTER_OTLP_ENDPOINT and its like (default: off)",
    )


def _wall_ns(monotonic_ns: int) -> int:
    """The wall clock's time of a monotonic one."""
    return time.time_ns() - (time.monotonic_ns() - monotonic_ns)
