"""The gateway's protocol over the bundled pair: what it says is what Generate says."""

from __future__ import annotations

import hashlib
import io
import json
import random
import threading
import time
import zipfile
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tokenizers import Tokenizer

import verifier.options
from outrider import serving
from outrider.checkpoint import bundled
from outrider.client import Client
from outrider.faults import from_rpc_error
from outrider.security import ServerSecurity
from outrider.v1 import generation_service_pb2 as own_pb
from tests.tiny_pair import Pair, served
from verifier.options import OptionError, VerifierOptions
from verifier.text import Text

smg = pytest.importorskip("smg_grpc_proto", reason="needs the extra `gateway`")
pb, pb_grpc = smg.vllm_engine_pb2, smg.vllm_engine_pb2_grpc
common_pb2 = pytest.importorskip("smg_grpc_proto.generated.common_pb2")
gateway = pytest.importorskip("verifier.gateway")

PROMPT = "def main():"
CONTEXT = 512


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with served(
        bundled("target"),
        bundled("dflash2"),
        max_context=CONTEXT,
        gateway=True,
        model_defaults=False,
        model_name="bundled",
    ) as pair:
        yield pair


@pytest.fixture(scope="module")
def own(pair: Pair) -> Iterator[Client]:
    with Client(pair.address) as client:
        yield client


@pytest.fixture(scope="module")
def stub(pair: Pair) -> Iterator[pb_grpc.VllmEngineStub]:
    with grpc.insecure_channel(pair.address, options=serving.CHANNEL_OPTIONS) as channel:
        yield pb_grpc.VllmEngineStub(channel)


def ids_of(text: str) -> list[int]:
    return Tokenizer.from_file(str(bundled("target") / "tokenizer.json")).encode(text).ids


def request(*, prompt: str = PROMPT, stream: bool = False, **params: object) -> pb.GenerateRequest:
    params = {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, "n": 1} | params
    return pb.GenerateRequest(
        request_id=f"test-{time.monotonic_ns()}",
        tokenized=pb.TokenizedInput(original_text=prompt, input_ids=ids_of(prompt)),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
    )


def completes(stub: pb_grpc.VllmEngineStub, message: pb.GenerateRequest) -> list:
    """The complete messages of a call without chunks."""
    responses = list(stub.Generate(message, timeout=60))
    assert [r.WhichOneof("response") for r in responses] == ["complete"] * len(responses)
    return [r.complete for r in responses]


def refusal(stub: pb_grpc.VllmEngineStub, message: pb.GenerateRequest) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(message, timeout=60))
    fault = from_rpc_error(caught.value)
    return fault.reason, fault.code.name


# --- generation


def test_without_stream_one_message_holds_all_of_what_generate_says(stub, own):
    expected = own.generate(PROMPT, max_tokens=24, temperature=0)
    (complete,) = completes(stub, request(max_tokens=24))
    assert tuple(complete.output_ids) == expected.token_ids
    assert complete.finish_reason == "length" == expected.finish_reason
    assert (complete.prompt_tokens, complete.completion_tokens) == (len(ids_of(PROMPT)), 24)
    assert complete.spec_draft_tokens == expected.usage.proposed > 0
    assert complete.spec_accepted_tokens == expected.usage.accepted > 0
    assert not complete.HasField("output_logprobs")
    assert complete.WhichOneof("matched_stop") is None


def test_a_stream_is_chunks_with_running_counts_and_an_end_without_ids(stub, own):
    expected = own.generate(PROMPT, max_tokens=24, temperature=0)
    *responses, last = stub.Generate(request(max_tokens=24, stream=True), timeout=60)
    chunks = [response.chunk for response in responses]
    assert len(chunks) > 1
    assert [i for chunk in chunks for i in chunk.token_ids] == list(expected.token_ids)
    running = 0
    for chunk in chunks:
        running += len(chunk.token_ids)
        assert chunk.completion_tokens == running
        assert chunk.prompt_tokens == len(ids_of(PROMPT))
    assert (list(last.complete.output_ids), last.complete.completion_tokens) == ([], 24)
    assert last.complete.spec_draft_tokens == expected.usage.proposed


