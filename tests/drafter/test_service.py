"""A whole drafter: started on files, spoken to over loopback gRPC."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from concurrent import futures

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from drafter import service as service_module
from drafter.__main__ import CALL_THREADS, parse, start
from drafter.config import DrafterOptions
from drafter.model import ProposalAsk
from drafter.service import DraftService, Engine, Stream
from outrider import PROTOCOL_REVISION, faults, pair, serving, tensors
from outrider.v1 import draft_service_pb2 as wire
from outrider.v1 import draft_service_pb2_grpc

DEADLINE = 30


class Verifier:
    """The other end of one stream."""

    def __init__(self, channel, hello=None):
        self.stub = draft_service_pb2_grpc.DraftServiceStub(channel)
        self.outgoing = queue.SimpleQueue()
        self.call = self.stub.DraftRounds(iter(self.outgoing.get, None), timeout=DEADLINE)
        if hello is not None:
            self.send(hello=hello)
            self.welcome = next(self.call).welcome

    def send(self, **event):
        self.outgoing.put(wire.DraftRoundsRequest(**event))

    def close(self):
        self.outgoing.put(None)

    def ending(self) -> faults.FaultError:
        with pytest.raises(grpc.RpcError) as ended:
            for _ in self.call:
                pass
        return faults.from_rpc_error(ended.value)


def hello_for(info: wire.GetDraftInfoResponse, verifier=b"v", **changes) -> wire.Hello:
    return wire.Hello(
        **{
            "protocol_revision": PROTOCOL_REVISION,
            "verifier_id": verifier * 16,
            "max_concurrency": 2,
            "draft_tokens": info.draft_tokens,
            "geometry": info.geometry,
            "max_message_bytes": serving.MESSAGE_LIMIT,
            **changes,
        }
    )


@pytest.fixture
def running(make_pair):
    started = []

    def run(draft_format="dflash2", **options):
        tiny = make_pair(draft_format, "lf", is_causal=False)
        process = start(DrafterOptions(target=tiny.target, draft=tiny.draft, **options))
        channel = grpc.insecure_channel(process.address, options=serving.CHANNEL_OPTIONS)
        started.append((process, channel))
        return tiny, process, channel

    yield run
    for process, channel in started:
        channel.close()
        process.stop(0)


def describe(channel) -> wire.GetDraftInfoResponse:
    stub = draft_service_pb2_grpc.DraftServiceStub(channel)
    return stub.GetDraftInfo(wire.GetDraftInfoRequest(), timeout=DEADLINE)


def health_of(channel, service=serving.DRAFT_SERVICE):
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    return stub.Check(request, timeout=DEADLINE).status


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft_format", ["dflash", "dflash2"])
def test_proposals_cross_the_wire_as_they_were_drawn(running, load, features, draft_format, dtype):
    tiny, _, channel = running(draft_format, dtype=dtype)
    verifier = Verifier(channel, hello_for(describe(channel)))
    rows = features(30).to(getattr(torch, dtype))
    verifier.send(open=wire.Open(sequence_id=1, epoch=1))
    for first in (0, 20):
        piece = tensors.encode(rows[first : min(first + 20, 26)])
        event = wire.Features(sequence_id=1, epoch=1, first_position=first, rows=piece)
        verifier.send(features=event)
    row = wire.RoundRow(
        sequence_id=1, epoch=1, first_position=26, features=tensors.encode(rows[26:])
    )
    row.proposal.MergeFrom(
        wire.ProposalRequest(frontier=30, anchor=9, live=5, temperature=0.8, seed=2**64 - 3)
    )
    verifier.send(round=wire.Round(round_index=1, rows=[row]))
    reply = next(verifier.call).round_reply

    drafting = load(tiny, dtype=dtype)
    context = drafting.memory.open(0)
    for piece in (rows[:20], rows[20:26], rows[26:]):
        drafting.append((context, piece))
    block = drafting.block(ProposalAsk(context, 9, 5, 0.8, 2**64 - 3))
    drawn = drafting.selector.select(drafting.model.draft_block(block), block)
    tokens, candidate_ids, probabilities = (
        None if part is None else part[0, :5]
        for part in (drawn.tokens, drawn.candidate_ids, drawn.probabilities)
    )
    proposal = reply.rows[0].proposal
    assert reply.rows[0].context_frontier == proposal.frontier == 30
    assert list(proposal.token_ids) == tokens.tolist()
    if draft_format == "dflash":
        assert proposal.WhichOneof("distribution") == "point_mass"
    else:
        ids = tensors.decode(proposal.conditional.candidate_ids, (5, 16), torch.int32)
        q = tensors.decode(proposal.conditional.probabilities, (5, 16), torch.float32)
        assert torch.equal(ids, candidate_ids)
        assert torch.equal(q, probabilities), "q is the one drawn from, bit for bit"
    assert 0 < reply.materialize_ns + reply.draft_ns < reply.service_ns


def test_a_round_beyond_the_drafters_range_faults_and_the_sequence_stays(running, features):
    _, _, channel = running(max_context=40)
    info = describe(channel)
    verifier = Verifier(channel, hello_for(info))
    assert verifier.welcome.max_context == info.max_context == 40
    verifier.send(open=wire.Open(sequence_id=1, epoch=1))
    replies = []
    for index, first in enumerate(range(0, 40, 8), 1):
        row = wire.RoundRow(sequence_id=1, epoch=1, first_position=first)
        row.features.CopyFrom(tensors.encode(features(8)))
        row.proposal.MergeFrom(wire.ProposalRequest(frontier=first + 8, anchor=1, live=1))
        verifier.send(round=wire.Round(round_index=index, rows=[row]))
        replies.append(next(verifier.call).round_reply.rows[0])
    assert [row.context_frontier for row in replies] == [8, 16, 24, 32, 40]
    assert [row.HasField("proposal") for row in replies] == [True] * 4 + [False]
    assert faults.from_status(replies[-1].fault).reason == "RING_CAPACITY"


def test_info_says_what_runs_and_what_is_left(running):
    _, _, channel = running(max_concurrency=5, draft_tokens=4)
    info = describe(channel)
    assert (info.draft_tokens, info.max_concurrency, info.free_sequences) == (4, 5, 5)
    assert (info.device, info.protocol_revision) == ("cpu", PROTOCOL_REVISION)
    assert list(info.layer_causal) == [False, False]
    assert info.geometry.format == wire.DRAFT_FORMAT_DFLASH2
    assert (info.geometry.layer_count, info.geometry.full_layer_count) == (2, 1)
    verifier = Verifier(channel, hello_for(info, max_concurrency=3))
    info = describe(channel)
    assert (info.stream_count, info.free_sequences) == (1, 2)
    verifier.close()
    assert list(verifier.call) == []
    assert describe(channel).free_sequences == 5


def test_the_causal_option_is_published(running):
    _, _, channel = running(causal_local_layers=True)
    assert list(describe(channel).layer_causal) == [True, False]


def test_health_and_reflection_know_the_service(running):
    _, _, channel = running()
    serving_now = health_pb2.HealthCheckResponse.SERVING
    assert health_of(channel) == health_of(channel, "") == serving_now
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(stub.ServerReflectionInfo(iter([request]), timeout=DEADLINE))
    names = {entry.name for entry in answer.list_services_response.service}
    assert serving.DRAFT_SERVICE in names


def test_while_weights_load_health_says_so_and_calls_are_refused(make_pair, monkeypatch):
    """A verifier that dials early hears LOADING, not silence."""
    import drafter.__main__ as main

    tiny, seen, load_weights = make_pair("dflash2", "lf", is_causal=False), [], main.load_weights
    addresses = []
    bind = serving.bind
    monkeypatch.setattr(serving, "bind", lambda *a: addresses.append(bind(*a)) or addresses[-1])

    def slow_load(*arguments):
        with grpc.insecure_channel(addresses[0]) as channel:
            seen.append(health_of(channel))
            seen.append(Verifier(channel).ending().reason)
            with pytest.raises(grpc.RpcError) as refused:
                describe(channel)
            seen.append(faults.from_rpc_error(refused.value).reason)
        return load_weights(*arguments)

    monkeypatch.setattr(main, "load_weights", slow_load)
    start(DrafterOptions(target=tiny.target, draft=tiny.draft)).stop(0)
    assert seen == [health_pb2.HealthCheckResponse.NOT_SERVING, "LOADING", "LOADING"]


def test_a_start_that_fails_leaves_nothing_listening(make_pair, monkeypatch):
    tiny, addresses, bind = make_pair("dflash2", "lf", is_causal=False), [], serving.bind
    monkeypatch.setattr(serving, "bind", lambda *a: addresses.append(bind(*a)) or addresses[-1])
    options = DrafterOptions(target=tiny.target, draft=tiny.draft, proposal_head="/nowhere.st")
    with pytest.raises(ValueError, match=r"/nowhere.st: no such file"):
        start(options)
    with grpc.insecure_channel(addresses[0]) as channel, pytest.raises(grpc.RpcError) as refused:
        describe(channel)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_stop_ends_streams_with_draining_and_the_threads(running):
    before = set(threading.enumerate())
    _, process, channel = running()
    verifiers = [
        Verifier(channel, hello_for(describe(channel), verifier=name)) for name in (b"a", b"b")
    ]
    ending = futures.ThreadPoolExecutor(2)
    endings = [ending.submit(verifier.ending) for verifier in verifiers]
    process.stop()
    assert [each.result(DEADLINE).reason for each in endings] == ["DRAINING", "DRAINING"]
    process.wait(DEADLINE)
    process.stop()
    ending.shutdown()
    channel.close()
    # a reader hears of its call's end a moment after the verifier
    for thread in set(threading.enumerate()) - before:
        if thread.name in ("draft-engine", "draft-reader"):
            thread.join(DEADLINE)
            assert not thread.is_alive(), thread.name


def test_stop_does_not_wait_for_a_stream_that_never_said_hello(running):
    _, process, channel = running()
    silent = Verifier(channel)
    describe(channel)
    process.stop(0)
    assert silent.ending().code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def test_streams_that_never_say_hello_end_and_give_their_threads_back(running, monkeypatch):
    monkeypatch.setattr(service_module, "HELLO_SECONDS", 0.3)
    _, _, channel = running()
    hello = hello_for(describe(channel))
    silent = [Verifier(channel) for _ in range(CALL_THREADS + 4)]
    fault = silent[0].ending()
    assert (fault.reason, fault.code) == ("EVENT_INVALID", grpc.StatusCode.INVALID_ARGUMENT)
    quiet = Verifier(channel, hello)
    time.sleep(0.5)
    quiet.send(round=wire.Round(round_index=1))
    assert next(quiet.call).HasField("round_reply"), "silence after a Hello is none"


def test_a_verifier_that_sends_and_never_reads_stops_nobody(running, features):
    """Its events wait for it; the engine and the other stream do not."""
    _, _, channel = running(max_concurrency=4)
    info = describe(channel)
    flood = Verifier(channel, hello_for(info, verifier=b"f"))
    count = 40 * service_module.STREAM_CREDITS
    for index in range(1, count + 1):
        flood.send(round=wire.Round(round_index=index))
    other = Verifier(channel, hello_for(info, verifier=b"o"))
    other.send(open=wire.Open(sequence_id=1, epoch=1))
    row = wire.RoundRow(sequence_id=1, epoch=1, features=tensors.encode(features(4)))
    row.proposal.MergeFrom(wire.ProposalRequest(frontier=4, anchor=1, live=7))
    other.send(round=wire.Round(round_index=1, rows=[row]))
    assert len(next(other.call).round_reply.rows[0].proposal.token_ids) == 7
    flood.close()
    assert [answer.round_reply.round_index for answer in flood.call] == list(range(1, count + 1))


def test_events_of_one_stream_wait_when_nobody_takes_the_answers(make_pair, load):
    """The credits bound what a stream can pile up on either side of the engine."""
    drafting = load(make_pair("dflash", "lf", is_causal=False))
    geometry = pair.geometry(drafting.config.target, drafting.config.draft, "float32")
    engine = Engine(drafting.config, geometry, drafting.graphs)
    stream, taken = Stream(), 0
    hello = hello_for(wire.GetDraftInfoResponse(geometry=geometry, draft_tokens=7))

    def requests():
        nonlocal taken
        yield wire.DraftRoundsRequest(hello=hello)
        for index in range(1, 1000):
            taken = index
            yield wire.DraftRoundsRequest(round=wire.Round(round_index=index))

    reader = threading.Thread(target=stream.read, args=(requests(), engine))
    reader.start()
    replies = stream.replies()
    assert next(replies).HasField("welcome")
    for index in range(1, 11):
        assert next(replies).round_reply.round_index == index
        assert taken <= index + service_module.STREAM_CREDITS + 1
    engine.hang_up(stream)
    reader.join(DEADLINE)
    assert not reader.is_alive(), "an ended stream frees its reader"
    assert taken < 999
    engine.drain()
    engine.close()


def test_a_second_stream_of_a_verifier_takes_over_at_once(running):
    """A half-open connection must not keep a restarted verifier out."""
    _, _, channel = running(max_concurrency=2)
    info = describe(channel)
    first = Verifier(channel, hello_for(info))
    first.send(open=wire.Open(sequence_id=1, epoch=1))
    second = Verifier(channel, hello_for(info))
    assert first.ending().code == grpc.StatusCode.CANCELLED
    second.send(open=wire.Open(sequence_id=1, epoch=1))
    second.send(round=wire.Round(round_index=1, rows=[wire.RoundRow(sequence_id=1, epoch=1)]))
    assert next(second.call).round_reply.rows[0].context_frontier == 0
    assert describe(channel).stream_count == 1


def test_calls_before_an_engine_is_attached_are_refused_with_loading():
    server = grpc.server(futures.ThreadPoolExecutor(2))
    service = DraftService()
    service.register(server)
    address = serving.bind(server, "127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(address) as channel:
        assert Verifier(channel).ending().reason == "LOADING"
    service.drain()
    service.close()
    server.stop(0).wait()


def test_a_unix_socket_will_do(running, tmp_path):
    _, process, channel = running(listen=f"unix:{tmp_path / 'drafter.sock'}")
    assert process.address == f"unix:{tmp_path / 'drafter.sock'}"
    assert describe(channel).draft_tokens == 7


def test_the_command_line_becomes_options(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options, level = parse([])
    assert options == DrafterOptions(listen=serving.DRAFTER_LISTEN, max_concurrency=4)
    assert level == "info"
    line = "--target t --draft d --listen unix:x --dtype bfloat16 --draft-tokens 5 --max-context 99"
    line += " --max-concurrency 2 --proposal-head s.safetensors --causal-local-layers"
    options, _ = parse(line.split())
    assert (str(options.target), str(options.draft), options.listen) == ("t", "d", "unix:x")
    assert (options.dtype, options.draft_tokens, options.max_context) == ("bfloat16", 5, 99)
    assert (options.max_concurrency, options.proposal_head) == (2, "s.safetensors")
    assert options.causal_local_layers


def test_the_process_prints_ready_and_drains_on_a_signal(make_pair):
    tiny = make_pair("dflash2", "lf", is_causal=False)
    command = [sys.executable, "-m", "drafter", "--listen", "127.0.0.1:0", "--device", "cpu"]
    command += ["--target", str(tiny.target), "--draft", str(tiny.draft)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            word, address = process.stdout.readline().split()
            assert word == "ready"
            with grpc.insecure_channel(address) as channel:
                info = describe(channel)
                verifier = Verifier(channel, hello_for(info))
                process.terminate()
                assert verifier.ending().reason == "DRAINING"
            assert process.wait(DEADLINE) == 0
            assert process.stdout.read() == "", "stdout carries the ready line alone"
        finally:
            process.kill()


def test_a_wrong_folder_ends_the_process_with_one_line(tmp_path):
    command = [sys.executable, "-m", "drafter", "--target", str(tmp_path), "--draft", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert f"{tmp_path / 'config.json'}: no such file" in ended.stderr
    assert "Traceback" not in ended.stderr
