"""Metrics, logs and traces of a whole pair say what the requests themselves say."""

from __future__ import annotations

import io
import json
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import structlog
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import drafter.metrics
import verifier.metrics
import verifier.outbox
from outrider import cli
from outrider.cli import top
from outrider.cli.top import Scrape
from outrider.client import ClientError
from outrider.tracing import Tracer
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import generation_service_pb2_grpc as pb_grpc
from tests.system.conftest import prompt
from tests.tiny_pair import Pair
from verifier.metrics import PLAIN_CAUSES

V, D = "outrider_verifier", "outrider_drafter"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
K = 3


def look(pair: Pair) -> tuple[Scrape, Scrape]:
    drafting = pair.drafter._service._engine
    return (
        Scrape.read(pair.verifier.metrics.text(), 0.0),
        Scrape.read(drafting.metrics.text(), 0.0),
    )


def wait_until(condition: Callable[[], bool], patience: float = 20) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_metrics_of_both_services_add_up_to_the_usage_of_the_requests(dense, serve):
    pair, client = serve(dense, "dflash2", draft_tokens=K, max_concurrency=2)
    runs = [
        client.generate(
            prompt_ids=prompt(20, seed=i), max_tokens=24 + i, temperature=0, ignore_eos=True
        )
        for i in range(3)
    ]
    runs.append(client.generate(prompt_ids=prompt(9), max_tokens=10, seed=5, draft_tokens=0))
    runs.append(client.generate(prompt_ids=prompt(9), max_tokens=8, temperature=0, stop_token_ids=[
        client.generate(prompt_ids=prompt(9), max_tokens=3, temperature=0).token_ids[1]
    ]))  # fmt: skip
    pair.expect_idle()
    verifier, drafter = look(pair)
    usages = [run.usage for run in runs]
    extra = client.generate(prompt_ids=prompt(9), max_tokens=3, temperature=0).usage  # as above
    usages.append(extra)

    def total(name: str) -> int:
        return sum(getattr(usage, name) for usage in usages)

    value = verifier.value
    assert value(f"{V}_output_tokens_total") == total("output_tokens")
    assert value(f"{V}_prompt_tokens_total") == total("prompt_tokens")
    assert value(f"{V}_proposed_tokens_total") == total("proposed")
    assert value(f"{V}_accepted_tokens_total") == total("accepted")
    accepted = [sum(u.accepted_per_position[i] for u in usages) for i in range(K)]
    shown = verifier.values[f"{V}_accepted_at_position_total"]
    assert [shown[str(i + 1)] for i in range(K)] == accepted
    outcomes = verifier.values[f"{V}_requests_total"]
    assert outcomes == {"length": 5.0, "stop": 1.0}
    assert verifier.values[f"{V}_calls_total"]["OK"] == 6
    assert value(f"{V}_ttft_seconds_count") == value(f"{V}_queue_seconds_count") == 6
    assert value(f"{V}_inter_token_seconds_count") == total("output_tokens") - 6
    assert value(f"{V}_request_seconds_count") == 6
    assert value(f"{V}_request_seconds_sum") >= sum(u.total_ns for u in usages[:5]) / 1e9
    # each sample alone in its rounds
    assert value(f"{V}_round_rows_sum") == value(f"{V}_round_rows_count") == total("rounds")
    assert value(f"{V}_live_proposals_count") == total("rounds")
    assert value(f"{V}_live_proposals_sum") == total("proposed")
    plain = verifier.values[f"{V}_plain_rounds_total"]
    drafted = value(f"{V}_accept_length_count")
    assert drafted + sum(plain.values()) == total("rounds")
    assert plain["request"] == runs[3].usage.rounds
    assert plain["drafter_away"] == plain["no_proposal"] == plain["out_of_range"] == 0
    assert value(f"{V}_accept_length_sum") + sum(plain.values()) + 6 == total("output_tokens")
    for phase in ("draft", "wire", "verify", "host", "total"):
        assert value(f"{V}_round_seconds_count", phase) == total("rounds")
    parts = sum(value(f"{V}_round_seconds_sum", p) for p in ("draft", "wire", "verify", "host"))
    assert parts == pytest.approx(value(f"{V}_round_seconds_sum", "total"), rel=0.05)
    assert value(f"{V}_drafter_connected") == 1
    for name, count in (("lanes", 2), ("state_slots", 2)):
        assert verifier.values[f"{V}_{name}"] == {"used": 0, "free": count}
    assert verifier.values[f"{V}_pages"]["used"] == 0
    assert verifier.values[f"{V}_samples"] == {"waiting": 0, "running": 0, "paused": 0}
    # the two ends agree on what went between them
    events, link = drafter.values[f"{D}_events_total"], verifier.values[f"{V}_link_events_total"]
    assert events["rounds"] == link["rounds"] == drafter.value(f"{D}_round_seconds_count", "total")
    assert events["opens"] == link["opens"]
    assert events["feature_rows"] == link["feature_rows"]
    assert events["proposals"] == drafted
    there, here = drafter.values[f"{D}_wire_bytes_total"], verifier.values[f"{V}_wire_bytes_total"]
    assert there["received"] == here["sent"] > 1_000
    assert there["sent"] == here["received"] > 0
    assert drafter.value(f"{D}_streams") == 1
    assert drafter.values[f"{D}_sequences"] == {"used": 0, "free": 2}