def test_whichever_sample_ends_first_all_carry_the_prompt_s_count():
    """Of a text it is known from sample 0's usage alone."""
    translation = gateway._Translation(0, 3, stream=False)
    ends = []
    for index in (2, 0, 1):
        usage = own_pb.Usage(prompt_tokens=9 if index == 0 else 0, output_tokens=4 + index)
        finish = own_pb.Finish(reason=own_pb.FINISH_REASON_LENGTH, usage=usage)
        response = own_pb.GenerateResponse(sample_index=index, token_ids=[7] * (4 + index))
        response.finish.CopyFrom(finish)
        ends += translation.messages(response)
    found = [
        (e.complete.index, e.complete.prompt_tokens, e.complete.completion_tokens) for e in ends
    ]
    assert found == [(0, 9, 4), (1, 9, 5), (2, 9, 6)]


@pytest.mark.parametrize("stream", [False, True])
def test_samples_are_generate_s_by_index_and_each_carries_the_prompt_s_count(stub, own, stream):
    options = {"max_tokens": 12, "temperature": 0.9, "seed": 7, "n": 3}
    expected = own.samples(PROMPT, **options)
    assert len({len(each.token_ids) for each in expected}) > 1, "all end at once: choose a seed"
    ids, ends = {0: [], 1: [], 2: []}, []
    for response in stub.Generate(request(stream=stream, **options), timeout=60):
        if response.HasField("chunk"):
            ids[response.chunk.index].extend(response.chunk.token_ids)
        else:
            ends.append(response.complete)
            ids[response.complete.index].extend(response.complete.output_ids)
    assert [tuple(ids[index]) for index in range(3)] == [each.token_ids for each in expected]
    assert {end.prompt_tokens for end in ends} == {len(ids_of(PROMPT))}
    if not stream:
        assert [end.index for end in ends] == [0, 1, 2]


def test_a_negative_seed_is_a_seed(stub):
    options = {"max_tokens": 12, "temperature": 1.0}
    first, again, other = (
        list(completes(stub, request(seed=seed, **options))[0].output_ids) for seed in (-4, -4, 4)
    )
    assert first == again != other


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_generate(stub, own, stream):
    expected = own.generate(PROMPT, max_tokens=6, temperature=0, logprobs=2)
    entries = pb.OutputLogProbs()
    for response in stub.Generate(request(max_tokens=6, logprobs=2, stream=stream), timeout=60):
        entries.MergeFrom(getattr(response, response.WhichOneof("response")).output_logprobs)
    assert tuple(entries.token_ids) == expected.token_ids
    for mine, top, theirs in zip(
        entries.token_logprobs, entries.top_logprobs, expected.logprobs, strict=True
    ):
        assert mine == pytest.approx(theirs.logprob, abs=5e-5)
        assert tuple(top.token_ids) == theirs.top_token_ids
        assert list(top.values) == pytest.approx(list(theirs.top_logprobs), abs=5e-5)


def test_a_stop_string_and_a_stop_id_are_named(stub, own):
    text = own.generate(PROMPT, max_tokens=24, temperature=0)
    (complete,) = completes(stub, request(max_tokens=24, stop=["^"]))
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "^")
    assert tuple(complete.output_ids) == text.token_ids[: len(complete.output_ids)]
    third = text.token_ids[2]
    (complete,) = completes(stub, request(max_tokens=24, stop_token_ids=[third]))
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", third)
    assert complete.output_ids[-1] == third


