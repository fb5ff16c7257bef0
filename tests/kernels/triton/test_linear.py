"""The small product's kernel against its reference, and alone against itself in company."""

from types import SimpleNamespace

import pytest
import torch

from kernels.linear import kernel, linear
from kernels.linear.kernel import SPLITS, cut, product
from kernels.linear.reference import linear as reference

HALF = torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize(
    ("shape", "N"), [((1, 40), 7), ((2, 3, 200), 130), ((17, 64), 64), ((1, 1024), 65)], ids=str
)
def test_equals_reference(random, distance, shape, N, dtype):
    x, weight = random(*shape, dtype=dtype), random(N, shape[-1], dtype=dtype, scale=0.1)
    actual = linear(x, weight)
    assert actual.dtype == dtype
    limit = 1e-6 if dtype.itemsize == 4 else 1e-3
    assert distance(actual, reference(x, weight)) < limit


def test_short_weight_is_cut_along_k_and_summed_in_one_order(random, distance):
    """Twice, because the counters must be left as they were found."""
    x, weight = random(3, 2048), random(70, 2048, scale=0.05)
    assert cut(70, 2048, 4).split == 4
    first = linear(x, weight)
    assert distance(first, reference(x, weight)) < 1e-6
    assert torch.equal(linear(x, weight), first)


@pytest.mark.parametrize("K", [96, 1024], ids=lambda K: f"K={K}")
def test_column_does_not_depend_on_its_neighbours(random, K):
    x, weight = random(33, K, dtype=HALF), random(70, K, dtype=HALF)
    x[2] = float("nan")
    together = linear(x, weight)
    for rows in (slice(0, 1), slice(8, 16), slice(16, 33)):
        assert torch.equal(together[rows], linear(x[rows], weight))


def test_more_rows_than_a_tile_and_than_the_kernel_takes(random, distance):
    weight = random(10, 32)
    for M in (130, 300):
        x = random(M, 32)
        assert distance(linear(x, weight), reference(x, weight)) < 1e-6


def test_views_and_no_rows(random):
    wide, weight = random(5, 100), random(40, 32).t()
    rows = wide[:, 4:44]
    assert torch.equal(linear(rows, weight), linear(rows.contiguous(), weight.contiguous()))
    assert linear(random(0, 40), weight).shape == (0, 32)


def test_result_may_be_wider_than_the_inputs(random, distance):
    x, weight = random(2, 64, dtype=HALF), random(30, 64, dtype=HALF)
    wide = product(x, weight, torch.float32)
    assert distance(wide, reference(x.float(), weight.float())) < 1e-6


@pytest.mark.parametrize(
    ("N", "K", "split", "whole"),
    [
        (5120, 6144, 3, 0),
        (5120, 17408, 3, 0),
        (14336, 5120, 1, 0),
        (16480, 5120, 1, 0),
        (34816, 5120, 8, 33792),
        (248320, 5120, 1, 0),
        (2048, 4096, 4, 0),
        (256, 2048, 2, 0),
    ],
    ids=str,
)
def test_weight_alone_decides_the_runs_of_k(N, K, split, whole):
    plan = cut(N, K, 2)
    assert plan == (128, split, whole)
    assert plan.split in SPLITS
    assert plan.whole < N


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize(
    ("N", "split", "whole"), [(257, 2, 256), (300, 2, 256), (512, 1, 0), (640, 2, 512)], ids=str
)
def test_rows_left_over_by_a_full_device_are_cut(
    random, distance, monkeypatch, N, split, whole, rows
):
    cut.cache_clear()
    monkeypatch.setattr("kernels.linear.kernel.PROCESSORS", 2)
    monkeypatch.setattr("kernels.linear.kernel.tile_rows", lambda *_: rows)
    assert cut(N, 600, 4) == (64, split, whole)
    x, weight = random(5, 600), random(N, 600, scale=0.05)
    first = linear(x, weight)
    assert distance(first, reference(x, weight)) < 1e-6
    assert torch.equal(linear(x, weight), first)
    assert torch.equal(linear(x[3:4], weight), first[3:4])
    cut.cache_clear()


def test_streams_count_apart(monkeypatch):
    """Two engines of one process may be in the same product at once."""
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(kernel, "_lines", {})
    monkeypatch.setattr(kernel, "_LINES", 2)
    monkeypatch.setattr(kernel, "_counters", lambda device, block: [(block, 0), (block, 1)])
    seen = {}
    for number in (7, 5, 7, 9, 5):
        stream.cuda_stream = number
        seen.setdefault(number, set()).add(kernel.counters(torch.device("cuda", 0)))
    assert all(len(places) == 1 for places in seen.values())
    assert len(set.union(*seen.values())) == 3


def test_tile_of_weight_rows_changes_no_bit(random, monkeypatch):
    """It may follow the number of columns, since no sum follows it."""
    x, weight = random(20, 1024, dtype=HALF), random(300, 1024, dtype=HALF)
    results = []
    for rows in (64, 128):
        monkeypatch.setattr("kernels.linear.kernel.tile_rows", lambda *_, rows=rows: rows)
        results.append(linear(x, weight))
    assert torch.equal(*results)
