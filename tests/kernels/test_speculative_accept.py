"""Acceptance keeps the target's law, whatever was proposed, and states its rule exactly."""

import math

import pytest
import torch
from scipy.stats import chi2

from kernels.rng import Purpose, uniform
from kernels.speculative_accept import reference, speculative_accept

ROUNDS = 200_000


def accept(p, proposals, live, ids, q, seeds, frontiers):
    return speculative_accept(
        p, *(torch.as_tensor(x) for x in (proposals, live, ids, q, seeds, frontiers))
    )


def misfit(observed, law):
    """p-value of Pearson's chi-square of counts against probabilities.

    Cells expected fewer than 10 times are pooled; a cell of probability 0 must stay empty.
    """
    observed, law = observed.double().flatten(), law.double().flatten()
    assert (observed[law == 0] == 0).all()
    expected = law / law.sum() * observed.sum()
    rare = expected < 10
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    used = expected > 0
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum().item()
    return float(chi2.sf(statistic, int(used.sum()) - 1))


def draw(q, u):
    """Column drawn from each law q [N, k] by u [N]."""
    return (q.double().cumsum(1) <= u.double()[:, None]).sum(1).clamp(max=q.shape[1] - 1)


class Chain:
    """A target whose next token depends on the last one, and a drafter that is wrong about it."""

    def __init__(self, vocab, k, *, seed, sharpness):
        g = torch.Generator().manual_seed(seed)

        def laws(width):
            return (sharpness * torch.randn(vocab, width, generator=g)).double().softmax(1).float()

        self.vocab = vocab
        self.target = laws(vocab)
        self.ids = torch.stack([torch.randperm(vocab, generator=g)[:k] for _ in range(vocab)])
        # half of the drafter's opinion is the target's, so that both outcomes are common
        near = self.target.gather(1, self.ids)
        q = 0.5 * near / near.sum(1, keepdim=True) + 0.5 * laws(k)
        self.q = q / q.sum(1, keepdim=True)

    def draft_law(self):
        """q as laws [V, V] over all tokens."""
        return torch.zeros(self.vocab, self.vocab).scatter_(1, self.ids, self.q)

    def round(self, anchors, seeds, frontier, drafts):
        """Proposes a conditional path of `drafts` tokens and accepts it."""
        tokens, ids, laws = [anchors], [], []
        for i in range(drafts):
            u = uniform(seeds, frontier + i, Purpose.PROPOSAL)
            ids.append(self.ids[tokens[-1]])
            laws.append(self.q[tokens[-1]])
            chosen = draw(laws[-1], u)
            tokens.append(ids[-1].gather(1, chosen[:, None]).squeeze(1))
        path = torch.stack(tokens, 1)
        count = anchors.shape[0]
        return accept(
            self.target[path],
            path[:, 1:],
            torch.full((count,), drafts),
            torch.stack(ids, 1) if ids else torch.zeros(count, 0, 16, dtype=torch.int64),
            torch.stack(laws, 1) if laws else torch.zeros(count, 0, 16),
            seeds,
            torch.full((count,), frontier),
        )


class PointMassChain(Chain):
    """The same target; each proposal is one fixed guess, padded to k candidates."""

    def __init__(self, vocab, k, **kwargs):
        super().__init__(vocab, k, **kwargs)
        self.q = torch.zeros(vocab, k)
        self.q[:, 0] = 1.0
        self.ids[:, 0] = self.target.topk(2, dim=1).indices[:, 1]
        # what pads the candidates has probability 0, even where it repeats the guess
        self.ids[:, 1:] = torch.where(torch.arange(k - 1) % 2 == 0, self.ids[:, :1], 0)

    def draft_law(self):
        return torch.zeros(self.vocab, self.vocab).scatter_(1, self.ids[:, :1], 1.0)


CHAINS = {
    "conditional-16": lambda seed: Chain(20, 16, seed=seed, sharpness=1.5),
    "conditional-16-sharp": lambda seed: Chain(20, 16, seed=seed, sharpness=4.0),
    "point-mass": lambda seed: PointMassChain(20, 16, seed=seed, sharpness=2.0),
    "point-mass-1-candidate": lambda seed: PointMassChain(20, 1, seed=seed, sharpness=1.0),
}


