"""Trees in the verifier: what is let in, what the ops see of it, and what a commit leaves."""

from __future__ import annotations

import pytest
import torch

from kernels.candidate_tree import candidate_tree
from kernels.trees import ancestor_masks
from outrider import tensors
from outrider.faults import FaultError
from outrider.tree_nodes import TreeNodes
from outrider.v1 import draft_service_pb2 as wire
from tests.tiny_target import Variant, save_target
from tests.verifier.test_blocks import make_blocks
from verifier import proposals
from verifier.blocks import BlockRow, Blocks, most_columns
from verifier.draft_context import Context
from verifier.trees import (
    ListedTrees,
    TreeAsk,
    accepted_within,
    depths_of,
    main_chain,
    masks_of,
    tree_widths,
)

K, NODES, PATHS, VOCAB = 4, 14, 6, 100
TREES = [
    [0, 1, 2, 3, 0, 5, 1, 0],
    [0, 1, 2, 3, 0, 0, 0],
    [0, 1, 2, 3, 3, 2, 1, 0],
    [0, 1, 2, 3, 0, 5, 6, 7],
]


@pytest.mark.parametrize("parents", TREES)
def test_masks_are_the_closure_of_the_parents(parents):
    width = len(parents) + 1
    expected = ancestor_masks(torch.tensor([parents]))[0].tolist()
    assert masks_of(parents, width) == expected
    # dead columns change no live one
    assert masks_of(parents, width + 5)[:width] == expected
    assert depths_of(parents) == [mask.bit_count() - 1 for mask in expected]


def test_the_last_of_32_columns_has_the_sign():
    assert masks_of(range(31), 32)[-1] == -1
    assert masks_of([0] * 31, 32)[-1] == 1 - (1 << 31)


def test_a_narrower_tree_would_have_accepted_the_columns_below_its_width():
    assert [accepted_within([1, 2, 9, 13], width) for width in (9, 12, 14)] == [2, 3, 4]
    assert main_chain([1, 2, 9, 13]) == 2
    assert (main_chain([]), main_chain([5, 6])) == (0, 0)


def test_a_list_counts_rows_and_its_last_entry_is_for_more():
    nodes = TreeNodes.parse("16,12,0")
    trees = ListedTrees(nodes, 7)
    assert [trees.columns(rows, 5) for rows in (1, 2, 3, 8)] == [16, 12, 0, 0]
    assert trees.widths == (12, 16)
    # on a device three samples run in a block of four rows
    assert tree_widths(nodes, 7, [1, 2, 4, 4]) == {1: (16,), 2: (12,)}
    assert tree_widths(TreeNodes.parse("16,12,10"), 7, [1, 2, 4, 4]) == {
        1: (16,),
        2: (12,),
        4: (10,),
    }
    assert tree_widths(TreeNodes.parse("off"), 7, [1, 2]) == {}
    assert most_columns(4, 8, {1: (16,), 2: (12,)}) == 32
    assert most_columns(4, 8, {4: (10, 12)}) == 48


# ---- replies -------------------------------------------------------------------------------------


