"""The kernels that turn logits into p against their reference."""

from dataclasses import replace

import pytest
import torch

from kernels.target_distribution import SamplingRows, kernel, target_distribution
from kernels.target_distribution.reference import target_distribution as reference
from kernels.trees import ancestor_masks

V, PUBLIC = 300, 291
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_k": 0,
    "min_tokens": 0,
    "output_index": 0,
}
WISHES = {
    "neutral": {},
    "greedy": {"temperature": 0.0, "top_k": 3, "top_p": 0.1},
    "hot": {"temperature": 3.0, "min_p": 0.1},
    "top-k-1": {"top_k": 1},
    "top-k-5": {"top_k": 5},
    "few": {"temperature": 0.2, "top_k": 6, "top_p": 0.7, "min_p": 0.05},
    "few-min-p": {"temperature": 0.3, "top_p": 0.8, "min_p": 0.2},
    "top-k-290": {"top_k": 290},
    "top-k-beyond": {"top_k": 10_000},
    "top-p-0": {"top_p": 0.0},
    "top-p-0.5": {"top_p": 0.5},
    "top-p-0.999": {"top_p": 0.999},
    "all": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.9, "frequency_penalty": -0.2, "repetition_penalty": 1.3},
    "greedy-penalties": {"temperature": 0.0, "presence_penalty": 3.0},
    "min-tokens": {"min_tokens": 7, "output_index": 5, "top_k": 30},
    "tiny-temperature": {"temperature": 1e-30, "top_k": 7, "top_p": 0.9},
}


def rows_of(wishes, *, vocab=V):
    """Lanes are in reverse; each has generated, prompt, biased and stop tokens of its own."""
    B = len(wishes)
    generator = torch.Generator().manual_seed(7)
    full = [NEUTRAL | wish for wish in wishes]

    # columns of tables, as a server keeps them
    reals = torch.tensor([list(wish.values())[:6] for wish in full], dtype=torch.float32)
    wholes = torch.tensor([list(wish.values())[6:8] for wish in full])
    columns = [*reals.unbind(1), *wholes.unbind(1)]
    columns.append(torch.tensor([wish["output_index"] for wish in full]))

    generated = torch.randint(0, 12, (B, vocab), generator=generator).sub(9).clamp_min(0)
    bias = torch.randn(B, vocab, generator=generator)
    bias[torch.rand(B, vocab, generator=generator) < 0.9] = 0.0
    return SamplingRows(
        **dict(zip(NEUTRAL, columns, strict=True)),
        lanes=torch.arange(B).flip(0),
        generated_counts=generated.int(),
        prompt_seen=torch.rand(B, vocab, generator=generator) < 0.2,
        logit_bias=bias,
        stop_mask=torch.rand(B, vocab, generator=generator) < 0.1,
    )


@pytest.fixture(autouse=True)
def small_passes(monkeypatch):
    monkeypatch.setattr(kernel, "_CHUNK", 512)
    monkeypatch.setattr(kernel, "_PASS", 512)
    # short rankings, so that the same wishes go beyond them
    monkeypatch.setattr(kernel, "_TILE", 8)
    monkeypatch.setattr(kernel, "_RANKED", 8)


def check(logits, proposals, counts, rows, public=PUBLIC, ancestors=None):
    wanted = {"public_vocab": public, "ancestors": ancestors}
    actual = target_distribution(logits, proposals, counts, rows, **wanted)
    expected = reference(logits, proposals, counts, rows, **wanted)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7, equal_nan=True)
    return actual, expected


def test_wishes_of_unequal_strides_are_taken_too(random):
    rows = rows_of([WISHES["all"], WISHES["penalties"]])
    rows = replace(rows, top_p=rows.top_p.clone(), top_k=rows.top_k.clone())
    check(random(2, 1, V), torch.zeros(2, 0, dtype=torch.int64), torch.tensor([1, 1]), rows)


