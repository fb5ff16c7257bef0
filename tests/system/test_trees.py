"""Rounds over trees, through both services: the target's own output, whatever branch it takes."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch

import drafter.__main__ as drafter_process
from drafter.model import DraftBlock
from drafter.selector import Proposals
from kernels.candidate_tree import candidate_tree
from outrider.checkpoint import bundled
from outrider.client import Client
from tests.system.conftest import greedy, prompt
from tests.system.test_sampled import (
    REJECT,
    SETTINGS,
    VOCAB,
    Tilted,
    chi_square,
    goodness,
    joint_law,
    processed,
    tilt,
)
from tests.tiny_pair import Pair, served
from tests.tiny_target import load_oracle
from verifier.rounds import Rounds
from verifier.tree_policy import TreePolicy

NEW_TOKENS = 40
GREEDY = {"temperature": 0, "ignore_eos": True}


def check_traces(completion, draft_tokens: int, nodes: int) -> None:
    """What every trace of a round with a tree must say."""
    side = 0
    for trace in completion.rounds:
        assert bool(trace.columns) <= bool(trace.parents)
        if not trace.parents:
            continue
        assert draft_tokens < len(trace.proposed) == len(trace.parents) < nodes
        assert list(trace.parents[:draft_tokens]) == list(range(draft_tokens))
        assert trace.accepted == len(trace.columns)
        before = 0
        for column in trace.columns:
            assert trace.parents[column - 1] == before
            before = column
        side += sum(c != depth for depth, c in enumerate(trace.columns, 1))
    usage = completion.usage
    assert usage.side_accepted == side
    trees = [len(t.parents) for t in completion.rounds if t.parents]
    assert (usage.tree_rounds, usage.tree_columns) == (len(trees), sum(trees) + len(trees))


@pytest.mark.parametrize(
    ("draft_tokens", "nodes"),
    [(1, "3"), (3, "12,6,0"), (7, "9"), (7, "32"), (15, "20")],
)
def test_greedy_equals_generate(dense, serve, oracle, draft_tokens, nodes):
    pair, client = serve(dense, draft_tokens=draft_tokens, draft_tree_nodes=nodes, prefill_chunk=64)
    most = int(nodes.split(",")[0])
    for length in (1, 130):
        completion = client.generate(prompt_ids=prompt(length), max_tokens=NEW_TOKENS, **GREEDY)
        assert list(completion.token_ids) == greedy(oracle, prompt(length), NEW_TOKENS)
        assert completion.usage.tree_rounds > 0
        check_traces(completion, draft_tokens, most + 1)
    pair.expect_nothing_left()


def test_a_mixture_of_experts_too(mixture, serve):
    oracle = load_oracle(mixture / "target")
    _, client = serve(mixture, draft_tree_nodes="16")
    completion = client.generate(prompt_ids=prompt(70), max_tokens=30, **GREEDY)
    assert list(completion.token_ids) == greedy(oracle, prompt(70), 30)
    assert completion.usage.tree_rounds > 0


@pytest.fixture(scope="module")
def held_out():
    path = bundled("target").parent.parent / "prompts.json"
    return [entry["token_ids"] for entry in json.loads(path.read_text())["prompts"]]


@pytest.fixture(scope="module")
def trained():
    with (
        served(bundled("target"), bundled("dflash2"), draft_tree_nodes="16") as pair,
        Client(pair.address) as client,
    ):
        yield pair, client


PENALTIES = {
    "plain": {},
    "penalised": {"presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "biased": {"logit_bias": {220: -2.0, 256: 1.0}, "min_tokens": 30, "ignore_eos": None},
}


@pytest.mark.parametrize("name", PENALTIES)
def test_a_trained_pair_takes_branches_and_emits_what_plain_decoding_emits(trained, held_out, name):
    _, client = trained
    side = 0
    for ids in (held_out[0], held_out[20]):
        wanted = {"prompt_ids": ids, "max_tokens": 48, **GREEDY, **PENALTIES[name]}
        branching = client.generate(**wanted)
        plain = client.generate(**wanted, draft_tokens=0)
        assert branching.token_ids == plain.token_ids
        check_traces(branching, 7, 17)
        side += branching.usage.side_accepted
    assert side > 0


@pytest.mark.parametrize(("draft_tokens", "nodes"), [(1, "8"), (3, "12"), (7, "16"), (15, "32")])
def test_a_bundled_pair_equals_generate(held_out, draft_tokens, nodes):
    oracle, ids = load_oracle(bundled("target")), held_out[20]
    folders = bundled("target"), bundled("dflash2")
    with (
        served(*folders, draft_tokens=draft_tokens, draft_tree_nodes=nodes) as pair,
        Client(pair.address) as client,
    ):
        completion = client.generate(prompt_ids=ids, max_tokens=32, **GREEDY)
    assert list(completion.token_ids) == greedy(oracle, ids, 32)
    assert completion.usage.tree_rounds > 0


def expect_greedy_together(client, oracle, count: int, tokens: int) -> None:
    """Runs so many prompts side by side and fails unless each comes out as it does alone."""

    def run(index: int):
        return client.generate(prompt_ids=prompt(20 + index), max_tokens=tokens, **GREEDY)

    with ThreadPoolExecutor(count) as pool:
        completions = list(pool.map(run, range(count)))
    for index, completion in enumerate(completions):
        assert list(completion.token_ids) == greedy(oracle, prompt(20 + index), tokens)


def test_widths_and_drafting_may_both_be_chosen_by_the_load(dense, serve, oracle):
    pair, client = serve(dense, draft_tree_nodes="auto", draft_policy="auto", max_concurrency=2)
    expect_greedy_together(client, oracle, 2, 60)
    pair.expect_nothing_left()


def test_trees_bring_more_tokens_a_round(trained, held_out):
    _, client = trained
    rounds = {True: 0, False: 0}
    for ids in held_out[:3]:
        for trees in rounds:
            completion = client.generate(prompt_ids=ids, max_tokens=48, **GREEDY, draft_trees=trees)
            rounds[trees] += completion.usage.rounds
            assert (completion.usage.tree_rounds > 0) == trees
    assert rounds[True] < rounds[False]


class PlantedTree:
    """Proposes the target's own tokens, wrong at a moving place; a branch there is right."""

    def __init__(self, sequence: Sequence[int], errors: Sequence[int]) -> None:
        self.sequence = list(sequence)
        self.errors = errors
        self.rounds = 0

    def select(self, hidden: torch.Tensor, block: DraftBlock) -> Proposals:
        (first,) = block.rows.frontiers.tolist()
        live, width = block.most_live, block.tree_width
        right = self.sequence[first + 1 : first + 1 + live]
        right += [0] * (live - len(right))
        error = self.errors[self.rounds % len(self.errors)]
        self.rounds += 1
        chain = [token if place < error else (token + 1) % 150 for place, token in enumerate(right)]
        if not width or error >= live:
            tokens, parents = chain, list(range(live))
        else:
            branch = right[error:][: width - 1 - live]
            tokens = chain + branch
            parents = [*range(live), error, *range(live + 1, live + len(branch))]
        return proposals_of(tokens, parents, block)