def test_while_they_run_samples_pages_and_lanes_are_counted_as_used(dense, serve):
    pair, client = serve(dense, "dflash2", draft_tokens=K, max_concurrency=1)
    arguments = {"max_tokens": 480, "temperature": 0, "ignore_eos": True}
    running = client.stream(prompt_ids=prompt(9), **arguments)
    next(running)
    waiting = client.stream(prompt_ids=prompt(9), **arguments)
    wait_until(lambda: look(pair)[0].value(f"{V}_samples", "waiting") == 1)
    verifier, drafter = look(pair)
    assert verifier.value(f"{V}_samples", "running") == 1
    assert verifier.value(f"{V}_lanes", "used") == verifier.value(f"{V}_state_slots", "used") == 1
    assert verifier.value(f"{V}_pages", "used") > 0
    assert drafter.values[f"{D}_sequences"] == {"used": 1, "free": 0}
    running.cancel()
    next(waiting)
    waiting.cancel()
    pair.expect_idle()
    wait_until(lambda: look(pair)[0].value(f"{V}_requests_total", "left") == 2)


def test_every_way_to_end_has_its_outcome(dense, serve):
    pair, client = serve(dense, "dflash2", draft_tokens=K, max_concurrency=1, queue_timeout_ms=300)
    long = {"max_tokens": 480, "temperature": 0, "ignore_eos": True}
    stream = client.stream(prompt_ids=prompt(9), request_id="mine", **long)
    next(stream)
    with pytest.raises(ClientError, match="QUEUE_TIMEOUT"):
        client.generate(prompt_ids=prompt(9), **long)
    client.abort("mine")
    assert stream.completions()[0].finish_reason == "aborted"
    with pytest.raises(ClientError, match="DEADLINE"):
        client.generate(prompt_ids=prompt(9), timeout=0.1, **long)
    with pytest.raises(ClientError, match="PROMPT_EMPTY"):
        client.generate(prompt_ids=[])
    pair.expect_idle()
    wait_until(lambda: sum(look(pair)[0].values[f"{V}_calls_total"].values()) == 4)
    verifier, _ = look(pair)
    outcomes = verifier.values[f"{V}_requests_total"]
    # whether the engine or the transport sees the deadline first is a matter of timing
    late = outcomes.pop("deadline_expired", 0) + outcomes.pop("left", 0)
    assert (outcomes, late) == ({"aborted": 1, "queue_timeout": 1}, 1)
    codes = verifier.values[f"{V}_calls_total"]
    assert codes["OK"] == codes["RESOURCE_EXHAUSTED"] == codes["INVALID_ARGUMENT"] == 1


def test_rounds_without_a_drafter_are_counted_by_that_cause(dense, serve):
    pair, client = serve(dense, "dflash2", draft_tokens=K)
    pair.drafter.stop(0)
    pair.wait_for_drafter("connecting")
    usage = client.generate(
        prompt_ids=prompt(9), max_tokens=20, temperature=0, ignore_eos=True
    ).usage
    verifier, _ = look(pair)
    plain = verifier.values[f"{V}_plain_rounds_total"]
    assert plain["drafter_away"] == usage.plain_rounds == 18
    assert plain["budget"] == 1, "the last one"
    assert verifier.value(f"{V}_drafter_connected") == 0
    assert verifier.value(f"{V}_link_events_total", "losses") == 1


