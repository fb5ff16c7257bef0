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
    """Simulates rounds; returns (tokens, time, rounds that drafted).

    As in the engine, what a round brought is known when the next one has been chosen.
    """
    chosen = random.Random(seed)
    tokens = elapsed = drafting = 0
    brought: list[int] = []
    for _ in range(rounds):
        drafts = policy.drafts(len(samples), samples)
        for sample, got in zip(samples, brought, strict=False):
            policy.committed(sample, got)
        spent = drafted_ns if drafts else plain_ns
        spent = int(spent * (1 + noise * chosen.uniform(-1, 1)))
        brought = [accepted(chosen) for _ in samples] if drafts else []
        drafting += drafts
        tokens += len(samples) + sum(brought)
        policy.round_ended(len(samples), spent, drafted=drafts)
        elapsed += spent
    for sample, got in zip(samples, brought, strict=False):
        policy.committed(sample, got)
    return tokens, elapsed, drafting


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("ratio", [1.1, 1.5, 2.0])
def test_rejected_drafts_cost_three_percent_at_most(rows, ratio):
    policy, samples = DraftPolicy(), [Sample() for _ in range(rows)]
    tokens, elapsed, _ = run(policy, samples, 3000, 1000, int(1000 * ratio), lambda r: 0, 0.1)
    assert tokens / elapsed >= 0.97 * rows / 1000


def moods(length: int, seed: int) -> list[float]:
    """Slowness of a shared machine, round by round: spells of up to three times the usual."""
    chosen, spells = random.Random(seed), []
    while len(spells) < length:
        slow = chosen.choice((1.0, 1.0, chosen.uniform(1.0, 3.0)))
        spells += [slow] * chosen.randrange(5, 80)
    return spells[:length]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ratio", [1.3, 2.0, 2.9])
def test_a_machine_s_moods_are_not_taken_for_costs(ratio, seed):
    """A slow spell of plain rounds must not make drafts look cheap that were timed before it."""
    policy, samples = DraftPolicy(), [Sample()]
    # what a server's first rounds cost is another test's
    run(policy, samples, 1000, 1000, int(1000 * ratio), lambda r: 0)
    spent = plain = 0.0
    for slow in moods(6000, seed):
        drafts = policy.drafts(1, samples)
        elapsed = 1000 * slow * (ratio if drafts else 1)
        if drafts:
            policy.committed(samples[0], 0)
        policy.round_ended(1, int(elapsed), drafted=drafts)
        spent += elapsed
        plain += 1000 * slow
    assert plain / spent >= 0.98


@pytest.mark.parametrize("ratio", [1.1, 1.35, 2.0, 2.9, 5.0])
def test_trials_cost_half_a_percent_and_come_as_often_as_that_allows(ratio):
    policy, samples = DraftPolicy(), [Sample()]
    run(policy, samples, 1500, 1000, int(1000 * ratio), lambda r: 0)
    _, elapsed, drafting = run(policy, samples, 5000, 1000, int(1000 * ratio), lambda r: 0)
    allowed = min(LAST_TRIAL, max(FIRST_TRIAL, (ratio - 1) / 0.005))
    assert drafting == pytest.approx(5000 / allowed, abs=1.5 + 0.1 * 5000 / allowed)
    assert elapsed <= 5000 * 1000 * (1.0075 if ratio < 3 else 1.01)


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
    assert policy._trial == 400  # a trial costs two plain rounds more: half a percent
    fresh, samples = DraftPolicy(), [Sample()]
    _, _, drafting = run(fresh, samples, 4 * PLAIN_TRIAL, 1000, 1100, lambda r: 5)
    assert 4 * PLAIN_TRIAL - 12 <= drafting < 4 * PLAIN_TRIAL