def test_every_field_has_its_word_in_a_request_of_ours(stub, own):
    fields = {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.02,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.2,
        "logit_bias": {ids_of("the")[0]: -5.0, ids_of("self")[0]: 4.0},
        "seed": 11,
    }
    rest = {
        "max_tokens": 32,
        "min_tokens": 3,
        "stop": ["END"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "n": 2,
        "logprobs": 0,
    }
    message = request(**fields, **rest)
    expected = own_pb.GenerateRequest(
        request_id=message.request_id,
        token_ids=own_pb.TokenIds(ids=ids_of(PROMPT)),
        sampling=own_pb.Sampling(**fields),
        **rest,
    )
    assert gateway._to_request(message) == expected
    written = own.samples(PROMPT, **fields, **rest)
    answers = completes(stub, message)
    assert [tuple(each.output_ids) for each in answers] == [each.token_ids for each in written]


def test_what_a_message_cannot_leave_out_is_absent_at_zero():
    message = pb.GenerateRequest(request_id="r", text="x", sampling_params=pb.SamplingParams())
    sampling = own_pb.Sampling(top_k=0, min_p=0, presence_penalty=0, frequency_penalty=0)
    expected = own_pb.GenerateRequest(
        request_id="r", text="x", sampling=sampling, min_tokens=0, ignore_eos=False
    )
    assert gateway._to_request(message) == expected


def test_a_text_prompt_is_tokenized_here_and_counted_at_the_end(stub, own):
    expected = own.generate(PROMPT, max_tokens=5, temperature=0)
    params = pb.SamplingParams(temperature=0.0, max_tokens=5)
    message = pb.GenerateRequest(request_id="text", text=PROMPT, sampling_params=params)
    (complete,) = completes(stub, message)
    assert tuple(complete.output_ids) == expected.token_ids
    assert complete.prompt_tokens == len(ids_of(PROMPT))


def test_abort_ends_a_stream_as_aborted_and_a_client_that_leaves_frees_its_lane(stub, pair):
    endless = {"max_tokens": CONTEXT - 20, "ignore_eos": True, "stream": True}
    message = request(**endless)
    call = stub.Generate(message, timeout=60)
    next(call)
    stub.Abort(pb.AbortRequest(request_ids=[message.request_id, "unknown"]), timeout=20)
    assert list(call)[-1].complete.finish_reason == "abort"
    call = stub.Generate(request(**endless), timeout=60)
    next(call)
    call.cancel()
    pair.expect_idle()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"n": 9}, ("REQUEST_INVALID", "INVALID_ARGUMENT")),
        ({"temperature": -1.0}, ("SAMPLING_INVALID", "INVALID_ARGUMENT")),
        ({"logprobs": -1}, ("REQUEST_INVALID", "INVALID_ARGUMENT")),
        ({"max_tokens": 1 << 31}, ("REQUEST_INVALID", "INVALID_ARGUMENT")),
        ({"stop_token_ids": [(1 << 32) - 1]}, ("REQUEST_INVALID", "INVALID_ARGUMENT")),
        ({"json_schema": "{}"}, ("FEATURE_UNSUPPORTED", "UNIMPLEMENTED")),
        ({"json_object": False}, ("FEATURE_UNSUPPORTED", "UNIMPLEMENTED")),
        ({"prompt_logprobs": 0}, ("FEATURE_UNSUPPORTED", "UNIMPLEMENTED")),
        ({"truncate_prompt_tokens": 3}, ("FEATURE_UNSUPPORTED", "UNIMPLEMENTED")),
        ({"prompt": ""}, ("PROMPT_EMPTY", "INVALID_ARGUMENT")),
        ({"prompt": "x " * CONTEXT}, ("PROMPT_TOO_LONG", "INVALID_ARGUMENT")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_has_no_words_here_and_what_generate_refuses_is_refused(stub, params, expected):
    assert refusal(stub, request(**params)) == expected


def test_media_transfers_and_ranks_are_refused(stub):
    def changed(**fields: object) -> pb.GenerateRequest:
        message = request()
        message.MergeFrom(pb.GenerateRequest(**fields))
        return message

    media = pb.MediaRefs(items=[pb.MediaRef(url="https://x/y.png")])
    assert refusal(stub, changed(media_refs=media))[0] == "MEDIA_UNSUPPORTED"
    inputs = pb.MultimodalInputs(mm_hashes=["a"])
    assert refusal(stub, changed(mm_inputs=inputs))[0] == "MEDIA_UNSUPPORTED"
    assert refusal(stub, changed(kv_transfer_params_json="{}"))[0] == "FEATURE_UNSUPPORTED"
    assert refusal(stub, changed(data_parallel_rank=1))[0] == "FEATURE_UNSUPPORTED"
    assert completes(stub, changed(data_parallel_rank=0, sampling_params={"max_tokens": 1}))
    too_large = changed(tokenized={"input_ids": [1 << 31]})
    assert refusal(stub, too_large)[0] == "REQUEST_INVALID"
    none = pb.GenerateRequest(request_id="none")
    assert refusal(stub, none)[0] == "REQUEST_INVALID"


def test_a_running_id_is_taken_for_both_protocols(stub, own):
    message = request(max_tokens=CONTEXT - 20, ignore_eos=True, stream=True)
    call = stub.Generate(message, timeout=60)
    next(call)
    assert refusal(stub, message) == ("REQUEST_ID_TAKEN", "ALREADY_EXISTS")
    assert own.abort(message.request_id)
    list(call)


# --- the limits of the port hold for it too


def test_bytes_that_are_no_message_end_their_call_and_nobody_else_s(stub, pair):
    running = stub.Generate(request(max_tokens=200, ignore_eos=True, stream=True), timeout=60)
    next(running)
    draw = random.Random(5)
    with grpc.insecure_channel(pair.address) as channel:
        for method in ("Generate", "Abort", "GetLoads", "GetTokenizer", "FlushCache"):
            call = channel.unary_stream(f"/{serving.GATEWAY_SERVICE}/{method}")
            for size in (1, 7, 200):
                with pytest.raises(grpc.RpcError) as caught:
                    # a tag of wire type 7 is none
                    list(call(b"\x0f" + draw.randbytes(size), timeout=20))
                assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, method
    assert list(running)[-1].complete.completion_tokens == 200


def test_a_reader_that_stops_loses_its_lane(tmp_path):
    with (
        served(
            bundled("target"),
            bundled("dflash2"),
            gateway=True,
            max_context=1024,
            max_concurrency=1,
            reader_timeout_ms=300,
        ) as pair,
        grpc.insecure_channel(
            pair.address,
            options=[("grpc.http2.lookahead_bytes", 16384), ("grpc.http2.bdp_probe", 0)],
        ) as channel,
    ):
        stub = pb_grpc.VllmEngineStub(channel)
        stuck = stub.Generate(
            request(max_tokens=900, ignore_eos=True, logprobs=20, stream=True), timeout=120
        )
        next(stuck)
        with Client(pair.address) as client:
            # the only lane
            assert client.generate(PROMPT, max_tokens=2, ignore_eos=True, timeout=60).token_ids
        with pytest.raises(grpc.RpcError) as caught:
            list(stuck)
        assert from_rpc_error(caught.value).reason == "READER_TOO_SLOW"


def test_a_port_that_wants_a_token_wants_it_here_too(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("secret-token\n")
    with (
        served(
            bundled("target"),
            bundled("dflash2"),
            gateway=True,
            max_context=64,
            security=ServerSecurity(token_file=tokens),
        ) as pair,
        grpc.insecure_channel(pair.address) as channel,
    ):
        stub = pb_grpc.VllmEngineStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20)
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        shown = (("authorization", "Bearer secret-token"),)
        assert stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20, metadata=shown).vocab_size


