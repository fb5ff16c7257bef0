"""The SDK against a scripted service: results, streams, cancellation, deadlines, errors."""

import asyncio
import threading
import time
import tracemalloc

import grpc
import pytest
from fake_generation import TEXT, TOKEN_IDS, FakeGeneration, serve

from outrider import client as sdk
from outrider.client import AsyncClient, Client
from outrider.v1 import generation_service_pb2 as pb


@pytest.fixture
def client(fake):
    with Client(fake[1]) as made:
        yield made


def run_async(address, use):
    """Runs `use(client)` with an AsyncClient of its own."""

    async def run():
        async with AsyncClient(address) as made:
            return await use(made)

    return asyncio.run(run())


def until(condition, timeout=10.0):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "condition was not met in time"
        time.sleep(0.005)


# --- results


def is_the_scripted_completion(completion):
    assert completion.token_ids == TOKEN_IDS
    assert completion.text == TEXT
    assert (completion.finish_reason, completion.matched) == ("stop", 15)
    assert completion.origins == ("target", "accepted", "accepted", "correction", "bonus")
    usage = completion.usage
    assert (usage.proposed, usage.accepted, usage.rounds) == (9, 2, 2)
    assert usage.accepted_per_position == (1, 1, 0)
    assert (usage.seed, usage.ttft_ns) == (2**64 - 1, 1_500_000)
    assert completion.rounds == (
        sdk.RoundTrace(frontier=3, proposed=(12, 13), accepted=2, committed=3),
        sdk.RoundTrace(frontier=4, proposed=(12, 13), accepted=2, committed=3),
    )


def test_generate_returns_the_whole_completion(client):
    is_the_scripted_completion(client.generate("hello"))


def test_generate_returns_the_whole_completion_async(fake):
    is_the_scripted_completion(run_async(fake[1], lambda client: client.generate("hello")))


def test_logprobs_come_with_their_alternatives(client):
    completion = client.generate("hello", logprobs=2)
    assert completion.logprobs == (sdk.TokenLogprobs(-0.5, (0, 1), (-0.5, -1.5)),) * 5
    assert client.generate("hello").logprobs == ()


def test_samples_returns_each_of_n(client, fake):
    completions = client.samples("hello", n=3)
    assert [each.sample_index for each in completions] == [0, 1, 2]
    assert all(each.token_ids == TOKEN_IDS for each in completions)
    again = run_async(fake[1], lambda client: client.samples("hello", n=2))
    assert [each.text for each in again] == [TEXT, TEXT]


def test_generate_refuses_several_samples(client):
    with pytest.raises(ValueError, match=r"n: expected 1, got 2"):
        client.generate("hello", n=2)


def test_a_stream_iterates_deltas_and_ends_with_a_finish(client):
    with client.stream("hello") as stream:
        deltas = list(stream)
    assert [each.text for each in deltas] == ["Once", " €!", " end\n"]
    assert [each.finish is None for each in deltas] == [True, True, False]
    assert deltas[-1].finish.usage.output_tokens == 5
    assert deltas[0].rounds == ()
    (completion,) = stream.completions()
    assert completion.text == TEXT


def test_a_stream_iterates_deltas_async(fake):
    async def use(client):
        async with client.stream("hello") as stream:
            texts = [delta.text async for delta in stream]
            (completion,) = await stream.completions()
        return texts, completion.text

    assert run_async(fake[1], use) == (["Once", " €!", " end\n"], TEXT)


def test_pieces_give_each_token_its_text_and_a_split_character_to_its_last_token(client):
    with client.stream("hello") as stream:
        pieces = [piece for delta in stream for piece in delta.pieces()]
    assert pieces == [
        (11, "target", "Once"),
        (12, "accepted", " "),
        (13, "accepted", "€"),
        (14, "correction", "!"),
        (15, "bonus", " end\n"),
    ]


def has_trees(completion):
    usage = completion.usage
    assert (usage.tree_rounds, usage.side_accepted, usage.tree_columns) == (2, 1, 8)
    trace = completion.rounds[0]
    assert (trace.proposed, trace.parents, trace.columns) == ((12, 13, 14), (0, 1, 0), (1, 2))


