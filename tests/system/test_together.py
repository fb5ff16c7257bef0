"""Several requests at once: none depends on its neighbours, and none leaves anything behind."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.client import ClientError, InvalidRequestError, ServerError
from tests.system.conftest import greedy, prompt
from verifier.request import FinishReason
from verifier.target import Target

KINDS = ["dflash2", "dflash"]


@pytest.mark.parametrize("kind", KINDS)
def test_more_requests_than_lanes_all_equal_their_solo_runs(dense, serve, oracle, kind):
    pair, client = serve(dense, kind, draft_tokens=7, max_concurrency=8, prefill_chunk=64)
    lengths = [random.Random(i).choice([1, 7, 16, 30, 70, 140]) for i in range(20)]

    def run(i: int) -> tuple[int, ...]:
        return client.generate(
            prompt_ids=prompt(lengths[i], seed=i),
            max_tokens=8 + 3 * (i % 5),
            temperature=0,
            ignore_eos=True,
        ).token_ids

    with ThreadPoolExecutor(12) as pool:
        outputs = list(pool.map(run, range(20)))
    for i, tokens in enumerate(outputs):
        assert list(tokens) == greedy(oracle, prompt(lengths[i], seed=i), 8 + 3 * (i % 5)), i
    pair.expect_idle()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("length", "sampling"),
    [
        pytest.param(8, {"temperature": 0}, id="greedy"),
        # a seeded row waits for its context, so that its rounds depend on the request alone
        pytest.param(33, {"temperature": 0.8, "seed": 11}, id="seeded"),
    ],
)
def test_rounds_do_not_depend_on_the_number_of_sessions(dense, serve, kind, length, sampling):
    _, client = serve(dense, kind, draft_tokens=7, max_concurrency=8)
    arguments = {
        "prompt_ids": prompt(length),
        "max_tokens": 24,
        "ignore_eos": True,
        "return_rounds": True,
        **sampling,
    }
    alone = client.generate(**arguments)
    assert alone.usage.proposed > 0
    for sessions in (4, 8):
        with ThreadPoolExecutor(sessions) as pool:
            runs = list(pool.map(lambda _: client.generate(**arguments), range(sessions)))
        for run in runs:
            assert run.token_ids == alone.token_ids
            assert run.rounds == alone.rounds


def test_a_seeded_prompt_keeps_its_coverage_beside_drafting_neighbours(dense, serve):
    """With a full layer every row of a long prompt is sent, whoever else has rows to send."""
    pair, client = serve(dense, "dflash", draft_tokens=7, prefill_chunk=32, max_context=1024)
    arguments = {
        "prompt_ids": prompt(400),
        "max_tokens": 16,
        "temperature": 0.8,
        "seed": 11,
        "ignore_eos": True,
        "return_rounds": True,
    }
    alone = client.generate(**arguments)
    neighbours = [
        client.stream(prompt_ids=prompt(8, seed=i), max_tokens=900, temperature=0, ignore_eos=True)
        for i in range(3)
    ]
    for neighbour in neighbours:
        next(neighbour)
    beside = client.generate(**arguments)
    for neighbour in neighbours:
        neighbour.cancel()
    assert beside.rounds == alone.rounds
    assert beside.token_ids == alone.token_ids
    assert "drafter_backlog_reopens" not in client.server_info().counters
    pair.expect_idle()


def test_cancelled_streams_free_everything_and_neighbours_go_on(dense, serve, oracle):
    pair, client = serve(dense, "dflash2", draft_tokens=3, max_concurrency=4)
    expected = greedy(oracle, prompt(20), 60)

    def steady(_: int) -> list[int]:
        return list(
            client.generate(
                prompt_ids=prompt(20), max_tokens=60, temperature=0, ignore_eos=True
            ).token_ids
        )

    def fickle(seed: int) -> None:
        stream = client.stream(
            prompt_ids=prompt(10 + seed), max_tokens=400, temperature=0, ignore_eos=True
        )
        for number, _ in enumerate(stream):
            if number == seed % 5:
                stream.cancel()
                break

    with ThreadPoolExecutor(6) as pool:
        steadies = [pool.submit(steady, i) for i in range(4)]
        list(pool.map(fickle, range(12)))
        assert all(s.result() == expected for s in steadies)
    pair.expect_idle()


def test_abort_finishes_the_stream_with_what_was_published(dense, serve):
    pair, client = serve(dense, "dflash2", draft_tokens=3)
    started = threading.Event()
    deltas = []

    def consume() -> None:
        for delta in client.stream(
            prompt_ids=prompt(10),
            max_tokens=480,
            temperature=0,
            ignore_eos=True,
            request_id="to-abort",
        ):
            deltas.append(delta)
            started.set()

    reader = threading.Thread(target=consume)
    reader.start()
    assert started.wait(10)
    assert client.abort("to-abort")
    reader.join(10)
    assert deltas[-1].finish.reason == FinishReason.ABORTED.value
    published = sum(len(d.token_ids) for d in deltas)
    assert published == deltas[-1].finish.usage.output_tokens < 480
    assert not client.abort("to-abort")
    pair.expect_idle()


def test_a_deadline_ends_a_waiting_and_a_running_request(dense, serve):
    pair, client = serve(dense, "dflash2", draft_tokens=3, max_concurrency=1)
    running = client.stream(prompt_ids=prompt(5), max_tokens=480, temperature=0, ignore_eos=True)
    next(iter(running))
    with pytest.raises(ClientError, match="DEADLINE"):
        client.generate(prompt_ids=prompt(6), max_tokens=5, temperature=0, timeout=0.15)
    running.cancel()
    pair.expect_idle()
    with pytest.raises(ClientError, match="DEADLINE"):
        client.generate(
            prompt_ids=prompt(6), max_tokens=480, temperature=0, ignore_eos=True, timeout=0.2
        )
    pair.expect_idle()


def test_a_failing_round_ends_its_rows_and_the_server_goes_on(dense, serve, oracle, monkeypatch):
    pair, client = serve(dense, "dflash2", draft_tokens=3)
    whole = Target.verify
    calls = []

    def breaks_once(self, *arguments, **keywords):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("planted")
        return whole(self, *arguments, **keywords)

    monkeypatch.setattr(Target, "verify", breaks_once)
    with pytest.raises(ServerError, match="INTERNAL"):
        client.generate(prompt_ids=prompt(8), max_tokens=60, temperature=0, ignore_eos=True)
    pair.expect_idle()
    completion = client.generate(
        prompt_ids=prompt(8), max_tokens=20, temperature=0, ignore_eos=True
    )
    assert list(completion.token_ids) == greedy(oracle, prompt(8), 20)


def test_logits_that_are_not_finite_fail_one_request_alone(dense, serve, oracle, monkeypatch):
    pair, client = serve(dense, "dflash2", draft_tokens=3, max_concurrency=2)
    whole = Target.verify
    poisoned = prompt(9, seed=1)

    def poisons(self, rows, token_ids, frontiers, counts, **options):
        forward = whole(self, rows, token_ids, frontiers, counts, **options)
        sequences = pair.verifier.engine._resident
        lanes = {s.residency.lane for s in sequences if list(s.request.prompt_ids) == poisoned}
        for row, lane in enumerate(rows.lanes.tolist()):
            if lane in lanes and frontiers[row] > 12:
                forward.logits[row] = float("nan")
        return forward

    monkeypatch.setattr(Target, "verify", poisons)
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(
            client.generate, prompt_ids=prompt(9), max_tokens=40, temperature=0, ignore_eos=True
        )
        with pytest.raises(ServerError, match="LOGITS_NOT_FINITE"):
            client.generate(prompt_ids=poisoned, max_tokens=40, temperature=0, ignore_eos=True)
        assert list(good.result().token_ids) == greedy(oracle, prompt(9), 40)
    pair.expect_idle()


def test_features_that_are_not_finite_stop_drafting_for_one_request_alone(
    dense, serve, oracle, monkeypatch
):
    pair, client = serve(dense, "dflash2", draft_tokens=3, max_concurrency=2)
    link = pair.verifier.engine._link
    whole = type(link).extend
    poisoned: list[int] = []

    def poisons(self, context, first_position, rows):
        if context.sequence_id == min([*poisoned, context.sequence_id]):
            poisoned.append(context.sequence_id)
            rows = rows.copy()
            rows[-1] = 255  # every float32 of it is no number
        whole(self, context, first_position, rows)

    monkeypatch.setattr(type(link), "extend", poisons)
    with ThreadPoolExecutor(2) as pool:
        runs = list(
            pool.map(
                lambda i: client.generate(
                    prompt_ids=prompt(9, seed=i), max_tokens=30, temperature=0, ignore_eos=True
                ),
                range(2),
            )
        )
    for i, run in enumerate(runs):
        assert list(run.token_ids) == greedy(oracle, prompt(9, seed=i), 30)
    assert min(run.usage.proposed for run in runs) == 0
    assert max(run.usage.proposed for run in runs) > 0
    assert pair.verifier.engine.status().counters["drafter_fault_proposal_not_finite"] > 0
    pair.expect_idle()


def test_an_id_is_taken_until_its_last_sample_has_ended(dense, serve):
    pair, client = serve(dense, "dflash2", draft_tokens=3, max_concurrency=1)
    both = client.stream(
        prompt_ids=prompt(5), n=2, max_tokens=200, temperature=0, ignore_eos=True, request_id="both"
    )
    for delta in both:
        if delta.finish is not None:
            break
    # sample 0 has ended; sample 1 runs or waits
    with pytest.raises(ClientError, match="REQUEST_ID_TAKEN"):
        client.generate(prompt_ids=prompt(7), max_tokens=1, request_id="both")
    both.cancel()
    pair.expect_idle()


def test_a_full_queue_refuses_with_advice_and_a_taken_id_is_refused(dense, serve):
    pair, client = serve(dense, "dflash2", draft_tokens=3, max_concurrency=1, max_queue=1)
    arguments = {"max_tokens": 480, "temperature": 0, "ignore_eos": True}
    first = client.stream(prompt_ids=prompt(5), request_id="first", **arguments)
    next(iter(first))
    with pytest.raises(ClientError, match="REQUEST_ID_TAKEN"):
        client.generate(prompt_ids=prompt(5), request_id="first", **arguments)
    with pytest.raises(ClientError, match="QUEUE_FULL") as refused:
        client.samples(prompt_ids=prompt(6), n=2, **arguments)
    assert refused.value.retry_after == 1.0
    with pytest.raises(InvalidRequestError, match=r"n: expected at most 2, .* got 3") as refused:
        client.samples(prompt_ids=prompt(6), n=3, **arguments)
    assert (refused.value.reason, refused.value.retry_after) == ("REQUEST_INVALID", None)
    first.cancel()
    pair.expect_idle()


def test_bad_requests_harm_nobody(dense, serve, oracle):
    pair, client = serve(dense, "dflash2", draft_tokens=3)
    bad = [
        {"prompt_ids": []},
        {"prompt_ids": [1], "max_tokens": 0},
        {"prompt_ids": [1], "max_tokens": -3},
        {"prompt_ids": [160]},
        {"prompt_ids": [-1]},
        {"prompt_ids": list(range(100)) * 6},
        {"prompt_ids": [1], "temperature": float("nan")},
        {"prompt_ids": [1], "top_p": 0.0},
        {"prompt_ids": [1], "stop": [""]},
        {"prompt_ids": [1], "draft_tokens": 4},
    ]
    with ThreadPoolExecutor(1) as pool:
        good = pool.submit(
            client.generate, prompt_ids=prompt(8), max_tokens=60, temperature=0, ignore_eos=True
        )
        for arguments in bad:
            with pytest.raises(InvalidRequestError):
                client.generate(**arguments)
        assert list(good.result().token_ids) == greedy(oracle, prompt(8), 60)
    pair.expect_idle()


def test_a_stop_inside_a_block_commits_exactly_the_tokens_before_its_end(dense, serve, oracle):
    pair, client = serve(dense, "dflash2", draft_tokens=7)
    ids = prompt(21)
    continuation = greedy(oracle, ids, 40)
    for index in (0, 1, 5, 17):
        stop = continuation[index]
        first = continuation.index(stop)
        completion = client.generate(
            prompt_ids=ids,
            max_tokens=40,
            temperature=0,
            ignore_eos=True,
            stop_token_ids=[stop],
            return_rounds=True,
        )
        assert list(completion.token_ids) == continuation[: first + 1]
        assert (completion.finish_reason, completion.matched) == ("stop", stop)
        assert sum(r.committed for r in completion.rounds) == first
    pair.expect_idle()


@pytest.mark.parametrize("options", [{}, {"draft_tokens": 0}, {"max_tokens": 1}], ids=str)
def test_the_server_counts_what_usages_say(dense, serve, options):
    """To the last round of a sample, as soon as its client has heard of the end."""
    pair, client = serve(dense, draft_tokens=3)
    wanted = {"max_tokens": 21, "temperature": 0, "ignore_eos": True} | options
    with ThreadPoolExecutor(3) as pool:
        runs = [
            pool.submit(client.generate, prompt_ids=prompt(9 + index), **wanted)
            for index in range(3)
        ]
    usages = [run.result().usage for run in runs]
    pair.expect_idle()
    counted = client.server_info().counters
    for name in ("output_tokens", "rounds", "proposed", "accepted"):
        assert counted.get(name, 0) == sum(getattr(usage, name) for usage in usages), name
