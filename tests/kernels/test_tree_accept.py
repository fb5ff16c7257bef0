"""Recursive rejection keeps the target's law for every shape of tree, and states its rule."""

import math
from types import SimpleNamespace

import pytest
import torch

from kernels.candidate_tree import candidate_tree
from kernels.rng import Purpose, uniform
from kernels.speculative_accept import speculative_accept
from kernels.tree_accept import reference, tree_accept
from kernels.trees import ancestor_masks
from tests.kernels.test_candidate_selector import lattice
from tests.kernels.test_speculative_accept import CHAINS, Chain, misfit, one_hot
from tests.kernels.test_trees import random_parents

ROUNDS = 60_000


def drawn_tree(chain, anchors, parents, seeds, frontier, *, replacing=False):
    """Tokens [n, N] of a tree of this shape, each from its parent's law without elder siblings."""
    tokens, ids, laws, depth = [anchors], [], [], [0]
    elders: dict[int, list] = {}
    for line, parent in enumerate(parents):
        before = elders.setdefault(parent, [])
        support, law = chain.ids[tokens[parent]], chain.q[tokens[parent]]
        rest = law.double()
        for token in before:
            rest = torch.where((support == token[:, None]) & (not replacing), 0.0, rest)
        u = uniform(seeds, frontier + depth[parent], Purpose.PROPOSAL, 64 * line).double()
        goal = u * rest.sum(1)
        rank = (rest.cumsum(1) <= goal[:, None]).sum(1)
        rank = torch.minimum(rank, ((rest > 0) * torch.arange(rest.shape[1])).amax(1))
        before.append(support.gather(1, rank[:, None]).squeeze(1))
        tokens.append(before[-1])
        ids.append(support)
        laws.append(law)
        depth.append(depth[parent] + 1)
    return torch.stack(tokens, 1), torch.stack(ids, 1), torch.stack(laws, 1)


def emitted(chain, anchors, parents, seeds, frontier, **kwargs):
    """A round over trees of one shape: what is accepted, and the tokens."""
    tokens, ids, laws = drawn_tree(chain, anchors, parents, seeds, frontier, **kwargs)
    count, lines = anchors.shape[0], len(parents)
    masks = ancestor_masks(torch.tensor([parents])).expand(count, -1)
    return tree_accept(
        chain.target[tokens],
        tokens[:, 1:],
        torch.full((count,), lines),
        masks,
        ids,
        laws,
        seeds,
        torch.full((count,), frontier),
    )


def law_of_two(chain, round_of):
    """Misfit of the first token and of the first two; a round that ends early goes on."""
    seeds = torch.arange(ROUNDS) * 7919 + 3
    first, second = two_tokens(chain, round_of, seeds)
    law = chain.target[0].double()
    joint = law[:, None] * chain.target.double()
    return (
        misfit(torch.bincount(first, minlength=chain.vocab), law),
        misfit(torch.bincount(first * chain.vocab + second, minlength=chain.vocab**2), joint),
    )


def two_tokens(chain, round_of, seeds):
    anchors = torch.zeros(ROUNDS, dtype=torch.int64)
    tokens, accepted, _ = round_of(anchors, seeds, 100)
    first, second = tokens[:, 0], tokens[:, 1].clone()
    short = accepted == 0
    second[short] = round_of(first[short], seeds[short], 101)[0][:, 0]
    return first, second


