"""The conditional walk: its formula, its ties, and that q is the law it drew from."""

import math

import pytest
import torch
from scipy.stats import chi2

from kernels.candidate_selector import candidate_selector, reference
from kernels.rng import Purpose, uniform


def lattice(rows, positions, k, rank, vocab, *, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    scores = (2 * torch.randn(rows, positions, k, generator=g)).sort(dim=2, descending=True).values
    ids = torch.stack(
        [torch.randperm(vocab, generator=g)[:k] for _ in range(rows * positions)]
    ).view(rows, positions, k)
    projected = torch.randn(rows, positions, rank, generator=g)
    books = [scale * torch.randn(vocab, rank, generator=g) for _ in range(2)]
    anchors = torch.randint(vocab, (rows,), generator=g)
    return [scores, ids, projected, *books, anchors]


def walk(inputs, temperatures, seeds, frontiers):
    return candidate_selector(
        *inputs,
        torch.as_tensor(temperatures, dtype=torch.float32),
        torch.as_tensor(seeds),
        torch.as_tensor(frontiers),
    )


def restated_edges(inputs, row, position, previous):
    """Edges [k] from one predecessor token, in FP64."""
    scores, ids, projected, left, right, _ = inputs
    return [
        float(scores[row, position, c])
        + math.fsum(
            float(left[previous, r])
            * float(projected[row, position, r])
            * float(right[ids[row, position, c], r])
            for r in range(left.shape[1])
        )
        for c in range(scores.shape[2])
    ]


def restated_law(edges, temperature):
    top = max(edges)
    weights = [math.exp((edge - top) / temperature) for edge in edges]
    return [weight / math.fsum(weights) for weight in weights]


@pytest.mark.parametrize(
    ("rows", "positions", "k", "rank"), [(1, 1, 1, 1), (1, 7, 16, 8), (5, 4, 6, 3)]
)
@pytest.mark.parametrize("temperature", [0.0, -1.0, 0.3, 1.0, 2.5])
def test_equals_the_walk_in_fp64(rows, positions, k, rank, temperature):
    inputs = lattice(rows, positions, k, rank, 40)
    seeds, frontiers = list(range(100, 100 + rows)), list(range(7, 7 + rows))
    tokens, q = walk(inputs, [temperature] * rows, seeds, frontiers)
    for row in range(rows):
        previous = int(inputs[5][row])
        for i in range(positions):
            edges = restated_edges(inputs, row, i, previous)
            ids = inputs[1][row, i].tolist()
            choice = ids.index(int(tokens[row, i]))
            if temperature <= 0:
                assert choice == edges.index(max(edges))
                assert q[row, i].tolist() == [float(c == choice) for c in range(k)]
            else:
                law = restated_law(edges, temperature)
                for c in range(k):
                    assert q[row, i, c].item() == pytest.approx(law[c], abs=2e-6, rel=2e-5)
                u = uniform(seeds[row], frontiers[row] + i, Purpose.PROPOSAL, 0).item()
                # the token drawn must fit q through its inclusive sums, but for their rounding
                reached = math.fsum(law[: choice + 1])
                assert reached - law[choice] - 1e-5 <= u <= reached + 1e-5
            previous = ids[choice]


def test_equal_edges_go_to_the_lowest_rank():
    inputs = lattice(3, 4, 8, 2, 20)
    inputs[0].fill_(1.5)
    for book in inputs[3:5]:
        book.zero_()
    tokens, q = walk(inputs, [0.0] * 3, [1, 2, 3], [0, 0, 0])
    assert torch.equal(tokens, inputs[1][:, :, 0])
    assert (q[..., 0] == 1).all()
    assert (q[..., 1:] == 0).all()


def test_walk_follows_the_token_chosen_not_the_best_predecessor():
    """Successor 1 follows only predecessor 3: the drawn path decides what comes next."""
    scores = torch.tensor([[[0.0, -1.0], [0.0, 0.0]]])
    ids = torch.tensor([[[2, 3], [0, 1]]])
    left, right = torch.zeros(4, 1), torch.zeros(4, 1)
    left[3], right[1] = 10.0, 10.0
    inputs = [scores, ids, torch.ones(1, 2, 1), left, right, torch.tensor([0])]
    seen = set()
    for seed in range(60):
        tokens, _ = walk(inputs, [1.0], [seed], [0])
        seen.add(tuple(tokens[0].tolist()))
    assert (3, 1) in seen
    assert (3, 0) not in seen
    assert {(2, 0), (2, 1)} <= seen


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_draw_at_either_end_takes_a_rank_with_mass(u, monkeypatch):
    inputs = lattice(1, 3, 8, 2, 20)
    inputs[0][:, :, 5:] = -1e9
    monkeypatch.setattr(
        reference, "uniform", lambda seeds, positions, *_: torch.full(positions.shape, u)
    )
    tokens, q = walk(inputs, [0.5], [0], [0])
    for i in range(3):
        rank = inputs[1][0, i].tolist().index(int(tokens[0, i]))
        assert q[0, i, rank] > 0
        assert q[0, i, :rank].sum() <= u
        assert rank == 0 if u == 0.0 else q[0, i, rank + 1 :].sum() < 1e-6


@pytest.mark.parametrize(("u", "rank"), [(0.5 - 2**-24, 0), (0.5, 1)])
def test_a_draw_equal_to_a_cumulative_sum_takes_the_next_rank(u, rank, monkeypatch):
    inputs = lattice(1, 3, 2, 2, 20)
    inputs[0].zero_()
    inputs[3].zero_()
    monkeypatch.setattr(
        reference, "uniform", lambda seeds, positions, *_: torch.full(positions.shape, u)
    )
    tokens, q = walk(inputs, [1.0], [0], [0])
    assert (q == 0.5).all()
    assert torch.equal(tokens, inputs[1][:, :, rank])


def test_sum_below_the_draw_falls_back_to_the_last_rank_with_mass(monkeypatch):
    inputs = lattice(1, 1, 8, 2, 20)
    inputs[0][:, :, 5:] = -1e9
    monkeypatch.setattr(
        reference, "uniform", lambda seeds, positions, *_: torch.full(positions.shape, 2.0)
    )
    tokens, _ = walk(inputs, [0.5], [0], [0])
    assert tokens.item() == inputs[1][0, 0, 4]


def test_greedy_rows_are_one_hot_and_untouched_by_sampled_neighbours():
    inputs = lattice(4, 7, 16, 8, 60)
    temperatures, seeds, frontiers = [0.0, 1.0, 0.0, 0.6], [5, 6, 7, 8], [10, 20, 30, 40]
    tokens, q = walk(inputs, temperatures, seeds, frontiers)
    for row in range(4):
        part = [x[row : row + 1] for x in inputs[:3]] + inputs[3:5] + [inputs[5][row : row + 1]]
        alone, alone_q = walk(part, [temperatures[row]], [seeds[row]], [frontiers[row]])
        assert torch.equal(alone[0], tokens[row])
        assert torch.equal(alone_q[0], q[row])
    assert q[[0, 2]].unique().tolist() == [0.0, 1.0]
    assert (q[[0, 2]].sum(dim=2) == 1).all()
    for _ in range(50):
        again, again_q = walk(inputs, temperatures, seeds, frontiers)
        assert torch.equal(again, tokens)
        assert torch.equal(again_q, q)


def test_scores_that_are_not_finite_concern_their_own_row():
    inputs = lattice(3, 4, 16, 8, 60)
    clean, clean_q = walk(inputs, [1.0, 1.0, 0.0], [1, 2, 3], [0, 0, 0])
    inputs[0][1] = torch.nan
    tokens, q = walk(inputs, [1.0, 1.0, 0.0], [1, 2, 3], [0, 0, 0])
    assert q[1].isnan().any()
    assert torch.equal(tokens[[0, 2]], clean[[0, 2]])
    assert torch.equal(q[[0, 2]], clean_q[[0, 2]])


def test_no_positions_give_no_tokens():
    inputs = lattice(2, 1, 4, 2, 20)
    empty = [x[:, :0] for x in inputs[:3]] + inputs[3:]
    tokens, q = walk(empty, [1.0, 0.0], [1, 2], [0, 0])
    assert tokens.shape == (2, 0)
    assert q.shape == (2, 0, 4)


def test_paths_follow_the_product_of_the_reported_laws():
    """50,000 seeds over one lattice: each path as often as its conditional laws say."""
    count, k = 50_000, 4
    one = lattice(1, 2, k, 3, 20, scale=0.5)
    rows = [x.expand(count, *x.shape[1:]) for x in one[:3]]
    tokens, q = walk(
        [*rows, *one[3:5], one[5].expand(count)],
        torch.full((count,), 3.0),
        torch.arange(count),
        torch.full((count,), 55),
    )
    ranks = (one[1][0] == tokens.unsqueeze(2)).int().argmax(dim=2)
    observed = torch.bincount(ranks[:, 0] * k + ranks[:, 1], minlength=k * k)
    first = restated_law(restated_edges(one, 0, 0, int(one[5])), 3.0)
    expected = []
    for a in range(k):
        second = restated_law(restated_edges(one, 0, 1, int(one[1][0, 0, a])), 3.0)
        expected += [first[a] * second[b] for b in range(k)]
        reported = q[ranks[:, 0] == a][:, 1]
        assert (reported == reported[0]).all()
        assert reported[0].tolist() == pytest.approx(second, abs=2e-6)
    wanted = torch.tensor(expected, dtype=torch.float64) * count
    assert (wanted > 10).all()
    statistic = ((observed - wanted) ** 2 / wanted).sum().item()
    assert chi2.sf(statistic, k * k - 1) > 1e-3


def test_law_is_that_of_fp32_scores():
    """10.00 and 10.02, one number in BF16: q and the draws keep them apart."""
    count = 100_000
    scores = torch.tensor([[[10.02, 10.0]]]).expand(count, 1, 2)
    ids = torch.tensor([[[4, 9]]]).expand(count, 1, 2)
    tokens, q = walk(
        [
            scores,
            ids,
            torch.zeros(count, 1, 1),
            torch.zeros(10, 1),
            torch.zeros(10, 1),
            torch.zeros(count, dtype=torch.int64),
        ],
        torch.ones(count),
        torch.arange(count),
        torch.full((count,), 3),
    )
    expected = 1 / (1 + math.exp(-0.02))
    assert q[:, 0, 0].unique().tolist() == pytest.approx([expected], abs=1e-6)
    frequency = (tokens == 4).double().mean().item()
    assert abs(frequency - expected) < 3 * math.sqrt(0.25 / count)


def test_other_shape_is_refused():
    inputs = lattice(2, 3, 4, 2, 20)
    inputs[4] = inputs[4][:, :1]
    with pytest.raises(ValueError, match=r"^successor: expected \[20, 2\], got \[20, 1\] float32$"):
        walk(inputs, [0.0, 0.0], [1, 2], [0, 0])
