"""Raw logits become p: every step alone, all of them together, and each column's own history."""

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kernels.target_distribution import SamplingRows, target_distribution
from kernels.trees import ancestor_masks


@dataclass
class Row:
    """One row's wishes; neutral unless said otherwise."""

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    output_index: int = 0
    generated: dict[int, int] = field(default_factory=dict)
    prompt: frozenset[int] = frozenset()
    bias: dict[int, float] = field(default_factory=dict)
    stops: frozenset[int] = frozenset()


def tables(rows, vocab):
    """Rows as the op takes them; lanes are in reverse so that lane and row differ."""
    count = len(rows)
    lanes = torch.arange(count).flip(0)
    generated = torch.zeros(count, vocab, dtype=torch.int32)
    prompt = torch.zeros(count, vocab, dtype=torch.bool)
    bias = torch.zeros(count, vocab)
    stops = torch.zeros(count, vocab, dtype=torch.bool)
    for row, lane in zip(rows, lanes.tolist(), strict=True):
        for token, times in row.generated.items():
            generated[lane, token] = times
        for token, amount in row.bias.items():
            bias[lane, token] = amount
        prompt[lane, list(row.prompt)] = True
        stops[lane, list(row.stops)] = True

    def floats(name):
        return torch.tensor([getattr(row, name) for row in rows], dtype=torch.float32)

    def whole(name):
        return torch.tensor([getattr(row, name) for row in rows])

    return SamplingRows(
        temperature=floats("temperature"),
        top_p=floats("top_p"),
        min_p=floats("min_p"),
        presence_penalty=floats("presence"),
        frequency_penalty=floats("frequency"),
        repetition_penalty=floats("repetition"),
        top_k=whole("top_k"),
        min_tokens=whole("min_tokens"),
        output_index=whole("output_index"),
        lanes=lanes,
        generated_counts=generated,
        prompt_seen=prompt,
        logit_bias=bias,
        stop_mask=stops,
    )


def run(logits, rows, proposals=None, counts=None, public=None, ancestors=None):
    batch, width, vocab = logits.shape
    if proposals is None:
        proposals = torch.zeros(batch, width - 1, dtype=torch.int64)
    counts = torch.full((batch,), width) if counts is None else torch.tensor(counts)
    return target_distribution(
        logits,
        proposals,
        counts,
        tables(rows, vocab),
        public_vocab=public or vocab,
        ancestors=ancestors,
    )


class CloseCall(Exception):
    """The exact numbers are too near a threshold for FP32 to be held to one side."""


def apart(a, b, scale=1.0):
    if abs(a - b) < 3e-6 * max(scale, abs(a), abs(b)):
        raise CloseCall
    return a < b


def restated(z, row, overlay, column, public):
    """One column's p in FP64, step by step in the stated order, one token at a time."""
    counts = dict(row.generated)
    for token in overlay:
        counts[token] = counts.get(token, 0) + 1
    adjusted = {}
    for token in range(public):
        if row.output_index + column < row.min_tokens and token in row.stops:
            continue
        value = z[token]
        if token in row.prompt or counts.get(token, 0) > 0:
            value = value / row.repetition if value > 0 else value * row.repetition
        value += row.bias.get(token, 0.0)
        if counts.get(token, 0) > 0:
            value -= row.presence
        value -= row.frequency * counts.get(token, 0)
        adjusted[token] = value
    order = sorted(adjusted, key=lambda token: (-adjusted[token], token))
    best = adjusted[order[0]]
    p = [0.0] * len(z)
    if row.temperature <= 0:
        if len(order) > 1:
            apart(adjusted[order[1]], best)
        p[order[0]] = 1.0
        return p
    weights = {t: math.exp((adjusted[t] - best) / row.temperature) for t in order}
    if 0 < row.top_k < len(order):
        apart(adjusted[order[row.top_k]], adjusted[order[row.top_k - 1]])
        order = order[: row.top_k]
    total = math.fsum(weights[t] for t in order)
    kept = [order[0]]
    reached = weights[order[0]]
    for token in order[1:]:
        if row.top_p < 1 and not apart(reached, row.top_p * total, total):
            break
        if row.min_p > 0 and apart(weights[token], row.min_p):
            break
        kept.append(token)
        reached += weights[token]
    mass = math.fsum(weights[t] for t in kept)
    for token in kept:
        p[token] = weights[token] / mass
    return p


