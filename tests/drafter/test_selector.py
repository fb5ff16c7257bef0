"""Proposal head and selector against the `dflash` package, and what a shortlist changes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from drafter.model import ProposalAsk
from kernels.rng import Purpose, uniform

TOLERANCE = 1e-5
LENGTH = 20

SCALED = {
    "dflash__output_multiplier": 0.4,
    "dflash__final_logit_softcapping": 3.0,
}


def ask(context, live=7, anchor=5, temperature=0.0, seed=0):
    return ProposalAsk(context, anchor, live, temperature, seed)


def drafted(drafting, rows, *asks_of):
    """Hidden states, block and proposals of one batch; `asks_of` make asks from the context."""
    context = drafting.memory.open(0)
    drafting.append((context, rows))
    block = drafting.block(*(make(context) for make in asks_of))
    hidden = drafting.model.draft_block(block)
    return hidden, drafting.selector.select(hidden, block)


def oracle_logits(pair, hidden):
    """[P, V] of one row's mask columns."""

    class Head(torch.nn.Module):
        def forward(self, x):
            return x @ pair.head.T

    return pair.oracle.compute_logits(hidden[1:], Head())


def save_shortlist(folder, token_ids):
    path = folder / "shortlist.safetensors"
    save_file({"token_ids": torch.tensor(token_ids, dtype=torch.int32)}, path)
    return path


@pytest.mark.parametrize("fields", [{}, SCALED], ids=["plain", "scaled and capped"])
def test_dflash_proposes_the_argmax_of_the_oracles_logits(make_pair, load, features, fields):
    pair = make_pair("dflash", "lf", is_causal=False, **fields)
    for temperature in (0.0, 1.5):
        hidden, proposals = drafted(
            load(pair), features(LENGTH), lambda c, t=temperature: ask(c, temperature=t)
        )
        assert proposals.candidate_ids is None, "a point mass at any temperature"
        expected = oracle_logits(pair, hidden[0]).argmax(-1)
        assert torch.equal(proposals.tokens[0], expected)


@pytest.mark.parametrize("fields", [{}, SCALED], ids=["plain", "scaled and capped"])
def test_dflash2_candidates_are_the_oracles_best(make_pair, load, features, fields):
    pair = make_pair("dflash2", "ll", is_causal=False, **fields)
    drafting = load(pair)
    hidden, proposals = drafted(drafting, features(LENGTH), ask)
    scores, _ = drafting.selector._candidates(hidden[:, 1:])
    expected, expected_ids = oracle_logits(pair, hidden[0]).topk(16, dim=-1)
    torch.testing.assert_close(scores[0], expected, atol=TOLERANCE, rtol=0)
    assert torch.equal(proposals.candidate_ids[0], expected_ids)


@pytest.mark.parametrize("fields", [{}, SCALED], ids=["plain", "scaled and capped"])
def test_dflash2_greedy_walk_equals_the_oracles(make_pair, load, features, fields):
    pair = make_pair("dflash2", "ll", is_causal=False, **fields)
    hidden, proposals = drafted(load(pair), features(LENGTH), ask)
    logits = oracle_logits(pair, hidden[0])
    selector = pair.oracle.candidate_selector
    path, _, _ = selector.select(hidden[:, 1:], logits.unsqueeze(0), torch.tensor([5]), 0.0)
    assert torch.equal(proposals.tokens, path)
    chosen = proposals.candidate_ids == proposals.tokens.unsqueeze(-1)
    assert torch.equal(proposals.probabilities, chosen.float()), "q is exactly one-hot"


@pytest.mark.parametrize("temperature", [0.3, 1.0, 6.0])
@pytest.mark.parametrize("fields", [{}, SCALED], ids=["plain", "scaled and capped"])
def test_dflash2_q_is_the_softmax_of_the_oracles_edges(
    make_pair, load, features, temperature, fields
):
    pair = make_pair("dflash2", "ll", is_causal=False, **fields)
    hidden, proposals = drafted(
        load(pair), features(LENGTH), lambda c: ask(c, temperature=temperature, seed=2**63 + 11)
    )
    logits, selector = oracle_logits(pair, hidden[0]), pair.oracle.candidate_selector
    projected = selector.hidden_projection(hidden[0, 1:])
    predecessor = torch.tensor(5)
    for position in range(7):
        ids = proposals.candidate_ids[0, position]
        edges = logits[position, ids] + selector.successor_codebook(ids) @ (
            selector.predecessor_codebook(predecessor) * projected[position]
        )
        q = proposals.probabilities[0, position]
        expected = torch.softmax(edges / temperature, dim=-1)
        torch.testing.assert_close(q, expected, atol=TOLERANCE, rtol=0)
        u = uniform(torch.tensor([11 - 2**63]), LENGTH + position, Purpose.PROPOSAL, 0)
        rank = int((u >= q.cumsum(0)).sum())
        predecessor = proposals.tokens[0, position]
        assert predecessor == ids[rank], "drawn by position, purpose and seed alone"


