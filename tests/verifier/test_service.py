"""The public service over real loopback gRPC, against an engine that plays a script."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer

from outrider.faults import FaultError, from_rpc_error
from outrider.serving import CHANNEL_OPTIONS, GENERATION_SERVICE
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import generation_service_pb2_grpc as pb_grpc
from verifier.request import (
    Delta,
    Finish,
    FinishReason,
    Request,
    RoundTrace,
    Sink,
    TokenLogprobs,
    TokenOrigin,
    Usage,
)
from verifier.scheduler import EngineStatus
from verifier.service import Backend, GenerationService, ModelFacts, ServerFacts, build_server
from verifier.text import Text

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.reasoning_content | default('-') }};"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}>{% endif %}{{ enable_thinking | default('unset') }}"
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('No.') }}{% endif %}"
)
MAX_CONTEXT = 2000
K = 7
PAUSE_MS = 1500


def play(request: Request, sink: Sink) -> None:
    """Two deltas and an end."""
    for word in ("ab", "c"):
        ends = tuple(range(1, len(word) + 1))
        sink.delta(Delta((5,) * len(word), word, ends, (TokenOrigin.TARGET,) * len(word)))
    usage = Usage(prompt_tokens=len(request.prompt_ids), seed=request.sampling.seed)
    sink.finish(Finish(FinishReason.LENGTH, None, usage))


class ScriptedEngine:
    """Runs a script for each sample on a thread of its own, as the engine would."""

    def __init__(self) -> None:
        self.script: Callable[[Request, Sink], None] = play
        self.submitted: list[tuple[Request, ...]] = []
        self.cancelled: queue.Queue[str] = queue.Queue()
        self.live: dict[str, threading.Event] = {}
        self.refusal: FaultError | None = None
        self.left: list[Sink] = []
        self.woken: queue.Queue[bool] = queue.Queue()

    def submit(self, requests: Sequence[Request], sinks: Sequence[Sink]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(tuple(requests))
        script = self.script
        request_id = requests[0].request_id
        if request_id in self.live:
            raise FaultError("REQUEST_ID_TAKEN", f"request_id: {request_id} is taken")
        self.live[request_id] = threading.Event()

        def run() -> None:
            for request, sink in zip(requests, sinks, strict=True):
                script(request, sink)
            self.live.pop(request_id, None)

        threading.Thread(target=run, daemon=True).start()

    def wake(self) -> None:
        self.woken.put(True)

    def cancel(self, request_id: str, sinks: Sequence[Sink] | None = None) -> bool:
        self.cancelled.put(request_id)
        self.left.extend(sinks or ())
        event = self.live.get(request_id)
        if event is not None:
            event.set()
        return event is not None

    def status(self) -> EngineStatus:
        return EngineStatus("connecting", "127.0.0.1:1", "refused", 2, 3, {"rounds": 9})


class Served:
    """A server on its own loop, and a stub."""

    def __init__(self, text: Text, *, ready: bool = True) -> None:
        self.engine = ScriptedEngine()
        self.service = GenerationService()
        self._started: queue.Queue[int] = queue.Queue()
        self.loop = asyncio.new_event_loop()
        self.text = text
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        self.address = f"127.0.0.1:{self._started.get(timeout=20)}"
        self.channel = grpc.insecure_channel(
            self.address, options=[*CHANNEL_OPTIONS, ("grpc.max_send_message_length", -1)]
        )
        self.stub = pb_grpc.GenerationServiceStub(self.channel)

    def backend(self) -> Backend:
        model = ModelFacts(
            model_name="tiny",
            architecture="Qwen3_5ForCausalLM",
            vocab_size=500,
            public_vocab=450,
            max_context=MAX_CONTEXT,
            eos_token_ids=frozenset({1, 2}),
            layer_count=8,
            hidden_size=256,
            draft_format="dflash2",
            draft_tokens=K,
            target_layer_ids=(1, 4),
        )
        facts = ServerFacts(4, 64, "cpu", "float32")
        return Backend.of(self.engine, self.text, model, facts, reader_timeout_ms=PAUSE_MS)

    def _run(self, ready: bool) -> None:
        async def serve() -> None:
            self.server = build_server(self.service)
            port = self.server.add_insecure_port("127.0.0.1:0")
            await self.server.start()
            if ready:
                self.service.open(self.backend())
            self._closing = asyncio.Event()
            self._started.put(port)
            await self._closing.wait()
            await self.server.stop(None)

        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(serve())

    def on_loop(self, function: Callable[[], None]) -> None:
        async def call() -> None:
            function()

        asyncio.run_coroutine_threadsafe(call(), self.loop).result(20)

    def generate(self, timeout: float = 20, **fields) -> list[pb.GenerateResponse]:
        return list(self.stub.Generate(pb.GenerateRequest(**fields), timeout=timeout))

    def close(self) -> None:
        self.channel.close()
        self.loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.loop.close()


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer) -> Iterator[Served]:
    served = Served(Text(tokenizer, TEMPLATE))
    yield served
    served.close()


@pytest.fixture
def served(shared: Served) -> Served:
    shared.engine.__init__()
    return shared


def fault_of(call: Callable[[], object]) -> FaultError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return from_rpc_error(caught.value)


IDS = pb.TokenIds(ids=[3, 4])
NAN = float("nan")


def chat(*contents: str, role: str = "user", **fields) -> pb.Chat:
    messages = [pb.ChatMessage(role=role, content=content) for content in contents]
    return pb.Chat(messages=messages, **fields)


# name: message, reason, code; each field's own range is test_validation's matter
BAD = {
    "no_prompt": ({}, "REQUEST_INVALID"),
    "empty_text": ({"text": ""}, "PROMPT_EMPTY"),
    "empty_ids": ({"token_ids": pb.TokenIds()}, "PROMPT_EMPTY"),
    "empty_chat": ({"chat": pb.Chat()}, "PROMPT_EMPTY"),
    "id_beyond_vocab": ({"token_ids": pb.TokenIds(ids=[500])}, "TOKEN_OUT_OF_RANGE"),
    "id_negative": ({"token_ids": pb.TokenIds(ids=[-1])}, "TOKEN_OUT_OF_RANGE"),
    "prompt_of_the_whole_context": (
        {"token_ids": pb.TokenIds(ids=[3] * MAX_CONTEXT)},
        "PROMPT_TOO_LONG",
    ),
    "text_longer_than_context": ({"text": "x y " * 5000}, "PROMPT_TOO_LONG"),
    "text_of_10_mb": ({"text": "x" * 10_000_000}, "PROMPT_TOO_LARGE"),
    "chat_of_10_mb": ({"chat": chat("x" * 10_000_000)}, "PROMPT_TOO_LARGE"),
    "max_tokens_0": ({"token_ids": IDS, "max_tokens": 0}, "REQUEST_INVALID"),
    "max_tokens_negative": ({"token_ids": IDS, "max_tokens": -5}, "REQUEST_INVALID"),
    "min_tokens_above_max": (
        {"token_ids": IDS, "max_tokens": 2, "min_tokens": 3},
        "REQUEST_INVALID",
    ),
    "temperature_nan": (
        {"token_ids": IDS, "sampling": pb.Sampling(temperature=NAN)},
        "SAMPLING_INVALID",
    ),
    "temperature_inf": (
        {"token_ids": IDS, "sampling": pb.Sampling(temperature=float("inf"))},
        "SAMPLING_INVALID",
    ),
    "top_p_0": ({"token_ids": IDS, "sampling": pb.Sampling(top_p=0)}, "SAMPLING_INVALID"),
    "top_k_negative": (
        {"token_ids": IDS, "sampling": pb.Sampling(top_k=-1)},
        "SAMPLING_INVALID",
    ),
    "bias_beyond_public_vocab": (
        {"token_ids": IDS, "sampling": pb.Sampling(logit_bias={450: 1.0})},
        "TOKEN_OUT_OF_RANGE",
    ),
    "bias_nan": (
        {"token_ids": IDS, "sampling": pb.Sampling(logit_bias={4: NAN})},
        "SAMPLING_INVALID",
    ),
    "stop_empty": ({"token_ids": IDS, "stop": [""]}, "STOP_INVALID"),
    "stops_17": ({"token_ids": IDS, "stop": [str(i) for i in range(17)]}, "STOP_INVALID"),
    "stop_id_beyond_vocab": (
        {"token_ids": IDS, "stop_token_ids": [500]},
        "TOKEN_OUT_OF_RANGE",
    ),
    "n_0": ({"token_ids": IDS, "n": 0}, "REQUEST_INVALID"),
    "n_9": ({"token_ids": IDS, "n": 9}, "REQUEST_INVALID"),
    "logprobs_21": ({"token_ids": IDS, "logprobs": 21}, "REQUEST_INVALID"),
    "draft_tokens_above_k": ({"token_ids": IDS, "draft_tokens": K + 1}, "REQUEST_INVALID"),
    "draft_tokens_negative": ({"token_ids": IDS, "draft_tokens": -1}, "REQUEST_INVALID"),
    "request_id_long": ({"token_ids": IDS, "request_id": "r" * 129}, "REQUEST_INVALID"),
    "role_unknown": ({"chat": chat("x", role="robot")}, "REQUEST_INVALID"),
    "tool_no_json": ({"chat": chat("x", tools_json=["{"])}, "REQUEST_INVALID"),
    "tool_lone_surrogate": (
        {"chat": chat("x", tools_json=['{"a": "\\ud800"}'])},
        "REQUEST_INVALID",
    ),
    "tool_no_object": ({"chat": chat("x", tools_json=["[1]"])}, "REQUEST_INVALID"),
    "template_refuses": ({"chat": chat("refuse")}, "TEMPLATE_FAILED"),
}


@pytest.mark.parametrize(("message", "reason"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_with_code_and_reason(served, message, reason):
    fault = fault_of(lambda: served.generate(**message))
    assert (fault.reason, fault.code) == (reason, grpc.StatusCode.INVALID_ARGUMENT)
    assert served.engine.submitted == [] and served.engine.cancelled.empty()


def test_media_is_unimplemented(served):
    message = pb.ChatMessage(role="user", content="What is this?", media=["https://x/y.png"])
    fault = fault_of(lambda: served.generate(chat=pb.Chat(messages=[message])))
    assert (fault.reason, fault.code) == ("MEDIA_UNSUPPORTED", grpc.StatusCode.UNIMPLEMENTED)


def test_a_message_over_16_mib_dies_with_resource_exhausted(served):
    fault = fault_of(lambda: served.generate(text="x" * (16 << 20)))
    assert fault.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert served.engine.submitted == []


def test_bad_requests_leave_a_running_one_unharmed(served):
    goes_on = threading.Event()

    def script(request: Request, sink: Sink) -> None:
        sink.delta(Delta((5,), "a", (1,), (TokenOrigin.TARGET,)))
        assert goes_on.wait(20)
        play(request, sink)

    served.engine.script = script
    call = served.stub.Generate(pb.GenerateRequest(token_ids=IDS), timeout=20)
    assert next(call).text == "a"
    for message, reason in BAD.values():
        assert fault_of(lambda message=message: served.generate(**message)).reason == reason
    goes_on.set()
    assert [response.text for response in call] == ["ab", "c", ""]
    assert served.engine.cancelled.empty()


def test_a_long_prompt_does_not_hold_up_the_loop(served, monkeypatch):
    encodes, goes_on = threading.Event(), threading.Event()

    def encode(text: str, *, rendered: bool = False) -> list[int]:
        encodes.set()
        assert goes_on.wait(20)
        return [3]

    monkeypatch.setattr(served.text, "encode", encode)
    call = served.stub.Generate(pb.GenerateRequest(text="x" * 100_000), timeout=20)
    assert encodes.wait(20)
    assert served.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20).model_name == "tiny"
    goes_on.set()
    assert len(list(call)) == 3


# --- what reaches the engine


def test_text_is_tokenized_and_fields_become_the_request(served, tokenizer):
    served.generate(
        text="the END",
        request_id="mine",
        sampling=pb.Sampling(temperature=0, seed=7, logit_bias={4: 1.5}),
        max_tokens=3,
        min_tokens=1,
        stop=["a", "b"],
        stop_token_ids=[9],
        ignore_eos=True,
        logprobs=2,
        draft_tokens=0,
        return_rounds=True,
    )
    ((request,),) = served.engine.submitted
    assert request.prompt_ids == tuple(tokenizer.encode("the END").ids)
    assert (request.request_id, request.sample_index) == ("mine", 0)
    assert request.sampling.greedy and request.sampling.logit_bias == ((4, 1.5),)
    assert (request.sampling.seed, request.sampling.seed_given) == (7, True)
    assert (request.max_tokens, request.min_tokens, request.stop) == (3, 1, ("a", "b"))
    assert (request.stop_token_ids, request.logprobs) == ({9}, 2)
    assert (request.draft_tokens, request.return_rounds) == (0, True)
    assert request.deadline_ns is not None


def test_without_a_deadline_none_is_set_and_ids_and_seed_are_drawn(served):
    for _ in range(2):
        responses = list(served.stub.Generate(pb.GenerateRequest(token_ids=IDS)))
    (first,), (second,) = served.engine.submitted
    assert first.deadline_ns is None
    assert first.request_id != second.request_id and first.sampling.seed != second.sampling.seed
    assert responses[-1].request_id == second.request_id
    assert responses[-1].finish.usage.seed == second.sampling.seed


def test_the_deadline_reaches_the_engine_on_its_clock(served):
    before = time.monotonic_ns()
    served.generate(token_ids=IDS, timeout=50)
    ((request,),) = served.engine.submitted
    assert before + 40e9 < request.deadline_ns < time.monotonic_ns() + 51e9
    assert before < request.arrival_ns < time.monotonic_ns()


def test_chat_is_rendered_by_the_template(served, tokenizer):
    message = chat("x", tools_json=['{"a": "<ø>"}'], enable_thinking=False)
    message.messages.add(role="assistant", content="y", reasoning_content="z")
    served.generate(chat=message)
    ((request,),) = served.engine.submitted
    assert tokenizer.decode(request.prompt_ids) == 'user:x-;assistant:yz;[{"a": "<ø>"}]>False'
    message = chat("x", add_generation_prompt=False)
    served.generate(chat=message)
    assert tokenizer.decode(served.engine.submitted[1][0].prompt_ids) == "user:x-;unset"


# --- what comes back


def test_finish_comes_once_with_the_last_message_of_the_sample(served):
    first, second, last = served.generate(token_ids=IDS, request_id="mine")
    assert {response.request_id for response in (first, second, last)} == {"mine"}
    assert (list(first.token_ids), first.text, list(first.text_ends)) == ([5, 5], "ab", [1, 2])
    assert list(second.origins) == [pb.TOKEN_ORIGIN_TARGET]
    assert not first.HasField("finish") and not second.HasField("finish")
    assert last.finish.reason == pb.FINISH_REASON_LENGTH
    assert last.finish.WhichOneof("matched") is None


def test_everything_of_a_delta_and_an_end_is_packed(served):
    usage = Usage(
        prompt_tokens=2,
        cached_tokens=1,
        output_tokens=3,
        rounds=4,
        proposed=5,
        accepted=6,
        accepted_per_position=[7, 8],
        plain_rounds=9,
        seed=(1 << 64) - 1,
        ttft_ns=10,
        queue_ns=11,
        prefill_ns=12,
        draft_ns=13,
        verify_ns=14,
        wire_ns=15,
        total_ns=16,
    )
    delta = Delta(
        (5, 6),
        "é!",
        (2, 3),
        (TokenOrigin.ACCEPTED, TokenOrigin.BONUS),
        (TokenLogprobs(-0.5, (5, 9), (-0.5, -1.0)), TokenLogprobs(-0.25, (6, 8), (-0.25, -2.0))),
        (RoundTrace(17, (5, 6, 7), 2, 3),),
    )

    def script(request: Request, sink: Sink) -> None:
        sink.delta(delta)
        sink.finish(Finish(FinishReason.STOP, "END", usage))

    served.engine.script = script
    first, last = served.generate(token_ids=IDS)
    assert first.text == "é!" and list(first.text_ends) == [2, 3]
    assert list(first.origins) == [pb.TOKEN_ORIGIN_ACCEPTED, pb.TOKEN_ORIGIN_BONUS]
    assert list(first.logprobs[1].top_token_ids) == [6, 8] and first.logprobs[0].logprob == -0.5
    (trace,) = first.rounds
    assert (trace.frontier, list(trace.proposed)) == (17, [5, 6, 7])
    assert (trace.accepted, trace.committed) == (2, 3)
    assert (last.finish.reason, last.finish.stop_string) == (pb.FINISH_REASON_STOP, "END")
    packed = last.finish.usage
    for name, value in vars(usage).items():
        read = getattr(packed, name)
        assert (list(read) if isinstance(value, list) else read) == value, name


def test_a_stop_id_is_told_even_when_it_is_0(served):
    served.engine.script = lambda request, sink: sink.finish(Finish(FinishReason.STOP, 0, Usage()))
    (last,) = served.generate(token_ids=IDS)
    assert last.finish.WhichOneof("matched") == "stop_token_id"


def test_samples_end_separately_and_the_prompt_counts_once(served):
    gates = [threading.Event() for _ in range(3)]

    def script(request: Request, sink: Sink) -> None:
        def one() -> None:
            assert gates[request.sample_index].wait(20)
            play(request, sink)

        threading.Thread(target=one, daemon=True).start()

    served.engine.script = script
    call = served.stub.Generate(
        pb.GenerateRequest(token_ids=IDS, n=3, sampling=pb.Sampling(seed=5)), timeout=20
    )
    order = [2, 0, 1]
    seeds = {}
    for index in order:
        gates[index].set()
        responses = [next(call) for _ in range(3)]
        assert {response.sample_index for response in responses} == {index}
        assert [response.HasField("finish") for response in responses] == [False, False, True]
        usage = responses[-1].finish.usage
        assert usage.prompt_tokens == (2 if index == 0 else 0)
        seeds[index] = usage.seed
    with pytest.raises(StopIteration):
        next(call)
    assert seeds[0] == 5 and len(set(seeds.values())) == 3


# --- ends other than the natural one


def waiting(started: threading.Event, engine: ScriptedEngine) -> Callable[[Request, Sink], None]:
    """Publishes one token and then waits for the engine's cancel; publishes on until then."""

    def script(request: Request, sink: Sink) -> None:
        cancelled = engine.live[request.request_id]
        sink.delta(Delta((5,), "a", (1,), (TokenOrigin.TARGET,)))
        started.set()
        assert cancelled.wait(20)
        if not sink.gone:
            sink.finish(Finish(FinishReason.ABORTED, None, Usage()))

    return script