def expect(logits, rows, proposals=None, counts=None, public=None, ancestors=None):
    """Runs the op and holds every column to the restatement."""
    batch, width, vocab = logits.shape
    drafts = proposals.tolist() if proposals is not None else [[0] * (width - 1)] * batch
    counts = counts or [width] * batch
    wanted = torch.zeros(batch, width, vocab, dtype=torch.float64)
    for b, row in enumerate(rows):
        for i in range(counts[b]):
            z = logits[b, i].double().tolist()
            before_it = range(1, i + 1)
            if ancestors is not None:
                before_it = [c for c in before_it if int(ancestors[b, i]) >> c & 1]
            overlay = [drafts[b][c - 1] for c in before_it]
            wanted[b, i] = torch.tensor(
                restated(z, row, overlay, len(overlay), public or vocab), dtype=torch.float64
            )
    before = logits.clone()
    p = run(logits, rows, proposals, counts, public, ancestors)
    assert p.dtype is torch.float32
    assert torch.equal(before.nan_to_num(7.0), logits.nan_to_num(7.0))
    torch.testing.assert_close(p.double(), wanted, atol=2e-6, rtol=1e-4)
    # what stays is exactly what the rule keeps; between the bounds FP32 may underflow
    assert (p[wanted == 0] == 0).all()
    assert (p[wanted > 1e-36] > 0).all()
    return p


def expect_clear(logits, rows, *args, **kwargs):
    """As `expect`, on the first of logits(0), logits(1), ... that comes close to no threshold."""
    for seed in range(20):
        try:
            return expect(logits(seed), rows, *args, **kwargs)
        except CloseCall:
            continue
    raise AssertionError("every seed came close to a threshold")


def normal(batch, width, vocab, *, seed=0, scale=2.0):
    return scale * torch.randn(batch, width, vocab, generator=torch.Generator().manual_seed(seed))


SINGLE = {
    "neutral": Row(),
    "hot": Row(temperature=3.0),
    "cold": Row(temperature=0.05),
    "greedy": Row(temperature=0.0),
    "greedy-ignores-filters": Row(temperature=0.0, top_k=5, top_p=0.3, min_p=0.4),
    "negative-temperature-is-greedy": Row(temperature=-1.0),
    "top-k-1": Row(top_k=1),
    "top-k-3": Row(top_k=3),
    "top-k-63": Row(top_k=63),
    "top-k-64": Row(top_k=64),
    "top-k-150": Row(top_k=150),
    "top-k-vocab": Row(top_k=400),
    "top-k-beyond-vocab": Row(top_k=10_000),
    "top-p-0": Row(top_p=0.0),
    "top-p-0.5": Row(top_p=0.5),
    "top-p-0.9": Row(top_p=0.9),
    "top-p-0.999": Row(top_p=0.999),
    "min-p-0.2": Row(min_p=0.2),
    "min-p-1": Row(min_p=1.0),
    "min-p-and-top-p": Row(min_p=0.05, top_p=0.7),
    "top-k-and-top-p": Row(top_k=20, top_p=0.8),
    "all-filters": Row(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
    "presence": Row(presence=1.2, generated={3: 1, 7: 5}),
    "frequency": Row(frequency=0.4, generated={3: 1, 7: 5}),
    "negative-presence": Row(presence=-1.2, generated={3: 1}),
    "repetition": Row(repetition=1.4, generated={3: 1}, prompt=frozenset(range(20, 90))),
    "bias": Row(bias={5: 4.0, 9: -100.0}),
    "min-tokens": Row(min_tokens=7, output_index=5, stops=frozenset({1, 2})),
    "min-tokens-reached": Row(min_tokens=5, output_index=5, stops=frozenset({1, 2})),
}


@pytest.mark.parametrize("public", [400, 333])
@pytest.mark.parametrize("name", SINGLE)
def test_each_parameter_equals_the_rule_in_fp64(name, public):
    proposals = torch.tensor([[3, 3, 50], [7, 1, 3]])

    def logits(seed):
        z = normal(2, 4, 400, seed=seed)
        z[..., public:] = torch.inf  # never looked at
        return z

    p = expect_clear(logits, [SINGLE[name], SINGLE[name]], proposals, public=public)
    assert (p[..., public:] == 0).all()
    torch.testing.assert_close(p.sum(dim=2), torch.ones(2, 4), atol=1e-5, rtol=0)


FLOATS = st.floats(0.0, 1.0, allow_subnormal=False)
TOKENS = st.integers(0, 23)
ROWS = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
    top_p=st.one_of(st.just(1.0), FLOATS),
    min_p=st.one_of(st.just(0.0), FLOATS),
    presence=st.one_of(st.just(0.0), st.floats(-2, 2)),
    frequency=st.one_of(st.just(0.0), st.floats(-2, 2)),
    repetition=st.one_of(st.just(1.0), st.floats(0.5, 2)),
    top_k=st.integers(0, 30),
    min_tokens=st.integers(0, 6),
    output_index=st.integers(0, 5),
    generated=st.dictionaries(TOKENS, st.integers(1, 4), max_size=5),
    prompt=st.frozensets(TOKENS, max_size=8),
    bias=st.dictionaries(TOKENS, st.floats(-5, 5), max_size=4),
    stops=st.frozensets(TOKENS, max_size=3),
)