def proposals_of(tokens: list[int], parents: list[int], block: DraftBlock) -> Proposals:
    """Point masses over candidates that siblings share, as greedy rows have them."""
    k, count = 16, len(tokens)
    siblings = {p: [t for t, q in zip(tokens, parents, strict=True) if q == p] for p in parents}
    ids = torch.tensor([(siblings[p] + others(siblings[p], k))[:k] for p in parents])
    drawn = torch.tensor(tokens)
    width = block.tree_width or count + 1

    def padded(values: torch.Tensor) -> torch.Tensor:
        room = values.new_zeros(1, width - 1, *values.shape[1:])
        room[0, :count] = values
        return room

    return Proposals(
        padded(drawn),
        torch.ones(1, dtype=torch.bool),
        padded(ids),
        padded((ids == drawn[:, None]).float()),
        padded(torch.tensor(parents)) if block.tree_width else None,
        torch.tensor([count]) if block.tree_width else None,
    )


def others(tokens: Sequence[int], count: int) -> list[int]:
    return [token for token in range(count + len(tokens)) if token not in tokens]


@pytest.mark.parametrize("error", [0, 3, 6], ids="error={}".format)
def test_a_branch_at_every_depth_leaves_the_state_a_plain_run_would(
    dense, serve, oracle, monkeypatch, error
):
    ids = prompt(21)
    continuation = greedy(oracle, ids, 60)
    # a branch in every other round, so that what follows a branch is a chain, and another branch
    double = PlantedTree([*ids, *continuation], [error, 9, error, error])
    monkeypatch.setattr(drafter_process, "selector_for", lambda config, weights: double)
    pair, client = serve(dense, draft_tree_nodes="16", checkpoint_slots=4)
    completion = client.generate(prompt_ids=ids, max_tokens=60, **GREEDY)
    assert list(completion.token_ids) == continuation
    check_traces(completion, 7, 17)
    full = [r for r in completion.rounds if r.parents]
    assert all(r.accepted == 7 for r in full), "the branch was followed to its end"
    assert full
    assert completion.usage.side_accepted == len(full) * (7 - error)
    corrected = sum(not r.parents and r.accepted < len(r.proposed) for r in completion.rounds)
    # nothing continues the end of a branch: its token is a bonus
    assert completion.origins.count("correction") == corrected
    # what the next request continues was compacted and committed
    longer = [*ids, *continuation[:50]]
    again = client.generate(prompt_ids=longer, max_tokens=10, **GREEDY)
    assert list(again.token_ids) == continuation[50:]
    pair.expect_nothing_left()


