"""Sampled output through both services has the target's law; a wrong q does not."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

import drafter.__main__ as drafter_process
from drafter.model import DraftBlock
from drafter.selector import Proposals
from kernels.rng import Purpose, uniform
from tests.system.conftest import prompt

VOCAB = 160
REJECT = 1e-6  # probability under which a law is refuted


def processed(
    logits: torch.Tensor, prompt_ids: Sequence[int], generated: Sequence[int], s: dict[str, Any]
) -> np.ndarray:
    """The processed law in float64, written anew from the documented order."""
    x = logits.double().numpy().copy()
    seen = set(prompt_ids) | set(generated)
    for token in seen:
        penalty = s.get("repetition_penalty", 1.0)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token, bias in s.get("logit_bias", {}).items():
        x[token] += bias
    for token, count in Counter(generated).items():
        x[token] -= s.get("presence_penalty", 0.0) + count * s.get("frequency_penalty", 0.0)
    x /= s["temperature"]
    order = np.lexsort((np.arange(len(x)), -x))
    if s.get("top_k"):
        order = order[: s["top_k"]]
    weights = np.exp(x[order] - x[order[0]])
    mass = weights.sum()
    kept = weights >= s.get("min_p", 0.0)
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
    kept &= before < s.get("top_p", 1.0) * mass
    p = np.zeros(len(x))
    p[order[kept]] = weights[kept] / weights[kept].sum()
    return p


def joint_law(oracle: torch.nn.Module, ids: list[int], s: dict[str, Any]) -> np.ndarray:
    """P(first, second) over the vocabulary, [V, V]."""
    with torch.inference_mode():
        first = processed(oracle(torch.tensor([ids])).logits[0, -1], ids, [], s)
        support = np.flatnonzero(first > 1e-12).tolist()
        following = oracle(torch.tensor([[*ids, token] for token in support])).logits[:, -1]
    joint = np.zeros((VOCAB, VOCAB))
    for row, token in enumerate(support):
        joint[token] = first[token] * processed(following[row], ids, [token], s)
    return joint


def goodness(pairs: Sequence[tuple[int, int]], joint: np.ndarray) -> float:
    """Least p-value of the observed pairs: of the first token, the second, and both together."""
    observed = np.zeros_like(joint)
    for first, second in pairs:
        observed[first, second] += 1
    assert observed[joint == 0].sum() == 0, "a token outside the law's support"
    return min(
        chi_square(observed.sum(1), joint.sum(1)),
        chi_square(observed.sum(0), joint.sum(0)),
        chi_square(observed.ravel(), joint.ravel()),
    )


def chi_square(observed: np.ndarray, law: np.ndarray) -> float:
    """p-value of counts against a law; cells expected under 5 times are pooled."""
    expected = law / law.sum() * observed.sum()
    large = expected >= 5
    cells = [*observed[large], observed[~large].sum()]
    wanted = [*expected[large], expected[~large].sum()]
    if wanted[-1] < 5:
        cells, wanted = cells[:-1], wanted[:-1]
        wanted = [w * sum(cells) / sum(wanted) for w in wanted]
    return float(scipy.stats.chisquare(cells, wanted).pvalue) if len(cells) > 1 else 1.0


def draws(client: Any, ids: list[int], s: dict[str, Any], count: int) -> Iterator[tuple[int, int]]:
    """First two tokens of ``count`` samples; the third gives the second a proposal."""
    for seed in range(count // 8):
        for completion in client.samples(
            prompt_ids=ids, max_tokens=3, seed=seed * 7919 + 1, n=8, ignore_eos=True, **s
        ):
            yield completion.token_ids[0], completion.token_ids[1]


SETTINGS = {
    "temperature": {"temperature": 0.5},
    "top-k-top-p": {"temperature": 0.7, "top_k": 12, "top_p": 0.85},
    "min-p": {"temperature": 0.6, "min_p": 0.15},
    "penalties": {
        "temperature": 0.5,
        "top_k": 30,
        "presence_penalty": 0.9,
        "frequency_penalty": 0.6,
        "repetition_penalty": 1.4,
        "logit_bias": {7: 1.5, 11: -3.0},
    },
}


class Tilted:
    """A selector that knows p(.|anchor) and proposes from a power of it: proposals often pass.

    With ``reported`` unequal to ``drawn`` the law on the wire is not the one drawn from.
    """

    def __init__(self, joint: np.ndarray, drawn: float, reported: float) -> None:
        self.p = torch.from_numpy(joint)
        self.drawn, self.reported = drawn, reported

    def select(self, hidden: torch.Tensor, block: DraftBlock) -> Proposals:
        rows, width = hidden.shape[0], block.most_live
        ids, drawn, reported = self.law(block.anchors)
        # keyed like the drafter's own draws, so that a run does not depend on who shares a batch
        positions = block.rows.frontiers[:, None] + torch.arange(width)
        u = uniform(block.seeds[:, None], positions, Purpose.PROPOSAL)
        ranks = (drawn.cumsum(1)[:, None] <= u[..., None]).sum(2).clamp_max(15)
        ids = ids[:, None].expand(rows, width, 16).contiguous()
        tokens = ids.gather(2, ranks[:, :, None])[:, :, 0]
        q = reported[:, None].expand(rows, width, 16).float().contiguous()
        return Proposals(tokens, torch.ones(rows, dtype=torch.bool), ids, q)

    def law(self, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        top = self.p[anchors].clamp_min(1e-30).topk(16)
        drawn, reported = top.values**self.drawn, top.values**self.reported
        drawn, reported = drawn / drawn.sum(1, True), reported / reported.sum(1, True)
        return top.indices, drawn.float(), reported.float()


def tilt(monkeypatch: pytest.MonkeyPatch, double: Tilted) -> None:
    monkeypatch.setattr(drafter_process, "selector_for", lambda config, weights: double)


@pytest.mark.parametrize(
    ("kind", "name"), [*(("dflash2", name) for name in SETTINGS), ("dflash", "penalties")]
)
def test_the_first_two_tokens_have_the_processed_law(dense, serve, oracle, kind, name):
    settings = SETTINGS[name]
    ids = prompt(12, seed=4)
    _, client = serve(dense, kind, draft_tokens=3, max_concurrency=8, max_queue=64)
    pairs = list(draws(client, ids, settings, 800))
    assert goodness(pairs, joint_law(oracle, ids, settings)) > REJECT


@pytest.mark.parametrize("reported", [4.0, 1.5], ids=["true-q", "wrong-q"])
def test_a_wrong_q_is_refuted_and_the_true_one_is_not(dense, serve, oracle, monkeypatch, reported):
    """A law of few tokens and a q far from it: corrections drawn from p would be refuted too."""
    settings = SETTINGS["top-k-top-p"]
    ids = prompt(12, seed=4)
    joint = joint_law(oracle, ids, settings)
    tilt(monkeypatch, Tilted(joint, 4.0, reported))
    _, client = serve(dense, "dflash2", draft_tokens=3, max_concurrency=8, max_queue=64)
    value = goodness(list(draws(client, ids, settings, 1000)), joint)
    assert (value > 1e-3) if reported == 4.0 else (value < REJECT)


def test_the_accept_rate_is_the_overlap_of_p_and_q(dense, serve, oracle, monkeypatch):
    settings = {"temperature": 0.5}
    ids = prompt(12, seed=9)
    joint = joint_law(oracle, ids, settings)
    double = Tilted(joint, 0.5, 0.5)
    tilt(monkeypatch, double)
    _, client = serve(dense, "dflash2", draft_tokens=1, max_concurrency=8, max_queue=64)
    accepted = total = 0
    expected = variance = 0.0
    for seed in range(60):
        for completion in client.samples(
            prompt_ids=ids,
            max_tokens=3,
            seed=seed,
            n=8,
            ignore_eos=True,
            return_rounds=True,
            **settings,
        ):
            first = completion.token_ids[0]
            candidates, q, _ = double.law(torch.tensor([first]))
            p = joint[first, candidates[0].numpy()] / joint[first].sum()
            overlap = np.minimum(p, q[0].numpy()).sum()
            accepted += completion.rounds[0].accepted
            total += 1
            expected += overlap
            variance += overlap * (1 - overlap)
    assert 0.1 < expected / total < 0.9
    assert abs(accepted - expected) < 5 * variance**0.5


def test_seeded_output_depends_on_the_request_alone(dense, serve):
    _, client = serve(dense, "dflash2", draft_tokens=3, max_concurrency=8, max_queue=64)
    arguments = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "ignore_eos": True}
    solo = [
        client.generate(prompt_ids=prompt(40, seed=i), seed=i, **arguments).token_ids
        for i in range(6)
    ]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(6) as pool:
        together = list(
            pool.map(
                lambda i: (
                    client.generate(prompt_ids=prompt(40, seed=i), seed=i, **arguments).token_ids
                ),
                range(6),
            )
        )
    assert together == solo
    assert len(set(solo)) == 6


def test_samples_of_one_request_differ_and_sample_0_is_the_seeds_own(dense, serve):
    _, client = serve(dense, "dflash2", draft_tokens=3, max_concurrency=4)
    arguments = {"prompt_ids": prompt(10), "max_tokens": 20, "temperature": 1.0, "seed": 5}
    samples = client.samples(**arguments, n=4, ignore_eos=True)
    alone = client.generate(**arguments, ignore_eos=True)
    assert samples[0].token_ids == alone.token_ids
    assert len({s.token_ids for s in samples}) == 4
    assert [s.usage.prompt_tokens for s in samples] == [10, 0, 0, 0]
    assert dataclasses.asdict(alone.usage)["seed"] == 5


def test_a_greedy_row_beside_a_sampled_one_is_still_greedy(dense, serve):
    _, client = serve(dense, "dflash2", draft_tokens=3, max_concurrency=2)
    ids = prompt(14)
    alone = client.generate(prompt_ids=ids, max_tokens=20, temperature=0, ignore_eos=True)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        for seed in range(10):
            sampled = pool.submit(
                client.generate,
                prompt_ids=ids,
                max_tokens=20,
                temperature=1.0,
                seed=seed,
                ignore_eos=True,
            )
            beside = pool.submit(
                client.generate, prompt_ids=ids, max_tokens=20, temperature=0, ignore_eos=True
            )
            assert beside.result().token_ids == alone.token_ids
            sampled.result()


def test_logprobs_come_from_the_verify_rows_with_and_without_drafting(dense, serve, oracle):
    _, client = serve(dense, "dflash2", draft_tokens=7)
    ids = prompt(20)
    arguments = {"prompt_ids": ids, "max_tokens": 32, "temperature": 0, "logprobs": 5}
    drafted = client.generate(**arguments, ignore_eos=True)
    plain = client.generate(**arguments, ignore_eos=True, draft_tokens=0)
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*ids, *drafted.token_ids]])).logits[0]
    reference = torch.log_softmax(logits.double(), -1)
    assert drafted.token_ids == plain.token_ids
    for index, (a, b) in enumerate(zip(drafted.logprobs, plain.logprobs, strict=True)):
        row = reference[len(ids) - 1 + index]
        assert a.logprob == pytest.approx(row[drafted.token_ids[index]].item(), abs=1e-4)
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        top = row.topk(5)
        assert a.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-4)
        assert a.top_token_ids[0] == top.indices[0]
