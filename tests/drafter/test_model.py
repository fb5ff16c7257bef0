"""Hidden states, logits and selector scores against the `dflash` package, in FP32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafter.model import ProposalAsk

TOLERANCE = 1e-5


def oracle_hidden(pair, features: Tensor, first: int, anchor: int, width: int, scale: float = 1.0):
    """[width, H]: the oracle's hidden states of one block after features of [first, first + n)."""
    tokens = torch.full((1, width), pair.oracle.mask_token_id)
    tokens[0, 0] = anchor
    with torch.inference_mode():
        return pair.oracle(
            target_hidden=features.unsqueeze(0),
            noise_embedding=pair.embedding[tokens] * scale,
            position_ids=torch.arange(first, first + len(features) + width).unsqueeze(0),
        )[0]


def fed(drafting, rows: Tensor, pieces: list[int], first: int = 0):
    """A context that took the rows in pieces."""
    context = drafting.memory.open(first)
    assert sum(pieces) == len(rows)
    for piece in rows.split(pieces):
        drafting.append((context, piece))
    return context


def ask(context, live: int = 7, anchor: int = 5, temperature: float = 0.0, seed: int = 0):
    return ProposalAsk(context, anchor, live, temperature, seed)


VARIANTS = {
    # name: format, layers, config fields, options
    "dflash local": ("dflash", "ll", {"is_causal": False}, {}),
    "dflash mixed": ("dflash", "llf", {"is_causal": False}, {}),
    "dflash full alone": ("dflash", "ff", {"is_causal": False}, {}),
    "dflash mixed absent, causal option": ("dflash", "lfl", {}, {"causal_local_layers": True}),
    "dflash mixed causal everywhere": ("dflash", "lf", {"is_causal": True}, {}),
    "dflash2 local": ("dflash2", "lll", {"is_causal": False}, {}),
    "dflash2 mixed": ("dflash2", "lfl", {"is_causal": False}, {}),
    "dflash2 causal option": ("dflash2", "ll", {}, {"causal_local_layers": True}),
    "dflash2 four taps, group 8": (
        "dflash2",
        "ll",
        {"is_causal": False, "dflash__conv_kernel_size": 4, "dflash__conv_group_size": 8},
        {},
    ),
    "dflash2 scaled and capped": (
        "dflash2",
        "lf",
        {
            "is_causal": False,
            "dflash__input_embedding_scale": 1.75,
            "dflash__output_multiplier": 0.4,
            "dflash__final_logit_softcapping": 3.0,
        },
        {},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "pieces",
    [[5], [8], [9], [31], [3, 20, 1, 5], [1] * 19, [64, 2, 30]],
    ids=lambda pieces: f"context {sum(pieces)} in {len(pieces)}",
)
def test_hidden_states_equal_the_oracle(make_pair, load, features, name, pieces):
    draft_format, layers, fields, options = VARIANTS[name]
    pair = make_pair(draft_format, layers, **fields)
    drafting = load(pair, **options)
    rows = features(sum(pieces))
    context = fed(drafting, rows, pieces)
    hidden = drafting.model.draft_block(drafting.block(ask(context)))
    scale = drafting.config.draft.input_embedding_scale
    expected = oracle_hidden(pair, rows, 0, 5, 8, scale)
    torch.testing.assert_close(hidden[0], expected, atol=TOLERANCE, rtol=0)


def test_an_absent_is_causal_is_read_as_not_causal(make_pair, load, features):
    """The two readings of an absent is_causal are told apart by this very comparison."""
    pair = make_pair("dflash", "lfl")
    drafting = load(pair)
    context = fed(drafting, features(20), [20])
    hidden = drafting.model.draft_block(drafting.block(ask(context)))
    assert (hidden[0] - oracle_hidden(pair, features(20), 0, 5, 8)).abs().max() > 1e-3


@pytest.mark.parametrize("first", [1, 13, 200])
@pytest.mark.parametrize("layers", ["ll", "lf"])
def test_context_may_begin_anywhere(make_pair, load, features, first, layers):
    pair = make_pair("dflash", layers, is_causal=False)
    drafting = load(pair)
    rows = features(21)
    context = fed(drafting, rows, [5, 16], first)
    hidden = drafting.model.draft_block(drafting.block(ask(context)))
    expected = oracle_hidden(pair, rows, first, 5, 8)
    torch.testing.assert_close(hidden[0], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("draft_tokens", [1, 3, 7, 15])
@pytest.mark.parametrize("draft_format", ["dflash", "dflash2"])
def test_any_width_equals_the_oracle(make_pair, load, features, draft_format, draft_tokens):
    pair = make_pair(draft_format, "lf", is_causal=False)
    drafting = load(pair, draft_tokens=draft_tokens)
    context = fed(drafting, features(12), [12])
    hidden = drafting.model.draft_block(drafting.block(ask(context, live=draft_tokens)))
    expected = oracle_hidden(pair, features(12), 0, 5, draft_tokens + 1)
    torch.testing.assert_close(hidden[0], expected, atol=TOLERANCE, rtol=0)


def test_dflash_attends_live_columns_and_dflash2_all(make_pair, load, features):
    rows = features(12)
    for draft_format, width in (("dflash", 4), ("dflash2", 8)):
        pair = make_pair(draft_format, "lf", is_causal=False)
        drafting = load(pair)
        block = drafting.block(ask(fed(drafting, rows, [12]), live=3))
        assert block.counts.tolist() == [width]
        hidden = drafting.model.draft_block(block)
        expected = oracle_hidden(pair, rows, 0, 5, width)
        torch.testing.assert_close(hidden[0, :4], expected[:4], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("draft_format", ["dflash", "dflash2"])
def test_batch_rows_equal_solo_rows(make_pair, load, features, draft_format):
    pair = make_pair(draft_format, "lfl", is_causal=False)
    drafting = load(pair, max_concurrency=8)
    lengths, lives = (3, 8, 9, 40, 17), (7, 1, 4, 7, 2)
    asks = [
        ask(fed(drafting, features(length, seed), [length]), live, anchor=seed + 1)
        for seed, (length, live) in enumerate(zip(lengths, lives, strict=True))
    ]
    batched = drafting.model.draft_block(drafting.block(*asks))
    for row, one in enumerate(asks):
        solo = drafting.model.draft_block(drafting.block(one))[0]
        live = slice(0, one.live + 1)
        torch.testing.assert_close(batched[row, live], solo[live], atol=2e-6, rtol=0)


def test_contexts_catch_up_together(make_pair, load, features):
    """Rows of several sequences, of several counts, in one materialization."""
    pair = make_pair("dflash2", "lf", is_causal=False)
    drafting = load(pair)
    lengths = (3, 20, 1)
    contexts = [drafting.memory.open(0) for _ in lengths]
    pieces = [features(length, seed) for seed, length in enumerate(lengths)]
    drafting.append(*zip(contexts, pieces, strict=True))
    assert [context.frontier for context in contexts] == list(lengths)
    hidden = drafting.model.draft_block(drafting.block(*(ask(context) for context in contexts)))
    for row, rows in enumerate(pieces):
        expected = oracle_hidden(pair, rows, 0, 5, 8)
        torch.testing.assert_close(hidden[row], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("draft_format", ["dflash", "dflash2"])
def test_nan_features_of_one_sequence_leave_neighbours_bit_identical(
    make_pair, load, features, draft_format
):
    pair = make_pair(draft_format, "lf", is_causal=False)

    def draft(poison: bool):
        drafting = load(pair, max_concurrency=4)
        contexts = [drafting.memory.open(0) for _ in range(3)]
        pieces = [features(6, seed) for seed in range(3)]
        if poison:
            pieces[1][2] = torch.nan
        drafting.append(*zip(contexts, pieces, strict=True))
        block = drafting.block(*(ask(context, temperature=0.7, seed=3) for context in contexts))
        hidden = drafting.model.draft_block(block)
        return hidden, drafting.selector.select(hidden, block)

    clean_hidden, clean = draft(poison=False)
    hidden, proposals = draft(poison=True)
    assert clean.finite.tolist() == [True, True, True]
    assert proposals.finite.tolist() == [True, False, True]
    for row in (0, 2):
        assert torch.equal(hidden[row], clean_hidden[row])
        assert torch.equal(proposals.tokens[row], clean.tokens[row])
        if clean.probabilities is not None:
            assert torch.equal(proposals.probabilities[row], clean.probabilities[row])


def test_a_slot_that_held_nan_is_as_good_as_new(make_pair, load, features):
    pair = make_pair("dflash2", "lf", is_causal=False)
    drafting = load(pair, max_concurrency=1)
    poisoned = fed(drafting, torch.full_like(features(20), torch.nan), [20])
    drafting.memory.release(poisoned)
    rows = features(5)
    hidden = drafting.model.draft_block(drafting.block(ask(fed(drafting, rows, [5]))))
    expected = oracle_hidden(pair, rows, 0, 5, 8)
    torch.testing.assert_close(hidden[0], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("slots", [2, 5])
def test_a_fork_continues_its_source(make_pair, load, features, slots):
    pair = make_pair("dflash2", "lf", is_causal=False)
    drafting = load(pair, max_concurrency=slots)
    rows = features(100)
    source = fed(drafting, rows[:90], [90])
    copy = drafting.memory.fork(source)
    drafting.append((copy, rows[90:]))
    drafting.append((source, features(3, seed=9)))
    hidden = drafting.model.draft_block(drafting.block(ask(copy)))
    expected = oracle_hidden(pair, rows, 0, 5, 8)
    torch.testing.assert_close(hidden[0], expected, atol=TOLERANCE, rtol=0)


def test_bfloat16_follows_float32(make_pair, load, features):
    """Same weights and features in the other profile: near, and rings in their own types."""
    pair = make_pair("dflash2", "lf", is_causal=False)
    drafting = load(pair, dtype="bfloat16")
    assert drafting.memory.key_rings.dtype == torch.bfloat16
    assert drafting.memory.value_pages.dtype == torch.float16
    rows = features(20).bfloat16()
    hidden = drafting.model.draft_block(drafting.block(ask(fed(drafting, rows, [20]))))
    expected = oracle_hidden(pair, rows.float(), 0, 5, 8)
    assert hidden.dtype == torch.bfloat16
    error = (hidden[0].float() - expected).norm() / expected.norm()
    assert error < 2e-2