def test_logprobs_are_those_of_the_branch(dense, serve, oracle, monkeypatch):
    ids = prompt(20)
    continuation = greedy(oracle, ids, 32)
    double = PlantedTree([*ids, *continuation], [2, 0, 5])
    monkeypatch.setattr(drafter_process, "selector_for", lambda config, weights: double)
    _, client = serve(dense, draft_tree_nodes="16")
    completion = client.generate(prompt_ids=ids, max_tokens=32, logprobs=3, **GREEDY)
    assert completion.usage.side_accepted > 0
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*ids, *continuation]])).logits[0]
    reference = torch.log_softmax(logits.double(), -1)
    for index, entry in enumerate(completion.logprobs):
        row = reference[len(ids) - 1 + index]
        assert entry.logprob == pytest.approx(row[continuation[index]].item(), abs=1e-4)
        assert entry.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


# ---- who shares a round -------------------------------------------------------------------------


def test_trees_chains_and_plain_rows_share_rounds(dense, serve, oracle):
    pair, client = serve(dense, draft_tree_nodes="16,14,12", max_concurrency=4)
    kinds = [{}, {"draft_trees": False}, {"draft_tokens": 3}, {"draft_tokens": 0}, {}, {}]

    def run(index: int):
        return client.generate(
            prompt_ids=prompt(20 + 9 * index, seed=index), max_tokens=30, **GREEDY, **kinds[index]
        )

    with ThreadPoolExecutor(len(kinds)) as pool:
        completions = list(pool.map(run, range(len(kinds))))
    for index, completion in enumerate(completions):
        expected = greedy(oracle, prompt(20 + 9 * index, seed=index), 30)
        assert list(completion.token_ids) == expected
        assert (completion.usage.tree_rounds > 0) == (not kinds[index])
    pair.expect_nothing_left()


def test_seeded_output_depends_on_the_request_alone(dense, serve):
    _, client = serve(dense, draft_tokens=3, draft_tree_nodes="10", max_concurrency=4)
    arguments = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "ignore_eos": True}

    def run(index: int):
        return client.generate(prompt_ids=prompt(40, seed=index), seed=index, **arguments)

    solo = [run(index) for index in range(5)]
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(run, range(5)))
    assert [c.token_ids for c in together] == [c.token_ids for c in solo]
    assert [c.usage.tree_rounds for c in together] == [c.usage.tree_rounds for c in solo]
    assert all(c.usage.tree_rounds for c in solo)