def test_a_draw_does_not_depend_on_its_row_or_its_neighbours(make_pair, load, features):
    pair = make_pair("dflash2", "ll", is_causal=False)
    drafting = load(pair, max_concurrency=3)
    kinds = [(0.7, 3), (0.0, 0), (1.3, 2**64 - 1)]
    contexts = [drafting.memory.open(0) for _ in kinds]
    drafting.append(*((c, features(LENGTH, seed)) for seed, c in enumerate(contexts)))

    def tokens(order):
        asks = [ask(contexts[i], temperature=kinds[i][0], seed=kinds[i][1]) for i in order]
        block = drafting.block(*asks)
        hidden = drafting.model.draft_block(block)
        proposals = drafting.selector.select(hidden, block)
        return dict(zip(order, proposals.tokens.tolist(), strict=True))

    together = tokens([0, 1, 2])
    assert tokens([2, 0, 1]) == together
    assert {**tokens([0]), **tokens([1]), **tokens([2])} == together


def test_a_narrower_ask_gets_the_prefix_in_dflash2(make_pair, load, features):
    """DFlash2 computes all W columns whatever P is, so P decides only how many are offered."""
    pair = make_pair("dflash2", "ll", is_causal=False)
    drafting = load(pair)
    wide = drafted(drafting, features(LENGTH), ask)[1].tokens[0]
    narrow = drafted(drafting, features(LENGTH), lambda c: ask(c, live=3))[1].tokens[0]
    assert torch.equal(narrow[:3], wide[:3])


def with_tokenizer(pair, tmp_path, public):
    """The pair's target folder, with a tokenizer that knows `public` ids."""
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(pair.target / file)
    vocabulary = {f"t{token_id}": token_id for token_id in range(public)}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []})
    )
    return tmp_path


@pytest.mark.parametrize("draft_format", ["dflash", "dflash2"])
def test_ids_beyond_the_public_vocabulary_are_never_proposed(
    make_pair, load, features, tmp_path, draft_format
):
    pair = make_pair(draft_format, "ll", is_causal=False)
    drafting = load(pair, target=with_tokenizer(pair, tmp_path, public=40))
    assert drafting.config.draft.mask_token_id >= 40, "the mask is only looked up"
    hidden, proposals = drafted(drafting, features(LENGTH), ask)
    offered = proposals.candidate_ids if draft_format == "dflash2" else proposals.tokens
    assert int(offered.max()) < 40
    logits = oracle_logits(pair, hidden[0])
    assert int(logits.argmax(-1).max()) >= 40, "the mask mattered"
    expected = logits[:, :40].topk(16).indices if draft_format == "dflash2" else logits[:, :40]
    if draft_format == "dflash2":
        assert torch.equal(proposals.candidate_ids[0], expected)
    else:
        assert torch.equal(proposals.tokens[0], expected.argmax(-1))


SHORTLIST = [(37 * step + 11) % 160 for step in range(40)]


@pytest.mark.parametrize("draft_format", ["dflash", "dflash2"])
def test_a_shortlist_proposes_global_ids_of_its_own_rows(
    make_pair, load, features, tmp_path, draft_format
):
    pair = make_pair(draft_format, "ll", is_causal=False)
    path = save_shortlist(tmp_path, SHORTLIST)
    drafting = load(pair, proposal_head=str(path))
    hidden, proposals = drafted(drafting, features(LENGTH), ask)
    logits = oracle_logits(pair, hidden[0])
    listed = torch.tensor(SHORTLIST)
    if draft_format == "dflash":
        assert torch.equal(proposals.tokens[0], listed[logits[:, listed].argmax(-1)])
        return
    ids = proposals.candidate_ids[0]
    assert torch.equal(ids, listed[logits[:, listed].topk(16).indices])
    # remapped before the codebooks are read: the walk's first edge is the oracle's
    selector = pair.oracle.candidate_selector
    edges = logits[0, ids[0]] + selector.successor_codebook(ids[0]) @ (
        selector.predecessor_codebook(torch.tensor(5)) * selector.hidden_projection(hidden[0, 1])
    )
    assert proposals.tokens[0, 0] == ids[0, edges.argmax()]


def test_a_shortlist_of_everything_changes_nothing(make_pair, load, features, tmp_path):
    for draft_format in ("dflash", "dflash2"):
        pair = make_pair(draft_format, "ll", is_causal=False)
        path = save_shortlist(tmp_path, list(range(159, -1, -1)))
        full = drafted(load(pair), features(LENGTH), ask)[1]
        indexed = drafted(load(pair, proposal_head=str(path)), features(LENGTH), ask)[1]
        assert torch.equal(full.tokens, indexed.tokens)


def test_a_row_is_not_finite_only_for_what_it_was_asked(make_pair, load, features):
    pair = make_pair("dflash", "ll", is_causal=False)
    drafting = load(pair)
    context = drafting.memory.open(0)
    drafting.append((context, features(LENGTH)))
    block = drafting.block(ask(context, live=2), ask(context, live=5))
    hidden = drafting.model.draft_block(block)
    hidden[:, 4] = torch.inf
    assert drafting.selector.select(hidden, block).finite.tolist() == [True, False]
    hidden[:, 0] = torch.nan  # the anchor's own column is never sampled
    hidden[:, 4] = 0
    assert drafting.selector.select(hidden, block).finite.tolist() == [True, True]