@settings(max_examples=250, deadline=None)
@given(
    rows=st.lists(ROWS, min_size=1, max_size=3),
    width=st.integers(1, 4),
    public=st.integers(5, 24),
    seed=st.integers(0, 10_000),
    data=st.data(),
)
def test_any_combination_equals_the_rule_in_fp64(rows, width, public, seed, data):
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(len(rows), width, 24, generator=g)
    proposals = torch.randint(0, public, (len(rows), width - 1), generator=g)
    if data.draw(st.booleans(), label="repeat one draft"):
        proposals[:] = proposals[:, :1]
    counts = [data.draw(st.integers(0, width), label="count") for _ in rows]
    try:
        p = expect(logits, rows, proposals, counts, public)
    except CloseCall:
        assume(False)
    for row, count in enumerate(counts):
        assert (p[row, count:] == 0).all()


@pytest.mark.parametrize("spread", [0.02, 0.3, 1.0])
@pytest.mark.parametrize(
    "row",
    [Row(top_p=0.95), Row(top_p=0.6, min_p=1e-3), Row(top_k=700), Row(top_k=300, top_p=0.5)],
    ids=["top-p", "top-p-min-p", "top-k", "top-k-top-p"],
)
def test_wide_nuclei_equal_the_rule(row, spread):
    """Flat logits keep thousands of tokens: every size of ranking is gone through."""

    def logits(seed):
        z = normal(1, 3, 3000, seed=seed, scale=spread)
        z[0, 1, 17] += 20.0  # one column is settled at once, its neighbours are not
        return z

    expect_clear(logits, [row])


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (Row(top_k=3), [0, 1, 2]),
        (Row(top_k=100), list(range(100))),
        (Row(top_p=0.01), list(range(20))),
        (Row(top_p=0.0), [0]),
        (Row(temperature=0.0), [0]),
        (Row(min_p=1.0), list(range(2000))),
    ],
    ids=["top-k-3", "top-k-100", "top-p-0.01", "top-p-0", "greedy", "min-p-1"],
)
def test_equal_logits_are_kept_from_the_lowest_id(row, kept):
    p = run(torch.full((1, 2, 2000), 0.5), [row])
    for column in range(2):
        assert p[0, column].nonzero().flatten().tolist() == kept
        torch.testing.assert_close(p[0, column, kept], torch.full((len(kept),), 1 / len(kept)))