def test_trees_are_told_of(client, fake):
    has_trees(client.generate("hello", draft_trees=True))
    has_trees(run_async(fake[1], lambda client: client.generate("hello", draft_trees=True)))
    plain = client.generate("hello", draft_trees=False)
    assert (plain.usage.tree_rounds, plain.rounds[0].parents) == (0, ())
    asked = [(r.HasField("draft_trees"), r.draft_trees) for r in fake[0].requests]
    assert asked == [(True, True), (True, True), (True, False)]


# --- requests


def test_what_is_left_out_stays_absent(client, fake):
    client.generate("hello", return_rounds=None)
    request = fake[0].requests[-1]
    assert not request.HasField("sampling")
    for name in ("max_tokens", "min_tokens", "ignore_eos", "n", "logprobs", "draft_tokens"):
        assert not request.HasField(name), name
    assert not request.HasField("draft_trees")
    assert len(request.request_id) == 32


def test_zero_is_a_value(client, fake):
    client.generate(
        "hello",
        temperature=0,
        top_p=0,
        top_k=0,
        min_p=0,
        seed=0,
        draft_tokens=0,
        logprobs=0,
        ignore_eos=False,
    )
    request = fake[0].requests[-1]
    for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
        assert request.sampling.HasField(name), name
    for name in ("draft_tokens", "logprobs", "ignore_eos"):
        assert request.HasField(name), name


def test_every_option_reaches_its_field(client, fake):
    client.generate(
        prompt_ids=[1, 2, 3],
        request_id="mine",
        temperature=0.5,
        top_p=0.25,
        top_k=4,
        min_p=0.125,
        presence_penalty=-1,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias={7: -100, 8: 1.5},
        seed=2**64 - 1,
        max_tokens=6,
        min_tokens=2,
        stop=["END", "\n"],
        stop_token_ids=[9, 10],
        ignore_eos=True,
        logprobs=5,
        draft_tokens=3,
        draft_trees=False,
    )
    assert fake[0].requests[-1] == pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        request_id="mine",
        sampling=pb.Sampling(
            temperature=0.5,
            top_p=0.25,
            top_k=4,
            min_p=0.125,
            presence_penalty=-1,
            frequency_penalty=2,
            repetition_penalty=1.5,
            logit_bias={7: -100, 8: 1.5},
            seed=2**64 - 1,
        ),
        max_tokens=6,
        min_tokens=2,
        stop=["END", "\n"],
        stop_token_ids=[9, 10],
        ignore_eos=True,
        logprobs=5,
        draft_tokens=3,
        draft_trees=False,
        return_rounds=True,
    )


def test_one_stop_string_is_one_string(client, fake):
    client.generate("hello", stop="END")
    assert fake[0].requests[-1].stop == ["END"]


def test_chat_sends_messages_for_the_server_to_render(client, fake):
    messages = [{"role": "user", "content": "hi"}]
    client.chat(messages, enable_thinking=False, max_tokens=3)
    run_async(fake[1], lambda client: client.chat(messages, add_generation_prompt=False))
    first, second = fake[0].requests
    assert first.chat == pb.Chat(
        messages=[pb.ChatMessage(role="user", content="hi")], enable_thinking=False
    )
    assert first.max_tokens == 3
    assert not second.chat.add_generation_prompt
    assert not second.chat.HasField("enable_thinking")


def test_a_number_of_samples_takes_no_memory_before_the_server_has_judged_it():
    tracemalloc.start()
    try:
        with Client("127.0.0.1:1") as nobody, pytest.raises(sdk.ClientError):
            nobody.samples("x", n=2**31 - 1, timeout=0.2)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_an_empty_prompt_is_sent_for_the_server_to_refuse(client, fake):
    client.generate("")
    client.generate(prompt_ids=[])
    kinds = [request.WhichOneof("prompt") for request in fake[0].requests]
    assert kinds == ["text", "token_ids"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected one of prompt, prompt_ids and messages, got 0"),
        ({"prompt_ids": [1], "messages": []}, "got 2"),
        ({"prompt_ids": [2**31]}, "prompt_ids: expected 32-bit token ids, got 2147483648"),
        ({"prompt_ids": ["x"]}, "prompt_ids: expected 32-bit token ids, got 'x'"),
        ({"prompt_ids": [1], "seed": -1}, "seed: expected a value its field can hold, got -1"),
        ({"prompt_ids": [1], "max_tokens": 2**40}, "max_tokens: expected"),
        ({"prompt_ids": [1], "temperature": "hot"}, "temperature: expected"),
    ],
)
def test_what_no_message_can_carry_is_refused_before_the_call(client, fake, options, message):
    with pytest.raises(ValueError, match=message):
        client.generate(**options)
    assert fake[0].requests == []