# --- what a gateway asks once, or now and then


def test_model_and_server_are_described(stub, own):
    model, described = own.model_info(), stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20)
    assert described.served_model_name == "bundled" == model.model_name
    assert described.is_generation and not described.supports_vision
    assert described.max_context_length == CONTEXT == described.max_req_input_len + 1
    assert (described.vocab_size, described.model_type) == (model.vocab_size, "qwen3_5_text")
    assert tuple(described.eos_token_ids) == model.eos_token_ids
    assert described.pad_token_id == 4055
    assert described.default_sampling_params_json == ""
    server = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=20)
    assert (server.server_type, server.data_parallel_size) == ("vllm-grpc", 1)
    assert (server.max_num_seqs, server.model_dtype) == (4, "torch.float32")
    assert server.uptime_seconds > 0


def test_loads_count_what_runs_and_the_tokens_since_the_last_look(stub, pair):
    def load() -> pb.SchedulerLoad:
        answer = stub.GetLoads(pb.GetLoadsRequest(include=["core"]), timeout=20)
        assert answer.dp_rank_count == len(answer.loads) == 1
        return answer.loads[0]

    pair.expect_idle()
    load()
    assert (load().num_total_reqs, load().token_usage, load().gen_throughput) == (0, 0, 0)
    call = stub.Generate(request(max_tokens=CONTEXT - 20, ignore_eos=True, stream=True), timeout=60)
    next(call)
    busy = load()
    assert (busy.num_running_reqs, busy.num_waiting_reqs, busy.max_running_requests) == (1, 0, 4)
    assert busy.utilization == 0.25
    # whole pages, of those for four contexts
    assert busy.max_total_num_tokens == 4 * CONTEXT
    assert 0 < busy.num_used_tokens <= CONTEXT and busy.num_used_tokens % 64 == 0
    assert busy.token_usage == busy.num_used_tokens / (4 * CONTEXT)
    call.cancel()
    pair.expect_idle()
    completes(stub, request(max_tokens=16))
    assert load().gen_throughput > 0


