"""The acceptance's kernels draw what their reference draws."""

import pytest
import torch

from kernels.speculative_accept import kernel, speculative_accept
from kernels.speculative_accept.reference import speculative_accept as reference


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(kernel, "_CHUNK", 32)
    monkeypatch.setattr(kernel, "_PASS", 128)
    # short rankings, so that some draws go beyond them
    monkeypatch.setattr(kernel, "_TILE", 8)
    monkeypatch.setattr(kernel, "_RANKED", 4)


def case(random, B, K, k, *, V=70, support=None, seed=0):
    """Laws and candidates near each other, so that accepting and rejecting are both common."""
    generator = torch.Generator().manual_seed(seed)
    z = random(B, K + 1, V, scale=2.0)
    if support:
        z[z < z.topk(support, dim=2).values[..., -1:]] = float("-inf")
    p = z.softmax(dim=2)
    ids = torch.rand(B, K, V, generator=generator).argsort(dim=2)[..., :k]
    q = random(B, K, k).softmax(dim=2)
    proposals = ids[..., 0].clone()
    return [
        p,
        proposals,
        torch.randint(0, K + 1, (B,), generator=generator),
        ids,
        q,
        torch.randint(-(2**62), 2**62, (B,), generator=generator),
        torch.randint(0, 2**20, (B,), generator=generator),
    ]


def check(arguments):
    actual, expected = speculative_accept(*arguments), reference(*arguments)
    assert torch.equal(actual.tokens, expected[0])
    assert torch.equal(actual.accepted, expected[1])
    return actual


@pytest.mark.parametrize(("K", "support"), [(1, None), (4, 5)])
def test_sampled_rows_equal_reference(random, K, support):
    arguments = case(random, 10, K, 16, support=support)
    arguments[2][:6] = K
    actual = check(arguments)
    rejected = actual.accepted < arguments[2]
    assert rejected.any()
    assert not rejected.all()


def test_passes_of_any_number_draw_the_same(random, monkeypatch):
    monkeypatch.setattr(kernel, "_PASS", 32)
    check(case(random, 2, 1, 16))


def test_no_drafts_are_a_draw_from_p(random):
    check(case(random, 5, 0, 1))


def test_greedy_rows_equal_reference(random):
    arguments = case(random, 8, 3, 16)
    p = arguments[0]
    best = p.argmax(dim=2)
    arguments[0] = torch.zeros_like(p).scatter_(2, best.unsqueeze(2), 1.0)
    arguments[1], arguments[2] = best[:, :3].clone(), torch.full((8,), 3)
    for row in range(8):  # an error planted at every place, and nowhere
        arguments[1][row, row % 4 : row % 4 + 1] = (best[row, row % 4] + 1) % 70
    actual = check(arguments)
    assert actual.accepted.tolist() == [0, 1, 2, 3] * 2


def test_point_masses_padded_with_repeated_ids_equal_reference(random):
    arguments = case(random, 6, 2, 4)
    arguments[3][..., 1:] = arguments[3][..., :1]
    arguments[4][:] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    arguments[2][:] = 2
    check(arguments)


def test_equal_probabilities_are_drawn_in_the_order_of_ids(random):
    arguments = case(random, 3, 1, 4)
    arguments[0][:] = 1 / 64
    arguments[0][..., 64:] = 0.0
    check(arguments)


def test_where_p_equals_q_and_rejects_p_is_left(random):
    arguments = case(random, 4, 1, 16, V=16)
    p, proposals, live, ids, q, *_ = arguments
    p[:, 0, 15] = 0.0
    ids[:] = torch.arange(16)
    q[:] = p[:, :1]
    proposals[:] = 15
    live[:] = 1
    check(arguments)


def test_not_a_number_gives_some_id(random):
    arguments = case(random, 2, 2, 4)
    clean = speculative_accept(*arguments)
    arguments[0][0] = float("nan")
    tokens, _ = speculative_accept(*arguments)
    assert ((tokens >= 0) & (tokens < 70)).all()
    assert torch.equal(tokens[1], clean.tokens[1])


def test_row_does_not_depend_on_its_neighbours(random):
    arguments = case(random, 6, 3, 16)
    together = speculative_accept(*arguments)
    for row in (0, 5):
        alone = speculative_accept(*(x[row : row + 1] for x in arguments))
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert torch.equal(alone.accepted[0], together.accepted[row])
