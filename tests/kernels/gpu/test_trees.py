"""Trees of columns: grown, verified, accepted and compacted at the official shapes."""

import pytest
import torch

from kernels.candidate_selector import candidate_selector
from kernels.candidate_tree import candidate_tree
from kernels.candidate_tree.reference import candidate_tree as tree_reference
from kernels.causal_attention import causal_attention
from kernels.causal_attention.reference import causal_attention as attention_reference
from kernels.gdn_fold import gdn_fold
from kernels.gdn_verify import GdnRecord, gdn_verify
from kernels.gdn_verify.reference import gdn_verify as verify_reference
from kernels.speculative_accept import speculative_accept
from kernels.target_distribution import target_distribution
from kernels.target_distribution.reference import target_distribution as distribution_reference
from kernels.tree_accept import tree_accept
from kernels.tree_accept.reference import tree_accept as accept_reference
from kernels.tree_compact import compact_columns, compact_pages
from kernels.tree_compact import reference as compact_reference
from kernels.trees import ancestor_masks
from tests.kernels.gpu.shared import BF16, NAN, ROUNDED, on_device, same
from tests.kernels.gpu.test_attention import TARGETS, paged
from tests.kernels.gpu.test_gdn import block, official, part
from tests.kernels.test_tree_accept import forest
from tests.kernels.test_tree_compact import COLUMNS
from tests.kernels.test_trees import few_paths
from tests.kernels.triton import test_candidate_selector as selector
from tests.kernels.triton import test_causal_attention as causal
from tests.kernels.triton import test_speculative_accept as accept
from tests.kernels.triton import test_target_distribution as distribution

pytestmark = pytest.mark.gpu
VOCAB = 248320


def masks_of(rows, width, counts, *, seed=0):
    """Trees of at most 8 paths on the device; masks of dead columns are wrong."""
    masks = ancestor_masks(few_paths(rows, width - 1, seed=seed))
    for row, count in enumerate(counts):
        masks[row, count:] = -1
    return masks.cuda()


@pytest.mark.parametrize(("P", "R", "width"), [(7, 256, 16), (15, 256, 32), (1, 8, 12)], ids=str)
def test_trees_of_candidates(host_random, P, R, width):
    temperatures = [0.0, 1.0, 0.3, -1.0, 2.5, 0.7, 1.3, 0.0]
    x = on_device(selector.case(host_random, 8, P, 16, R, temperatures, V=5000))
    x[2:5] = [plane.to(BF16) for plane in x[2:5]]
    limits = [torch.full((8,), n, device="cuda") for n in (width, 8)]
    tree = candidate_tree(*x, *limits, width=width)
    tokens, law = candidate_selector(*x)
    assert torch.equal(tree.tokens[:, :P], tokens)
    assert torch.equal(tree.probabilities[:, :P], law)
    wanted = tree_reference(*x, *limits, width=width)
    # two priorities within a sum's rounding of each other may change places
    alike = (tree.parents == wanted.parents) & (tree.tokens == wanted.tokens)
    assert alike.all(dim=1).float().mean() > 0.7
    for row in (0, 5):
        alone = [plane if i in (3, 4) else plane[row : row + 1] for i, plane in enumerate(x)]
        one = candidate_tree(*alone, *(limit[:1] for limit in limits), width=width)
        for mine, together in zip(one, tree, strict=True):
            assert torch.equal(mine[0], together[row])


@pytest.mark.parametrize("shape", TARGETS)
@pytest.mark.parametrize("W", [12, 16, 32])
def test_attention(host_random, distance, W, shape):
    frontiers, counts = (0, 120, 505, 2040), (W, 3, W, W)
    x = paged(host_random, frontiers, counts, W, **TARGETS[shape])
    masks = masks_of(4, W, counts, seed=W)
    mine, theirs = causal.copied(x), causal.copied(x)
    actual = causal_attention(*mine, masks)
    assert distance(actual, attention_reference(*theirs, masks)) < 3.95e-3
    for plane in (4, 5):
        assert same(mine[plane], theirs[plane])
    chain = ancestor_masks(torch.arange(W - 1).expand(4, W - 1)).cuda()
    plain = causal_attention(*causal.copied(x))
    assert torch.equal(causal_attention(*causal.copied(x), chain), plain)