def test_a_client_that_cancels_reaches_the_engine_and_gets_nothing_more(served):
    started, sinks = threading.Event(), []
    script = waiting(started, served.engine)

    def kept(request: Request, sink: Sink) -> None:
        sinks.append(sink)
        script(request, sink)

    served.engine.script = kept
    call = served.stub.Generate(pb.GenerateRequest(token_ids=IDS, request_id="left"))
    next(call)
    call.cancel()
    assert served.engine.cancelled.get(timeout=20) == "left"
    assert sinks[0].gone
    # by identity: the id may be another request's by now
    assert served.engine.left == sinks


def test_a_connection_that_breaks_reaches_the_engine(served):
    started = threading.Event()
    served.engine.script = waiting(started, served.engine)
    channel = grpc.insecure_channel(served.address, options=[("grpc.use_local_subchannel_pool", 1)])
    call = pb_grpc.GenerationServiceStub(channel).Generate(
        pb.GenerateRequest(token_ids=IDS, request_id="broken")
    )
    next(call)
    channel.close()
    assert served.engine.cancelled.get(timeout=20) == "broken"


def test_a_deadline_that_passes_reaches_the_engine(served):
    started = threading.Event()
    served.engine.script = waiting(started, served.engine)
    call = served.stub.Generate(pb.GenerateRequest(token_ids=IDS, request_id="late"), timeout=0.5)
    fault = fault_of(lambda: list(call))
    assert fault.code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert served.engine.cancelled.get(timeout=20) == "late"


