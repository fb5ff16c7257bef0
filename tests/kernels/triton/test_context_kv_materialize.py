"""The kernel that writes context keys and values against its reference."""

import pytest
import torch

from kernels.context_kv_materialize import context_kv_materialize
from kernels.context_kv_materialize.reference import context_kv_materialize as reference

NAN = float("nan")
OPTIONS = {"eps": 1e-6, "theta": 1e7}


def case(random, destinations, *, L=2, Hkv=2, D=16, H=40, cells=24, dtype=torch.float32):
    destinations = torch.tensor(destinations)
    context = random(*destinations.shape, H, dtype=dtype)
    context[destinations < 0] = NAN
    positions = torch.arange(destinations.numel()).view(destinations.shape) * 977 + 3
    weight = random(L, 2 * Hkv * D, H, dtype=dtype, scale=H**-0.5)
    gain = random(L, D)
    keys = torch.full((L, cells, Hkv, D), NAN, dtype=dtype)
    values = torch.full((L, cells, Hkv, D), NAN, dtype=torch.float16)
    return context, positions, destinations, weight, gain, keys, values


def run(op, arguments):
    *inputs, keys, values = arguments
    keys, values = keys.clone(), values.clone()
    op(*inputs, keys, values, **OPTIONS)
    return keys, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("D", [16, 20])
def test_live_cells_equal_reference_and_the_rest_stay(random, distance, dtype, D):
    arguments = case(random, [[5, -1, 23], [0, 7, -1]], D=D, dtype=dtype)
    keys, values = run(context_kv_materialize, arguments)
    expected = run(reference, arguments)
    for actual, wanted in zip((keys, values), expected, strict=True):
        assert torch.equal(actual.isnan(), wanted.isnan())
        written = ~wanted.isnan()
        error = 1e-3 if actual.dtype is torch.float16 else 2e-6
        assert distance(actual[written], wanted[written]) < error


def test_weights_may_be_part_of_a_larger_matrix(random, distance):
    """The context's K and V rows lie behind the block's Q rows, layer by layer."""
    arguments = list(case(random, [[5, 1, 23]], L=3))
    expected = run(reference, arguments)
    weight = arguments[3]
    whole = torch.full((3, weight.shape[1] + 8, weight.shape[2]), NAN)
    whole[:, 8:] = weight
    arguments[3] = whole[:, 8:]
    pairs = zip(run(context_kv_materialize, arguments), expected, strict=True)
    for index, (actual, wanted) in enumerate(pairs):
        written = ~wanted.isnan()
        assert distance(actual[written], wanted[written]) < (1e-3 if index else 2e-6)


def test_nothing_live_writes_nothing(random):
    keys, values = run(context_kv_materialize, case(random, [[-1, -1]]))
    assert keys.isnan().all()
    assert values.isnan().all()


def test_row_is_the_same_bits_alone_and_in_a_chunk(random):
    arguments = case(random, [list(range(19))], L=1, H=24)
    keys, values = run(context_kv_materialize, arguments)
    for row in (0, 18):
        context, positions, destinations, *rest = arguments
        alone = [x[:, row : row + 1] for x in (context, positions, destinations)]
        key, value = run(context_kv_materialize, [*alone, *rest])
        assert torch.equal(key[:, row], keys[:, row])
        assert torch.equal(value[:, row], values[:, row])
