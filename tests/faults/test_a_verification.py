"""Acceptance and sampling as a client sees them, with p and q of our choosing."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch

from kernels.rng import Purpose, uniform
from kernels.speculative_accept import reference
from outrider.client import Client
from tests.faults.doubles import (
    Foretelling,
    Lattice,
    Reporting,
    always,
    drawn_tokens,
    logits_of,
    misfit,
    overhear,
    plant,
    saying,
    scripted,
)
from tests.system.conftest import greedy, prompt
from tests.tiny_target import TEXT
from verifier.proposals import Drafted, Law, laws_of

REFUTED = 1e-6  # p-value under which a law is
ROUNDS = {"max_tokens": 480, "temperature": 1.0}
FEW_ROUNDS = {"max_tokens": 160, "temperature": 1.0}


def sharing(shared: Purpose | None):
    """`uniform` as acceptance calls it, with the correction's draws made under another purpose."""

    def drawn(seeds, positions, purposes):
        correction = (purposes == Purpose.CORRECTION) & (shared is not None)
        # the proposal that is checked for position F + 1 was drawn under the key F
        moved = positions - (correction & (shared == Purpose.PROPOSAL)).long()
        return uniform(seeds, moved, torch.where(correction, int(shared or 0), purposes))

    return drawn


@pytest.mark.parametrize(
    "shared", [None, Purpose.PROPOSAL, Purpose.ACCEPT], ids=["none", "proposal", "accept"]
)
def test_draft_accept_and_correction_draw_apart(dense, serve, monkeypatch, shared):
    """A1: P=1, p=[.2, .5, .3], q=[.6, .3, .1]: separate draws keep p, and shared ones are seen."""
    p, q = {0: 0.2, 1: 0.5, 2: 0.3}, {0: 0.6, 1: 0.3, 2: 0.1}
    scripted(monkeypatch, always(logits_of(p)))
    plant(monkeypatch, Lattice(logits_of(q)))
    monkeypatch.setattr(reference, "uniform", sharing(shared))
    _, client = serve(dense, draft_tokens=1, max_concurrency=8)
    if shared is not None:
        assert misfit(drawn_tokens(client, prompt(4), 1, **FEW_ROUNDS).first, p) < REFUTED
        return
    drawn = drawn_tokens(client, prompt(4), 2, **ROUNDS)
    # enough to refute [.201, .468, .332], which is what sharing one noise vector gives
    assert len(drawn.first) > 4000
    assert misfit(drawn.first, p) > 1e-3
    # bonus tokens too: with one p everywhere, all tokens are draws from it
    assert misfit(drawn.all, p) > 1e-3
    # sum of min(p, q)
    rate = sum(drawn.accepted) / len(drawn.accepted)
    assert abs(rate - 0.6) < 4 * math.sqrt(0.24 / len(drawn.accepted))


def test_the_draws_of_one_block_are_independent(dense, serve, monkeypatch):
    """A1: P=3; one number used for two positions would tie the tokens of a block together."""
    p, q = {0: 0.2, 1: 0.5, 2: 0.3}, {0: 0.6, 1: 0.3, 2: 0.1}
    scripted(monkeypatch, always(logits_of(p)))
    plant(monkeypatch, Lattice(logits_of(q)))
    _, client = serve(dense, draft_tokens=3, max_concurrency=8)
    tokens = drawn_tokens(client, prompt(5), 1, **ROUNDS).all
    pairs = [3 * first + second for first, second in zip(tokens[::2], tokens[1::2], strict=True)]
    assert len(pairs) > 1800
    assert misfit(pairs, {3 * a + b: p[a] * p[b] for a in p for b in p}) > 1e-3


@pytest.mark.parametrize("reported", ["drawn", "unfiltered"])
def test_only_the_q_that_was_drawn_from_keeps_the_law(dense, serve, monkeypatch, reported):
    """A2: drawn from [.6, .4, 0]; reporting [.48, .32, .2] instead publishes [.625, .375, 0]."""
    p, drawn = {0: 0.5, 1: 0.3, 2: 0.2}, {0: 0.6, 1: 0.4, 2: 0.0}
    scores = {0: math.log(0.6), 1: math.log(0.4), 2: -200.0}  # the last rank has no mass in FP32
    told = drawn if reported == "drawn" else {0: 0.48, 1: 0.32, 2: 0.2}
    scripted(monkeypatch, always(logits_of(p)))
    plant(monkeypatch, Reporting(scores, told))
    _, client = serve(dense, draft_tokens=1, max_concurrency=8)
    tokens = drawn_tokens(client, prompt(4), 1, **FEW_ROUNDS).first
    if reported == "drawn":
        assert misfit(tokens, p) > 1e-3
        return
    assert misfit(tokens, p) < REFUTED
    assert misfit(tokens, {0: 0.625, 1: 0.375, 2: 0.0}) > 1e-3