def test_abort_by_id_finishes_the_samples_and_is_idempotent(served):
    started = threading.Event()
    served.engine.script = waiting(started, served.engine)
    call = served.stub.Generate(pb.GenerateRequest(token_ids=IDS, request_id="mine"), timeout=20)
    next(call)
    assert served.stub.Abort(pb.AbortRequest(request_id="mine"), timeout=20).found
    assert [response.finish.reason for response in call] == [pb.FINISH_REASON_ABORTED]
    assert not served.stub.Abort(pb.AbortRequest(request_id="mine"), timeout=20).found
    assert not served.stub.Abort(pb.AbortRequest(), timeout=20).found


def test_a_taken_request_id_is_refused_and_its_owner_goes_on(served):
    started = threading.Event()
    served.engine.script = waiting(started, served.engine)
    call = served.stub.Generate(pb.GenerateRequest(token_ids=IDS, request_id="mine"), timeout=20)
    next(call)
    fault = fault_of(lambda: served.generate(token_ids=IDS, request_id="mine"))
    assert (fault.reason, fault.code) == ("REQUEST_ID_TAKEN", grpc.StatusCode.ALREADY_EXISTS)
    assert served.engine.cancelled.empty()
    served.stub.Abort(pb.AbortRequest(request_id="mine"), timeout=20)
    assert [response.finish.reason for response in call] == [pb.FINISH_REASON_ABORTED]