SHAPES = {
    "1-child": [0],
    "2-children": [0, 0],
    "3-children": [0, 0, 0],
    "4-children": [0, 0, 0, 0],
    "path-and-branches": [0, 1, 0, 1, 3],
    "2-of-each": [0, 1, 0, 1, 3, 3],
    "deep": [0, 1, 2, 0, 4, 0, 1, 1],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sharpness", [1.5, 4.0])
def test_emitted_tokens_follow_the_target(shape, sharpness):
    """60,000 seeds: the law of the first two tokens emitted is p and the product of p's."""
    chain = Chain(16, 12, seed=len(shape), sharpness=sharpness)

    def round_of(anchors, seeds, frontier):
        return emitted(chain, anchors, SHAPES[shape], seeds, frontier)

    first, both = law_of_two(chain, round_of)
    assert first > 1e-3
    assert both > 1e-3


def test_a_number_shared_by_siblings_would_break_the_law(monkeypatch):
    """The check above can fail: one number that rejects two children bends the law."""

    def sharing(seeds, at, purposes, sub=0):
        return uniform(seeds, at, purposes)

    monkeypatch.setattr(reference, "uniform", sharing)
    chain = Chain(16, 12, seed=3, sharpness=1.5)
    first, _ = law_of_two(chain, lambda a, s, f: emitted(chain, a, [0, 0, 0], s, f))
    assert first < 1e-6


def test_children_drawn_with_replacement_would_break_the_law():
    chain = Chain(16, 12, seed=3, sharpness=1.5)
    first, _ = law_of_two(chain, lambda a, s, f: emitted(chain, a, [0, 0, 0], s, f, replacing=True))
    assert first < 1e-6


def test_more_children_are_accepted_more_often():
    chain = Chain(16, 12, seed=1, sharpness=1.5)
    seeds, anchors = torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64)
    rates = [
        float((emitted(chain, anchors, [0] * m, seeds, 9).accepted > 0).double().mean())
        for m in (1, 2, 3, 4)
    ]
    assert rates == sorted(rates)
    overlap = torch.minimum(chain.target, chain.draft_law())[0].sum()
    assert rates[0] == pytest.approx(float(overlap), abs=0.02)
    assert rates[3] > rates[0] + 0.1


class Lattice:
    """A target, and a drafter whose trees `candidate_tree` grows; candidates are 4 of 12 tokens."""

    def __init__(self, *, temperature, seed=0):
        self.vocab, self.temperature = 12, temperature
        self.inputs = lattice(1, 3, 4, 3, 12, seed=seed, scale=0.7)
        generator = torch.Generator().manual_seed(seed)
        z = 1.5 * torch.randn(12, 12, generator=generator)
        self.target = z.double().softmax(1).float()

    def round_of(self, anchors, seeds, frontier):
        count, (scores, ids, projected, *books, _) = anchors.shape[0], self.inputs
        limits = torch.full((count,), 11), torch.full((count,), 6)
        frontiers = torch.full((count,), frontier)
        tree = candidate_tree(
            *(x.expand(count, -1, -1) for x in (scores, ids, projected)),
            *books,
            anchors,
            torch.full((count,), self.temperature),
            seeds,
            frontiers,
            *limits,
            width=11,
        )
        tokens = torch.cat([anchors[:, None], tree.tokens], dim=1)
        return tree_accept(
            self.target[tokens],
            tree.tokens,
            tree.counts,
            ancestor_masks(tree.parents),
            tree.candidate_ids,
            tree.probabilities,
            seeds,
            frontiers,
        )


@pytest.mark.parametrize("temperature", [0.0, 0.6, 2.0])
def test_trees_that_grow_by_what_was_drawn_keep_the_law(temperature):
    """Also where the proposals are point masses, as a greedy row's are, and p is not."""
    grown = Lattice(temperature=temperature)
    first, both = law_of_two(grown, grown.round_of)
    assert first > 1e-3
    assert both > 1e-3


@pytest.mark.parametrize("drafts", [0, 1, 2, 7])
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_gives_speculative_accept_bit_for_bit(name, drafts):
    chain = CHAINS[name](drafts)
    count = 300
    g = torch.Generator().manual_seed(drafts)
    path = torch.randint(0, 20, (count, drafts + 1), generator=g)
    ids, q = chain.ids[path[:, :drafts]], chain.q[path[:, :drafts]]
    if drafts:
        rank = torch.multinomial(q.flatten(0, 1), 1, generator=g).view(count, drafts, 1)
        proposals = ids.gather(2, rank).squeeze(2)
    else:
        proposals = path[:, :0]
    p = chain.target[path]
    p[::4] *= p[::4] > 0.05  # holes in the support
    p[::4] /= p[::4].sum(2, keepdim=True)
    live = torch.randint(0, drafts + 1, (count,), generator=g)
    for row in range(count):
        p[row, int(live[row]) + 1 :] = torch.nan
    seeds, frontiers = torch.arange(count) - 99, torch.arange(count) * 5
    expected = speculative_accept(p, proposals, live, ids, q, seeds, frontiers)
    masks = ancestor_masks(torch.arange(drafts).expand(count, drafts))
    actual = tree_accept(p, proposals, live, masks, ids, q, seeds, frontiers)
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.accepted, expected.accepted)
    assert torch.equal(actual.columns, torch.arange(drafts + 1).expand(count, -1))


