"""The automatic choice of P against simulated costs and acceptance."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from verifier.draft_policy import FIRST_TRIAL, LAST_TRIAL, PLAIN_TRIAL, DraftPolicy


@dataclass
class Sample:
    drafted_gain: float | None = None


def run(policy, samples, rounds, plain_ns, drafted_ns, accepted, noise=0.0, seed=0):
    """Simulates rounds; returns (tokens, time, rounds that drafted)."""
    chosen = random.Random(seed)
    tokens = elapsed = drafting = 0
    for _ in range(rounds):
        drafts = policy.drafts(len(samples), samples)
        spent = drafted_ns if drafts else plain_ns
        spent = int(spent * (1 + noise * chosen.uniform(-1, 1)))
        tokens += len(samples)
        if drafts:
            drafting += 1
            for sample in samples:
                got = accepted(chosen)
                policy.committed(sample, got)
                tokens += got
        policy.round_ended(len(samples), spent, drafted=drafts)
        elapsed += spent
    return tokens, elapsed, drafting


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("ratio", [1.1, 1.5, 2.0])
def test_rejected_drafts_cost_three_percent_at_most(rows, ratio):
    policy, samples = DraftPolicy(), [Sample() for _ in range(rows)]
    tokens, elapsed, _ = run(policy, samples, 3000, 1000, int(1000 * ratio), lambda r: 0, 0.1)
    assert tokens / elapsed >= 0.97 * rows / 1000


@pytest.mark.parametrize("rows", [1, 8])
def test_accepted_drafts_are_used_nearly_always(rows):
    policy, samples = DraftPolicy(), [Sample() for _ in range(rows)]
    tokens, elapsed, drafting = run(
        policy, samples, 3000, 1000, 1500, lambda r: r.randrange(2, 6), 0.1
    )
    assert drafting >= 0.97 * 3000
    assert tokens / elapsed >= 0.97 * rows * 4.5 / 1500


def test_a_gain_that_does_not_cover_the_cost_is_left_alone():
    policy, samples = DraftPolicy(), [Sample()]
    _, _, drafting = run(policy, samples, 2000, 1000, 2000, lambda r: r.random() < 0.5)
    assert drafting < 0.05 * 2000


def test_the_choice_follows_the_text_both_ways():
    policy, samples = DraftPolicy(), [Sample()]
    run(policy, samples, 500, 1000, 1400, lambda r: 0)
    _, _, drafting = run(policy, samples, LAST_TRIAL + 10, 1000, 1400, lambda r: 3)
    assert drafting > 0, "a trial came within the longest pause"
    _, _, drafting = run(policy, samples, 300, 1000, 1400, lambda r: 3)
    assert drafting > 290
    _, _, drafting = run(policy, samples, 500, 1000, 1400, lambda r: 0)
    assert drafting < 50


def test_the_choice_follows_the_load():
    """Eight rows share a drafted round's cost, one does not; each number has its own times."""
    policy, one, eight = DraftPolicy(), [Sample()], [Sample() for _ in range(8)]
    for _ in range(4):
        _, _, alone = run(policy, one, 200, 1000, 2500, lambda r: 1)
        _, _, together = run(policy, eight, 200, 1000, 1200, lambda r: 1)
    assert alone < 20
    assert together > 180


def test_trials_become_rare_and_plain_times_are_refreshed():
    policy, samples = DraftPolicy(), [Sample()]
    run(policy, samples, 40, 1000, 3000, lambda r: 0)
    assert policy._trial > FIRST_TRIAL
    run(policy, samples, 3000, 1000, 3000, lambda r: 0)
    assert policy._trial == LAST_TRIAL
    fresh, samples = DraftPolicy(), [Sample()]
    _, _, drafting = run(fresh, samples, 4 * PLAIN_TRIAL, 1000, 1100, lambda r: 5)
    assert 4 * PLAIN_TRIAL - 12 <= drafting < 4 * PLAIN_TRIAL
