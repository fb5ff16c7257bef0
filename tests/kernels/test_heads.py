"""Heads: the k best rows, the best row and log-probabilities, with every tie settled."""

import math

import pytest
import torch

from kernels.linear_argmax import linear_argmax
from kernels.linear_topk import linear_topk
from kernels.token_logprobs import token_logprobs


def restated_order(scores, ids, public_vocab):
    """Rows of a head in the order (score descending, id ascending), public ones alone."""
    rows = [row for row in range(len(scores)) if ids[row] < public_vocab]
    return sorted(rows, key=lambda row: (-scores[row], ids[row]))


def whole(low, high, *shape, seed=0):
    """Small whole numbers: products are exact, so that ties are."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=g).float()


@pytest.mark.parametrize("indexed", [False, True], ids=["full", "indexed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "rows", "k", "public"), [(1, 20, 1, 20), (5, 64, 16, 50)])
def test_topk_breaks_exact_ties_by_the_lower_global_id(count, rows, k, public, dtype, indexed):
    """Whole-number scores from a narrow range collide all the time, across the k-th place too."""
    hidden, head = whole(-2, 3, count, 4).to(dtype), whole(-2, 3, rows, 4, seed=1).to(dtype)
    ids = torch.randperm(rows, generator=torch.Generator().manual_seed(2))
    scores, tokens = linear_topk(
        hidden, head, k, public_vocab=public, token_ids=ids if indexed else None
    )
    assert scores.dtype is torch.float32
    names = ids.tolist() if indexed else list(range(rows))
    exact = (hidden.double() @ head.double().T).tolist()
    for line in range(count):
        order = restated_order(exact[line], names, public)[:k]
        assert tokens[line].tolist() == [names[row] for row in order]
        assert scores[line].tolist() == [exact[line][row] for row in order]


@pytest.mark.parametrize("ids", [[4, 5, 6, 7], [4, 5, 7, 6]], ids=str)
def test_topk_settles_a_tie_across_the_last_place(ids):
    head = torch.tensor([[3.0], [2.0], [1.0], [1.0]])
    _, tokens = linear_topk(torch.ones(1, 1), head, 3, public_vocab=8, token_ids=torch.tensor(ids))
    assert tokens.tolist() == [[4, 5, 6]]


@pytest.mark.parametrize("indexed", [False, True], ids=["full", "indexed"])
def test_topk_equals_the_formula_in_fp64(indexed):
    g = torch.Generator().manual_seed(3)
    hidden, head = torch.randn(7, 32, generator=g), torch.randn(300, 32, generator=g)
    ids = torch.randperm(1000, generator=g)[:300]
    scores, tokens = linear_topk(
        hidden,
        head,
        16,
        public_vocab=700 if indexed else 280,
        token_ids=ids if indexed else None,
        multiplier=0.25,
        softcap=3.0,
    )
    names = ids.tolist() if indexed else list(range(300))
    exact = (hidden.double() @ head.double().T).tolist()
    for line in range(7):
        order = restated_order(exact[line], names, 700 if indexed else 280)[:16]
        assert tokens[line].tolist() == [names[row] for row in order]
        expected = [3.0 * math.tanh(0.25 * exact[line][row] / 3.0) for row in order]
        assert scores[line].tolist() == pytest.approx(expected, abs=1e-5)


def test_topk_ranks_before_scaling_and_capping():
    """A cap makes large scores equal; their order stays that of the raw ones."""
    head = torch.tensor([[1e4], [2e4], [3e4]])
    scores, tokens = linear_topk(torch.ones(1, 1), head, 3, public_vocab=3, softcap=1.0)
    assert tokens.tolist() == [[2, 1, 0]]
    assert scores.tolist() == [[1.0, 1.0, 1.0]]


def test_topk_scores_are_not_rounded_to_the_dtype_of_hidden():
    """10.00 and 10.02 are one number in BF16; a law drawn from it would not be the one compared."""
    hidden = torch.tensor([[10.0, 0.02]], dtype=torch.bfloat16)
    head = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.bfloat16)
    scores, tokens = linear_topk(hidden, head, 2, public_vocab=2)
    assert tokens.tolist() == [[1, 0]]
    assert 0.019 < scores[0, 0] - scores[0, 1] < 0.021


def test_topk_of_a_wide_bfloat16_head_crosses_its_pieces():
    g = torch.Generator().manual_seed(4)
    hidden = torch.randn(2, 8, generator=g).bfloat16()
    head = torch.randn((1 << 14) + 77, 8, generator=g).bfloat16()
    scores, tokens = linear_topk(hidden, head, 4, public_vocab=head.shape[0])
    exact = hidden.double() @ head.double().T
    assert torch.equal(tokens, exact.topk(4).indices)
    torch.testing.assert_close(scores.double(), exact.topk(4).values, atol=1e-5, rtol=0)


def test_topk_shows_scores_that_are_not_finite():
    hidden = torch.tensor([[torch.nan, 0.0], [1.0, 1.0]])
    scores, _ = linear_topk(hidden, torch.randn(30, 2), 4, public_vocab=30)
    assert scores[0].isnan().all()
    assert scores[1].isfinite().all()


def test_topk_needs_k_public_rows():
    hidden, head = torch.zeros(1, 2), torch.zeros(8, 2)
    with pytest.raises(ValueError, match=r"^head: expected at least 4 public rows, got 3$"):
        linear_topk(hidden, head, 4, public_vocab=3)
    ids = torch.arange(8) * 10
    with pytest.raises(ValueError, match=r"^head: expected at least 4 public rows, got 2$"):
        linear_topk(hidden, head, 4, public_vocab=20, token_ids=ids)
    with pytest.raises(ValueError, match=r"^multiplier: expected a positive factor, got 0"):
        linear_topk(hidden, head, 4, public_vocab=8, multiplier=0.0)


@pytest.mark.parametrize("indexed", [False, True], ids=["full", "indexed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_argmax_breaks_ties_by_the_lowest_row_and_then_remaps(dtype, indexed):
    hidden, head = whole(-2, 3, 9, 4).to(dtype), whole(-2, 3, 64, 4, seed=1).to(dtype)
    ids = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    found = linear_argmax(hidden, head, public_vocab=50, token_ids=ids if indexed else None)
    names = ids.tolist() if indexed else list(range(64))
    exact = (hidden.double() @ head.double().T).tolist()
    for line in range(9):
        rows = [row for row in range(64) if names[row] < 50]
        best = min(rows, key=lambda row: (-exact[line][row], row))
        assert found[line].item() == names[best]


def test_argmax_compares_rounded_logits():
    """10.00 and 10.02 tie in BF16, and the lower row wins."""
    hidden = torch.tensor([[10.0, 0.02]])
    head = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert linear_argmax(hidden, head, public_vocab=2).tolist() == [1]
    assert linear_argmax(hidden.bfloat16(), head.bfloat16(), public_vocab=2).tolist() == [0]


def test_argmax_needs_a_public_row():
    with pytest.raises(ValueError, match=r"^token_ids: expected one below 5, got none$"):
        linear_argmax(
            torch.zeros(1, 2), torch.zeros(3, 2), public_vocab=5, token_ids=torch.arange(5, 8)
        )


def test_heads_of_another_dtype_are_refused():
    hidden, head = torch.zeros(1, 4), torch.zeros(8, 4).bfloat16()
    for op in (linear_argmax, lambda *a, **k: linear_topk(*a, 2, **k)):
        with pytest.raises(ValueError, match=r"^head: expected \[\*, 4\] float32, got \[8, 4\] bf"):
            op(hidden, head, public_vocab=8)


def test_head_kept_transposed_gives_the_same_ids():
    """A head may be a view of columns: products with few vectors are faster that way."""
    g = torch.Generator().manual_seed(5)
    hidden, head = torch.randn(7, 32, generator=g), torch.randn(300, 32, generator=g)
    columns = head.T.contiguous().T
    _, expected = linear_topk(hidden, head, 16, public_vocab=290)
    _, tokens = linear_topk(hidden, columns, 16, public_vocab=290)
    assert torch.equal(tokens, expected)
    assert torch.equal(linear_argmax(hidden, columns, public_vocab=290), expected[:, 0])


@pytest.mark.parametrize("top", [0, 1, 5, 40])
def test_logprobs_equal_the_formula_in_fp64(top):
    g = torch.Generator().manual_seed(6)
    logits = 4 * torch.randn(6, 50, generator=g)
    logits[:, 40:] = torch.inf  # beyond the public vocabulary: never looked at
    tokens = torch.randint(40, (6,), generator=g)
    logprob, ids, values = token_logprobs(logits, tokens, top, public_vocab=40)
    assert ids.shape == values.shape == (6, top)
    for line in range(6):
        z = logits[line, :40].double().tolist()
        mass = math.log(math.fsum(math.exp(x - max(z)) for x in z)) + max(z)
        order = sorted(range(40), key=lambda v: (-z[v], v))[:top]
        assert logprob[line].item() == pytest.approx(z[tokens[line]] - mass, abs=2e-6)
        assert ids[line].tolist() == order
        assert values[line].tolist() == pytest.approx([z[v] - mass for v in order], abs=2e-6)


def test_logprobs_break_ties_by_the_lower_id():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0]])
    _, ids, values = token_logprobs(logits, torch.tensor([0]), 4, public_vocab=7)
    assert ids.tolist() == [[1, 3, 5, 2]]
    assert values[0, 0] == values[0, 2] > values[0, 3]


def test_logprobs_more_alternatives_than_ids_are_refused():
    with pytest.raises(ValueError, match=r"^top: expected 0\.\.6, got 7$"):
        token_logprobs(torch.zeros(1, 8), torch.tensor([0]), 7, public_vocab=6)