def test_an_option_that_does_not_exist_is_a_type_error(client):
    with pytest.raises(TypeError, match="temprature"):
        client.generate("hello", temprature=1)


# --- the other methods


def test_tokenize_detokenize_abort_and_descriptions(client, fake):
    assert client.tokenize("hé").token_ids == tuple("hé".encode())
    rendered = client.tokenize(messages=[{"role": "user", "content": "hi"}])
    assert rendered.text == "<user>hi"
    assert client.detokenize("hé".encode()) == "hé"
    assert client.abort("live") is True
    assert client.abort("unknown") is False
    assert fake[0].aborted == ["live", "unknown"]
    model, server = client.model_info(), client.server_info()
    assert (model.vocab_size, model.eos_token_ids, model.draft_format) == (320, (15, 16), "dflash2")
    assert (server.drafter_state, server.counters) == ("connected", {"rounds": 2})


def test_the_other_methods_async(fake):
    async def use(client):
        return (
            await client.tokenize("hé"),
            await client.detokenize("hé".encode()),
            await client.abort("live"),
            await client.model_info(),
            await client.server_info(),
        )

    tokens, text, found, model, server = run_async(fake[1], use)
    assert (tokens.text, text, found) == ("hé", "hé", True)
    assert (model.model_name, server.drafter_state) == ("fake", "connected")


def test_wait_ready_waits_while_the_server_loads(client, fake):
    fake[0].loading_until = time.monotonic() + 0.4
    assert client.wait_ready(10).drafter_state == "connected"
    assert time.monotonic() >= fake[0].loading_until
    fake[0].loading_until = time.monotonic() + 0.3
    assert run_async(fake[1], lambda client: client.wait_ready(10)).version == "0.1.0"


def test_wait_ready_gives_up(client, fake):
    fake[0].loading_until = time.monotonic() + 60
    with pytest.raises(sdk.UnavailableError) as caught:
        client.wait_ready(0.3)
    assert caught.value.reason == "LOADING"


# --- cancellation


def test_leaving_a_stream_cancels_the_request(client, fake):
    with client.stream("slow") as stream:
        next(stream)
        assert not fake[0].gone.is_set()
    assert fake[0].gone.wait(10)


def test_cancel_from_another_thread_ends_the_iteration_with_a_typed_error(client, fake):
    stream = client.stream("slow")
    next(stream)
    threading.Timer(0.05, stream.cancel).start()
    with pytest.raises(sdk.CancelledError) as caught:
        list(stream)
    assert caught.value.reason == "REQUEST_CANCELLED"
    assert fake[0].gone.wait(10)


def test_a_dropped_stream_cancels_the_request(client, fake):
    stream = client.stream("slow")
    next(stream)
    del stream
    assert fake[0].gone.wait(10)


def test_closing_the_client_cancels_what_runs(fake):
    with Client(fake[1]) as client:
        stream = client.stream("slow")
        next(stream)
    with pytest.raises(sdk.CancelledError):
        list(stream)
    assert fake[0].gone.wait(10)


@pytest.mark.parametrize("how", ["leave", "cancel", "cancel the task", "break"])
def test_cancellation_async(fake, how):
    async def use(client):
        if how == "cancel the task":
            task = asyncio.create_task(client.generate("slow"))
            while not fake[0].requests:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            async with client.stream("slow") as stream:
                await anext(stream)
                if how == "cancel":
                    stream.cancel()
                    with pytest.raises(sdk.CancelledError):
                        await stream.completions()
                elif how == "break":
                    async for _ in stream:
                        break
        return await asyncio.to_thread(fake[0].gone.wait, 10)

    assert run_async(fake[1], use)