def test_a_request_without_trees_is_what_it_is_without_the_flag(dense, serve):
    arguments = {"prompt_ids": prompt(33), "max_tokens": 40, "temperature": 0.8, "seed": 4}
    _, chains = serve(dense)
    _, trees = serve(dense, draft_tree_nodes="16")
    expected = chains.generate(**arguments, ignore_eos=True)
    opted_out = trees.generate(**arguments, ignore_eos=True, draft_trees=False)
    branching = trees.generate(**arguments, ignore_eos=True)
    assert opted_out.token_ids == expected.token_ids
    assert opted_out.rounds == expected.rounds
    # the main chain of the first tree is the chain that was proposed there
    assert branching.rounds[0].proposed[:7] == expected.rounds[0].proposed
    assert branching.rounds[0].parents


# ---- tails ---------------------------------------------------------------------------------------


def test_rounds_near_the_budget_are_chains(dense, serve, oracle):
    _, client = serve(dense, draft_tokens=3, draft_tree_nodes="8")
    ids = prompt(9)
    continuation = greedy(oracle, ids, 12)
    for budget in range(1, 13):
        completion = client.generate(prompt_ids=ids, max_tokens=budget, **GREEDY)
        assert list(completion.token_ids) == continuation[:budget]
        for trace in completion.rounds:
            left = len(ids) + budget - trace.frontier - 1
            assert bool(trace.parents) == (left > 3)


@pytest.mark.parametrize("max_context", [64, 70])
def test_no_tree_reaches_beyond_the_context(dense, serve, oracle, max_context):
    pair, client = serve(dense, draft_tokens=3, draft_tree_nodes="12", max_context=max_context)
    ids = prompt(max_context - 24)
    completion = client.generate(prompt_ids=ids, **GREEDY)
    assert len(ids) + len(completion.token_ids) == max_context
    assert list(completion.token_ids) == greedy(oracle, ids, 24)
    assert any(r.parents for r in completion.rounds)
    for trace in completion.rounds:
        assert bool(trace.parents) == (trace.frontier + 12 <= max_context)
    pair.expect_nothing_left()


def test_a_tree_takes_no_page_that_its_request_would_not(dense, serve, oracle):
    """Prompt and output fill a page exactly; the pages in all are no more than that."""
    pair, client = serve(dense, draft_tree_nodes="16", kv_pages=2, max_concurrency=1)
    ids = prompt(100)
    completion = client.generate(prompt_ids=ids, max_tokens=29, **GREEDY)
    assert list(completion.token_ids) == greedy(oracle, ids, 29)
    assert completion.usage.tree_rounds > 0
    pair.expect_nothing_left()


def test_samples_are_paused_and_come_back(dense, serve, oracle):
    pair, client = serve(dense, draft_tree_nodes="16", kv_pages=4, max_concurrency=3)
    expect_greedy_together(client, oracle, 3, 100)
    assert client.server_info().counters["pauses"] > 0
    pair.expect_nothing_left()


# ---- what goes wrong -----------------------------------------------------------------------------


ROWS_OF = {
    "verify": lambda proposal: proposal.rows,
    "preview": lambda licensed: licensed.rows,
    "commit": lambda previewed: previewed.licensed.rows,
}