def test_what_the_engine_refuses_reaches_the_client_with_its_retry_time(served):
    served.engine.refusal = FaultError("QUEUE_FULL", "queue: full", retry_after_ms=1500)
    fault = fault_of(lambda: served.generate(token_ids=IDS))
    assert (fault.reason, fault.code) == ("QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert fault.retry_after == 1.5


def test_a_sample_that_fails_ends_the_call_and_cancels_the_others(served):
    def script(request: Request, sink: Sink) -> None:
        if request.sample_index == 1:
            sink.fail(FaultError("LOGITS_NOT_FINITE", "target: not finite", frontier=3))
        else:
            sink.delta(Delta((5,), "a", (1,), (TokenOrigin.TARGET,)))

    served.engine.script = script
    call = served.stub.Generate(
        pb.GenerateRequest(token_ids=IDS, n=2, request_id="bad"), timeout=20
    )
    assert next(call).text == "a"
    fault = fault_of(lambda: next(call))
    assert (fault.reason, fault.code) == ("LOGITS_NOT_FINITE", grpc.StatusCode.INTERNAL)
    assert fault.metadata["frontier"] == "3"
    assert served.engine.cancelled.get(timeout=20) == "bad"


def test_an_unexpected_error_is_internal_and_the_server_goes_on(served, monkeypatch):
    def broken(text: str, *, rendered: bool = False) -> list[int]:
        raise RuntimeError("secret")

    with monkeypatch.context() as patch:
        patch.setattr(served.text, "encode", broken)
        fault = fault_of(lambda: served.generate(text="x"))
    assert (fault.reason, fault.code) == ("INTERNAL", grpc.StatusCode.INTERNAL)
    assert "secret" not in fault.message and fault.metadata["error_id"] in fault.message
    assert len(served.generate(text="x")) == 3


# --- readers that are behind

BIG = Delta((5,), "x" * 20_000, (20_000,), (TokenOrigin.TARGET,))
UNREAD = 64


def pausing(count: int, paused: queue.Queue[Sink]) -> Callable[[Request, Sink], None]:
    """Publishes ``count`` large deltas as the engine would: never to a full sink."""

    def script(request: Request, sink: Sink) -> None:
        for _ in range(count):
            if sink.full:
                paused.put(sink)
            while sink.full:
                if (fault := sink.overdue) is not None:
                    sink.fail(fault)
                    return
                time.sleep(0.005)
            if sink.gone:
                return
            sink.delta(BIG)
        sink.finish(Finish(FinishReason.LENGTH, None, Usage()))

    return script


def test_a_reader_that_stops_pauses_its_stream_and_ends_with_resource_exhausted(served):
    paused: queue.Queue[Sink] = queue.Queue()
    served.engine.script = pausing(10_000, paused)
    call = served.stub.Generate(pb.GenerateRequest(token_ids=IDS, request_id="slow"), timeout=60)
    next(call)
    began = time.monotonic()
    sink = paused.get(timeout=20)
    assert 0 < sink._call._put_count - sink._call._written_count <= UNREAD, "bounded"
    served.engine.script = play
    assert [r.text for r in served.generate(token_ids=IDS)] == ["ab", "c", ""], "others go on"
    assert served.engine.cancelled.get(timeout=20) == "slow"
    assert time.monotonic() - began >= PAUSE_MS / 1000
    assert sink._call._queue.empty(), "what waited is dropped"
    # what was on its way comes, and then why there is no more
    fault = fault_of(lambda: list(call))
    assert (fault.reason, fault.code) == ("READER_TOO_SLOW", grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert int(fault.metadata["waited_ms"]) >= int(fault.metadata["limit_ms"]) == PAUSE_MS


def test_a_reader_that_only_pauses_gets_everything(served):
    paused: queue.Queue[Sink] = queue.Queue()
    served.engine.script = pausing(400, paused)
    call = served.stub.Generate(pb.GenerateRequest(token_ids=IDS), timeout=60)
    next(call)
    sink = paused.get(timeout=20)
    rest = list(call)
    assert [len(r.text) for r in rest] == [20_000] * 399 + [0]
    assert rest[-1].HasField("finish") and not sink.gone
    assert served.engine.woken.get(timeout=20), "the end of the pause wakes the engine"


def test_a_client_that_leaves_while_it_is_behind_is_forgotten_at_once(served):
    paused: queue.Queue[Sink] = queue.Queue()
    served.engine.script = pausing(10_000, paused)
    call = served.stub.Generate(pb.GenerateRequest(token_ids=IDS, request_id="left"), timeout=60)
    next(call)
    sink = paused.get(timeout=20)
    call.cancel()
    assert served.engine.cancelled.get(timeout=20) == "left"
    assert sink.gone


def pinging(every: int) -> list[tuple[str, int]]:
    """Arguments of a channel of its own that pings each so many seconds, also when it is idle."""
    return [
        ("grpc.keepalive_time_ms", every * 1000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]


@pytest.mark.parametrize(
    ("silence", "ping_every"),
    [(6, 1), pytest.param(90, 10, marks=pytest.mark.slow)],
    ids=["6_s_silence_1_s_pings", "90_s_silence_10_s_pings"],
)
def test_a_silent_generation_outlives_a_client_that_pings(served, silence, ping_every):
    """F1: no GOAWAY for too many pings."""
    speaks = threading.Event()

    def script(request: Request, sink: Sink) -> None:
        speaks.wait(silence)
        play(request, sink)

    served.engine.script = script
    with grpc.insecure_channel(served.address, options=pinging(ping_every)) as channel:
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append)
        began = time.monotonic()
        call = pb_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(token_ids=IDS))
        assert [response.text for response in call] == ["ab", "c", ""]
        assert time.monotonic() - began >= silence
        # a GOAWAY would have let the call finish and taken the connection away
        time.sleep(0.2)
        assert states[-1] is grpc.ChannelConnectivity.READY
        assert states.count(grpc.ChannelConnectivity.READY) == 1


@pytest.mark.parametrize(
    ("idle", "ping_every"),
    [(4, 1), pytest.param(300, 10, marks=[pytest.mark.slow, pytest.mark.timeout(400)])],
    ids=["4_s_1_s_pings", "300_s_10_s_pings"],
)
def test_an_idle_channel_that_pings_is_not_sent_away(served, idle, ping_every):
    """F1: nor for pings without a call."""
    with grpc.insecure_channel(served.address, options=pinging(ping_every)) as channel:
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append)
        stub = pb_grpc.GenerationServiceStub(channel)
        assert stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20).model_name == "tiny"
        time.sleep(idle)
        assert stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20).model_name == "tiny"
        assert states.count(grpc.ChannelConnectivity.READY) == 1