def test_ties_across_the_cut_are_kept_from_the_lowest_id():
    logits = torch.zeros(1, 1, 300)
    logits[0, 0, [250, 40, 120]] = 3.0
    logits[0, 0, [260, 10, 200, 90]] = 1.0
    p = run(logits, [Row(top_k=5)])
    assert p[0, 0].nonzero().flatten().tolist() == [10, 40, 90, 120, 250]
    signed = torch.tensor([[[-0.0, 0.0, -1.0]]])
    assert run(signed, [Row(temperature=0.0)])[0, 0].tolist() == [1.0, 0.0, 0.0]


def test_top_p_is_measured_against_the_mass_before_min_p():
    """0.6 of [.4, .3, .2, .1] takes two tokens; of what min_p 0.6 leaves, it would take one."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().view(1, 1, 4)
    p = run(logits, [Row(top_p=0.65, min_p=0.6)])
    torch.testing.assert_close(p[0, 0], torch.tensor([4 / 7, 3 / 7, 0.0, 0.0]))
    p = run(logits, [Row(top_p=0.5, min_p=0.6)])
    torch.testing.assert_close(p[0, 0], torch.tensor([4 / 7, 3 / 7, 0.0, 0.0]))


def test_top_p_is_measured_against_the_mass_of_the_top_k():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().view(1, 1, 4)
    p = run(logits, [Row(top_k=2, top_p=0.55)])
    assert p[0, 0].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_presence_penalty_counts_the_drafts_before_each_column():
    """Logits A=2.0, B=1.5 at both positions, presence 1: A wins first, and B after it."""
    logits = torch.tensor([[[2.0, 1.5], [2.0, 1.5], [2.0, 1.5]]])
    p = run(logits, [Row(temperature=0.0, presence=1.0)], torch.tensor([[0, 0]]))
    assert p[0].argmax(dim=1).tolist() == [0, 1, 1]
    p = run(logits, [Row(temperature=0.0, frequency=0.3)], torch.tensor([[0, 0]]))
    assert p[0].argmax(dim=1).tolist() == [0, 0, 1]


@pytest.mark.parametrize("name", SINGLE)
def test_a_tree_s_column_has_the_history_of_its_own_path(name):
    proposals = torch.tensor([[3, 3, 50, 7, 3, 1], [7, 1, 3, 3, 7, 9]])
    masks = ancestor_masks(torch.tensor([[0, 1, 0, 3, 2, 2], [0, 0, 0, 1, 4, 5]]))
    masks[1, 5:] = -1
    rows = [SINGLE[name], SINGLE[name]]
    expect_clear(
        lambda seed: normal(2, 7, 400, seed=seed), rows, proposals, [7, 5], ancestors=masks
    )


def test_a_path_is_the_same_bits_in_a_tree_and_alone():
    rows = list(SINGLE.values())
    logits = normal(len(rows), 6, 400, seed=4)
    proposals = torch.tensor([[3, 7, 3, 1, 2]]).expand(len(rows), 5)
    masks = ancestor_masks(torch.tensor([[0, 1, 0, 3, 4]]).expand(len(rows), 5))
    tree = run(logits, rows, proposals, ancestors=masks)
    path = [0, 3, 4, 5]
    assert torch.equal(run(logits[:, path], rows, proposals[:, [2, 3, 4]]), tree[:, path])


def test_repetition_penalty_sees_prompt_and_drafts():
    logits = torch.tensor([[[2.0, 1.8, -0.5], [2.0, 1.8, -0.5]]])
    row = Row(repetition=1.5, prompt=frozenset({2}))
    p = expect(logits, [row], torch.tensor([[0]]))
    assert p[0, 0].argmax() == 0
    assert p[0, 1].argmax() == 1


def test_min_tokens_advances_by_columns():
    logits = torch.zeros(1, 5, 6)
    logits[..., 2] = 9.0
    row = Row(temperature=0.0, min_tokens=5, output_index=3, stops=frozenset({2}))
    p = run(logits, [row])
    assert p[0].argmax(dim=1).tolist() == [0, 0, 2, 2, 2]


def test_bias_does_not_revive_a_masked_stop():
    logits = torch.zeros(1, 1, 6)
    row = Row(min_tokens=1, bias={2: 100.0}, stops=frozenset({2}), presence=-5.0, generated={2: 3})
    assert run(logits, [row])[0, 0, 2] == 0


def test_dead_columns_are_zero_whatever_their_logits():
    logits = normal(3, 4, 50)
    logits[0, 2:] = torch.nan
    logits[1] = torch.inf
    p = run(logits, [Row(), Row(), Row(top_p=0.5)], counts=[2, 0, 4])
    assert (p[0, 2:] == 0).all()
    assert (p[1] == 0).all()
    assert p.isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("row", [Row(), Row(temperature=0.0), Row(top_p=0.9)], ids=["t", "0", "p"])
def test_logits_that_are_not_finite_show_in_their_row_alone(row, bad):
    logits = normal(3, 4, 50)
    clean = run(logits, [row] * 3, counts=[4, 3, 4])
    logits[1, 2, 31] = bad
    p = run(logits, [row] * 3, counts=[4, 3, 4])
    assert p[1, :3].isnan().all()
    assert (p[1, 3] == 0).all()
    assert torch.equal(p[[0, 2]], clean[[0, 2]])


def test_large_finite_logits_are_finite():
    logits = torch.full((1, 2, 8), 3e38)
    logits[0, 0, 3] = 3.1e38
    p = run(logits, [Row()])
    assert p[0, 0].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    torch.testing.assert_close(p[0, 1], torch.full((8,), 1 / 8))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
def test_tiny_temperature_is_an_argmax(temperature):
    logits = normal(1, 3, 50)
    for row in (Row(temperature=temperature), Row(temperature=temperature, top_p=0.9, top_k=7)):
        p = run(logits, [row])
        assert torch.equal(p[0].argmax(dim=1), logits[0].argmax(dim=1))
        assert p[0].max(dim=1).values.tolist() == [1.0] * 3


def test_rows_and_columns_do_not_influence_each_other():
    """Each p is the same bits alone as among neighbours that ask for other things."""
    rows = list(SINGLE.values())
    logits = normal(len(rows), 3, 400, seed=9)
    proposals = torch.tensor([[3, 7]]).expand(len(rows), 2)
    together = run(logits, rows, proposals)
    for b, row in enumerate(rows):
        alone = run(logits[b : b + 1], [row], proposals[b : b + 1])
        assert torch.equal(alone[0], together[b])
        for count in (1, 2):
            fewer = run(logits[b : b + 1], [row], proposals[b : b + 1], counts=[count])
            assert torch.equal(fewer[0, :count], together[b, :count])


def test_nothing_is_ranked_when_no_row_filters(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("ranked a vocabulary that no row filters")

    for name in ("sort", "topk", "argsort"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    rows = [Row(), Row(temperature=0.0, top_k=3), Row(min_p=0.1), Row(presence=1.0), Row(top_k=99)]
    run(normal(5, 2, 50), rows)
    with pytest.raises(AssertionError, match="ranked"):
        run(normal(1, 2, 50), [Row(top_p=0.9)])


def test_low_precision_logits_are_widened_first():
    logits = normal(2, 3, 60).bfloat16()
    p = run(logits, [Row(temperature=0.7), Row(top_p=0.8)])
    wide = run(logits.float(), [Row(temperature=0.7), Row(top_p=0.8)])
    assert torch.equal(p, wide)


def test_unfit_arguments_are_refused():
    logits = normal(2, 3, 40)
    with pytest.raises(ValueError, match=r"^proposals: expected at least 2, got 1$"):
        run(logits, [Row(), Row()], torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^public_vocab: expected 1\.\.40, got 41$"):
        run(logits, [Row(), Row()], public=41)
    with pytest.raises(ValueError, match=r"^top_p: expected \[1\] float32, got \[2\] float32$"):
        replace(tables([Row()], 40), top_p=torch.ones(2))
    with pytest.raises(ValueError, match=r"^generated_counts: expected \[\*, 40\], got \[1, 39\]"):
        target_distribution(
            logits[:1],
            torch.zeros(1, 2, dtype=torch.int64),
            torch.tensor([3]),
            tables([Row()], 39),
            public_vocab=40,
        )