@pytest.mark.parametrize("shape", TARGETS)
@pytest.mark.parametrize("W", [12, 16, 32])
def test_attention_of_a_path_is_that_of_a_chain(host_random, shape, W):
    frontiers = (0, 61, 126, 505, 1000, 2047, 2048 - W // 2, 2555)
    counts = (W, W, W, 5, W, W, W, W - 1)
    x = paged(host_random, frontiers, counts, W, **TARGETS[shape])
    causal.expect_paths_to_be_chains(x, masks_of(8, W, counts, seed=W), counts)
    for row in (1, 6):
        alone = [*(plane[row : row + 1] for plane in x[:4]), *x[4:6]]
        alone += [plane[row : row + 1] for plane in x[6:]]
        masks = masks_of(1, W, [W], seed=W + row)
        causal.expect_paths_to_be_chains(alone, masks, [W])


@pytest.mark.parametrize("shape", TARGETS)
@pytest.mark.parametrize("W", [12, 16, 32])
def test_height_of_a_tile_changes_no_bit_of_attention(host_random, monkeypatch, shape, W):
    frontiers, counts = (0, 61, 505, 2040, 4100), (W, W, 5, W, W - 1)
    x = paged(host_random, frontiers, counts, W, **TARGETS[shape])
    masks = masks_of(5, W, counts, seed=W)
    for ancestors in (None, masks):
        causal.expect_height_to_change_no_bit(x, ancestors, monkeypatch)
    # chains of few columns beside trees of many: a low tile's bits against a tall one's
    monkeypatch.setattr(causal.kernel, "TALL_FROM", 0)
    causal.expect_paths_to_be_chains(x, masks, counts)


@official
@pytest.mark.parametrize("W", [12, 16, 32])
def test_delta_rule(gdn, distance, W, geometry):
    arguments = block(gdn, 3, W, geometry)
    counts = (W, 5, W)
    arguments["counts"] = torch.tensor(counts, device="cuda")
    arguments["ancestors"] = masks_of(3, W, counts, seed=W)
    out = gdn_verify(**arguments)
    theirs = GdnRecord(*(torch.full_like(plane, NAN) for plane in arguments["record"]))
    assert distance(out, verify_reference(**arguments | {"record": theirs})) < ROUNDED
    for column in range(0, W, 3):
        mask = int(arguments["ancestors"][2, column])
        path = [j for j in range(column + 1) if mask >> j & 1]
        alone = part(arguments, 2, path, ancestors=None)
        assert torch.equal(gdn_verify(**alone)[0], out[2, path])
        for plane, recorded in zip(alone["record"], arguments["record"], strict=True):
            assert torch.equal(plane[0], recorded[2, path])


@official
def test_fold_of_a_compacted_tree_is_the_fold_of_its_branch(gdn, geometry):
    parents = torch.tensor([[0, 1, 2, 3, 1, 5, 6, 0]])
    branch = [0, 1, 5, 6]
    tree = block(gdn, 1, 9, geometry) | {"ancestors": ancestor_masks(parents).cuda()}
    alone = part(tree, 0, branch, ancestors=None)
    gdn_verify(**tree)
    gdn_verify(**alone)
    columns = torch.tensor([[*branch, *range(4, 9)]], device="cuda")
    compact_columns([plane.unsqueeze(0) for plane in tree["record"]], columns)
    left = []
    for arguments in (tree, alone):
        state, history = (arguments[n].unsqueeze(0).clone() for n in ("state", "conv_history"))
        records = GdnRecord(*(plane.unsqueeze(0) for plane in arguments["record"]))
        slots, count = arguments["slots"], torch.tensor([4], device="cuda")
        gdn_fold(records, state, history, slots, slots, count)
        left.append((state, history))
    assert torch.equal(left[0][0], left[1][0])
    assert torch.equal(left[0][1], left[1][1])


def test_distribution(host_random):
    wishes = [
        distribution.WISHES[n] for n in ("penalties", "greedy-penalties", "min-tokens", "all")
    ]
    rows = distribution.rows_of(wishes, vocab=VOCAB)
    rows = type(rows)(**{name: on_device(value) for name, value in vars(rows).items()})
    logits = host_random(4, 12, VOCAB, scale=2.0).cuda()
    proposals = torch.tensor([3, 7, 3, 3, 9, 7, 7, 1, 2, 3, 4]).expand(4, 11).cuda()
    counts = torch.tensor([12, 12, 12, 5], device="cuda")
    wanted = {"public_vocab": 248077, "ancestors": masks_of(4, 12, counts.tolist())}
    p = target_distribution(logits, proposals, counts, rows, **wanted)
    expected = distribution_reference(logits, proposals, counts, rows, **wanted)
    torch.testing.assert_close(p, expected, rtol=1e-4, atol=1e-7)


def test_acceptance_of_trees():
    trees = forest(12, 15, VOCAB, 16, seed=1)
    x = on_device(trees.arguments)
    result, expected = tree_accept(*x), accept_reference(*x)
    # a draw within a sum's rounding of a boundary may fall to the neighbour
    assert (result.tokens == expected[0]).all(dim=1).float().mean() > 0.8
    assert (result.accepted > 0).any()
    for row in (0, 11):
        alone = tree_accept(*(plane[row : row + 1] for plane in x))
        for mine, together in zip(alone, result, strict=True):
            assert torch.equal(mine[0], together[row])


def test_acceptance_of_a_chain_is_speculative_accept_s_bit_for_bit(host_random):
    x = on_device(accept.case(host_random, 8, 7, 16, V=VOCAB))
    masks = ancestor_masks(torch.arange(7).expand(8, 7)).cuda()
    expected = speculative_accept(*x)
    actual = tree_accept(*x[:3], masks, *x[3:])
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.accepted, expected.accepted)


def test_compaction(random):
    columns = COLUMNS.cuda()
    planes = [random(48, 3, 9, 10240), random(48, 3, 9, 16, 128), random(1, 3, 9, 5120)]
    pages = random(16, 40, 64, 4, 256), random(16, 40, 64, 4, 256, dtype=torch.float16)
    tables = torch.randperm(40, device="cuda")[:39].view(3, 13)
    frontiers = torch.tensor([0, 60, 700], device="cuda")
    mine = [plane.clone() for plane in (*planes, *pages)]
    compact_columns(mine[:3], columns)
    compact_pages(*mine[3:], tables, frontiers, columns)
    compact_reference.compact_columns(planes, columns)
    compact_reference.compact_pages(*pages, tables, frontiers, columns)
    for actual, expected in zip(mine, (*planes, *pages), strict=True):
        assert torch.equal(actual, expected)