def test_prefix_hits_are_counted_and_forks_and_restores_carry_their_trail(dense, serve, events):
    pair, client = serve(
        dense, "dflash2", draft_tokens=K, checkpoint_slots=4, prefill_chunk=16, max_concurrency=2
    )
    arguments = {"prompt_ids": prompt(64), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    first = client.generate(request_id="first", **arguments)
    second = client.generate(request_id="second", **arguments)
    client.samples(request_id="forked", n=2, **arguments | {"prompt_ids": prompt(40, seed=1)})
    pair.expect_idle()
    verifier, _ = look(pair)
    assert first.usage.cached_tokens == 0 < second.usage.cached_tokens
    assert second.token_ids == first.token_ids
    assert verifier.values[f"{V}_prefix_cache_total"] == {"hit": 1, "miss": 2}
    assert verifier.value(f"{V}_cached_tokens_total") == second.usage.cached_tokens
    assert verifier.value(f"{V}_prompt_tokens_total") == 64 + 64 + 40, "samples share a prompt"
    kept = verifier.values[f"{V}_checkpoint_events_total"]
    assert kept["hits"] == 1 and kept["captures"] >= 2
    assert verifier.value(f"{V}_checkpoints") >= 2
    begun = {e["how"]: e for e in events if e["event"] == "context_begun"}
    assert begun["restore"]["request_id"] == "second"
    assert begun["fork"]["request_id"] == "forked"


def test_the_operations_page_explains_every_metric_and_no_other(dense, serve):
    pair, client = serve(dense, "dflash2", draft_tokens=K)
    client.generate(prompt_ids=prompt(9), max_tokens=8, temperature=0)
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    told = page.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    of_verifier, of_drafter = told.split("Of a drafter, prefix")
    drafting = pair.drafter._service._engine
    for text, metrics in ((of_verifier, pair.verifier.metrics), (of_drafter, drafting.metrics)):
        prefix = f"{metrics._prefix}_"
        shown = {
            family.name.removeprefix(prefix) + "_total" * (family.type == "counter")
            for family in metrics.collect()
        }
        cells = re.findall(r"^\| (`[^|]+) \|", text, re.M)
        named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
        assert named == shown
    told_causes = told.partition("Causes of plain rounds:")[2].partition("\n\n")[0]
    causes = set(re.findall(r"`(\w+)`", told_causes))
    assert causes == set(PLAIN_CAUSES)


def test_top_shows_both_services_as_they_are(dense, serve, capsys):
    pair, client = serve(dense, "dflash2", draft_tokens=K, metrics_listen="127.0.0.1:0")
    client.generate(prompt_ids=prompt(9), max_tokens=40, temperature=0, ignore_eos=True)
    address = pair.verifier.metrics_address
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        assert f"{V}_build_info" in answer.read().decode()
    words = ["top", f"--metrics={address}", "--drafter-metrics=127.0.0.1:1"]
    assert cli.main([*words, "--once", "--interval=0.1"]) == 0
    shown = capsys.readouterr().out
    assert f"verifier {address}" in shown
    assert "  drafter                   connected" in shown
    assert "  lanes, slots, pages       0 of 4, 0 of 4, 0 of" in shown
    assert "no metrics there" in shown, "of the drafter's"
    assert cli.main(["top", "--metrics=127.0.0.1:1", "--drafter-metrics=127.0.0.1:1"]) == 1
    assert "--metrics-listen" in capsys.readouterr().err


def test_top_draws_both_services(dense, serve):
    from rich.console import Console

    pair, client = serve(dense, "dflash2", draft_tokens=K)
    client.generate(prompt_ids=prompt(9), max_tokens=40, temperature=0, ignore_eos=True)
    verifier, drafter = look(pair)
    panels = (
        top.Panel("verifier", top.verifier_lines(top.Change(Scrape(), verifier))),
        top.Panel("drafter", [], "no metrics there: [Errno 111]"),
    )
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(top._drawn(panels))
    shown = console.export_text()
    assert "accept length" in shown and "no metrics there: [Errno 111]" in shown
    lines = dict(top.drafter_lines(top.Change(Scrape(), drafter)))
    assert (lines["verifiers"], lines["contexts"]) == ("1", "0 of 4")
    assert lines["faults since start"] == "none"
    assert lines["round"].startswith("total ")


# --- trails


@pytest.fixture
def events(monkeypatch):
    """Log events of both services about requests, at every level, as dictionaries."""
    seen: list[dict[str, object]] = []

    def keep(logger, method, event):
        seen.append({"level": method, **event})
        raise structlog.DropEvent

    listening = structlog.wrap_logger(
        None, processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(0)
    )
    # the modules' own loggers remember how logs were set up when they were first used
    for module in (verifier.metrics, verifier.outbox, drafter.metrics):
        monkeypatch.setattr(module, "log", listening)
    return seen


def start(client_channel: grpc.Channel, request_id: str, **metadata: str):
    message = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt(9)), max_tokens=12, request_id=request_id
    )
    headers = tuple((name.replace("_", "-"), value) for name, value in metadata.items())
    return pb_grpc.GenerationServiceStub(client_channel).Generate(
        message, metadata=headers, timeout=30
    )