# --- the other methods


def test_tokenize_gives_the_ids_of_generate(served, tokenizer):
    response = served.stub.Tokenize(pb.TokenizeRequest(text="the END"))
    assert list(response.token_ids) == tokenizer.encode("the END").ids
    assert response.text == "the END"
    response = served.stub.Tokenize(pb.TokenizeRequest(chat=chat("x")))
    assert response.text == "user:x-;>unset"
    assert tokenizer.decode(list(response.token_ids)) == response.text
    served.generate(chat=chat("x"))
    assert served.engine.submitted[0][0].prompt_ids == tuple(response.token_ids)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (pb.TokenizeRequest(), "REQUEST_INVALID"),
        (pb.TokenizeRequest(text=""), "PROMPT_EMPTY"),
        (pb.TokenizeRequest(text="x" * 10_000_000), "PROMPT_TOO_LARGE"),
    ],
    ids=["no_input", "empty", "10_mb"],
)
def test_tokenize_refuses_what_generate_refuses(served, message, reason):
    assert fault_of(lambda: served.stub.Tokenize(message)).reason == reason


def test_detokenize_shows_special_tokens_unless_told_otherwise(served, tokenizer):
    ids = tokenizer.encode("a<|im_end|>é").ids
    assert served.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text == "a<|im_end|>é"
    response = served.stub.Detokenize(
        pb.DetokenizeRequest(token_ids=[*ids, ids[-1]][:-2], skip_special_tokens=True)
    )
    assert response.text == tokenizer.decode(ids[:-1])


