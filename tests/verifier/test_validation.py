"""Absent fields are neutral, present ones are taken or refused, and samples have own seeds."""

from __future__ import annotations

import dataclasses

import pytest

from outrider.checkpoint import CheckpointError
from outrider.faults import FaultError
from verifier import validation
from verifier.request import Sampling
from verifier.text import Text
from verifier.validation import Limits, RequestFields, SamplingFields

LIMITS = Limits(
    vocab_size=100,
    public_vocab=90,
    max_context=32,
    draft_tokens=7,
    eos_token_ids=frozenset({1, 2}),
    max_prompt_bytes=64,
)


def fields(**changes) -> RequestFields:
    return RequestFields(**({"request_id": "r"} | changes))


def sampled(**changes) -> Sampling:
    return validation.check(fields(sampling=SamplingFields(**changes)), LIMITS).sampling


def requests(wanted: RequestFields, prompt: tuple[int, ...] = (5, 6), limits: Limits = LIMITS):
    return validation.check(wanted, limits).requests(
        prompt, limits, arrival_ns=11, deadline_ns=None
    )


def test_absent_fields_are_neutral():
    (request,) = requests(fields())
    assert dataclasses.replace(request.sampling, seed=0) == Sampling()
    assert (request.max_tokens, request.min_tokens) == (30, 0)
    assert (request.logprobs, request.draft_tokens, request.return_rounds) == (None, 7, False)
    assert (request.stop, request.stop_token_ids) == ((), {1, 2})
    assert (request.arrival_ns, request.deadline_ns) == (11, None)


def test_zero_is_a_value_and_not_absence():
    assert sampled(temperature=0.0).greedy
    (request,) = requests(fields(draft_tokens=0, logprobs=0))
    assert (request.draft_tokens, request.logprobs) == (0, 0)


def test_every_sampling_field_is_taken():
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 30,
        "min_p": 0.1,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1.2,
        "seed": (1 << 64) - 1,
    }
    sampling = sampled(**given, logit_bias={9: -100.0, 3: 100.0})
    assert sampling == Sampling(**given, logit_bias=((3, 100.0), (9, -100.0)), seed_given=True)


def test_an_absent_seed_is_drawn_anew():
    first, second = sampled(), sampled()
    assert first.seed != second.seed and not first.seed_given


def test_sample_0_has_the_seed_and_the_others_a_splitmix64_step_of_it():
    samples = requests(fields(n=3, sampling=SamplingFields(seed=1234566)))
    assert [request.sample_index for request in samples] == [0, 1, 2]
    # the first output of SplitMix64 seeded 1234567, as its reference code prints it
    assert [request.sampling.seed for request in samples][:2] == [1234566, 6457827717110365317]
    assert all(request.sampling.seed_given for request in samples)
    assert validation.sample_seed((1 << 64) - 1, 1) == 16294208416658607535  # wraps to seed 0


def test_max_tokens_is_capped_by_the_context():
    (request,) = requests(fields(max_tokens=1000), prompt=(5,) * 31)
    assert request.max_tokens == 1


def test_ignore_eos_leaves_the_requests_own_stop_ids():
    (request,) = requests(fields(ignore_eos=True, stop_token_ids=(7, 7)))
    assert request.stop_token_ids == {7}
    (request,) = requests(fields(stop_token_ids=(7,)))
    assert request.stop_token_ids == {1, 2, 7}


def test_model_defaults_fill_absent_fields_alone():
    defaults = validation.model_defaults(
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 3}
    )
    limits = dataclasses.replace(LIMITS, defaults=defaults)
    sampling = validation.check(fields(sampling=SamplingFields(top_k=0)), limits).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 0, 0.95)
    assert not sampling.seed_given
    assert validation.model_defaults({"do_sample": False, "temperature": 0.6}).greedy
    assert validation.model_defaults({}) == Sampling()


@pytest.mark.parametrize("config", [{"top_p": 1.5}, {"temperature": "hot"}])
def test_model_defaults_out_of_range_are_refused(config):
    with pytest.raises(CheckpointError, match=r"generation_config\.json: "):
        validation.model_defaults(config)


NAN, INF = float("nan"), float("inf")
OUT_OF_RANGE = {
    "temperature": [-0.1, NAN, INF],
    "top_p": [0.0, -0.5, 1.0001, NAN, INF],
    "top_k": [-1],
    "min_p": [-0.1, 1.1, NAN],
    "presence_penalty": [-2.1, 2.1, NAN, -INF],
    "frequency_penalty": [-2.1, 2.1, NAN, INF],
    "repetition_penalty": [0.0, -1.0, NAN, INF, 9e-4, 1001.0],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in OUT_OF_RANGE.items() for value in values],
)
def test_sampling_outside_its_range_is_refused(name, value):
    with pytest.raises(FaultError, match=f"{name}: expected") as caught:
        sampled(**{name: value})
    assert caught.value.reason == "SAMPLING_INVALID"
    assert caught.value.metadata["field"] == name
    assert caught.value.metadata["actual"] == str(value)