def test_a_request_s_ids_are_in_the_logs_of_both_services_and_in_the_answer(dense, serve, events):
    pair, _ = serve(dense, "dflash2", draft_tokens=K)
    with grpc.insecure_channel(pair.address) as channel:
        call = start(channel, "r-1", x_request_id="front-7", traceparent=f"00-{TRACE}-{PARENT}-01")
        assert ("x-request-id", "front-7") in [tuple(pair) for pair in call.initial_metadata()]
        responses = list(call)
        plain = start(channel, "r-2")
        assert ("x-request-id", "r-2") in [tuple(pair) for pair in plain.initial_metadata()]
        list(plain)
    pair.expect_idle()
    usage = responses[-1].finish.usage
    named = {
        name: [e for e in events if e["event"] == name]
        for name in ("request_ended", "round_committed", "context_begun", "round_drafted")
    }
    first, second = named["request_ended"]
    assert (first["level"], first["request_id"], first["outcome"]) == ("info", "r-1", "length")
    assert (first["x_request_id"], first["trace_id"]) == ("front-7", TRACE)
    assert first["output_tokens"] == usage.output_tokens == 12
    assert "x_request_id" not in second and "trace_id" not in second
    rounds = [e for e in named["round_committed"] if e["request_id"] == "r-1"]
    assert len(rounds) == usage.rounds and {e["level"] for e in rounds} == {"debug"}
    (begun,) = [e for e in named["context_begun"] if e["request_id"] == "r-1"]
    assert (begun["x_request_id"], begun["trace_id"]) == ("front-7", TRACE)
    assert any(e["request_ids"] == ["r-1"] for e in named["round_drafted"])
    json.dumps(events)  # all of it is JSON


def test_spans_of_both_services_hang_below_the_caller_s(dense, serve, monkeypatch):
    exporters = {}

    def chosen(service: str, choice: str) -> Tracer:
        exporters[service] = InMemorySpanExporter()
        return Tracer(service, exporters[service])

    monkeypatch.setattr(Tracer, "chosen", chosen)
    pair, client = serve(dense, "dflash2", draft_tokens=K)
    with grpc.insecure_channel(pair.address) as channel:
        list(start(channel, "r-1", traceparent=f"00-{TRACE}-{PARENT}-01"))
    other = TRACE[::-1]
    client.generate(
        prompt_ids=prompt(9), max_tokens=4, traceparent=f"00-{other}-{PARENT}-01", x_request_id="x"
    )
    client.generate(prompt_ids=prompt(9), max_tokens=4)
    pair.expect_idle()
    pair.verifier.stop(0)
    pair.drafter.stop(0)
    spans = {
        service: [s for s in exporter.get_finished_spans() if f"{s.context.trace_id:032x}" == TRACE]
        for service, exporter in exporters.items()
    }
    every = exporters["outrider-verifier"].get_finished_spans()
    assert sum(f"{s.context.trace_id:032x}" == other for s in every) == 4, "by the SDK too"
    by_name = {span.name: span for span in spans["outrider-verifier"]}
    assert by_name.keys() == {"queue", "prefill", "decode", "generate"}
    whole = by_name["generate"]
    assert f"{whole.parent.span_id:016x}" == PARENT
    assert whole.attributes["outrider.request_id"] == "r-1"
    assert whole.attributes["outrider.outcome"] == "length"
    assert whole.attributes["gen_ai.usage.output_tokens"] == 12
    for name in ("queue", "prefill", "decode"):
        part = by_name[name]
        assert part.parent.span_id == whole.context.span_id
        assert whole.start_time - 1e6 <= part.start_time <= part.end_time <= whole.end_time + 1e6
    (draft,) = spans["outrider-drafter"]
    assert draft.parent.span_id == whole.context.span_id
    assert draft.attributes["outrider.proposed"] == by_name["decode"].attributes[
        "outrider.proposed"
    ]  # fmt: skip
    # and no text of a prompt or an output anywhere
    words = {type(value) for s in spans["outrider-verifier"] for value in s.attributes.values()}
    assert words <= {str, int}
