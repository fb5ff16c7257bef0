"""Paged causal attention against a formula in FP64 over the logical context."""

from dataclasses import dataclass, fields, replace

import pytest
import torch

from kernels.causal_attention import causal_attention
from kernels.trees import ancestor_masks
from tests.kernels.test_trees import random_parents

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """The op's arguments, in its order."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gate: torch.Tensor
    key_pages: torch.Tensor
    value_pages: torch.Tensor
    page_tables: torch.Tensor
    frontiers: torch.Tensor
    counts: torch.Tensor
    ancestors: torch.Tensor | None = None

    def run(self):
        return causal_attention(*(getattr(self, f.name) for f in fields(self)))

    def copy(self):
        return replace(self, key_pages=self.key_pages.clone(), value_pages=self.value_pages.clone())


def make(
    frontiers,
    counts,
    W,
    *,
    Hq=4,
    Hkv=2,
    D=8,
    page=4,
    scattered=True,
    seed=0,
    dtype=torch.float32,
    page_dtypes=(torch.float32, torch.float32),
):
    """Pages are NaN but for the positions [0, F) of each row; dead columns are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    B = len(frontiers)
    needed = [-(-(f + n) // page) for f, n in zip(frontiers, counts, strict=True)]
    N = max(needed) + 1
    pages = sum(needed) + 3
    order = torch.randperm(pages, generator=generator) if scattered else torch.arange(1, pages)
    key_pages = torch.full((pages, page, Hkv, D), NAN).to(page_dtypes[0])
    value_pages = torch.full((pages, page, Hkv, D), NAN).to(page_dtypes[1])
    # entries past the needed ones are far outside the pool: looking at them would fail
    page_tables = torch.full((B, N), 10**6)
    taken = 0
    for row, frontier in enumerate(frontiers):
        page_tables[row, : needed[row]] = order[taken : taken + needed[row]]
        taken += needed[row]
        for p in range(frontier):
            cell = int(page_tables[row, p // page]), p % page
            key_pages[cell] = random(Hkv, D)
            value_pages[cell] = random(Hkv, D)
    case = Case(
        random(B, W, Hq, D).to(dtype),
        random(B, W, Hkv, D).to(dtype),
        random(B, W, Hkv, D).to(dtype),
        random(B, W, Hq, D).to(dtype),
        key_pages,
        value_pages,
        page_tables,
        torch.tensor(frontiers),
        torch.tensor(counts),
    )
    for row, count in enumerate(counts):
        for columns in (case.query, case.key, case.value, case.gate):
            columns[row, count:] = NAN
    return case


def formula(case):
    """Outputs in FP64 and the pages as they should be left."""
    B, W, Hq, D = case.query.shape
    page, Hkv = case.key_pages.shape[1:3]
    key_pages, value_pages = case.key_pages.clone(), case.value_pages.clone()
    out = torch.zeros(B, W, Hq, D, dtype=torch.float64)
    for row in range(B):
        F, table = int(case.frontiers[row]), case.page_tables[row].tolist()
        for i in range(int(case.counts[row])):
            cell = table[(F + i) // page], (F + i) % page
            key_pages[cell] = case.key[row, i].to(key_pages.dtype)
            value_pages[cell] = case.value[row, i].to(value_pages.dtype)
            seen = range(i + 1)
            if case.ancestors is not None:
                seen = [j for j in seen if int(case.ancestors[row, i]) >> j & 1]
            places = [*range(F), *(F + j for j in seen)]
            cells = [(table[p // page], p % page) for p in places]
            keys = torch.stack([key_pages[c] for c in cells]).double()
            values = torch.stack([value_pages[c] for c in cells]).double()
            for h in range(Hq):
                shared = h // (Hq // Hkv)
                scores = keys[:, shared] @ case.query[row, i, h].double() / D**0.5
                attended = scores.softmax(0) @ values[:, shared]
                out[row, i, h] = attended * torch.sigmoid(case.gate[row, i, h].double())
    return out.flatten(2), key_pages, value_pages


def check(case, tolerance=2e-6):
    expected, key_pages, value_pages = formula(case)
    actual = case.run()
    assert actual.dtype is case.query.dtype
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    for row, count in enumerate(case.counts.tolist()):
        assert torch.equal(actual[row, count:], torch.zeros_like(actual[row, count:]))
    # bits, so that NaN cells compare too
    bits = {4: torch.int32, 2: torch.int16}
    for pages, after in ((case.key_pages, key_pages), (case.value_pages, value_pages)):
        width = bits[pages.element_size()]
        assert torch.equal(pages.view(width), after.view(width))


@pytest.mark.parametrize("scattered", [True, False], ids=["scattered", "one-run"])
@pytest.mark.parametrize("page", [1, 3, 4, 64])
@pytest.mark.parametrize("W", [1, 2, 8, 32])
def test_equals_formula_around_page_boundaries(W, page, scattered):
    for frontier in (0, page - 1, page, 2 * page + 1):
        check(make([frontier], [W], W, page=page, scattered=scattered, seed=frontier))


@pytest.mark.parametrize(
    ("Hq", "Hkv", "D"), [(1, 1, 2), (2, 2, 8), (6, 2, 16), (4, 1, 12), (6, 1, 32)], ids=str
)
def test_heads_share_keys_in_order(Hq, Hkv, D):
    check(make([5, 0], [3, 2], 3, Hq=Hq, Hkv=Hkv, D=D))


@pytest.mark.parametrize("scattered", [True, False], ids=["scattered", "one-run"])
def test_rows_of_several_lengths_and_counts(scattered):
    case = make([0, 7, 21, 64, 3], [8, 0, 1, 5, 7], 8, page=4, scattered=scattered)
    check(case)


def test_every_width_up_to_32():
    for W in range(1, 33):
        check(make([W % 7, 3], [W, W // 2], W, Hq=2, Hkv=1, D=4, seed=W))


def test_no_live_column_touches_nothing():
    case = make([6, 0], [0, 0], 4)
    kept = case.copy()
    case = replace(case, page_tables=torch.full_like(case.page_tables, 10**6))
    assert torch.equal(case.run(), torch.zeros(2, 4, 32))
    assert torch.equal(case.key_pages.view(torch.int32), kept.key_pages.view(torch.int32))
    assert torch.equal(case.value_pages.view(torch.int32), kept.value_pages.view(torch.int32))


@pytest.mark.parametrize("frontier", [0, 5], ids=["fresh", "continued"])
def test_long_prefill_equals_formula(frontier):
    # beyond the number of columns that are scored at a time
    check(make([frontier], [130], 130, Hq=2, Hkv=1, D=4, page=16))


@pytest.mark.parametrize("pieces", [(130,), (64, 66), (1, 63, 64, 2), (65, 65), (129, 1)], ids=str)
def test_prefill_in_pieces_equals_one_pass(pieces):
    whole = make([0], [130], 130, page=16, D=16)
    expected = whole.copy().run()
    done = []
    first = 0
    for count in pieces:
        end = first + count
        part = replace(
            whole,
            query=whole.query[:, first:end],
            key=whole.key[:, first:end],
            value=whole.value[:, first:end],
            gate=whole.gate[:, first:end],
            frontiers=torch.tensor([first]),
            counts=torch.tensor([count]),
        )
        done.append(part.run())
        first = end
    torch.testing.assert_close(torch.cat(done, dim=1), expected, rtol=2e-6, atol=2e-6)


def test_rejected_columns_are_overwritten_by_the_next_round():
    case = make([9], [8], 8)
    case.run()
    # three columns were kept; the rest of the old block must not be seen any more
    following = make([12], [8], 8, seed=5)
    check(
        replace(
            case,
            query=following.query,
            key=following.key,
            value=following.value,
            frontiers=torch.tensor([12]),
        )
    )


def test_row_equals_itself_alone_bit_for_bit():
    together = make([0, 13, 40, 5], [8, 3, 8, 1], 8, page=4)
    out = together.copy().run()
    for row in range(4):
        alone = replace(
            together.copy(),
            **{
                f.name: getattr(together, f.name)[row : row + 1]
                for f in fields(together)
                if not f.name.endswith("pages") and f.name != "ancestors"
            },
        )
        assert torch.equal(alone.run()[0], out[row])


def test_shared_prefix_pages_serve_two_rows():
    case = make([8, 8], [2, 2], 2, page=4)
    tables = case.page_tables.clone()
    tables[1, :2] = tables[0, :2]
    check(replace(case, page_tables=tables))


def test_infinite_and_nan_garbage_never_reaches_a_result():
    case = make([5], [3], 8, page=4)
    clean = replace(
        case,
        key_pages=case.key_pages.nan_to_num(0.0),
        value_pages=case.value_pages.nan_to_num(0.0),
    ).run()
    infinite = replace(
        case.copy(),
        key_pages=case.key_pages.nan_to_num(float("inf")),
        value_pages=case.value_pages.nan_to_num(float("-inf")),
    ).run()
    assert torch.equal(case.run(), clean)
    assert torch.equal(infinite, clean)


def test_large_scores_do_not_overflow():
    case = make([6], [2], 2)
    check(replace(case, query=case.query * 1e4), tolerance=1e-4)


def test_bfloat16_columns_over_bfloat16_keys_and_float16_values():
    case = make(
        [6, 1], [4, 2], 4, dtype=torch.bfloat16, page_dtypes=(torch.bfloat16, torch.float16)
    )
    check(case, tolerance=2**-8 * 1.01)


def test_strided_views_are_taken():
    case = make([3], [4], 4)
    packed = torch.cat((case.query, case.gate), dim=-1)
    D = case.query.shape[-1]
    check(replace(case, query=packed[..., :D], gate=packed[..., D:]))


def test_heads_first_storage_is_taken():
    case = make([3, 6], [4, 2], 4)
    turned = {
        name: getattr(case, name).transpose(1, 2).contiguous().transpose(1, 2)
        for name in ("query", "key", "value", "gate")
    }
    check(replace(case, **turned))


def in_trees(case, *, seed=0):
    """The case with every row a tree of its own; masks of dead columns are wrong."""
    rows, width = case.query.shape[:2]
    masks = ancestor_masks(random_parents(rows, width - 1, seed=seed))
    for row, count in enumerate(case.counts.tolist()):
        masks[row, count:] = -1
    return replace(case, ancestors=masks)


@pytest.mark.parametrize("page", [1, 3, 64])
@pytest.mark.parametrize("W", [2, 5, 16, 32])
def test_trees_equal_formula_around_page_boundaries(W, page):
    for frontier in (0, page - 1, 2 * page + 1):
        check(in_trees(make([frontier], [W], W, page=page, seed=frontier), seed=frontier))


def test_trees_of_several_rows_and_counts():
    check(in_trees(make([0, 7, 21, 3], [12, 0, 1, 7], 12, Hq=6, Hkv=2)))


def test_masks_of_a_chain_change_no_bit():
    case = make([5, 0, 30], [9, 4, 1], 9, page=4)
    chain = replace(case, ancestors=ancestor_masks(torch.arange(8).expand(3, 8)))
    assert torch.equal(chain.copy().run(), case.copy().run())


def test_a_column_equals_the_last_of_its_own_path():
    """A tree's column, and a chain of its ancestors alone with the same keys and queries."""
    case = in_trees(make([6], [12], 12, page=4), seed=3)
    out = case.copy().run()
    for column in range(12):
        path = [j for j in range(12) if int(case.ancestors[0, column]) >> j & 1]
        alone = {name: getattr(case, name)[:, path] for name in ("query", "key", "value", "gate")}
        counts = torch.tensor([len(path)])
        chain = replace(case.copy(), **alone, counts=counts, ancestors=None)
        torch.testing.assert_close(chain.run()[0, -1], out[0, column], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"ancestors": torch.zeros(2, 2, dtype=torch.int32)},
            r"ancestors: expected \[2, 3\] int32",
        ),
        ({"ancestors": torch.zeros(2, 3)}, r"ancestors: expected \[2, 3\] int32, got .* float32"),
        ({"key": torch.zeros(2, 3, 3, 8)}, r"key: expected \[2, 3, 2, 8\]"),
        ({"value": torch.zeros(2, 2, 2, 8)}, r"value: expected \[2, 3, 2, 8\]"),
        ({"gate": torch.zeros(2, 3, 4, 4)}, r"gate: expected \[2, 3, 4, 8\]"),
        ({"counts": torch.zeros(1, dtype=torch.int64)}, r"counts: expected \[2\]"),
        ({"frontiers": torch.zeros(3, dtype=torch.int64)}, r"frontiers: expected \[2\]"),
        ({"page_tables": torch.zeros(1, 4, dtype=torch.int64)}, r"page_tables: expected \[2, \*\]"),
        ({"value_pages": torch.zeros(5, 8, 2, 8)}, r"value_pages: expected"),
        (
            {"query": torch.zeros(2, 3, 5, 8), "gate": torch.zeros(2, 3, 5, 8)},
            "multiple of 2, got 5",
        ),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(make([1, 2], [3, 3], 3), **change).run()


def test_wide_blocks_of_several_rows_are_refused():
    with pytest.raises(ValueError, match="at most 32 columns for several rows, got 33"):
        make([0, 0], [33, 33], 33).run()