@pytest.mark.parametrize("verb", ROWS_OF)
def test_a_cancellation_between_build_and_commit_moves_nobody_else(
    dense, serve, oracle, monkeypatch, verb
):
    """The tree of a row is there, and verified, when its client leaves."""
    whole, turns = getattr(Rounds, verb), iter(range(10**9))

    def cancelling(self, value):
        rows = ROWS_OF[verb](value)
        victim = next((row for row in rows if row.request.request_id == "victim"), None)
        if victim is not None and victim.usage.tree_rounds and next(turns) == 3:
            victim.ticket.abort()
        return whole(self, value)

    monkeypatch.setattr(Rounds, verb, cancelling)
    pair, client = serve(dense, draft_tree_nodes="16", max_concurrency=2)
    with ThreadPoolExecutor(2) as pool:
        victim = pool.submit(
            client.generate, prompt_ids=prompt(30), max_tokens=50, request_id="victim", **GREEDY
        )
        beside = pool.submit(client.generate, prompt_ids=prompt(40), max_tokens=50, **GREEDY)
        assert list(beside.result().token_ids) == greedy(oracle, prompt(40), 50)
        ended = victim.result()
    assert ended.finish_reason == "aborted"
    count = len(ended.token_ids)
    assert 0 < count < 50
    assert list(ended.token_ids) == greedy(oracle, prompt(30), 50)[:count]
    pair.expect_nothing_left()


CORRUPT = {
    "a parent that is not before": lambda p: dataclasses.replace(
        p, parents=p.parents.index_fill(1, torch.tensor([9]), 12)
    ),
    "another main chain": lambda p: dataclasses.replace(
        p, parents=p.parents.index_fill(1, torch.tensor([2]), 0)
    ),
    "equal siblings": lambda p: dataclasses.replace(p, tokens=_twins(p)),
    "a law that sums to less": lambda p: dataclasses.replace(
        p, probabilities=p.probabilities * 0.9
    ),
}


def _twins(p: Proposals) -> torch.Tensor:
    tokens = p.tokens.clone()
    for row in range(len(tokens)):
        parents = p.parents[row].tolist()
        for line in range(7, int(p.lines[row])):
            tokens[row, line] = tokens[row, parents.index(parents[line])]
    return tokens


@pytest.mark.parametrize(
    ("name", "temperature"), [*((name, 0.0) for name in CORRUPT), ("equal siblings", 0.7)]
)
def test_a_bad_tree_costs_its_proposals_and_nothing_else(
    dense, serve, oracle, monkeypatch, name, temperature
):
    made = drafter_process.selector_for

    class Corrupt:
        def __init__(self, selector) -> None:
            self.selector = selector

        def select(self, hidden, block):
            proposals = self.selector.select(hidden, block)
            return CORRUPT[name](proposals) if block.tree_width else proposals

    monkeypatch.setattr(
        drafter_process, "selector_for", lambda config, weights: Corrupt(made(config, weights))
    )
    pair, client = serve(dense, draft_tree_nodes="16")
    completion = client.generate(
        prompt_ids=prompt(30), max_tokens=24, temperature=temperature, seed=1, ignore_eos=True
    )
    if not temperature:
        assert list(completion.token_ids) == greedy(oracle, prompt(30), 24)
    assert completion.usage.tree_rounds == 0
    assert completion.usage.plain_rounds > 10
    counters = client.server_info().counters
    assert counters["drafter_fault_proposal_invalid"] == completion.usage.plain_rounds
    assert counters["drafter_connections"] == 1
    pair.expect_nothing_left()


def test_a_drafter_that_grows_no_such_trees_refuses(dense, monkeypatch):
    monkeypatch.setattr(Pair, "wait_for_drafter", lambda pair: None)
    folders = dense / "target", dense / "dflash2"
    with served(*folders, draft_tree_nodes="16", drafter_tree_nodes="12") as pair:
        monkeypatch.undo()
        pair.wait_for_drafter("refused")
        detail = pair.verifier.engine.status().drafter_detail
        assert "tree_nodes: expected 0 or 9..12, got 16" in detail


def test_a_draft_without_a_selector_refuses_the_flag(dense):
    with (
        pytest.raises(ValueError, match=r"--draft-tree-nodes: expected off, .*DFlash.*, got 16"),
        served(dense / "target", dense / "dflash", draft_tree_nodes="16"),
    ):
        pass


@pytest.mark.parametrize(
    ("nodes", "said"),
    [("8", "0 or 9..32 columns for 7 draft tokens, got 8"), ("33", "9..32"), ("wide", "'wide'")],
)
def test_a_width_out_of_range_is_refused(dense, nodes, said):
    with (
        pytest.raises(ValueError, match="--draft-tree-nodes: expected") as refused,
        served(dense / "target", dense / "dflash2", draft_tree_nodes=nodes),
    ):
        pass
    assert said in str(refused.value)


