"""From logits to tokens: the laws, the draws and their keys, over the official vocabulary."""

import pytest
import torch

from kernels.candidate_selector import candidate_selector
from kernels.candidate_selector.reference import candidate_selector as selector_reference
from kernels.rng import Purpose, uniform
from kernels.rng.reference import uniform as uniform_reference
from kernels.rows_finite import rows_finite
from kernels.speculative_accept import speculative_accept
from kernels.speculative_accept.reference import speculative_accept as accept_reference
from kernels.target_distribution import SamplingRows, target_distribution
from kernels.target_distribution.reference import (
    target_distribution as distribution_reference,
)
from kernels.token_logprobs import token_logprobs
from kernels.token_logprobs.reference import token_logprobs as logprobs_reference
from tests.kernels.gpu.shared import BF16, FP32, NAN, on_device
from tests.kernels.triton import test_candidate_selector as selector
from tests.kernels.triton import test_speculative_accept as accept
from tests.kernels.triton import test_target_distribution as distribution

pytestmark = pytest.mark.gpu
VOCAB, PUBLIC = 248320, 248077


@pytest.mark.parametrize("count", [1, 255, 100_000])
def test_draws_equal_the_reference_bit_for_bit(count):
    generator = torch.Generator("cuda").manual_seed(count)
    draw = {"generator": generator, "device": "cuda"}
    seeds, positions = torch.randint(-(2**62), 2**62, (2, count), **draw)
    purposes = torch.arange(6, device="cuda").unsqueeze(1)
    sub = torch.randint(0, 2**33, (count,), **draw)
    expected = uniform_reference(seeds, positions, purposes, sub)
    assert torch.equal(uniform(seeds, positions, purposes, sub), expected)
    assert torch.equal(uniform(seeds, positions, Purpose.ACCEPT, sub), expected[Purpose.ACCEPT])


@pytest.mark.parametrize(("B", "P"), [(8, 15), (1, 7), (3, 1)])
def test_what_is_not_finite_is_found_wherever_it_stands(random, B, P):
    hidden, scores = random(B, P + 1, 5120), random(B, P, 16, dtype=FP32)
    hidden[:, 0] = NAN
    parts = hidden[:, 1:], scores, random(B, P, 256)
    counts = torch.arange(P, P - B, -1, device="cuda").clamp_min(0)
    for values, at in ((hidden[:, 1:], 5119), (scores, 15), (parts[2], 0)):
        for row in range(B):
            live = int(counts[row])
            assert rows_finite(*((counts, part) for part in parts)).all()
            for position in {0, live - 1, live} & set(range(P)):
                kept = values[row, position, at].clone()
                values[row, position, at] = float("inf")
                found = rows_finite(*((counts, part) for part in parts)).tolist()
                assert found == [other != row or position >= live for other in range(B)]
                values[row, position, at] = kept


@pytest.mark.parametrize(("B", "P", "R"), [(8, 15, 256), (1, 7, 256), (3, 0, 8)])
def test_walk_of_candidates(host_random, B, P, R):
    temperatures = [0.0, 1.0, 0.3, -1.0, 2.5, 0.7, 1.3, 0.0][:B]
    x = on_device(selector.case(host_random, B, max(P, 1), 16, R, temperatures, V=5000))
    x[2:5] = [part.to(BF16) for part in x[2:5]]
    x[:3] = [part[:, :P] for part in x[:3]]
    tokens, law = candidate_selector(*x)
    expected, wanted = selector_reference(*x)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(law, wanted, rtol=2e-5, atol=2e-6)
    for row in range(0, B, 3):
        alone = [part if i in (3, 4) else part[row : row + 1] for i, part in enumerate(x)]
        one, one_law = candidate_selector(*alone)
        assert torch.equal(one[0], tokens[row])
        assert torch.equal(one_law[0], law[row])