@pytest.mark.parametrize(
    ("changes", "reason", "name"),
    [
        ({"max_tokens": 0}, "REQUEST_INVALID", "max_tokens"),
        ({"max_tokens": -1}, "REQUEST_INVALID", "max_tokens"),
        ({"min_tokens": -1}, "REQUEST_INVALID", "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "REQUEST_INVALID", "min_tokens"),
        ({"n": 0}, "REQUEST_INVALID", "n"),
        ({"n": 9}, "REQUEST_INVALID", "n"),
        ({"logprobs": -1}, "REQUEST_INVALID", "logprobs"),
        ({"logprobs": 21}, "REQUEST_INVALID", "logprobs"),
        ({"draft_tokens": -1}, "REQUEST_INVALID", "draft_tokens"),
        ({"draft_tokens": 8}, "REQUEST_INVALID", "draft_tokens"),
        ({"stop": ("",)}, "STOP_INVALID", "stop"),
        ({"stop": ("x", "")}, "STOP_INVALID", "stop"),
        ({"stop": ("x" * 1025,)}, "STOP_INVALID", "stop"),
        ({"stop": tuple("abcdefghijklmnopq")}, "STOP_INVALID", "stop"),
        ({"stop_token_ids": (100,)}, "TOKEN_OUT_OF_RANGE", "stop_token_ids"),
        ({"stop_token_ids": (-1,)}, "TOKEN_OUT_OF_RANGE", "stop_token_ids"),
        ({"stop_token_ids": range(90), "min_tokens": 1}, "STOP_INVALID", "stop_token_ids"),
        ({"request_id": "é" * 65}, "REQUEST_INVALID", "request_id"),
        (
            {"sampling": SamplingFields(logit_bias={90: 1.0})},
            "TOKEN_OUT_OF_RANGE",
            "logit_bias",
        ),
        (
            {"sampling": SamplingFields(logit_bias={-1: 1.0})},
            "TOKEN_OUT_OF_RANGE",
            "logit_bias",
        ),
        (
            {"sampling": SamplingFields(logit_bias={3: NAN})},
            "SAMPLING_INVALID",
            "logit_bias",
        ),
        (
            {"sampling": SamplingFields(logit_bias={3: 100.5})},
            "SAMPLING_INVALID",
            "logit_bias",
        ),
    ],
)
def test_a_field_outside_its_range_is_refused(changes, reason, name):
    with pytest.raises(FaultError, match=f"{name}: expected") as caught:
        validation.check(fields(**changes), LIMITS)
    assert (caught.value.reason, caught.value.metadata["field"]) == (reason, name)


def test_the_ends_of_the_ranges_are_taken():
    wanted = fields(n=8, logprobs=20, draft_tokens=7, max_tokens=1, stop=("x" * 1024,) * 16)
    checked = validation.check(wanted, LIMITS)
    assert (checked.sample_count, checked.stop) == (8, ("x" * 1024,))
    assert sampled(top_p=1.0, min_p=1.0, top_k=0, repetition_penalty=1e-3).min_p == 1.0


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(FaultError, match="STOP_INVALID"):
        validation.check(fields(stop=("x",)), LIMITS, has_tokenizer=False)


def test_a_prompt_leaves_room_for_one_token():
    text = Text(None)
    assert len(validation.prompt_ids(text, [1] * 31, LIMITS)) == 31
    with pytest.raises(FaultError, match="at most 31 tokens, got 32") as caught:
        validation.prompt_ids(text, [1] * 32, LIMITS)
    assert caught.value.reason == "PROMPT_TOO_LONG"


def test_prompt_ids_may_lie_beyond_the_public_vocabulary_but_not_beyond_the_matrix():
    assert validation.prompt_ids(Text(None), [99], LIMITS) == (99,)
    with pytest.raises(FaultError, match=r"expected ids in \[0, 100\), got 100"):
        validation.prompt_ids(Text(None), [3, 100], LIMITS)


def test_a_text_is_measured_in_bytes(text: Text):
    limits = dataclasses.replace(LIMITS, max_prompt_bytes=6, vocab_size=1000)
    assert validation.prompt_ids(text, "ééé", limits)
    for long in ("éééa", "a" * 7):
        with pytest.raises(FaultError, match="at most 6 bytes, got 7") as caught:
            validation.prompt_ids(text, long, limits)
        assert caught.value.reason == "PROMPT_TOO_LARGE"


@pytest.mark.parametrize(
    ("max_context", "expected"),
    [(4096, 1 << 20), (262_144, 1 << 21), (1 << 22, 1 << 22)],
)
def test_the_default_prompt_size_follows_the_context(max_context, expected):
    assert validation.default_prompt_bytes(max_context) == expected
