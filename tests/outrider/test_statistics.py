"""The laws and tests of fit that `outrider check` relies on, against scipy and the ops."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from scipy import stats

from kernels.target_distribution import SamplingRows, target_distribution
from outrider.cli.statistics import ChiSquare, Independence, Law, Rate

VOCAB = 60
LAWS = [
    Law(),
    Law(temperature=0.5),
    Law(top_k=5),
    Law(top_p=0.6, temperature=1.5),
    Law(min_p=0.2),
    Law(top_k=20, min_p=0.05, top_p=0.8, temperature=1.3),
    Law(presence_penalty=0.7, frequency_penalty=-0.4, repetition_penalty=1.4),
    Law(repetition_penalty=0.8, top_p=0.9),
]


def processed(law: Law, logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
    """p as the op that serves requests computes it."""

    def one(value: float) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.float32)

    def whole(value: int) -> torch.Tensor:
        return torch.tensor([value])

    counts = torch.zeros(1, VOCAB, dtype=torch.int32)
    for token_id in output:
        counts[0, token_id] += 1
    seen = torch.zeros(1, VOCAB, dtype=torch.bool)
    seen[0, prompt] = True
    rows = SamplingRows(
        temperature=one(law.temperature),
        top_p=one(law.top_p),
        min_p=one(law.min_p),
        presence_penalty=one(law.presence_penalty),
        frequency_penalty=one(law.frequency_penalty),
        repetition_penalty=one(law.repetition_penalty),
        top_k=whole(law.top_k),
        min_tokens=whole(0),
        output_index=whole(len(output)),
        lanes=whole(0),
        generated_counts=counts,
        prompt_seen=seen,
        logit_bias=torch.zeros(1, VOCAB),
        stop_mask=torch.zeros(1, VOCAB, dtype=torch.bool),
    )
    none = torch.zeros(1, 0, dtype=torch.int64)
    return target_distribution(logits.view(1, 1, -1), none, whole(1), rows, public_vocab=VOCAB)[
        0, 0
    ]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law}".replace("Law", ""))
@pytest.mark.parametrize("output", [[], [4], [4, 7, 4]], ids=lambda o: f"{len(o)}_out")
def test_a_law_is_what_the_op_computes(law, output):
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(len(output))) * 2
    prompt = [1, 2, 4, 9]
    restated = law.probabilities(logits, prompt, output)
    torch.testing.assert_close(
        restated.float(), processed(law, logits, prompt, output), atol=2e-6, rtol=1e-5
    )
    assert float(restated.sum()) == pytest.approx(1.0, abs=1e-12)


def test_a_law_keeps_the_lower_id_of_a_tie_at_the_edge():
    logits = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0])
    assert (Law(top_k=2).probabilities(logits, [], []) > 0).tolist() == [0, 1, 1, 0, 0]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law}".replace("Law", ""))
def test_what_rounding_moves_across_an_edge_was_undecided(law):
    """And little else is: a filter keeps its power over most of the vocabulary."""
    generator, tie, moved, undecided = torch.Generator().manual_seed(7), 0.25, 0, 0
    for _ in range(100):
        logits = torch.randn(VOCAB, generator=generator) * 2
        near = law.undecided(logits, [1, 2], [4], tie)
        rounded = logits + (torch.rand(VOCAB, generator=generator) - 0.5) * tie / 2
        before, after = (law.probabilities(z, [1, 2], [4]) > 0 for z in (logits, rounded))
        assert not ((before != after) & ~near).any()
        moved += int((before != after).sum())
        undecided += int(near.sum())
    filters = law.top_k or law.min_p or law.top_p < 1
    assert (moved > 0) == (undecided > 0) == bool(filters)
    assert undecided <= 100 * VOCAB / 5


@pytest.mark.parametrize("law", [Law(min_p=1e-4), Law(top_k=2), Law(top_p=0.99999)])
def test_far_from_an_edge_everything_is_decided(law):
    assert not law.undecided(torch.tensor([10.0, 5.0, -20.0, -30.0]), [], [], 0.125).any()


def drawn(p: torch.Tensor, count: int, seed: int) -> Counter[int]:
    generator = torch.Generator().manual_seed(seed)
    return Counter(torch.multinomial(p, count, replacement=True, generator=generator).tolist())


def test_the_chi_square_is_scipys_where_every_bin_is_large():
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    fit = ChiSquare()
    expected_statistic = 0.0
    for seed in range(3):
        observed = drawn(p, 200, seed)
        fit.add(observed, p)
        expected_statistic += stats.chisquare([observed[i] for i in range(4)], p * 200).statistic
    assert (fit.freedom, fit.observations, fit.impossible) == (9, 600, 0)
    assert fit.statistic == pytest.approx(expected_statistic)
    assert fit.p_value == pytest.approx(stats.chi2.sf(expected_statistic, 9))


def test_rare_tokens_share_bins_of_five():
    p = torch.cat([torch.tensor([0.5, 0.25]), torch.full((64,), 1 / 256)]).double()
    fit = ChiSquare()
    fit.add(drawn(p, 128, 0), p)
    # two bins of one token, and six of the rare ones: ten a bin, the last four in with the sixth
    assert fit.freedom == 7


def test_what_cannot_occur_is_counted_apart():
    fit = ChiSquare()
    fit.add({0: 50, 2: 3}, torch.tensor([0.5, 0.5, 0.0]).double())
    assert fit.impossible == 3


def test_one_possible_token_leaves_nothing_to_compare():
    fit = ChiSquare()
    fit.add({1: 50}, torch.tensor([0.0, 1.0]).double())
    assert (fit.freedom, fit.p_value, fit.impossible) == (0, 1.0, 0)


def test_p_values_are_small_as_often_as_they_should_be():
    p = torch.softmax(torch.randn(50, generator=torch.Generator().manual_seed(0)) * 2, 0).double()
    values = []
    for seed in range(300):
        fit = ChiSquare()
        fit.add(drawn(p, 150, seed), p)
        values.append(fit.p_value)
    assert stats.kstest(values, "uniform").pvalue > 0.01


def test_a_law_that_is_off_is_found():
    p = torch.tensor([0.4, 0.3, 0.2, 0.1]).double()
    fit = ChiSquare()
    fit.add(drawn(torch.tensor([0.3, 0.3, 0.2, 0.2]).double(), 600, 0), p)
    assert fit.p_value < 1e-6


def pairs(count: int, seed: int, *, tied: bool) -> list[tuple[int, int]]:
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(count, generator=generator)
    v = u if tied else torch.rand(count, generator=generator)
    left, right = (u**2 * 6).long(), (v**3 * 5).long()
    return list(zip(left.tolist(), right.tolist(), strict=True))


def test_independence_is_scipys_contingency_where_every_cell_is_large():
    table = [[30, 20], [25, 40]]
    fit = Independence()
    fit.add([(i, j) for i in range(2) for j in range(2) for _ in range(table[i][j])])
    expected = stats.chi2_contingency(table, correction=False)
    assert (fit.freedom, fit.statistic) == (1, pytest.approx(expected.statistic))
    assert fit.p_value == pytest.approx(expected.pvalue)


def test_independent_pairs_pass_and_tied_ones_do_not():
    values = []
    for seed in range(200):
        fit = Independence()
        for group in range(3):
            fit.add(pairs(60, 1000 * seed + group, tied=False))
        values.append(fit.p_value)
    assert 0.01 < sum(value < 0.05 for value in values) / 200 < 0.1
    fit = Independence()
    fit.add(pairs(60, 0, tied=True))
    assert fit.p_value < 1e-6


@pytest.mark.parametrize("group", [[], [(1, 2)], [(1, 2)] * 50, [(1, 2), (2, 2)] * 30])
def test_a_group_that_cannot_speak_adds_nothing(group):
    fit = Independence()
    fit.add(group)
    assert (fit.freedom, fit.p_value) == (0, 1.0)


def test_a_rate_is_judged_by_all_groups_together():
    rate = Rate()
    rate.add(48, 100, 0.5)
    rate.add(29, 100, 0.3)
    assert rate.p_value == pytest.approx(
        2 * stats.norm.sf((3 - 0.5) / (100 * 0.25 + 100 * 0.21) ** 0.5)
    )
    rate.add(60, 100, 0.1)
    assert rate.p_value < 1e-4


def test_a_certain_rate_allows_no_exception():
    rate = Rate()
    rate.add(100, 100, 1.0)
    assert rate.p_value == 1.0
    rate.add(99, 100, 1.0)
    assert rate.p_value == 0.0