@pytest.mark.parametrize(("B", "K", "support"), [(6, 7, None), (6, 7, 20), (3, 0, None)])
def test_acceptance(host_random, B, K, support):
    x = on_device(accept.case(host_random, B, K, 16, V=VOCAB, support=support))
    x[2][: B // 2] = K
    together = speculative_accept(*x)
    tokens, accepted = accept_reference(*x)
    assert torch.equal(together.accepted, accepted)
    # a draw within a sum's rounding of a boundary may fall to the neighbour
    assert (together.tokens == tokens).float().mean() > 0.9
    for row in (0, B - 1):
        alone = speculative_accept(*(part[row : row + 1] for part in x))
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert torch.equal(alone.accepted[0], together.accepted[row])


def test_greedy_acceptance_finds_an_error_at_every_place():
    K, B = 7, 8
    best = torch.randint(0, PUBLIC, (B, K + 1), device="cuda")
    p = torch.zeros(B, K + 1, VOCAB, device="cuda").scatter_(2, best.unsqueeze(2), 1.0)
    proposals = best[:, :K].clone()
    rows = torch.arange(K, device="cuda")
    proposals[rows, rows] += 1
    ids = proposals.unsqueeze(2).expand(B, K, 16)
    law = torch.zeros(B, K, 16, device="cuda")
    law[..., 0] = 1.0
    live, seeds = torch.full((B,), K, device="cuda"), torch.arange(B, device="cuda")
    actual = speculative_accept(p, proposals, live, ids.contiguous(), law, seeds, seeds)
    assert actual.accepted.tolist() == list(range(K + 1))
    for row in range(B):
        assert torch.equal(actual.tokens[row, : row + 1], best[row, : row + 1])
        assert not actual.tokens[row, row + 1 :].any()


def on_device_rows(rows):
    return SamplingRows(**on_device(vars(rows)))


def test_every_wish_over_the_official_vocabulary(random):
    B, W = len(distribution.WISHES), 2
    logits = random(B, W, VOCAB, dtype=FP32, scale=2.0)
    logits[..., PUBLIC:] = NAN
    proposals = torch.full((B, 1), 4, device="cuda")
    counts = torch.tensor([2, 2, 1, 0] * 5, device="cuda")[:B]
    rows = on_device_rows(distribution.rows_of(list(distribution.WISHES.values()), vocab=VOCAB))
    actual = target_distribution(logits, proposals, counts, rows, public_vocab=PUBLIC)
    expected = distribution_reference(logits, proposals, counts, rows, public_vocab=PUBLIC)
    # where a filter's boundary falls between two sums of other orders, one id more or less stays
    assert (actual - expected).abs().sum(dim=-1).max() < 1e-4
    apart = ((actual == 0) != (expected == 0)).sum(dim=-1)
    assert apart.max() <= VOCAB // 1000
    for row, count in enumerate(counts.tolist()):
        assert not actual[row, count:].any()
    for row in (1, 12):
        part = slice(row, row + 1)
        one = SamplingRows(**{n: v[part] if v.ndim == 1 else v for n, v in vars(rows).items()})
        alone = target_distribution(
            logits[part, :1], proposals[part], counts[part].clamp_max(1), one, public_vocab=PUBLIC
        )
        assert torch.equal(alone[0, 0], actual[row, 0])


@pytest.mark.parametrize("top", [0, 5, 20])
def test_log_probabilities(random, top):
    logits = random(16, VOCAB, dtype=FP32, scale=3.0)
    logits[:, [7, 70_000, 200_000]] = 50.0
    logits[:, PUBLIC:] = NAN
    tokens = torch.randint(0, PUBLIC, (16,), device="cuda")
    actual = token_logprobs(logits, tokens, top, public_vocab=PUBLIC)
    expected = logprobs_reference(logits, tokens, top, public_vocab=PUBLIC)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual[2], expected[2], rtol=1e-5, atol=1e-5)
    alone = token_logprobs(logits[9:10], tokens[9:10], top, public_vocab=PUBLIC)
    for one, all_of_them in zip(alone, actual, strict=True):
        assert torch.equal(one[0], all_of_them[9])
