"""Trees in the drafter: what is asked for and refused, and that the main chain is the chain."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from drafter.checkpoints import CheckpointSlots, CheckpointTables
from drafter.config import DraftConfig, DrafterOptions
from drafter.context import ContextMemory
from drafter.graphs import BlockBuffers, DraftGraphs
from drafter.model import DraftModel, ProposalAsk
from drafter.rounds import DraftRounds, TreeLimits
from drafter.selector import selector_for
from drafter.service import expect_fitting
from drafter.weights import load_weights
from outrider import PROTOCOL_REVISION, pair, tensors
from outrider.checkpoint import Checkpoint, bundled
from outrider.faults import FaultError
from outrider.serving import MESSAGE_LIMIT
from outrider.tensors import row_bytes
from outrider.v1 import draft_service_pb2 as wire

LENGTH, NODES, PATHS = 20, 16, 6


@pytest.fixture(scope="module")
def drafting(make_pair, load):
    pair = make_pair("dflash2", "lf", is_causal=False)
    return load(pair, max_concurrency=4, draft_tree_nodes=f"{NODES},12")


def opened(drafting, features, seed=0):
    context = drafting.memory.open(0)
    drafting.append((context, features(LENGTH, seed)))
    return context


def lines_of(proposals, row, live):
    """A row's tokens, what each continues, candidates and laws."""
    offers = proposals.offers()
    assert offers.finite[row]
    lines = slice(offers.count(row, live))
    return (
        offers.tokens[row, lines].tolist(),
        offers.branches(row, live),
        torch.tensor(offers.candidate_ids[row, lines]),
        torch.tensor(offers.probabilities[row, lines]),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_first_lines_of_a_tree_are_the_chain(drafting, features, temperature):
    context = opened(drafting, features)
    chain, tree = (
        lines_of(
            drafting.graphs.draft([ProposalAsk(context, 5, 7, temperature, 9, *more)])[0], 0, 7
        )
        for more in ((), (NODES, PATHS))
    )
    tokens, parents, ids, q = tree
    expected_tokens, no_parents, expected_ids, expected_q = chain
    assert no_parents == []
    assert tokens[:7] == expected_tokens
    assert torch.equal(ids[:7], expected_ids)
    assert torch.equal(q[:7], expected_q)
    assert len(tokens) == len(parents) == NODES - 1
    assert parents[:7] == list(range(7))
    assert NODES - len({0, *parents}) <= PATHS
    drafting.memory.release(context)


def test_rows_with_and_without_trees_share_a_block(drafting, features):
    contexts = [opened(drafting, features, seed) for seed in range(4)]
    wishes = [(7, NODES, PATHS), (3, 0, 1), (7, 12, 2), (7, 0, 1)]
    asks = [
        ProposalAsk(context, 5, live, 0.7, seed, nodes, paths)
        for seed, (context, (live, nodes, paths)) in enumerate(zip(contexts, wishes, strict=True))
    ]
    together, _ = drafting.graphs.draft(asks)
    for row, (live, nodes, _) in enumerate(wishes):
        alone, _ = drafting.graphs.draft([asks[row]])
        tokens, parents, ids, q = lines_of(together, row, live)
        expected = lines_of(alone, 0, live)
        assert (tokens, parents) == expected[:2]
        assert torch.equal(ids, expected[2])
        torch.testing.assert_close(q, expected[3], atol=1e-5, rtol=0)
        assert len(tokens) == (nodes - 1 if nodes else live)
    for context in contexts:
        drafting.memory.release(context)


def test_a_tree_is_not_finite_where_a_live_line_is_not(drafting, features):
    contexts = [opened(drafting, features, seed) for seed in range(2)]
    buffers = BlockBuffers(drafting.config, 2)
    asks = [ProposalAsk(contexts[0], 5, 7, 0.7, 1, 12, 4), ProposalAsk(contexts[1], 5, 2, 0.7, 1)]
    buffers.write(asks)
    buffers.send()
    pages = drafting.memory.plan.pages_per_sequence
    block = buffers.block(drafting.memory, pages, NODES)
    hidden = drafting.model.draft_block(block)
    assert drafting.selector.select(hidden, block).finite.tolist() == [True, True]
    hidden[:, 5] = torch.inf  # beyond the second row's two proposals
    assert drafting.selector.select(hidden, block).finite.tolist() == [False, True]
    for context in contexts:
        drafting.memory.release(context)


# ---- the wire -----------------------------------------------------------------------------------


@pytest.fixture
def rounds(drafting):
    slots = CheckpointSlots(drafting.memory, 0)
    table = CheckpointTables(slots, 0.0, Counter()).claim(b"v" * 16, 0)
    made = DraftRounds(
        drafting.config, drafting.graphs, 2, table, Counter(), trees=TreeLimits(NODES, PATHS)
    )
    yield made
    made.close()


def ask_for(rounds, features, **changes):
    wanted = {"live": 7, "tree_nodes": NODES, "tree_paths": PATHS, "temperature": 0.5} | changes
    rounds.apply(wire.DraftRoundsRequest(open=wire.Open(sequence_id=1, epoch=1)))
    row = wire.RoundRow(
        sequence_id=1,
        epoch=1,
        features=tensors.encode(features(LENGTH)),
        proposal=wire.ProposalRequest(frontier=LENGTH, anchor=5, seed=3, **wanted),
    )
    reply = rounds.apply(wire.DraftRoundsRequest(round=wire.Round(round_index=1, rows=[row])))
    return reply.round_reply.rows[0].proposal


def test_a_reply_has_parents_and_laws_of_every_line(rounds, features):
    proposal = ask_for(rounds, features)
    assert len(proposal.token_ids) == len(proposal.parents) == NODES - 1
    conditional = proposal.conditional
    assert list(conditional.candidate_ids.shape) == [NODES - 1, 16]
    ids = tensors.decode(conditional.candidate_ids, (None, 16), torch.int32)
    q = tensors.decode(conditional.probabilities, (None, 16), torch.float32)
    drawn = q[ids == torch.tensor(proposal.token_ids)[:, None]]
    assert len(drawn) == NODES - 1
    assert bool((drawn > 0).all())
    assert rounds._counters["trees"] == 1


def test_a_reply_without_a_tree_has_no_parents(rounds, features):
    proposal = ask_for(rounds, features, tree_nodes=0, tree_paths=0)
    assert (len(proposal.token_ids), len(proposal.parents)) == (7, 0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"live": 6}, "live"),
        ({"tree_nodes": 8}, "tree_nodes"),
        ({"tree_nodes": NODES + 1}, "tree_nodes"),
        ({"tree_paths": 1}, "tree_paths"),
        ({"tree_paths": PATHS + 1}, "tree_paths"),
    ],
)
def test_a_tree_that_hello_did_not_allow_ends_the_stream(rounds, features, changes, field):
    with pytest.raises(FaultError) as refused:
        ask_for(rounds, features, **changes)
    assert refused.value.reason == "EVENT_INVALID"
    assert refused.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("flag", "nodes", "paths", "said"),
    [
        ("16,12", 0, 0, None),
        ("16,12", 9, 2, None),
        ("16,12", 16, 8, None),
        ("auto", 24, 8, None),
        ("16,12", 17, 8, "tree_nodes: expected 0 or 9..16, got 17"),
        ("16,12", 8, 8, "tree_nodes: expected 0 or 9..16, got 8"),
        ("16,12", 16, 1, "tree_paths: expected 2..8, got 1"),
        ("16,12", 16, 9, "tree_paths: expected 2..8, got 9"),
        ("off", 9, 2, "tree_nodes: expected 0, got 9; tree_paths: expected 0, got 2"),
    ],
)
def test_hello_is_refused_where_the_drafter_grows_no_such_trees(
    make_pair, flag, nodes, paths, said
):
    files = make_pair("dflash2", "lf", is_causal=False)
    options = DrafterOptions(target=files.target, draft=files.draft, draft_tree_nodes=flag)
    with Checkpoint(files.target) as target, Checkpoint(files.draft) as draft:
        config = DraftConfig.read(options, target, draft)
        geometry = pair.geometry(config.target, config.draft, "float32")
    hello = wire.Hello(
        protocol_revision=PROTOCOL_REVISION,
        verifier_id=b"v" * 16,
        max_concurrency=1,
        draft_tokens=7,
        tree_nodes=nodes,
        tree_paths=paths,
        geometry=geometry,
        max_message_bytes=MESSAGE_LIMIT,
    )
    if said is None:
        expect_fitting(config, geometry, hello)
        return
    with pytest.raises(FaultError) as refused:
        expect_fitting(config, geometry, hello)
    assert (refused.value.reason, refused.value.message) == ("MODEL_MISMATCH", said)