@pytest.mark.parametrize("token_id", [450, -1])
def test_detokenize_refuses_ids_outside_the_public_vocabulary(served, token_id):
    fault = fault_of(lambda: served.stub.Detokenize(pb.DetokenizeRequest(token_ids=[3, token_id])))
    assert (fault.reason, fault.metadata["actual"]) == ("TOKEN_OUT_OF_RANGE", str(token_id))


def test_detokenize_refuses_a_text_beyond_the_message_limit(served, tokenizer):
    longest = max(range(420), key=lambda i: len(served.text.decode([i]).encode()))
    count = (16 << 20) // len(served.text.decode([longest]).encode()) + 1
    fault = fault_of(
        lambda: served.stub.Detokenize(pb.DetokenizeRequest(token_ids=[longest] * count))
    )
    assert (fault.reason, fault.code) == ("MESSAGE_TOO_LARGE", grpc.StatusCode.RESOURCE_EXHAUSTED)


def test_detokenize_refuses_before_it_makes_the_text(served, monkeypatch):
    longest = max(range(420), key=lambda i: len(served.text.decode([i]).encode()))
    monkeypatch.setattr(served.text, "decode", lambda *_, **__: pytest.fail("text was made"))
    fault = fault_of(
        lambda: served.stub.Detokenize(pb.DetokenizeRequest(token_ids=[longest] * (7 << 20)))
    )
    assert fault.reason == "MESSAGE_TOO_LARGE"