def restated(p, proposals, live, parents, ids, q, seed, frontier):
    """One row by the rule, in FP64; None where FP32 may rightly decide otherwise."""

    def key(offset, purpose, sub=0):
        return uniform(seed, frontier + offset, purpose, sub).item()

    node, branch, tokens = 0, [0], []
    while True:
        weights, mass, elders = dict(enumerate(p[node])), 1.0, set()
        children = [c for c in range(1, live + 1) if parents[c - 1] == node]
        for j, column in enumerate(children):
            x = proposals[column - 1]
            law = dict.fromkeys(weights, 0.0)
            for v, w in zip(ids[column - 1], q[column - 1], strict=True):
                law[v] += 0.0 if v in elders else w
            share = math.fsum(law.values()) if j else 1.0
            owed, offered = weights[x] / mass, law[x] / share
            level = key(len(branch), Purpose.ACCEPT, j) * offered
            if 0 < owed < offered and abs(level - owed) < 1e-5:
                return None
            if owed > 0 and (owed >= offered or level < owed):
                node = column
                branch.append(column)
                tokens.append(x)
                break
            elders.add(x)
            weights = {v: max(w - mass / share * law[v], 0.0) for v, w in weights.items()}
            mass = math.fsum(weights.values())
            if mass < 1e-5:
                return None
        else:
            break
    purpose = Purpose.CORRECTION if children else Purpose.BONUS
    goal = key(len(branch), purpose) * math.fsum(weights.values())
    reached = 0.0
    for v in sorted(weights, key=lambda v: (-p[node][v], v)):
        reached += weights[v]
        if abs(reached - goal) < 2e-6:
            return None
        if weights[v] > 0 and goal < reached:
            return [*tokens, v] + [0] * (len(p) - len(branch)), branch
    return None


def forest(rows, lines, vocab, k, *, seed=0):
    """Random trees; siblings share candidates and have distinct tokens among them."""
    g = torch.Generator().manual_seed(seed)
    parents = random_parents(rows, lines, seed=seed)
    p = (2 * torch.randn(rows, lines + 1, vocab, generator=g)).softmax(2)
    ids = torch.zeros(rows, lines, k, dtype=torch.int64)
    q = torch.zeros(rows, lines, k)
    tokens = torch.zeros(rows, lines, dtype=torch.int64)
    live = torch.randint(0, lines + 1, (rows,), generator=g)
    live[::2] = lines
    for row in range(rows):
        born = {}
        for line, parent in enumerate(parents[row].tolist()):
            if parent not in born:
                candidates = torch.randperm(vocab, generator=g)[:k]
                law = torch.randn(k, generator=g).softmax(0)
                born[parent] = candidates, law, candidates[torch.randperm(k, generator=g)].tolist()
                # near the law, so that accepting and rejecting are both common
                p[row, parent] *= 0.6
                p[row, parent, candidates] += 0.4 * law.roll(1)
            ids[row, line], q[row, line], rest = born[parent]
            if not rest:  # more children than candidates: this one and all after it are dead
                live[row] = min(int(live[row]), line)
                rest.append(0)
            tokens[row, line] = rest.pop()
    return SimpleNamespace(
        parents=parents,
        arguments=[
            p,
            tokens,
            live,
            ancestor_masks(parents),
            ids,
            q,
            torch.randint(-(2**62), 2**62, (rows,), generator=g),
            torch.randint(0, 10_000, (rows,), generator=g),
        ],
    )


