"""A prompt's attention against its formula, whatever way the prompt is cut."""

import math

import pytest
import torch

from kernels.prefill_attention import prefill_attention

NAN = float("nan")


def arguments(F, T, *, Hq=4, Hkv=2, D=6, page=4, spare=2, dtype=torch.float32, seed=0):
    """Scattered pages, not a number where nothing is stored, and all positions' own planes."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    N = -(-(F + T) // page)
    table = torch.randperm(N + spare, generator=generator)[: N + spare // 2]
    keys, values = random(F + T, Hkv, D), random(F + T, Hkv, D)
    key_pages = torch.full((N + spare, page, Hkv, D), NAN, dtype=dtype)
    value_pages = key_pages.clone()
    for p in range(F):
        cell = table[p // page], p % page
        key_pages[cell], value_pages[cell] = keys[p], values[p]
    query, gate = random(T, Hq, D), random(T, Hq, D)
    own = [query, keys[F:], values[F:], gate, key_pages, value_pages, table, torch.tensor(F)]
    return own, keys, values


def formula(query, gate, keys, values, F):
    T, Hq, D = query.shape
    group = Hq // keys.shape[1]
    out = torch.zeros(T, Hq, D, dtype=torch.float64)
    for i in range(T):
        for h in range(Hq):
            seen = keys[: F + i + 1, h // group].double()
            weights = (seen @ query[i, h].double() / math.sqrt(D)).softmax(0)
            attended = weights @ values[: F + i + 1, h // group].double()
            out[i, h] = attended / (1 + torch.exp(-gate[i, h].double()))
    return out.flatten(1)


@pytest.mark.parametrize(("F", "T"), [(0, 1), (0, 9), (3, 1), (4, 4), (7, 6), (30, 140)])
def test_equals_formula_and_stores_every_column(F, T):
    x, keys, values = arguments(F, T)
    out = prefill_attention(*x)
    torch.testing.assert_close(
        out.double(), formula(x[0], x[3], keys, values, F), rtol=1e-5, atol=2e-6
    )
    stored = x[4][x[6]].flatten(0, 1), x[5][x[6]].flatten(0, 1)
    for plane, all_of_them in zip(stored, (keys, values), strict=True):
        assert torch.equal(plane[: F + T], all_of_them)
        assert plane[F + T :].isnan().all()


@pytest.mark.parametrize("pieces", [(20,), (1, 19), (7, 1, 12)], ids=str)
def test_pieces_equal_one_pass(pieces):
    x, *_ = arguments(5, 20)
    whole = prefill_attention(*[*x[:4], x[4].clone(), x[5].clone(), *x[6:]])
    outs, first = [], 0
    for count in pieces:
        block = [plane[first : first + count] for plane in x[:4]]
        outs.append(prefill_attention(*block, *x[4:7], torch.tensor(5 + first)))
        first += count
    torch.testing.assert_close(torch.cat(outs), whole, rtol=1e-5, atol=2e-6)


def test_keys_are_read_back_as_their_pages_round_them():
    x, keys, values = arguments(2, 5)
    x[4], x[5] = x[4].bfloat16(), x[5].half()
    out = prefill_attention(*x)
    expected = formula(x[0], x[3], keys.bfloat16(), values.half(), 2)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, torch.zeros(0, 4, 6), "query: expected at least one column, got 0"),
        (1, torch.zeros(3, 3, 6), r"key: expected \[3, 2, 6\]"),
        (6, torch.zeros(1, 2, dtype=torch.int64), r"page_table: expected \[\*\]"),
        (7, torch.zeros(1, dtype=torch.int64), r"frontier: expected \[\], got \[1\]"),
    ],
    ids=["empty", "key", "table", "frontier"],
)
def test_what_does_not_fit_is_refused(place, change, message):
    x, *_ = arguments(2, 3)
    x[place] = change
    with pytest.raises(ValueError, match=message):
        prefill_attention(*x)