@pytest.mark.parametrize(
    "reported",
    [
        pytest.param({0: 0.6, 1: 0.39998}, id="sum-off-by-2e-5"),
        pytest.param({0: 0.0, 1: 1.0}, id="drafted-token-outside-the-support"),
    ],
)
def test_a_q_that_cannot_have_been_drawn_from_is_dropped(
    dense, serve, oracle, monkeypatch, reported
):
    """A2: such a proposal is counted and its round runs plainly; the output is the target's."""
    # token 0 is drawn every time
    plant(monkeypatch, Reporting({0: 50.0, 1: -50.0}, reported))
    pair, client = serve(dense, draft_tokens=1)
    completion = client.generate(
        prompt_ids=prompt(9), max_tokens=12, temperature=0, ignore_eos=True
    )
    assert list(completion.token_ids) == greedy(oracle, prompt(9), 12)
    assert completion.usage.proposed == 0
    assert pair.verifier.engine.status().counters["drafter_fault_proposal_invalid"] == 10


def law_of(drafted: Drafted) -> Law:
    """What a proposal was drawn from, as a round decodes it."""
    (law,) = laws_of([drafted], TEXT["vocab_size"])
    assert isinstance(law, Law)
    return law


def test_q_on_the_wire_is_the_fp32_law_that_was_drawn_from(dense, serve, monkeypatch):
    """A3: scores 10.00 and 10.02, equal in BF16, in the BF16 profile; the law published is p."""
    p = {0: 0.3, 1: 0.7}
    scripted(monkeypatch, always(logits_of(p)))
    lattice = Lattice({0: 10.02, 1: 10.0})
    plant(monkeypatch, lattice)
    heard = overhear(monkeypatch)
    _, client = serve(dense, draft_tokens=1, max_concurrency=8, dtype="bfloat16")
    tokens = drawn_tokens(client, prompt(4), 1, **ROUNDS).first
    for _, drafted in heard.proposals:
        assert torch.equal(law_of(drafted).probabilities, lattice.reported[0][0])
    q = lattice.reported[0][0, 0].double()
    assert q.tolist() == pytest.approx(torch.tensor([10.02, 10.0]).double().softmax(0).tolist())
    assert q[0] > q[1]
    drafts = [drafted.token_ids[0] for _, drafted in heard.proposals]
    deviation = math.sqrt(0.25 / len(drafts))
    assert abs(drafts.count(0) / len(drafts) - float(q[0])) < 3 * deviation
    assert abs(tokens.count(0) / len(tokens) - 0.3) < 3 * math.sqrt(0.21 / len(tokens))


def test_a_greedy_row_in_a_mixed_batch_is_greedy_every_time(dense, serve, oracle, monkeypatch):
    """A5: T=0 and T=1 on one prompt, 50 times: one-hot q, and the tokens of plain decoding."""
    heard = overhear(monkeypatch)
    _, client = serve(dense, draft_tokens=3, max_concurrency=2)
    expected = greedy(oracle, prompt(6), 8)
    done = threading.Event()
    failures: list[BaseException] = []

    def sample() -> None:
        try:
            for seed in itertools.count():
                stream = client.stream(
                    prompt_ids=prompt(6), max_tokens=200, seed=seed, ignore_eos=True
                )
                for _ in stream:
                    if done.is_set():
                        stream.cancel()
                        return
        except BaseException as error:
            failures.append(error)
            raise

    neighbour = threading.Thread(target=sample)
    neighbour.start()
    try:
        for _ in range(50):
            completion = client.generate(
                prompt_ids=prompt(6), max_tokens=8, temperature=0, ignore_eos=True
            )
            assert list(completion.token_ids) == expected
    finally:
        done.set()
        neighbour.join()
    assert not failures
    assert sum(batch in ((0.0, 1.0), (1.0, 0.0)) for batch in heard.batches) > 50
    for ask, drafted in heard.proposals:
        law = law_of(drafted)
        hot = law.candidate_ids == torch.tensor(drafted.token_ids)[:, None]
        if ask.temperature == 0:
            assert torch.equal(law.probabilities, hot.float())
        else:
            assert not torch.equal(law.probabilities, hot.float())


A, B, STOP, OTHER = 11, 12, 13, 14


