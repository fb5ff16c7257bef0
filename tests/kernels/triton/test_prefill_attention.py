"""The prompt's attention's kernels against their reference."""

import pytest
import torch

from kernels.prefill_attention import kernel, prefill_attention
from kernels.prefill_attention.reference import prefill_attention as reference
from tests.kernels.test_prefill_attention import arguments


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(kernel, "COLUMNS", 32)


def run(op, x):
    pages = x[4].clone(), x[5].clone()
    return op(*x[:4], *pages, *x[6:]), pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("F", "T", "shape"),
    [
        (0, 40, {"page": 16}),
        (37, 33, {"page": 32}),
        (5, 1, {"Hq": 3, "Hkv": 1, "D": 12, "page": 5}),
        (64, 70, {"Hq": 2, "Hkv": 1, "D": 16, "page": 64}),
        (63, 2, {"Hq": 2, "Hkv": 2, "D": 16, "page": 64}),
    ],
    ids=str,
)
def test_equals_reference(distance, F, T, shape, dtype):
    x, *_ = arguments(F, T, dtype=dtype, **shape)
    actual, pages = run(prefill_attention, x)
    expected, wanted = run(reference, x)
    assert distance(actual, expected) < (2e-6 if dtype is torch.float32 else 1.5e-3)
    for plane, other in zip(pages, wanted, strict=True):
        assert torch.equal(plane.isnan(), other.isnan())
        assert torch.equal(plane.nan_to_num(), other.nan_to_num())


def test_values_may_be_stored_narrower_than_keys(distance):
    x, *_ = arguments(20, 30, page=16)
    x[5] = x[5].half()
    actual, pages = run(prefill_attention, x)
    expected, wanted = run(reference, x)
    assert distance(actual, expected) < 1e-3
    assert torch.equal(pages[1].nan_to_num(), wanted[1].nan_to_num())


def test_inputs_may_be_part_of_wider_columns():
    x, *_ = arguments(3, 5)
    wide = torch.cat([plane.flatten(1) for plane in x[:4]], dim=-1)
    parts = wide.split([plane[0].numel() for plane in x[:4]], dim=-1)
    views = [part.unflatten(-1, plane.shape[1:]) for part, plane in zip(parts, x[:4], strict=True)]
    assert torch.equal(run(prefill_attention, [*views, *x[4:]])[0], run(prefill_attention, x)[0])