def grown(temperature: float, seed: int):
    """A tree as the drafter grows it: tokens, parents, candidates, laws."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:16] for _ in range(K)])
    tree = candidate_tree(
        torch.randn(1, K, 16, generator=generator),
        ids.unsqueeze(0),
        torch.zeros(1, K, 1),
        torch.zeros(VOCAB, 1),
        torch.zeros(VOCAB, 1),
        torch.tensor([3]),
        torch.tensor([temperature]),
        torch.tensor([seed]),
        torch.tensor([10]),
        torch.tensor([NODES]),
        torch.tensor([PATHS]),
        width=NODES,
    )
    count = int(tree.counts)
    return [part[0, :count].clone() for part in (*tree[:2], *tree[4:])]


ASKED = TreeAsk(NODES, PATHS)


def decoded(message, tree):
    ask = proposals.Ask(Context(1), K, 10, anchor=0, temperature=1.0, seed=0, tree=tree)
    drafted = proposals.decode_proposal(message, ask, VOCAB)
    (law,) = proposals.laws_of([drafted], VOCAB)
    if isinstance(law, FaultError):
        raise law
    return drafted, law


def decode(tokens, parents, ids, q, tree=ASKED):
    message = wire.Proposal(
        frontier=10, token_ids=tokens.tolist(), parents=[int(p) % (1 << 32) for p in parents]
    )
    message.conditional.candidate_ids.CopyFrom(tensors.encode(ids.int()))
    message.conditional.probabilities.CopyFrom(tensors.encode(q))
    return decoded(message, tree)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("seed", range(6))
def test_what_the_drafter_grows_is_let_in(temperature, seed):
    tokens, parents, ids, q = grown(temperature, seed)
    drafted, law = decode(tokens, parents, ids, q)
    assert drafted.token_ids == tuple(tokens.tolist())
    assert drafted.parents == tuple(parents.tolist())
    assert drafted.nodes == NODES
    assert torch.equal(law.candidate_ids, ids.int())
    assert torch.equal(law.probabilities, q)
    deepest = [*range(1, K + 1)]
    assert drafted.ends_at(K, tuple(deepest))
    assert not drafted.ends_at(0, ())


def sibling_pair(parents):
    lines = parents.tolist()
    return next((lines.index(p), i) for i, p in enumerate(lines) if lines.index(p) < i)


def spoiled(name, tokens, parents, ids, q):
    """The tree with one thing wrong."""
    elder, younger = sibling_pair(parents)
    last = len(parents) - 1
    if name == "a parent that is itself":
        parents[last] = last + 1
    elif name == "a parent far behind":
        parents[last] = 1 << 31
    elif name == "another main chain":
        parents[1] = 0
    elif name == "a column too deep":
        parents[K] = K
    elif name == "equal siblings":
        tokens[younger], q[younger] = tokens[elder], q[elder]
    elif name == "siblings of other candidates":
        ids[younger] = ids[younger].flip(0)
        q[younger] = q[younger].flip(0)
    elif name == "siblings of other laws":
        q[younger] = (q[younger] + q[younger].roll(1)) / 2
    elif name == "candidates that repeat":
        free = [i for i in range(16) if ids[elder, i] not in (tokens[elder], tokens[younger])]
        ids[(parents == parents[elder]), free[0]] = ids[elder, free[1]]
    elif name == "a token outside its law":
        tokens[last] = next(t for t in range(VOCAB) if t not in ids[last].tolist())
    elif name == "a law that sums to less":
        q[last] *= 0.9
    elif name == "a negative law":
        q[last, :2] += torch.tensor([-2.0, 2.0])
    elif name == "NaN":
        q[last, 0] = torch.nan
    elif name == "a private id":
        tokens[last] = VOCAB
    return tokens, parents, ids, q


SPOILED = (
    "a parent that is itself",
    "a parent far behind",
    "another main chain",
    "a column too deep",
    "equal siblings",
    "siblings of other candidates",
    "siblings of other laws",
    "candidates that repeat",
    "a token outside its law",
    "a law that sums to less",
    "a negative law",
    "NaN",
    "a private id",
)


@pytest.mark.parametrize("name", SPOILED)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_what_is_no_tree_is_not_let_in(name, temperature):
    parts = spoiled(name, *grown(temperature, 1))
    with pytest.raises(FaultError) as refused:
        decode(*parts)
    assert refused.value.reason == "PROPOSAL_INVALID"


@pytest.mark.parametrize(
    "asked", [None, TreeAsk(NODES - 1, PATHS), TreeAsk(NODES, 2)], ids=["none", "nodes", "paths"]
)
def test_more_than_was_asked_for_is_not_let_in(asked):
    with pytest.raises(FaultError, match=r"proposal: expected a chain|tree: expected at most"):
        decode(*grown(0.9, 1), tree=asked)


def test_lines_and_parents_must_be_as_many():
    tokens, parents, ids, q = grown(0.9, 1)
    with pytest.raises(FaultError):
        decode(tokens, parents[:-1], ids, q)
    message = wire.Proposal(frontier=10, token_ids=tokens.tolist(), parents=parents.tolist())
    message.point_mass.SetInParent()
    with pytest.raises(FaultError, match="expected a chain, got a tree"):
        decoded(message, ASKED)


def test_a_chain_is_an_answer_to_a_tree_that_was_asked_for():
    tokens, _, ids, q = grown(0.9, 1)
    drafted, _ = decode(tokens[:K], [], ids[:K], q[:K])
    assert (drafted.parents, drafted.nodes) == ((), 0)


# ---- blocks --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blocks(tmp_path_factory) -> Blocks:
    folder = tmp_path_factory.mktemp("target")
    save_target(folder, Variant("dense"))
    return make_blocks(
        folder, (0, 2, 3), torch.device("cpu"), torch.float32, trees={1: (16,), 2: (16,)}
    )


def begun(blocks: Blocks, prompt: list[int]):
    residency = blocks.target.state.acquire(200)
    assert residency is not None
    blocks.prefill(residency, prompt, 0, last=False, features_from=None)
    # greedy and without penalties
    blocks.tables._floats[residency.lane] = torch.tensor([0.0, 1, 0, 0, 0, 1])
    for table in (blocks.tables._generated_counts, blocks.tables._logit_bias):
        table[residency.lane] = 0
    return residency


def state_of(blocks: Blocks, residency, end: int) -> dict[str, torch.Tensor]:
    """Everything that the next round reads of a resident, copied."""
    state = blocks.target.state
    pages = torch.tensor(residency.pages)
    kept = {
        "gdn": state.gdn[:, residency.state_slot],
        "history": state.conv_history[:, residency.state_slot],
        "continuation": state.continuation[residency.lane],
        "keys": state.key_pages[:, pages].flatten(1, 2)[:, :end],
        "values": state.value_pages[:, pages].flatten(1, 2)[:, :end],
    }
    return {name: tensor.clone() for name, tensor in kept.items()}


def law_of(tokens: list[int], parents: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Point masses over candidates that siblings share."""
    ids = []
    for parent in parents:
        mine = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
        ids.append((mine + [t for t in range(20) if t not in mine])[:4])
    found = torch.tensor(ids)
    return found, (found == torch.tensor(tokens)[:, None]).float()


