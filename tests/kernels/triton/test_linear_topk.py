"""The kernels that rank a head's rows against their references."""

import pytest
import torch

from kernels.linear_argmax import linear_argmax
from kernels.linear_argmax.reference import linear_argmax as argmax_reference
from kernels.linear_topk import kernel, linear_topk
from kernels.linear_topk.reference import linear_topk as topk_reference

NEUTRAL = {"multiplier": 1.0, "softcap": 0.0}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """The interpreter walks a ranking step by step; small heads have many tiles too."""
    usual = kernel.tiles
    monkeypatch.setattr(kernel, "tiles", lambda hidden: usual(hidden) | {"BLOCK_V": 16})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("M", "H", "V", "public", "k"),
    [(1, 33, 70, 65, 16), (2, 40, 180, 170, 8), (17, 16, 40, 40, 3)],
)
def test_best_rows_equal_reference(random, M, H, V, public, k, dtype):
    hidden, head = random(M, H, dtype=dtype), random(V, H, dtype=dtype)
    scores, ids = linear_topk(hidden, head, k, public_vocab=public)
    best, expected = topk_reference(hidden, head, k, public_vocab=public, token_ids=None, **NEUTRAL)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(scores, best, rtol=1e-5, atol=1e-5)
    assert scores.dtype is torch.float32


@pytest.mark.parametrize("indexed", [False, True])
def test_exact_ties_go_to_the_lower_global_id(indexed):
    V = 230
    hidden, head = torch.ones(1, 8), torch.zeros(V, 8)
    head[[220, 210, 40, 41, 229, 7]] = 1.0  # six rows of score 8
    head[100] = -0.0  # a zero is a zero
    token_ids = (torch.arange(V) * 79 + 13) % V + 500 if indexed else None
    _, ids = linear_topk(hidden, head, 16, public_vocab=V + 700, token_ids=token_ids)
    best = torch.tensor([220, 210, 40, 41, 229, 7])
    rest = torch.tensor([v for v in range(V) if v not in best])
    names = torch.arange(V) if token_ids is None else token_ids
    ranked = [names[rows].sort().values for rows in (best, rest)]
    ranked = [r[r < V + 700] for r in ranked]
    assert torch.equal(ids[0], torch.cat(ranked)[:16])


def test_indexed_rows_beyond_the_public_vocabulary_are_left_out(random):
    hidden, head = random(2, 24), random(90, 24)
    token_ids = torch.randperm(90, generator=torch.Generator().manual_seed(3)) * 2
    head[token_ids >= 150] = float("nan")
    actual = linear_topk(hidden, head, 8, public_vocab=150, token_ids=token_ids)
    clean = head.nan_to_num(0.0)
    expected = topk_reference(hidden, clean, 8, public_vocab=150, token_ids=token_ids, **NEUTRAL)
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual[0], expected[0])
    chosen = linear_argmax(hidden, head, public_vocab=150, token_ids=token_ids)
    assert torch.equal(
        chosen, argmax_reference(hidden, clean, public_vocab=150, token_ids=token_ids)
    )


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_scores_are_scaled_then_capped(random, softcap):
    hidden, head = random(2, 16), random(64, 16)
    options = {"public_vocab": 64, "token_ids": None, "multiplier": 0.5, "softcap": softcap}
    actual = linear_topk(hidden, head, 16, **options)
    expected = topk_reference(hidden, head, 16, **options)
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=2e-6)


def test_what_is_not_finite_ranks_first_and_comes_back(random):
    hidden, head = random(3, 16), random(64, 16)
    hidden[1] = float("nan")
    head[9] = float("inf")
    hidden[0] = hidden[0].abs()
    scores, ids = linear_topk(hidden, head, 4, public_vocab=60)
    assert scores[0, 0] == float("inf")
    assert ids[0, 0] == 9
    assert scores[1].isnan().all()
    assert ((ids >= 0) & (ids < 60)).all()
    chosen = linear_argmax(hidden, head, public_vocab=60)
    assert ((chosen >= 0) & (chosen < 60)).all()


def test_row_is_the_same_bits_alone_and_among_others(random):
    hidden, head = random(18, 40), random(70, 40)
    scores, ids = linear_topk(hidden, head, 4, public_vocab=70)
    for row in (0, 17):
        alone = linear_topk(hidden[row : row + 1], head, 4, public_vocab=70)
        assert torch.equal(scores[row], alone[0][0])
        assert torch.equal(ids[row], alone[1][0])


def test_too_few_rows_are_refused(random):
    with pytest.raises(ValueError, match="head: expected at least 16 public rows, got 15"):
        linear_topk(random(1, 8), random(40, 8), 16, public_vocab=15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("M", "H", "V", "public"), [(1, 33, 70, 65), (18, 40, 300, 300)])
def test_best_row_equals_reference(random, M, H, V, public, dtype):
    hidden, head = random(M, H, dtype=dtype), random(V, H, dtype=dtype)
    head[V // 2] = head[3]  # a tie wherever row 3 is best
    hidden[0] = head[3] * 4
    ids = linear_argmax(hidden, head, public_vocab=public)
    assert torch.equal(ids, argmax_reference(hidden, head, public_vocab=public, token_ids=None))
    assert ids[0] == 3


def test_best_row_ties_go_to_the_lowest_row_after_rounding():
    hidden = torch.ones(1, 2, dtype=torch.float16)
    head = torch.zeros(100, 2, dtype=torch.float16)
    head[70, 0], head[70, 1] = 2.0, 2**-11  # rounds to 2
    head[60, 0] = 2.0
    token_ids = torch.arange(100).flip(0)
    assert linear_argmax(hidden, head, public_vocab=100, token_ids=token_ids) == 39
    assert linear_argmax(hidden, head, public_vocab=100) == 60