@pytest.mark.parametrize("drafts", [0, 1, 2, 4], ids="K={}".format)
@pytest.mark.parametrize("name", CHAINS)
def test_emitted_tokens_follow_the_target(name, drafts):
    """200,000 seeds: the law of the first two tokens emitted is p and the product of p's."""
    chain = CHAINS[name](drafts)
    seeds = torch.arange(ROUNDS) * 7919 + 3
    anchors = torch.zeros(ROUNDS, dtype=torch.int64)
    tokens, accepted = chain.round(anchors, seeds, 100, drafts)
    first = tokens[:, 0]
    law = chain.target[0].double()
    assert misfit(torch.bincount(first, minlength=20), law) > 1e-3
    # where the round ended after one token, the next round starts on it
    second = tokens[:, 1].clone() if drafts else torch.zeros_like(first)
    short = accepted == 0
    second[short] = chain.round(first[short], seeds[short], 101, drafts)[0][:, 0]
    joint = law[:, None] * chain.target.double()
    assert misfit(torch.bincount(first * 20 + second, minlength=400), joint) > 1e-3

    if drafts:
        overlap = torch.minimum(chain.target, chain.draft_law()).double()
        rate = float(overlap[0].sum())
        assert abs(float((accepted >= 1).double().mean()) - rate) < 4 * deviation(rate)
        assert 0.05 < rate < 0.95
    if drafts > 1:
        rate = float(overlap[0] @ overlap.sum(1))
        assert abs(float((accepted >= 2).double().mean()) - rate) < 4 * deviation(rate)


def deviation(rate):
    return math.sqrt(rate * (1 - rate) / ROUNDS)


def one_step(p, q, drawn_from=None):
    """Emitted tokens and A of 200,000 rounds with one proposal over the vocabulary."""
    vocab = len(p)
    seeds = torch.arange(ROUNDS)
    source = torch.tensor(drawn_from or q).expand(ROUNDS, vocab)
    proposals = draw(source, uniform(seeds, 50, Purpose.PROPOSAL))
    return accept(
        torch.tensor(p).expand(ROUNDS, 2, vocab),
        proposals[:, None],
        torch.ones(ROUNDS, dtype=torch.int64),
        torch.arange(vocab).expand(ROUNDS, 1, vocab),
        torch.tensor(q).expand(ROUNDS, 1, vocab),
        seeds,
        torch.full((ROUNDS,), 50),
    )


SHARED_P, SHARED_Q = [0.2, 0.5, 0.3], [0.6, 0.3, 0.1]


def test_separate_purposes_keep_the_law():
    tokens, _ = one_step(SHARED_P, SHARED_Q)
    assert misfit(torch.bincount(tokens[:, 0], minlength=3), torch.tensor(SHARED_P)) > 1e-3


@pytest.mark.parametrize("shared", [Purpose.ACCEPT, Purpose.PROPOSAL])
def test_a_purpose_shared_with_the_correction_would_break_the_law(shared, monkeypatch):
    """The check above can fail: one number used twice bends the law beyond chance."""

    def sharing(seeds, positions, purposes):
        correction = purposes == Purpose.CORRECTION
        # the proposal checked at F + i + 1 was drawn with the key F + i
        moved = positions - (correction & (shared == Purpose.PROPOSAL)).long()
        return uniform(seeds, moved, torch.where(correction, int(shared), purposes))

    monkeypatch.setattr(reference, "uniform", sharing)
    tokens, _ = one_step(SHARED_P, SHARED_Q)
    assert misfit(torch.bincount(tokens[:, 0], minlength=3), torch.tensor(SHARED_P)) < 1e-6


def test_q_that_was_not_sampled_from_would_break_the_law():
    """Sampled from [.6, .4, 0], reported as [.48, .32, .2]: the fault publishes [.625, .375, 0]."""
    p, sampled, reported = [0.5, 0.3, 0.2], [0.6, 0.4, 0.0], [0.48, 0.32, 0.2]
    honest, _ = one_step(p, sampled)
    assert misfit(torch.bincount(honest[:, 0], minlength=3), torch.tensor(p)) > 1e-3
    faulty, _ = one_step(p, reported, drawn_from=sampled)
    observed = torch.bincount(faulty[:, 0], minlength=3)
    assert misfit(observed, torch.tensor(p)) < 1e-6
    assert (observed / ROUNDS).tolist() == pytest.approx([0.625, 0.375, 0.0], abs=0.005)