def test_model_info_describes_the_pair(served):
    info = served.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model_name, info.architecture) == ("tiny", "Qwen3_5ForCausalLM")
    assert (info.vocab_size, info.public_vocab, info.max_context) == (500, 450, MAX_CONTEXT)
    assert (list(info.eos_token_ids), info.layer_count, info.hidden_size) == ([1, 2], 8, 256)
    assert (info.draft_format, info.draft_tokens) == ("dflash2", K)
    assert list(info.target_layer_ids) == [1, 4] and info.has_chat_template


def test_server_info_describes_the_process(served):
    info = served.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.version, info.protocol_revision) == ("0.1.0", 2)
    assert (info.max_concurrency, info.max_queue) == (4, 64)
    assert (info.max_message_bytes, info.max_prompt_bytes) == (16 << 20, 1 << 20)
    assert (info.device, info.dtype) == ("cpu", "float32")
    assert info.drafter_state == pb.DRAFTER_STATE_CONNECTING
    assert (info.drafter_address, info.drafter_detail) == ("127.0.0.1:1", "refused")
    assert (info.resident_requests, info.queued_requests) == (2, 3)
    assert dict(info.counters) == {"rounds": 9} and info.uptime_seconds > 0


def test_until_the_weights_are_loaded_calls_are_unavailable_and_health_says_so(tokenizer):
    served = Served(Text(tokenizer), ready=False)
    try:
        health = health_pb2_grpc.HealthStub(served.channel)
        asked = health_pb2.HealthCheckRequest(service=GENERATION_SERVICE)
        fault = fault_of(lambda: served.generate(token_ids=IDS))
        assert (fault.reason, fault.code) == ("LOADING", grpc.StatusCode.UNAVAILABLE)
        assert health.Check(asked).status == health_pb2.HealthCheckResponse.NOT_SERVING
        served.on_loop(lambda: served.service.open(served.backend()))
        assert len(served.generate(token_ids=IDS)) == 3
        assert health.Check(asked).status == health_pb2.HealthCheckResponse.SERVING
        served.on_loop(served.service.close)
        assert health.Check(asked).status == health_pb2.HealthCheckResponse.NOT_SERVING
    finally:
        served.close()


def test_without_a_tokenizer_ids_still_work():
    served = Served(Text(None))
    try:
        assert len(served.generate(token_ids=IDS)) == 3
        assert fault_of(lambda: served.generate(text="x")).reason == "REQUEST_INVALID"
        assert fault_of(lambda: served.generate(chat=chat("x"))).reason == "TEMPLATE_FAILED"
        assert fault_of(lambda: served.generate(token_ids=IDS, stop=["x"])).reason == "STOP_INVALID"
    finally:
        served.close()