@pytest.mark.parametrize(
    ("lines", "vocab", "k"), [(1, 20, 4), (4, 30, 4), (12, 24, 16), (31, 40, 16)], ids=str
)
def test_equals_the_rule_stated_row_by_row(lines, vocab, k):
    trees = forest(96, lines, vocab, k, seed=lines)
    p, _, live, masks, *_ = trees.arguments
    for row in range(96):
        p[row, int(live[row]) + 1 :] = torch.nan  # columns that nothing may look at
        masks[row, int(live[row]) + 1 :] = -1
    before = p.clone()
    result = tree_accept(*trees.arguments)
    assert torch.equal(before.nan_to_num(9.0), p.nan_to_num(9.0))
    checked = moved = 0
    for row in range(96):
        numbers = [x[row].tolist() for x in trees.arguments]
        numbers[3] = trees.parents[row].tolist()
        wanted = restated(*numbers)
        if wanted is not None:
            checked += 1
            tokens, branch = wanted
            assert result.tokens[row].tolist() == tokens
            assert result.accepted[row] == len(branch) - 1
            columns = branch + list(range(len(branch), lines + 1))
            assert result.columns[row].tolist() == columns
            moved += columns != list(range(lines + 1))
        alone = tree_accept(*(x[row : row + 1] for x in trees.arguments))
        for mine, together in zip(alone, result, strict=True):
            assert torch.equal(mine[0], together[row])
    assert checked >= 80
    assert lines <= 4 or moved >= 10


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("argmaxes", "wanted"),
    [
        # the tree: 1 and 3 continue the anchor, 2 continues 1, 4 and 5 continue 3
        ([7, 0, 0, 0, 0, 0], ([7, 0, 0, 0, 0, 0], [0])),
        ([1, 2, 5, 0, 0, 0], ([1, 2, 5, 0, 0, 0], [0, 1, 2])),
        ([1, 8, 0, 0, 0, 0], ([1, 8, 0, 0, 0, 0], [0, 1])),
        ([3, 0, 0, 5, 0, 6], ([3, 5, 6, 0, 0, 0], [0, 3, 5])),
        ([3, 0, 0, 4, 2, 0], ([3, 4, 2, 0, 0, 0], [0, 3, 4])),
        ([3, 0, 0, 9, 0, 0], ([3, 9, 0, 0, 0, 0], [0, 3])),
    ],
)
def test_greedy_rows_follow_the_argmax_and_use_no_draw(argmaxes, wanted, seed, monkeypatch):
    def refuse(*_):
        raise AssertionError("drew a number that decides nothing")

    monkeypatch.setattr(reference, "uniform", refuse)
    tokens = torch.arange(1, 6)
    ids = torch.tensor([[1, 3], [2, 6], [1, 3], [4, 5], [4, 5]])
    q = (ids == tokens[:, None]).float()
    result = tree_accept(
        one_hot(argmaxes, 10)[None],
        tokens[None],
        torch.tensor([5]),
        ancestor_masks(torch.tensor([[0, 1, 0, 3, 3]])),
        ids[None],
        q[None],
        torch.tensor([seed]),
        torch.tensor([11]),
    )
    assert result.tokens[0].tolist() == wanted[0]
    accepted = len(wanted[1]) - 1
    assert result.accepted.tolist() == [accepted]
    assert result.columns[0].tolist() == [*wanted[1], *range(accepted + 1, 6)]


def test_residual_without_mass_falls_back_to_p(monkeypatch):
    """p below q by rounding alone can reject, and the next child is then held to p."""
    q = torch.tensor([0.3, 0.5, 0.2])

    def rigged(seeds, positions, purposes, sub=0):
        # the first child is rejected, the second held to a number that p's law decides
        return torch.full(positions.shape, 1 - 2**-24 if sub == 0 else 0.39)

    monkeypatch.setattr(reference, "uniform", rigged)
    p = (q * (1 - 2**-22)).expand(1, 3, 3)
    fixed = torch.tensor([2]), ancestor_masks(torch.tensor([[0, 0]]))
    law = torch.arange(3).expand(1, 2, 3), q.expand(1, 2, 3)
    # p(1) = 0.5 against 0.5 / 0.7: accepted below 0.7
    result = tree_accept(p, torch.tensor([[0, 1]]), *fixed, *law, *torch.zeros(2, 1).long())
    assert result.columns[0, :2].tolist() == [0, 2]


def test_p_that_is_nan_gives_ids_of_the_vocabulary_and_leaves_neighbours_alone():
    trees = forest(3, 6, 20, 8, seed=5)
    trees.arguments[2][:] = 6
    clean = tree_accept(*trees.arguments)
    trees.arguments[0][1] = torch.nan
    result = tree_accept(*trees.arguments)
    assert ((result.tokens >= 0) & (result.tokens < 20)).all()
    for after, before in zip(result, clean, strict=True):
        assert torch.equal(after[[0, 2]], before[[0, 2]])


def test_other_shape_or_dtype_is_refused():
    arguments = forest(1, 2, 9, 4).arguments
    arguments[3] = arguments[3].long()
    with pytest.raises(ValueError, match=r"^ancestors: expected \[1, 3\] int32, got .* int64$"):
        tree_accept(*arguments)
    arguments = forest(1, 2, 9, 4).arguments
    arguments[1] = arguments[1][:, :1]
    with pytest.raises(ValueError, match=r"^proposals: expected \[1, 2\] int64"):
        tree_accept(*arguments)