# --- deadlines and errors


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_deadline_ends_the_request_on_both_sides(client, fake, kind):
    with pytest.raises(sdk.DeadlineExceededError) as caught:
        if kind == "sync":
            client.generate("slow", timeout=0.2)
        else:
            run_async(fake[1], lambda client: client.generate("slow", timeout=0.2))
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.reason == "DEADLINE_EXPIRED"
    assert fake[0].gone.wait(10)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("PROMPT_TOO_LONG", sdk.InvalidRequestError),
        ("REQUEST_ID_TAKEN", sdk.InvalidRequestError),
        ("MEDIA_UNSUPPORTED", sdk.UnsupportedError),
        ("QUEUE_FULL", sdk.OverloadedError),
        ("DRAINING", sdk.UnavailableError),
        ("LOADING", sdk.UnavailableError),
        ("DEADLINE_EXPIRED", sdk.DeadlineExceededError),
        ("REQUEST_CANCELLED", sdk.CancelledError),
        ("LOGITS_NOT_FINITE", sdk.ServerError),
        ("MODEL_MISMATCH", sdk.ServerError),
    ],
)
def test_each_fault_is_raised_by_kind_with_all_it_carries(client, fake, reason, kind):
    async def use(client):
        await client.generate(f"fault {reason}")

    for call in (lambda: client.generate(f"fault {reason}"), lambda: run_async(fake[1], use)):
        with pytest.raises(sdk.ClientError) as caught:
            call()
        error = caught.value
        assert type(error) is kind
        assert error.reason == reason
        assert error.message == f"scripted: expected 1, got {reason}"
        assert error.metadata["got"] == reason
        assert error.retry_after == 0.25
        assert error.action


def test_an_error_after_the_first_tokens_is_raised_after_them(client):
    stream = client.stream("fault-later")
    assert next(stream).text == "Once"
    with pytest.raises(sdk.ServerError, match="LOGITS_NOT_FINITE"):
        next(stream)


def test_a_call_that_ends_without_a_finish_is_an_error_not_a_completion(client, fake):
    with pytest.raises(sdk.ServerError, match="expected a finish"):
        client.generate("no finish")
    with pytest.raises(sdk.ServerError, match="expected a finish"):
        run_async(fake[1], lambda client: client.generate("no finish"))


def test_an_exception_in_the_server_is_a_server_error(client):
    with pytest.raises(sdk.ServerError) as caught:
        client.generate("raise")
    assert caught.value.code is grpc.StatusCode.UNKNOWN


def test_nobody_at_the_address_is_unavailable():
    with Client("127.0.0.1:1") as client, pytest.raises(sdk.UnavailableError) as caught:
        client.generate("hello")
    assert caught.value.reason == "UNREACHABLE"
    assert "retry with back-off" in caught.value.action


def test_a_prompt_over_the_message_limit_is_an_invalid_request(client):
    with pytest.raises(sdk.InvalidRequestError) as caught:
        client.generate("x" * (17 * 1024 * 1024))
    assert caught.value.reason == "MESSAGE_TOO_LARGE"


def test_a_server_that_comes_back_is_found_again():
    server, address = serve(FakeGeneration())
    with Client(address) as client:
        assert client.generate("hello").text == TEXT
        server.stop(None).wait()
        with pytest.raises(sdk.UnavailableError):
            client.generate("hello")
        server, _ = serve(FakeGeneration(), address)
        client.wait_ready(15)
        assert client.generate("hello").text == TEXT
    server.stop(None).wait()


# --- what it needs


def test_importing_the_client_takes_grpc_and_protobuf_alone(base_install):
    code = (
        "import sys, outrider.client\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = base_install(code)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "numpy", "structlog", "rich", "grpc_health"} & set(eval(done.stdout))


def test_the_whole_sdk_works_on_the_base_install(base_install, fake):
    code = (
        "import asyncio, sys; from outrider.client import AsyncClient, Client\n"
        "async def again():\n"
        "    async with AsyncClient(sys.argv[1]) as client:\n"
        "        return await client.generate('hello')\n"
        "with Client(sys.argv[1]) as client:\n"
        "    same = client.generate('hello').token_ids == asyncio.run(again()).token_ids\n"
        "    print(same, client.model_info().model_name)"
    )
    done = base_install(code, fake[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True fake\n"


def test_the_base_install_of_these_tests_has_no_torch(base_install):
    assert "No module named 'torch'" in base_install("import torch").stderr