# ---- the law -------------------------------------------------------------------------------------


class TiltedTree(Tilted):
    """Grows trees in a lattice of tilted laws of the anchor; may report another than it drew."""

    def select(self, hidden: torch.Tensor, block: DraftBlock) -> Proposals:
        if not block.tree_width:
            return super().select(hidden, block)
        ids, drawn, reported = self.law(block.anchors)
        positions = (hidden.shape[0], block.most_live, 16)
        scores = block.temperatures[:, None] * drawn.clamp_min(1e-30).log()
        nothing = torch.zeros(self.p.shape[1], 1)
        tree = candidate_tree(
            scores[:, None].expand(positions).contiguous(),
            ids[:, None].expand(positions).contiguous(),
            torch.zeros(*positions[:2], 1),
            nothing,
            nothing,
            block.anchors,
            block.temperatures,
            block.seeds,
            block.rows.frontiers,
            block.tree_nodes,
            block.tree_paths,
            width=block.tree_width,
        )
        q = tree.probabilities
        if self.drawn != self.reported:
            q = reported[:, None].expand_as(q).contiguous()
        finite = torch.ones(len(ids), dtype=torch.bool)
        lines = torch.where(block.tree_nodes > 0, tree.counts, block.lives)
        return Proposals(tree.tokens, finite, tree.candidate_ids, q, tree.parents, lines)