def test_kept_prefixes_are_counted_as_cached_and_flushed_when_nothing_runs():
    def flush(timeout_s: float) -> common_pb2.FlushCacheResponse:
        return stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=timeout_s), timeout=60)

    with (
        served(
            bundled("target"),
            bundled("dflash2"),
            gateway=True,
            max_context=CONTEXT,
            checkpoint_slots=4,
        ) as pair,
        grpc.insecure_channel(pair.address) as channel,
    ):
        stub = pb_grpc.VllmEngineStub(channel)
        long = "def main():\n    return [" + "1, " * 40
        cached = []
        for _ in range(2):
            (complete,) = completes(stub, request(prompt=long, max_tokens=4))
            cached.append(complete.cached_tokens)
            pair.expect_idle()
        assert cached == [0, len(ids_of(long))]
        # what only checkpoints hold gives way, and is no load
        (load,) = stub.GetLoads(pb.GetLoadsRequest(), timeout=20).loads
        assert load.token_usage == 0

        running = stub.Generate(request(max_tokens=300, ignore_eos=True, stream=True), timeout=60)
        next(running)
        refused = flush(0)
        assert not refused.success and "run" in refused.message
        # waits for it to end
        assert flush(60).success
        assert list(running)[-1].complete.completion_tokens == 300
        (complete,) = completes(stub, request(prompt=long, max_tokens=4))
        assert complete.cached_tokens == 0


def test_the_tokenizer_bundle_is_complete_and_named_by_its_digest(stub):
    *pieces, last = stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=20)
    bundle = b"".join(piece.data for piece in pieces)
    assert not any(piece.sha256 for piece in pieces) and not last.data
    assert last.sha256 == hashlib.sha256(bundle).hexdigest()
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        assert archive.testzip() is None
        files = {name: archive.read(name) for name in archive.namelist()}
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json", "config.json"}
    template = (bundled("target") / "chat_template.jinja").read_text()
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == template
    sent = Tokenizer.from_str(files["tokenizer.json"].decode())
    for text in (PROMPT, "<|im_start|>user\nnaïve 中文<|im_end|>", "<think>\n\n</think>"):
        assert sent.encode(text).ids == ids_of(text)
    assert Text(sent, template).has_template


