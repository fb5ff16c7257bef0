"""The real gateway before real verifiers, asked as an OpenAI user asks; one of two is killed."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.client import Client
from tests.processes import Program, free_port, installed, running, service, until

SMG = installed("smg")
openai = pytest.importorskip("openai", reason="needs the OpenAI client: pip install openai")
pytestmark = pytest.mark.skipif(SMG is None, reason="needs the gateway: pip install smg")

MODEL = "bundled"
PROMPT = "def main():"
MESSAGES = [{"role": "user", "content": "Continue this function: def get(self, key):"}]
CONTEXT = "1024"


def verifier(
    log: Path, drafter: Program, *flags: str
) -> contextlib.AbstractContextManager[Program]:
    return service(
        "verifier",
        log,
        "--listen=127.0.0.1:0",
        f"--drafter={drafter.address}",
        f"--max-context={CONTEXT}",
        f"--model-name={MODEL}",
        "--device=cpu",
        "--max-concurrency=2",
        "--gateway=on",
        *flags,
    )


@contextlib.contextmanager
def fronted(log: Path, *verifiers: Program) -> Iterator[openai.OpenAI]:
    """A gateway before verifiers, and a client that never tries twice by itself."""
    port = free_port()
    command = [
        *(SMG, "launch", "--backend=vllm", "--policy=round_robin"),
        *("--host=127.0.0.1", f"--port={port}"),
        *("--prometheus-host=127.0.0.1", f"--prometheus-port={free_port()}"),
        "--worker-startup-check-interval=1",
        "--worker-urls",
        *(f"grpc://{each.address}" for each in verifiers),
    ]
    with running(command, log) as program:

        def ready() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/workers", timeout=5) as got:
                    workers = json.load(got)["workers"]
            except OSError:
                return False
            states = [worker["status"] for worker in workers if worker["model_id"] == MODEL]
            return states == ["ready"] * len(verifiers)

        until(ready, "the gateway knows its verifiers", program)
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60
        )

        def answers() -> bool:
            # the tokenizer is fetched after the worker is ready
            try:
                return bool(client.completions.create(model=MODEL, prompt="a", max_tokens=1))
            except openai.APIStatusError:
                return False

        until(answers, "the gateway answers", program)
        try:
            yield client
        finally:
            # it would take its time to end by itself
            program.kill()


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    log = tmp_path_factory.mktemp("drafter") / "log"
    flags = ("--listen=127.0.0.1:0", f"--max-context={CONTEXT}", "--device=cpu")
    # room for every verifier of this module
    with service("drafter", log, *flags, "--max-concurrency=6", "--checkpoint-slots=4") as program:
        yield program


@pytest.fixture(scope="module")
def two(
    drafter: Program, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Program, Program]]:
    logs = tmp_path_factory.mktemp("verifiers")
    with verifier(logs / "1", drafter) as first, verifier(logs / "2", drafter) as second:
        yield first, second


@pytest.fixture(scope="module")
def front(
    two: tuple[Program, Program], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    with fronted(tmp_path_factory.mktemp("gateway") / "log", *two) as client:
        yield client


@pytest.fixture(scope="module")
def own(two: tuple[Program, Program]) -> Iterator[Client]:
    """Asks the first verifier directly, for what the gateway's answers must equal."""
    with Client(two[0].address) as client:
        until(lambda: client.server_info().drafter_state == "connected", "the pair drafts")
        yield client


def test_the_model_is_listed_by_its_name(front):
    assert [model.id for model in front.models.list()] == [MODEL]


def test_a_completion_is_generate_s_with_its_speculative_counts(front, own):
    expected = own.generate(PROMPT, max_tokens=40, temperature=0)
    answer = front.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.text, "length")
    usage, counted = answer.usage, expected.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (counted.prompt_tokens, 40)
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == counted.accepted > 0
    assert details.rejected_prediction_tokens == counted.proposed - counted.accepted


def test_a_streamed_completion_is_the_same_and_ends_with_usage(front, own):
    expected = own.generate(PROMPT, max_tokens=40, temperature=0)
    events = list(
        front.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(choice.text for event in events for choice in event.choices) == expected.text
    assert len([event for event in events if event.choices]) > 3
    usage = events[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.usage.prompt_tokens, 40)
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens == expected.usage.accepted


def test_a_conversation_is_rendered_as_the_verifier_renders_it(front, own):
    expected = own.chat(MESSAGES, max_tokens=32, temperature=0)
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 32, "temperature": 0}
    answer = front.chat.completions.create(**asked)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    events = front.chat.completions.create(**asked, stream=True)
    pieces = [choice.delta.content or "" for event in events for choice in event.choices]
    assert "".join(pieces) == expected.text


def test_samples_follow_the_seed_through_either_verifier(front, own):
    options = {"max_tokens": 16, "temperature": 0.9, "seed": 7, "n": 2}
    expected = [each.text for each in own.samples(PROMPT, **options)]
    for _ in range(2):
        answer = front.completions.create(model=MODEL, prompt=PROMPT, **options)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage.prompt_tokens == 4


