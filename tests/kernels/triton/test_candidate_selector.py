"""The walk's kernel against its reference."""

import pytest
import torch

from kernels.candidate_selector import candidate_selector
from kernels.candidate_selector.reference import candidate_selector as reference


def case(random, B, P, k, R, temperatures, V=60):
    generator = torch.Generator().manual_seed(B * 100 + P)
    scores = random(B, P, k).sort(dim=2, descending=True).values
    ids = torch.stack([torch.randperm(V, generator=generator)[:k] for _ in range(B * P)])
    return [
        scores,
        ids.view(B, P, k),
        random(B, P, R),
        random(V, R, scale=0.5),
        random(V, R, scale=0.5),
        torch.randint(0, V, (B,), generator=generator),
        torch.tensor(temperatures),
        torch.randint(-(2**62), 2**62, (B,), generator=generator),
        torch.randint(0, 2**20, (B,), generator=generator),
    ]


@pytest.mark.parametrize(
    ("P", "k", "R"), [(1, 16, 8), (5, 16, 24), (4, 5, 7)], ids=lambda n: str(n)
)
def test_path_and_law_equal_reference(random, P, k, R):
    arguments = case(random, 5, P, k, R, [0.0, 1.0, 0.3, -1.0, 2.5])
    tokens, q = candidate_selector(*arguments)
    expected, law = reference(*arguments)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(q, law, rtol=2e-5, atol=2e-6)
    for row in (0, 3):
        assert torch.equal(q[row], law[row])  # one-hot, exactly


def test_ties_go_to_the_lowest_rank(random):
    arguments = case(random, 1, 2, 16, 4, [0.0])
    arguments[0][:] = 1.5
    arguments[3][:] = 0.0
    tokens, q = candidate_selector(*arguments)
    assert torch.equal(tokens[0], arguments[1][0, :, 0])
    assert (q[0, :, 0] == 1).all()


def test_row_is_the_same_bits_alone_shorter_and_among_others(random):
    arguments = case(random, 4, 5, 16, 12, [1.0, 0.7, 0.0, 1.3])
    tokens, q = candidate_selector(*arguments)
    for row in range(4):
        alone = [x if i in (3, 4) else x[row : row + 1] for i, x in enumerate(arguments)]
        alone[:3] = [x[:, :3] for x in alone[:3]]
        one_tokens, one_q = candidate_selector(*alone)
        assert torch.equal(one_tokens[0], tokens[row, :3])
        assert torch.equal(one_q[0], q[row, :3])


def test_what_is_not_finite_shows_in_the_law_and_ids_stay_valid(random):
    arguments = case(random, 2, 2, 16, 4, [1.0, 0.0])
    arguments[0][:, 1, 3] = float("nan")
    tokens, q = candidate_selector(*arguments)
    assert q[0, 1].isnan().any()
    assert all(tokens[row, 1] in arguments[1][row, 1] for row in range(2))


def test_no_positions(random):
    tokens, q = candidate_selector(*_empty(random))
    assert tokens.shape == (2, 0)
    assert q.shape == (2, 0, 16)


def _empty(random):
    arguments = case(random, 2, 1, 16, 4, [1.0, 0.0])
    return [x[:, :0] if i < 3 else x for i, x in enumerate(arguments)]