def test_health_reflection_and_the_rest(stub, pair):
    assert stub.HealthCheck(pb.HealthCheckRequest(), timeout=20).healthy
    assert stub.FlushCache(common_pb2.FlushCacheRequest(), timeout=20).success
    for method, message in (
        (stub.Embed, pb.EmbedRequest()),
        (stub.StartProfile, common_pb2.StartProfileRequest()),
        (stub.StopProfile, common_pb2.StopProfileRequest()),
        (lambda m, timeout: list(stub.SubscribeKvEvents(m, timeout=timeout)),
         common_pb2.SubscribeKvEventsRequest()),
    ):  # fmt: skip
        with pytest.raises(grpc.RpcError) as caught:
            method(message, timeout=20)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    with grpc.insecure_channel(pair.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        check = health_pb2.HealthCheckRequest(service=serving.GATEWAY_SERVICE)
        assert health.Check(check, timeout=20).status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = reflection.ServerReflectionInfo(iter([ask]), timeout=20)
        listed = {service.name for service in answer.list_services_response.service}
        assert {serving.GATEWAY_SERVICE, serving.GENERATION_SERVICE} <= listed


def test_a_draining_verifier_is_unhealthy_and_takes_nothing_new():
    with served(bundled("target"), bundled("dflash2"), gateway=True, max_context=CONTEXT) as pair:
        channel = grpc.insecure_channel(pair.address)
        stub = pb_grpc.VllmEngineStub(channel)
        call = stub.Generate(request(max_tokens=120, ignore_eos=True, stream=True), timeout=60)
        next(call)
        stopping = threading.Thread(target=pair.verifier.stop, args=(60,))
        stopping.start()
        end = time.monotonic() + 20
        while (health := stub.HealthCheck(pb.HealthCheckRequest(), timeout=20)).healthy:
            assert time.monotonic() < end
        assert "draining" in health.message
        assert refusal(stub, request())[0] == "DRAINING"
        assert list(call)[-1].complete.completion_tokens == 120
        stopping.join()
        channel.close()


def test_with_model_defaults_the_gateway_learns_of_them_and_fills_them_in():
    with (
        served(
            bundled("target"), bundled("dflash2"), gateway=True, max_context=64, model_defaults=True
        ) as pair,
        grpc.insecure_channel(pair.address) as channel,
    ):
        stub = pb_grpc.VllmEngineStub(channel)
        described = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20)
    suggested = json.loads(described.default_sampling_params_json)
    assert suggested == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


# --- whether it is there


def test_a_verifier_without_it_offers_its_own_service_alone():
    with (
        served(bundled("target"), bundled("dflash2"), max_context=64) as pair,
        grpc.insecure_channel(pair.address) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        pb_grpc.VllmEngineStub(channel).HealthCheck(pb.HealthCheckRequest(), timeout=20)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("choice", "is_installed", "expected"),
    [("auto", True, True), ("auto", False, False), ("on", True, True), ("off", True, False)],
)
def test_auto_takes_it_where_its_extra_is_installed(monkeypatch, choice, is_installed, expected):
    monkeypatch.setattr(
        verifier.options.importlib.util,
        "find_spec",
        lambda name: object() if is_installed else None,
    )
    assert verifier.options.choose_gateway(choice) is expected


def test_on_without_the_extra_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(verifier.options.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"outrider\[gateway\]"):
        verifier.options.parse(["--gateway", "on"])


def test_the_flag_reaches_the_options():
    assert verifier.options.parse(["--gateway=off"]).gateway is False
    assert isinstance(verifier.options.parse([]), VerifierOptions)