def test_penalties_see_the_drafts_before_each_position(dense, serve, monkeypatch):
    """A8: presence 1.0, logits A=2.0 and B=1.5 at both positions, drafts [A, A]: A, then B."""
    either, other = always({A: 2.0, B: 1.5}), always({OTHER: 9.0})

    def law(positions: torch.Tensor) -> torch.Tensor:
        # the prompt's own token is another one, so that A and B have no history
        return torch.where(positions[..., None] == 2, other(positions), either(positions))

    scripted(monkeypatch, law)
    plant(monkeypatch, Foretelling([0] * 4 + [A] * 3))
    _, client = serve(dense, "dflash", draft_tokens=2)
    wanted = {"prompt_ids": [3, 3, 3], "max_tokens": 4, "temperature": 0, "presence_penalty": 1.0}
    completion = client.generate(**wanted, return_rounds=True)
    assert completion.token_ids[:3] == (OTHER, A, B)
    assert (completion.rounds[0].proposed, completion.rounds[0].accepted) == ((A, A), 1)
    assert completion.token_ids == client.generate(**wanted, draft_tokens=0).token_ids


@pytest.mark.parametrize("wrong", [(99,), (2,), (0, 1)], ids=["accepted", "2-of-5", "mixed"])
def test_min_tokens_counts_tokens_and_not_rounds(dense, serve, monkeypatch, wrong):
    """A8: the stop is the best token throughout and comes as soon as five others are out."""
    scripted(monkeypatch, always({STOP: 3.0, A: 2.0}))
    plant(monkeypatch, Foretelling([0] * 3 + [A] * 5 + [STOP] * 40, wrong))
    _, client = serve(dense, "dflash", draft_tokens=5)
    completion = client.generate(
        prompt_ids=[3, 3, 3],
        max_tokens=40,
        min_tokens=5,
        temperature=0,
        stop_token_ids=[STOP],
    )
    assert completion.token_ids == (A, A, A, A, A, STOP)
    assert completion.finish_reason == "stop"


def drafted_and_plain(client: Client, ids: list[int], **options):
    arguments = {"prompt_ids": ids, "max_tokens": 32, "logprobs": 5, "ignore_eos": True, **options}
    return client.generate(**arguments), client.generate(**arguments, draft_tokens=0)


def test_logprobs_are_those_of_verify_rows_for_accepted_and_corrected_tokens(
    dense, serve, oracle, monkeypatch
):
    """A9: T=0, five alternatives, 32 tokens, with drafts of every fate and without."""
    ids = prompt(20)
    continuation = greedy(oracle, ids, 40)
    plant(monkeypatch, Foretelling([*ids, *continuation], wrong=(2, 0, 7, 4)))
    _, client = serve(dense, "dflash", draft_tokens=7)
    drafted, plain = drafted_and_plain(client, ids, temperature=0)
    assert drafted.token_ids == plain.token_ids
    assert {"accepted", "correction", "bonus"} <= set(drafted.origins)
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*ids, *drafted.token_ids]])).logits[0, len(ids) - 1 :]
    law = logits.double().log_softmax(1)
    for index, (ours, theirs) in enumerate(zip(drafted.logprobs, plain.logprobs, strict=True)):
        assert ours.top_token_ids == theirs.top_token_ids
        assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-4)
        assert ours.logprob == pytest.approx(float(law[index, drafted.token_ids[index]]), abs=1e-4)
        assert ours.logprob < -0.01


def test_logprobs_of_the_bfloat16_profile_match_plain_decoding(dense, serve):
    """A9: within 1e-2."""
    _, client = serve(dense, draft_tokens=7, dtype="bfloat16")
    drafted, plain = drafted_and_plain(client, prompt(20), temperature=0)
    same = [a == b for a, b in zip(drafted.token_ids, plain.token_ids, strict=True)]
    alike = same.index(False) if False in same else len(same)
    assert alike >= 8, "too few tokens to compare"
    for ours, theirs in zip(drafted.logprobs[:alike], plain.logprobs[:alike], strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-2)


def test_said_tokens_are_what_the_double_says(dense, serve, monkeypatch):
    """The double above works: the target says a script, with proposals and without."""
    scripted(monkeypatch, saying([3, 3], [10, 11, 12, 13, 14, 15]))
    _, client = serve(dense, draft_tokens=3)
    for draft_tokens in (3, 0):
        completion = client.generate(
            prompt_ids=[3, 3], max_tokens=6, temperature=0, draft_tokens=draft_tokens
        )
        assert completion.token_ids == (10, 11, 12, 13, 14, 15)