@pytest.mark.parametrize("depth", [0, 2, 6])
def test_a_branch_leaves_what_its_chain_would(blocks: Blocks, depth: int):
    """Every plane: states, history, continuation, KV, features, logits, beside a chain's row."""
    prompt, other = list(range(3, 60)), list(range(80, 40, -1))
    greedy = [11, 23, 5, 42, 77, 8, 91]
    with torch.inference_mode():
        outcomes = []
        for branching in (True, False):
            residency, beside = begun(blocks, prompt), begun(blocks, other)
            tokens, parents = list(greedy), list(range(7))
            if branching:
                tokens = [*greedy[:depth], *[(t + 1) % 90 for t in greedy[depth:]]]
                tokens += greedy[depth:]
                parents += [depth, *range(8, 8 + 6 - depth)]
            law = law_of(tokens, parents)
            row = BlockRow(
                residency,
                len(prompt),
                1,
                (7, *tokens),
                tuple(parents) if branching else (),
            )
            chain = BlockRow(beside, len(other), 1, (9, 1, 2, 3))
            block = blocks.verify([row, chain])
            followed(blocks, block, tokens, parents)
            licensed = blocks.accept(block, [2, 2], [proposals.Law(*law), proposals.POINT_MASSES])
            blocks.commit(block, [6, 1])
            features = [
                torch.tensor(blocks.features(block, row, count)).view(blocks.target.dtype)
                for row, count in ((0, 6), (1, 1))
            ]
            outcomes.append(
                (
                    licensed,
                    features,
                    state_of(blocks, residency, len(prompt) + 6),
                    state_of(blocks, beside, len(other) + 1),
                )
            )
            for each in (residency, beside):
                blocks.target.state.release(each)
    (tree, tree_features, *tree_states), (chain, chain_features, *chain_states) = outcomes
    side = tuple(range(8, 8 + 7 - depth))
    assert tree[0].columns == (*range(1, depth + 1), *side)
    assert chain[0].columns == tree[1].columns == ()
    for index in range(2):
        assert tree[index].token_ids == chain[index].token_ids
        for a, b in zip(tree[index].logprobs, chain[index].logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
        torch.testing.assert_close(tree_features[index], chain_features[index])
        for name, expected in chain_states[index].items():
            torch.testing.assert_close(
                tree_states[index][name], expected, atol=1e-5, rtol=1e-5, msg=name
            )


def followed(blocks: Blocks, block, tokens, parents) -> None:
    """Makes the target's logits follow the wanted tokens from every column of the first row."""
    logits = block.buffers.results.logits
    greedy = [11, 23, 5, 42, 77, 8, 91, 30]
    for column, depth in enumerate(depths_of(parents)):
        logits[0, column, greedy[depth]] = 50.0


def test_a_dead_row_moves_nothing(blocks: Blocks):
    """On a device it fills the block up, as a copy of the first row."""
    greedy = [11, 23, 5, 42, 77, 8, 91]
    tokens, parents = [1, 2, 3, 4, 5, 6, 7, *greedy], [*range(7), 0, *range(8, 14)]
    with torch.inference_mode():
        residency = begun(blocks, list(range(3, 60)))
        row = BlockRow(residency, 57, 1, (7, *tokens), tuple(parents))
        buffers = blocks._of(2, 16)
        blocks._fill(buffers, [row])
        blocks._fill_laws(buffers, [row], [proposals.Law(*law_of(tokens, parents))])
        blocks._verify_function(buffers, blocks.target.state.page_tables.shape[1])()
        for index in range(2):
            for column, depth in enumerate(depths_of(parents)):
                buffers.results.logits[index, column, [*greedy, 30][depth]] = 50.0
        blocks.run_accept(buffers)
        assert buffers.egress.host["columns"][0, :8].tolist() == [0, *range(8, 15)]
        assert buffers.egress.host["columns"][1].tolist() == list(range(16))
        blocks.target.state.release(residency)


def test_a_block_is_as_wide_as_it_needs_to_be(blocks: Blocks):
    with torch.inference_mode():
        residency = begun(blocks, [1, 2, 3])
        widths = []
        for tokens, parents in (
            ([], ()),
            ([4], ()),
            ([4, 5, 6, 7, 8, 9, 10, 11], (0, *range(1, 8))),
        ):
            row = BlockRow(residency, 3, 1, (9, *tokens), parents=parents)
            widths.append(blocks.verify([row]).buffers.width)
        blocks.target.state.release(residency)
    assert widths == [1, 8, 16]