def test_dflash_grows_no_trees(make_pair):
    files = make_pair("dflash", "lf", is_causal=False)
    options = DrafterOptions(target=files.target, draft=files.draft, draft_tree_nodes="auto")
    with (
        Checkpoint(files.target) as target,
        Checkpoint(files.draft) as draft,
        pytest.raises(ValueError, match=r"no candidate selector \(DFlash\), got auto"),
    ):
        DraftConfig.read(options, target, draft)


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_device():
    """The bundled draft in bfloat16 on a CUDA device, which grows trees of 16 columns."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    options = DrafterOptions(device="cuda", dtype="bfloat16", max_concurrency=8)
    options = DrafterOptions(**vars(options) | {"draft_tree_nodes": str(NODES)})
    with Checkpoint(bundled("target")) as target, Checkpoint(bundled("dflash2")) as draft:
        config = DraftConfig.read(options, target, draft)
        weights = load_weights(config, target, draft)
    memory = ContextMemory(config.context_plan, config.device)
    selector = selector_for(config, weights)
    return (
        config,
        selector,
        DraftGraphs(config, DraftModel(config.draft, weights, memory), selector),
    )


@pytest.mark.gpu
def test_a_graph_grows_what_its_functions_do_in_any_batch(on_device):
    config, selector, graphs = on_device
    generator = torch.Generator().manual_seed(5)
    contexts = []
    with graphs.stream():
        for length in (5, 64, 30, 130, 9):
            context = graphs.memory.open(0)
            for first in range(0, length, 64):
                count = min(64, length - first)
                rows = torch.randn(count, config.feature_width, generator=generator).bfloat16()
                append = graphs.memory.append([(context, count)])
                graphs.materialize([row_bytes(rows)], append)
                append.commit()
            contexts.append(context)
    asks = [
        ProposalAsk(context, 5 + row, 7, 0.8 if row % 2 else 0.0, row, nodes, 8 if nodes else 1)
        for row, (context, nodes) in enumerate(zip(contexts, (16, 0, 12, 16, 9), strict=True))
    ]

    def lines(some):
        with graphs.stream():
            proposals, _ = graphs.draft(some)
            found = [lines_of(proposals, row, 7) for row in range(len(some))]
        return [(tokens, parents, ids.tolist(), q.tolist()) for tokens, parents, ids, q in found]

    together = lines(asks)
    assert lines(asks) == together
    for row, ask in enumerate(asks):
        assert lines([ask]) == [together[row]]
    buffers = BlockBuffers(config, 1)
    with torch.inference_mode():
        buffers.write(asks[:1])
        buffers.send()
        block = buffers.block(graphs.memory, config.context_plan.pages_per_sequence, NODES)
        eager = selector.select(graphs._model.draft_block(block), block)
    assert eager.tokens[0].tolist() == together[0][0]
    assert eager.parents[0].tolist() == together[0][1]