def test_a_stop_string_ends_the_text_before_it(front, own):
    options = {"max_tokens": 40, "temperature": 0, "stop": ["^"]}
    expected = own.generate(PROMPT, **options)
    answer = front.completions.create(model=MODEL, prompt=PROMPT, **options)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(expected.token_ids)


def test_logprobs_come_with_a_conversation(front, own):
    expected = own.chat(MESSAGES, max_tokens=4, temperature=0, logprobs=2)
    answer = front.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    entries = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == pytest.approx(
        [each.logprob for each in expected.logprobs], abs=5e-5
    )
    assert [len(entry.top_logprobs) for entry in entries] == [2] * 4


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"prompt": "x " * 2000}, 400),
        ({"n": 9}, 400),
        ({"temperature": -1}, 400),
        ({"extra_body": {"regex": "a+"}}, 501),
        ({"model": "another"}, 404),
    ],
    ids=["too_long", "n", "temperature", "constraint", "model"],
)
def test_refusals_keep_their_kind_and_harm_nobody(front, change, status):
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4} | change
    with pytest.raises(openai.APIStatusError) as caught:
        front.completions.create(**asked)
    assert caught.value.status_code == status
    assert front.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1).choices


def test_a_reader_that_leaves_frees_its_lane(front, two):
    def resident() -> int:
        total = 0
        for each in two:
            with Client(each.address) as client:
                total += client.server_info(timeout=20).resident_requests
        return total

    stream = front.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert resident() == 1
    stream.close()
    until(lambda: resident() == 0, "the lane is free")


def test_both_verifiers_take_their_turns(front, two):
    def counts() -> list[int]:
        found = []
        for each in two:
            with Client(each.address) as client:
                found.append(client.server_info(timeout=20).counters["requests"])
        return found

    before = counts()
    for _ in range(4):
        front.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
    assert [after - earlier for earlier, after in zip(before, counts(), strict=True)] == [2, 2]


def test_one_verifier_is_enough_and_one_that_is_full_answers_429(drafter, own, tmp_path):
    asked = {"model": MODEL, "prompt": PROMPT, "temperature": 0}
    endless = asked | {"max_tokens": 900, "stream": True, "extra_body": {"ignore_eos": True}}
    expected = own.generate(PROMPT, max_tokens=24, temperature=0)
    with (
        verifier(tmp_path / "verifier", drafter, "--max-queue=0", "--checkpoint-slots=4") as only,
        fronted(tmp_path / "gateway", only) as client,
    ):
        for cached in (0, expected.usage.prompt_tokens):
            answer = client.completions.create(**asked, max_tokens=24)
            assert answer.choices[0].text == expected.text
            assert answer.usage.prompt_tokens_details.cached_tokens == cached
        streams = [client.completions.create(**endless) for _ in range(2)]
        for stream in streams:
            next(iter(stream))
        with pytest.raises(openai.RateLimitError):
            client.completions.create(**asked, max_tokens=1)
        for stream in streams:
            stream.close()
        only.kill()
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(**asked, max_tokens=1)
        assert caught.value.status_code == 503


def test_a_verifier_that_is_killed_costs_its_own_streams_and_nothing_later(
    two, drafter, own, tmp_path
):
    expected = own.generate(PROMPT, max_tokens=24, temperature=0).text
    asked = {"model": MODEL, "prompt": PROMPT, "temperature": 0}
    endless = asked | {"max_tokens": 900, "stream": True, "extra_body": {"ignore_eos": True}}
    with (
        verifier(tmp_path / "verifier", drafter) as victim,
        fronted(tmp_path / "gateway", two[0], victim) as client,
    ):
        streams = [iter(client.completions.create(**endless)) for _ in range(2)]
        for stream in streams:
            next(stream)
        victim.kill()
        for _ in range(8):
            answer = client.completions.create(**asked, max_tokens=24)
            assert answer.choices[0].text == expected
        ended = []
        for stream in streams:
            try:
                ended.append(bool(list(stream)))
            except openai.APIError:
                ended.append(False)
        assert sorted(ended) == [False, True]


def test_the_gateway_waits_for_a_verifier_that_still_starts(two, drafter, own, tmp_path):
    port = free_port()
    later = Program(None, tmp_path / "unused", f"127.0.0.1:{port}")
    flags = (f"--listen={later.address}", f"--drafter={drafter.address}", f"--model-name={MODEL}")
    command = [sys.executable, "-P", "-m", "verifier", *flags, "--device=cpu", "--max-context=256"]
    # both at once: the verifier's port is open long before its weights are loaded
    with running(command, tmp_path / "verifier"), fronted(tmp_path / "gateway", later) as client:
        started = time.monotonic()
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
        assert answer.choices[0].text == own.generate(PROMPT, max_tokens=8, temperature=0).text
        assert time.monotonic() - started < 60