def restated(p, proposals, live, ids, q, seed, frontier):
    """One row by the rule, in FP64; None where FP32 may rightly decide otherwise."""

    def key(offset, purpose):
        return uniform(seed, frontier + offset, purpose).item()

    tokens, accepted = [], 0
    for i in range(live):
        d = proposals[i]
        chance = math.fsum(w for v, w in zip(ids[i], q[i], strict=True) if v == d)
        level = key(i + 1, Purpose.ACCEPT) * chance
        if 0 < p[i][d] < chance and abs(level - p[i][d]) < 1e-6:
            return None
        if not (p[i][d] > 0 and (p[i][d] >= chance or level < p[i][d])):
            break
        accepted += 1
        tokens.append(d)
    law = p[accepted]
    weights = dict(enumerate(law))
    if accepted < live:
        for v, w in zip(ids[accepted], q[accepted], strict=True):
            weights[v] = max(weights[v] - w, 0.0)
        if sum(weights.values()) < 1e-6:
            return None
    purpose = Purpose.BONUS if accepted == live else Purpose.CORRECTION
    goal = key(accepted + 1, purpose) * math.fsum(weights.values())
    reached = 0.0
    order = sorted(weights, key=lambda v: (-law[v], v))
    for v in order:
        reached += weights[v]
        if abs(reached - goal) < 2e-6:
            return None
        if weights[v] > 0 and goal < reached:
            return [*tokens, v] + [0] * (len(p) - 1 - accepted), accepted
    return None


@pytest.mark.parametrize(
    ("batch", "drafts", "vocab", "k", "sharpness"),
    [
        (64, 0, 30, 4, 1.0),
        (64, 1, 30, 4, 1.0),
        (64, 7, 30, 16, 2.0),
        (64, 15, 40, 16, 3.0),
        (192, 1, 200, 16, 1.5),  # many draws end inside, or next to, entries that are equal
        (16, 3, 3000, 16, 0.3),  # flat: the draw goes through every size of ranking
        (16, 3, 3000, 16, 2.0),
    ],
)
def test_equals_the_rule_stated_row_by_row(batch, drafts, vocab, k, sharpness):
    g = torch.Generator().manual_seed(vocab + drafts)
    width = drafts + 1
    p = (sharpness * torch.randn(batch, width, vocab, generator=g)).softmax(2)
    p[batch // 2 :] *= p[batch // 2 :] > 0.3 / vocab  # holes in the support
    p /= p.sum(2, keepdim=True)
    p[::3] = (p[::3] * 256).round() / 256 + 1e-3  # and many equal entries
    p /= p.sum(2, keepdim=True)
    ids = p[:, :drafts].topk(k, dim=2).indices
    near = p[:, :drafts].gather(2, ids)
    q = near / near.sum(2, keepdim=True) * 0.5 + torch.rand(near.shape, generator=g).softmax(2) / 2
    choice = torch.multinomial(q.view(-1, k), 1, generator=g) if drafts else torch.zeros(0, 1)
    proposals = ids.gather(2, choice.long().view(batch, drafts, 1)).squeeze(2)
    live = torch.randint(0, width, (batch,), generator=g)
    seeds = torch.randint(-(2**62), 2**62, (batch,), generator=g)
    frontiers = torch.randint(0, 10_000, (batch,), generator=g)
    for row in range(batch):
        p[row, int(live[row]) + 1 :] = torch.nan  # columns that nothing may look at
    before = p.clone()
    tokens, accepted = accept(p, proposals, live, ids, q, seeds, frontiers)
    assert torch.equal(before.nan_to_num(9.0), p.nan_to_num(9.0))
    checked = 0
    for row in range(batch):
        numbers = [x[row].tolist() for x in (p, proposals, live, ids, q, seeds, frontiers)]
        wanted = restated(*numbers)
        if wanted is not None:
            checked += 1
            assert tokens[row].tolist() == wanted[0]
            assert accepted[row].item() == wanted[1]
        alone = accept(*(x[row : row + 1] for x in (p, proposals, live, ids, q, seeds, frontiers)))
        assert torch.equal(alone.tokens[0], tokens[row])
        assert torch.equal(alone.accepted[0], accepted[row])
    assert checked >= 0.8 * batch


def one_hot(tokens, vocab):
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("argmaxes", "proposals", "live", "wanted"),
    [
        ([4, 5, 6, 7], [4, 5, 6], 3, ([4, 5, 6, 7], 3)),
        ([4, 5, 6, 7], [4, 5, 1], 3, ([4, 5, 6, 0], 2)),
        ([4, 5, 6, 7], [1, 5, 6], 3, ([4, 0, 0, 0], 0)),
        ([4, 5, 6, 7], [4, 1, 6], 3, ([4, 5, 0, 0], 1)),
        ([4, 5, 6, 7], [4, 5, 6], 2, ([4, 5, 6, 0], 2)),
        ([4, 5, 6, 7], [4, 5, 6], 0, ([4, 0, 0, 0], 0)),
        ([0, 0, 0, 0], [0, 0, 0], 3, ([0, 0, 0, 0], 3)),
    ],
)
def test_one_hot_p_accepts_the_matching_prefix(argmaxes, proposals, live, wanted, seed):
    """Greedy rows run through the same rule, and no draw can change them."""
    ids = torch.tensor(proposals)[:, None].repeat(1, 4)
    q = torch.zeros(3, 4)
    q[:, 0] = 1.0
    tokens, accepted = accept(
        one_hot(argmaxes, 9)[None], [proposals], [live], ids[None], q[None], [seed], [11]
    )
    assert tokens[0].tolist() == wanted[0]
    assert accepted.tolist() == [wanted[1]]