def sampled(client: Client, ids: list[int], settings: dict, tokens: int, count: int):
    for seed in range(count // 8):
        yield from client.samples(
            prompt_ids=ids,
            max_tokens=tokens,
            seed=seed * 7919 + 1,
            n=8,
            ignore_eos=True,
            **settings,
        )


@pytest.mark.parametrize(
    ("reported", "name"),
    [(3.0, "top-k-top-p"), (3.0, "penalties"), (1.2, "top-k-top-p")],
    ids=["true-q", "true-q-penalties", "wrong-q"],
)
def test_the_first_two_tokens_have_the_processed_law(
    dense, serve, oracle, monkeypatch, reported, name
):
    """A tree of four siblings, K = 1; with a q that was not drawn from, the law is refuted."""
    settings = SETTINGS[name]
    ids = prompt(12, seed=4)
    joint = joint_law(oracle, ids, settings)
    tilt(monkeypatch, TiltedTree(joint, 3.0, reported))
    _, client = serve(dense, draft_tokens=1, draft_tree_nodes="5", max_concurrency=8, max_queue=64)
    done = list(sampled(client, ids, settings, 3, 480))
    assert reported != 3.0 or sum(c.usage.side_accepted for c in done) > 20
    value = goodness([c.token_ids[:2] for c in done], joint)
    assert (value > 1e-3) if reported == 3.0 else (value < REJECT)


class Foretold:
    """Grows trees from how often each token follows another under a law of triples, flattened."""

    def __init__(self, law: dict[tuple[int, ...], float]) -> None:
        follows = torch.full((VOCAB, VOCAB), 1e-3)
        for begun, mass in law.items():
            for before, after in pairwise(begun):
                follows[before, after] += mass
        self.edges = (follows / follows.sum(1, True)).log() / 2
        self.ids = torch.tensor([likeliest(law, place) for place in (1, 2)])

    def select(self, hidden: torch.Tensor, block: DraftBlock) -> Proposals:
        rows = hidden.shape[0]
        tree = candidate_tree(
            torch.zeros(rows, 2, 16),
            self.ids.expand(rows, 2, 16).contiguous(),
            block.temperatures[:, None, None].expand(rows, 2, VOCAB).contiguous(),
            torch.eye(VOCAB),
            self.edges.T.contiguous(),
            block.anchors,
            block.temperatures,
            block.seeds,
            block.rows.frontiers,
            block.tree_nodes,
            block.tree_paths,
            width=block.tree_width or 4,
        )
        lines = torch.where(block.tree_nodes > 0, tree.counts, block.lives)
        return Proposals(
            tree.tokens,
            torch.ones(rows, dtype=torch.bool),
            tree.candidate_ids,
            tree.probabilities,
            tree.parents,
            lines,
        )


def likeliest(law: dict[tuple[int, ...], float], place: int) -> list[int]:
    """The 16 likeliest tokens of a place, filled up with others."""
    mass = Counter[int]()
    for begun, share in law.items():
        mass[begun[place]] += share
    found = [token for token, _ in mass.most_common(16)]
    return (found + others(found, 16))[:16]


def test_three_tokens_have_the_joint_law_when_branches_are_two_deep(
    dense, serve, oracle, monkeypatch
):
    settings = {"temperature": 0.9, "top_k": 3}
    ids = prompt(12, seed=4)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        with torch.inference_mode():
            logits = oracle(torch.tensor([[*ids, *begun] for begun in law])).logits[:, -1]
        law = {
            (*begun, token): mass * p[token]
            for (begun, mass), row in zip(law.items(), logits, strict=True)
            for p in [processed(row, ids, begun, settings)]
            for token in np.flatnonzero(p).tolist()
        }
    tilt(monkeypatch, Foretold(law))
    _, client = serve(dense, draft_tokens=2, draft_tree_nodes="10", max_concurrency=8, max_queue=64)
    done = list(sampled(client, ids, settings, 4, 400))
    assert sum(c.usage.side_accepted for c in done) > 100
    assert sum(c.usage.accepted_per_position[1] for c in done) > 100
    counts = dict.fromkeys(law, 0)
    for completion in done:
        counts[completion.token_ids[:3]] += 1
    observed, expected = np.array(list(counts.values())), np.array(list(law.values()))
    assert chi_square(observed, expected) > 1e-3


def test_the_drafts_own_trees_keep_the_law(dense, serve, oracle):
    settings = SETTINGS["temperature"]
    ids = prompt(12, seed=4)
    _, client = serve(dense, draft_tokens=1, draft_tree_nodes="9", max_concurrency=8, max_queue=64)
    done = list(sampled(client, ids, settings, 3, 320))
    assert goodness([c.token_ids[:2] for c in done], joint_law(oracle, ids, settings)) > REJECT


# ---- auto ----------------------------------------------------------------------------------------


@pytest.fixture
def cost(monkeypatch):
    """Scripts what rounds cost by their columns: a test must not hang on the machine's mood."""
    whole = TreePolicy.round_ended

    def script(of_columns) -> None:
        def ended(self, row_count, frontier, columns, elapsed_ns):
            whole(self, row_count, frontier, columns, int(1000 * of_columns(columns)))

        monkeypatch.setattr(TreePolicy, "round_ended", ended)

    return script


@pytest.mark.parametrize(
    ("of_columns", "chosen"),
    [(lambda columns: 1.0, 24.0), (lambda columns: 1 + columns, 0.0)],
    ids=["trees cost nothing", "trees cost a lot"],
)
def test_auto_takes_the_width_that_pays_and_shows_it(held_out, cost, of_columns, chosen):
    cost(of_columns)
    with (
        served(bundled("target"), bundled("dflash2"), draft_tree_nodes="auto") as pair,
        Client(pair.address) as client,
    ):
        wanted = {"prompt_ids": held_out[20], "max_tokens": 160, **GREEDY}
        completion = client.generate(**wanted)
        plain = client.generate(**wanted, draft_tokens=0)
        assert completion.token_ids == plain.token_ids
        lines = pair.verifier.metrics.text().splitlines()
        assert f'outrider_verifier_tree_columns{{load="1 rows below 2048"}} {chosen}' in lines
        tried = [line for line in lines if line.startswith("outrider_verifier_round_columns")]
        assert len(tried) == 4, "each width was tried"
        usage = completion.usage
        assert (usage.tree_rounds > usage.rounds / 2) == (chosen > 0)
        pair.expect_nothing_left()
