"""The automatic width of trees against simulated costs and acceptance."""

from __future__ import annotations

import random

import pytest

from verifier.tree_policy import FIRST_TRIAL, LAST_TRIAL, TreePolicy

WIDTHS, K = (12, 16, 24), 7


def branch(chosen, chance, columns):
    """Columns that a tree of so many accepts: along the chain, and then perhaps off it."""
    found = []
    while len(found) < K and chosen.random() < chance:
        found.append(len(found) + 1)
    side = chosen.randrange(K + 1, 26)
    if len(found) < K and side < columns:
        found.append(side)
    return found


def run(policy, rounds, cost, *, rows=1, frontier=100, noise=0.0, seed=0, chance=0.6):
    """Simulates rounds; how often each width was taken, tokens, and time in plain rounds."""
    chosen = random.Random(seed)
    taken = dict.fromkeys((0, *WIDTHS), 0)
    tokens, elapsed = 0, 0.0
    for _ in range(rounds):
        columns = policy.columns(rows, frontier)
        taken[columns] += 1
        for _ in range(rows):
            accepted = branch(chosen, chance, columns or K + 1)
            policy.committed(columns, accepted)
            tokens += 1 + len(accepted)
        spent = cost(columns) * (1 + noise * chosen.uniform(-1, 1))
        policy.round_ended(rows, frontier, columns, int(1e6 * spent))
        elapsed += spent
    return taken, tokens, elapsed


def test_every_width_is_measured_first_the_widest_before_all():
    policy = TreePolicy(WIDTHS)
    first = []
    for _ in range(12):
        first.append(policy.columns(1, 10))
        policy.committed(first[-1], [1])
        policy.round_ended(1, 10, first[-1], 1000)
    assert first == [24] * 3 + [16] * 3 + [12] * 3 + [0] * 3


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    ("cost", "best"),
    [
        (lambda n: 1.0, 24),
        (lambda n: 1 + 0.03 * (n > 12) + 0.4 * (n > 16), 16),
        (lambda n: 1 + 0.001 * (n == 12) + 0.5 * (n > 12), 12),
        (lambda n: 1 + 0.8 * (n > 0), 0),
    ],
    ids=["free", "16", "12", "chain"],
)
def test_the_width_with_most_tokens_a_second_is_taken_nearly_always(rows, cost, best):
    taken, _, _ = run(TreePolicy(WIDTHS), 3000, cost, rows=rows, noise=0.05)
    assert taken[best] > 0.9 * 3000
    assert min(taken.values()) >= 3


def test_trees_that_lose_cost_two_percent_at_most():
    taken, tokens, elapsed = run(TreePolicy(WIDTHS), 4000, lambda n: 1 + 0.05 * n, noise=0.05)
    _, chain_tokens, chain_elapsed = run(TreePolicy(()), 4000, lambda n: 1.0)
    assert tokens / elapsed > 0.98 * chain_tokens / chain_elapsed
    assert taken[0] > 0.97 * 4000


def test_what_a_narrower_tree_brings_is_learned_from_a_wider_one():
    policy = TreePolicy(WIDTHS)
    for _ in range(50):
        policy.committed(24, [1, 2, 13, 20])
    assert policy.tokens(0) == pytest.approx(3)
    assert [policy.tokens(width) for width in WIDTHS] == pytest.approx([3, 4, 5])
    for _ in range(20):
        policy.committed(0, [1, 2, 3])
    assert policy.tokens(24) - policy.tokens(0) == pytest.approx(2), "a chain says nothing of it"


def test_the_choice_follows_the_load_and_the_context():
    policy = TreePolicy(WIDTHS)
    run(policy, 100, lambda n: 1.0)
    run(policy, 100, lambda n: 1 + 0.1 * n, rows=4)
    run(policy, 100, lambda n: 1 + 0.1 * n, frontier=5000)
    assert policy.choices() == {
        "1 rows below 2048": 24.0,
        "4 rows below 2048": 0.0,
        "1 rows below 8192": 0.0,
    }


def test_a_change_of_costs_is_noticed():
    policy = TreePolicy(WIDTHS)
    run(policy, 500, lambda n: 1 + 0.1 * n)
    assert policy.columns(1, 100) in (0, *WIDTHS)
    taken, _, _ = run(policy, 3000, lambda n: 1.0)
    assert taken[24] > 0.5 * 3000


def test_trials_become_rare_while_they_change_nothing():
    policy = TreePolicy(WIDTHS)
    taken, _, _ = run(policy, 5000, lambda n: 1 + 0.1 * n)
    trials = sum(taken.values()) - taken[0] - 9
    # three rounds each, at 32, 64, 128, ... rounds
    assert 3 * 3 <= trials < 3 * 5000 / FIRST_TRIAL / 4
    assert FIRST_TRIAL < LAST_TRIAL


def test_rounds_without_a_tree_that_was_asked_for_are_chains():
    """A tail: trees are asked for and none fits."""
    policy = TreePolicy(WIDTHS)
    for _ in range(20):
        assert policy.columns(1, 10) == 24
        policy.round_ended(1, 10, 0, 1000)


@pytest.mark.parametrize(
    ("rows", "frontier", "times", "paying"),
    [
        (1, 1024, {0: 17.17, 12: 17.33, 16: 17.54}, {12, 16}),
        (4, 1024, {0: 19.03, 12: 20.49, 16: 21.59}, {0, 12, 16}),
        (8, 1024, {0: 21.16, 12: 26.13, 16: 27.83}, {0}),
        (1, 32768, {0: 17.90, 12: 19.05, 16: 19.41}, {12, 16}),
        (4, 32768, {0: 22.71, 12: 26.85, 16: 27.86}, {0}),
    ],
)
def test_on_a_device_s_times_trees_are_taken_where_they_pay(rows, frontier, times, paying):
    """Milliseconds of an H200, and branches as long as the bundled pair's (docs/performance.md)."""
    brought = {0: 3.96, 12: 4.36, 16: 4.52}
    policy, chosen, taken = TreePolicy((12, 16)), random.Random(1), dict.fromkeys(times, 0)
    tokens, elapsed = 0, 0.0
    for _ in range(2000):
        columns = policy.columns(rows, frontier)
        taken[columns] += 1
        for _ in range(rows):
            along = list(range(1, 1 + chosen.choices((2, 3, 4), (27, 50, 23))[0]))
            off = chosen.random()
            side = 9 if off < 0.40 else 13 if off < 0.56 else 99
            accepted = [*along, side] if side < columns else along
            tokens += 1 + len(accepted)
            policy.committed(columns, accepted)
        spent = times[columns] * chosen.uniform(0.99, 1.01)
        elapsed += spent
        policy.round_ended(rows, frontier, columns, int(1e6 * spent))
    fixed = max(rows * brought[width] / times[width] for width in times)
    assert tokens / elapsed > 0.98 * fixed
    assert sum(taken[width] for width in paying) > 0.9 * 2000