def test_greedy_rows_need_no_draws(monkeypatch):
    def refuse(*_):
        raise AssertionError("drew a number that decides nothing")

    monkeypatch.setattr(reference, "uniform", refuse)
    test_one_hot_p_accepts_the_matching_prefix([4, 5, 6, 7], [4, 1, 6], 3, ([4, 5, 0, 0], 1), 0)


def test_no_proposals_draw_the_bonus_at_the_next_position():
    """A plain step: an inverse-CDF draw from p_0, most likely token first, with its own key."""
    g = torch.Generator().manual_seed(0)
    p = torch.randn(500, 1, 12, generator=g).softmax(2)
    seeds, frontiers = torch.arange(500), torch.arange(500) + 40
    empty = torch.zeros(500, 0, dtype=torch.int64)
    tokens, accepted = accept(
        p,
        empty,
        torch.zeros(500).long(),
        empty[..., None],
        empty[..., None].float(),
        seeds,
        frontiers,
    )
    assert tokens.shape == (500, 1)
    assert (accepted == 0).all()
    u = uniform(seeds, frontiers + 1, Purpose.BONUS)
    ranked, order = p[:, 0].sort(dim=1, descending=True)
    assert torch.equal(tokens, order.gather(1, draw(ranked, u)[:, None]))
    # and a wider block with P = 0 gives the same token
    wide = torch.cat([p, torch.full((500, 2, 12), torch.nan)], dim=1)
    zeros = torch.zeros(500, 2, 3)
    again, _ = accept(
        wide, zeros[..., 0].long(), torch.zeros(500).long(), zeros.long(), zeros, seeds, frontiers
    )
    assert torch.equal(again[:, :1], tokens)
    assert (again[:, 1:] == 0).all()


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (0.55, 0), (0.95, 2), (1 - 2**-24, 2)])
def test_residual_without_mass_falls_back_to_p(u, token, monkeypatch):
    """p below q by rounding alone can reject, and then leaves nothing to draw from but p."""
    q = torch.tensor([0.3, 0.5, 0.2])
    p = q * (1 - 2**-22)

    def rigged(seeds, positions, purposes):
        reject = torch.full(purposes.shape, 1 - 2**-24)
        return torch.where(purposes == Purpose.ACCEPT, reject, u).expand(1, -1)

    monkeypatch.setattr(reference, "uniform", rigged)
    tokens, accepted = accept(
        p.expand(1, 2, 3), [[0]], [1], torch.arange(3).view(1, 1, 3), q.view(1, 1, 3), [0], [0]
    )
    assert accepted.tolist() == [0]
    assert tokens.tolist() == [[token, 0]]