def test_every_wish_equals_reference(random):
    B, W = len(WISHES), 2
    logits = random(B, W, V, scale=2.0)
    logits[..., PUBLIC:] = float("inf")  # not looked at
    proposals = torch.tensor([[4]]).expand(B, 1)
    counts = torch.tensor([2, 2, 1] * 6)[:B]
    actual, expected = check(logits, proposals, counts, rows_of(list(WISHES.values())))
    assert torch.equal(actual == 0, expected == 0)
    for row, count in enumerate(counts.tolist()):
        assert (actual[row, count:] == 0).all()
        assert (actual[row, :, PUBLIC:] == 0).all()
    greedy = [row for row, wish in enumerate(WISHES.values()) if wish.get("temperature") == 0.0]
    assert torch.equal(actual[greedy], expected[greedy])


def test_chunks_and_passes_of_any_number_give_the_same(random, monkeypatch):
    monkeypatch.setattr(kernel, "_CHUNK", 64)
    monkeypatch.setattr(kernel, "_PASS", 128)
    wishes = [WISHES[name] for name in ("all", "penalties", "greedy")]
    proposals = torch.tensor([[9, 9], [250, 250], [1, 1]])
    check(random(3, 3, V), proposals, torch.tensor([1, 3, 2]), rows_of(wishes))


@pytest.mark.parametrize(
    ("wish", "kept"),
    [
        ({"top_k": 3}, 3),
        ({"top_k": 100}, 100),
        ({"top_p": 0.0503}, 11),
        ({"top_p": 0.0}, 1),
        ({"min_p": 1.0}, 200),
        ({"temperature": 0.0}, 1),
    ],
    ids=str,
)
def test_equal_logits_are_kept_from_the_lowest_id(wish, kept):
    rows = rows_of([wish])
    rows.logit_bias.zero_()
    p = target_distribution(
        torch.full((1, 1, V), 0.5),
        torch.zeros(1, 0, dtype=torch.int64),
        torch.tensor([1]),
        rows,
        public_vocab=200,
    )
    assert p[0, 0].nonzero().flatten().tolist() == list(range(kept))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_logits_that_are_not_finite_show_in_their_row_alone(random, bad):
    wishes = [{}, {"temperature": 0.0}, {"top_p": 0.9}, {}]
    logits, proposals = random(4, 3, V), torch.zeros(4, 2, dtype=torch.int64)
    logits[1, 1, 31] = bad
    logits[3, 2, 5] = bad  # of a dead column
    actual, _ = check(logits, proposals, torch.tensor([3, 2, 3, 2]), rows_of(wishes))
    assert actual[1, :2].isnan().all()
    assert actual[[0, 2, 3]].isfinite().all()


def test_row_and_column_are_the_same_bits_alone_and_among_others(random):
    names = ["all", "greedy", "penalties", "hot"]
    rows = rows_of([WISHES[name] for name in names])
    logits, proposals = random(4, 3, V), torch.tensor([[3, 7]] * 4)
    together = target_distribution(
        logits, proposals, torch.tensor([3] * 4), rows, public_vocab=PUBLIC
    )
    for row in range(4):
        one = SamplingRows(
            **{
                name: value[row : row + 1] if value.ndim == 1 else value
                for name, value in vars(rows).items()
            }
        )
        part = slice(row, row + 1)
        alone = target_distribution(
            logits[part, :2], proposals[part], torch.tensor([2]), one, public_vocab=PUBLIC
        )
        assert torch.equal(alone[0], together[row, :2])


def test_trees_equal_reference_and_a_path_the_same_bits_alone(random):
    wishes = [WISHES[name] for name in ("penalties", "greedy-penalties", "min-tokens", "all")]
    rows, logits = rows_of(wishes), random(4, 6, V)
    proposals = torch.tensor([[3, 7, 3, 3, 9]]).expand(4, 5)
    masks = ancestor_masks(torch.tensor([[0, 1, 0, 3, 4]]).expand(4, 5))
    masks[3, 4:] = -1
    tree, _ = check(logits, proposals, torch.tensor([6, 6, 6, 4]), rows, ancestors=masks)
    path = [0, 3, 4, 5]
    alone, _ = check(logits[:, path], proposals[:, 2:], torch.tensor([4, 4, 4, 2]), rows)
    assert torch.equal(alone, tree[:, path])