def test_draws_at_the_ends_take_a_token_with_weight(monkeypatch):
    """u = 0 takes the first token with weight; u next to 1 the last, though sums round."""
    g = torch.Generator().manual_seed(1)
    p = torch.randn(40, 1, 700, generator=g).softmax(2)
    p[:, :, 650:] = 0
    empty = torch.zeros(40, 0, dtype=torch.int64)
    for u in (0.0, 1 - 2**-24, 1.0):
        monkeypatch.setattr(
            reference, "uniform", lambda s, positions, _, u=u: torch.full(positions.shape, u)
        )
        tokens, _ = accept(
            p,
            empty,
            torch.zeros(40).long(),
            empty[..., None],
            empty[..., None].float(),
            torch.zeros(40).long(),
            torch.zeros(40).long(),
        )
        weight = p[:, 0].gather(1, tokens)
        assert (weight > 0).all()
        if u == 0.0:
            assert torch.equal(weight[:, 0], p[:, 0].amax(1))


@pytest.mark.parametrize(
    ("u", "wanted"), [(0.5 - 2**-24, 4), (0.5, 2), (0.75 - 2**-24, 2), (0.75, 5)]
)
def test_a_draw_equal_to_a_cumulative_sum_takes_the_next_token(u, wanted, monkeypatch):
    """A token is taken while u is below its inclusive sum, not at it; these sums are exact."""
    p = torch.tensor([0.0, 0.0, 0.25, 0.0, 0.5, 0.25]).view(1, 1, 6)
    monkeypatch.setattr(reference, "uniform", lambda s, at, _: torch.full(at.shape, u))
    empty = torch.zeros(1, 0, dtype=torch.int64)
    tokens, _ = accept(p, empty, [0], empty[..., None], empty[..., None].float(), [0], [0])
    assert tokens.tolist() == [[wanted]]


def test_rejected_point_mass_is_never_drawn_again():
    p = torch.tensor([0.9, 0.05, 0.05]).expand(2000, 2, 3)
    tokens, accepted = accept(
        p,
        torch.zeros(2000, 1).long(),
        torch.ones(2000).long(),
        torch.zeros(2000, 1, 1).long(),
        torch.ones(2000, 1, 1),
        torch.arange(2000),
        torch.zeros(2000).long(),
    )
    rejected = accepted == 0
    assert 100 < rejected.sum() < 300
    assert (tokens[rejected, 0] != 0).all()
    assert (tokens[~rejected, 0] == 0).all()


def test_p_that_is_nan_gives_ids_of_the_vocabulary_and_leaves_neighbours_alone():
    chain = CHAINS["conditional-16"](0)
    path = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    p = chain.target[path].clone()
    rest = (
        path[:, 1:],
        [2, 2, 2],
        chain.ids[path[:, :2]],
        chain.q[path[:, :2]],
        [1, 2, 3],
        [9] * 3,
    )
    clean = accept(p, *rest)
    p[1] = torch.nan
    tokens, accepted = accept(p, *rest)
    assert ((tokens >= 0) & (tokens < 20)).all()
    assert torch.equal(tokens[[0, 2]], clean.tokens[[0, 2]])
    assert torch.equal(accepted[[0, 2]], clean.accepted[[0, 2]])


def test_other_shape_is_refused():
    zeros = torch.zeros(1, 2, 4)
    with pytest.raises(
        ValueError, match=r"^proposals: expected \[1, 2\] int64, got \[1, 1\] int64$"
    ):
        accept(torch.zeros(1, 3, 9), [[1]], [1], zeros.long(), zeros, [1], [1])
    with pytest.raises(ValueError, match=r"^p: expected \[1, 3, \*\] float32, got .* bfloat16$"):
        accept(torch.zeros(1, 3, 9).bfloat16(), [[1, 2]], [1], zeros.long(), zeros, [1], [1])
