"""Context features become normalised, rotated K and plain V in the cells they are sent to."""

import math

import pytest
import torch

from kernels.context_kv_materialize import context_kv_materialize

EPS = 1e-6


def restated(context, position, weight, gain, heads, theta):
    """K and V [heads, D] of one layer and one row in FP64, element by element."""
    size = gain.shape[0]
    projected = weight.double() @ context.double()
    keys, values = projected[: heads * size], projected[heads * size :].view(heads, size)
    rotated = torch.zeros(heads, size, dtype=torch.float64)
    for head in range(heads):
        raw = keys[head * size : (head + 1) * size]
        normed = gain.double() * raw / math.sqrt(float((raw**2).mean()) + EPS)
        for j in range(size // 2):
            angle = position * theta ** (-2 * j / size)
            a, b = float(normed[j]), float(normed[j + size // 2])
            rotated[head, j] = a * math.cos(angle) - b * math.sin(angle)
            rotated[head, j + size // 2] = b * math.cos(angle) + a * math.sin(angle)
    return rotated, values


def setup(
    layers, rows, width, hidden, heads, size, cells, *, dtype=torch.float32, value_dtype=None
):
    g = torch.Generator().manual_seed(hidden + rows * width)
    context = torch.randn(rows, width, hidden, generator=g).to(dtype)
    weight = torch.randn(layers, 2 * heads * size, hidden, generator=g) / hidden**0.5
    gain = 1 + 0.2 * torch.randn(layers, size, generator=g)
    keys = torch.full((layers, cells, heads, size), torch.nan, dtype=dtype)
    values = torch.full_like(keys, torch.nan, dtype=value_dtype or dtype)
    return context, weight.to(dtype), gain.to(dtype), keys, values


@pytest.mark.parametrize("theta", [1e4, 1e7])
@pytest.mark.parametrize(
    ("layers", "rows", "width", "hidden", "heads", "size"),
    [(1, 1, 1, 8, 1, 2), (3, 2, 5, 24, 2, 8), (2, 1, 9, 16, 3, 6)],
)
def test_equals_the_formula_in_fp64(layers, rows, width, hidden, heads, size, theta):
    cells = rows * width + 3
    context, weight, gain, keys, values = setup(layers, rows, width, hidden, heads, size, cells)
    positions = torch.arange(width) + torch.tensor([[7], [1000]])[:rows]
    order = torch.randperm(cells, generator=torch.Generator().manual_seed(0))
    destinations = order[: rows * width].view(rows, width).clone()
    if width > 1:
        destinations[0, 1] = -1
    context_kv_materialize(
        context, positions, destinations, weight, gain, keys, values, eps=EPS, theta=theta
    )
    written = set()
    for row in range(rows):
        for column in range(width):
            cell = int(destinations[row, column])
            if cell < 0:
                continue
            written.add(cell)
            for layer in range(layers):
                key, value = restated(
                    context[row, column],
                    int(positions[row, column]),
                    weight[layer],
                    gain[layer],
                    heads,
                    theta,
                )
                # an FP32 angle of 1,000 radians is off by up to 6e-5
                torch.testing.assert_close(
                    keys[layer, cell].double(), key, atol=1e-5 if row == 0 else 2e-4, rtol=0
                )
                torch.testing.assert_close(
                    values[layer, cell].double(), value, atol=1e-5, rtol=1e-5
                )
    others = [cell for cell in range(cells) if cell not in written]
    assert keys[:, others].isnan().all()
    assert values[:, others].isnan().all()


def test_dead_rows_are_neither_read_nor_written():
    context, weight, gain, keys, values = setup(2, 2, 3, 16, 2, 4, 6)
    positions = torch.arange(6).view(2, 3)
    live = torch.tensor([[0, 1, 2], [3, -1, -1]])
    context[1, 1:] = torch.nan
    context_kv_materialize(context, positions, live, weight, gain, keys, values, eps=EPS, theta=1e4)
    assert keys[:, :4].isfinite().all()
    assert keys[:, 4:].isnan().all()
    assert values[:, 4:].isnan().all()
    before = keys.clone()
    dead = torch.full_like(live, -1)
    context_kv_materialize(context, positions, dead, weight, gain, keys, values, eps=EPS, theta=1e4)
    torch.testing.assert_close(keys, before, rtol=0, atol=0, equal_nan=True)


def test_chunk_longer_than_the_ring_keeps_its_last_rows():
    """A chunk of 200 rows into a ring of 64 equals the same rows sent in pieces."""
    ring, count = 64, 200
    context, weight, gain, keys, values = setup(1, 1, count, 16, 2, 4, ring)
    positions = torch.arange(count)[None]
    destinations = torch.where(positions >= count - ring, positions % ring, -1)
    context_kv_materialize(
        context, positions, destinations, weight, gain, keys, values, eps=EPS, theta=1e4
    )
    pieces, piece_values = torch.full_like(keys, torch.nan), torch.full_like(values, torch.nan)
    for first in range(0, count, 50):
        part = slice(first, first + 50)
        context_kv_materialize(
            context[:, part],
            positions[:, part],
            positions[:, part] % ring,
            weight,
            gain,
            pieces,
            piece_values,
            eps=EPS,
            theta=1e4,
        )
    assert keys.isfinite().all()
    torch.testing.assert_close(keys, pieces, atol=1e-6, rtol=0)
    torch.testing.assert_close(values, piece_values, atol=1e-6, rtol=0)


def test_bfloat16_profile_rounds_k_once_and_v_through_bfloat16():
    context, weight, gain, keys, values = setup(
        2, 1, 40, 64, 2, 16, 40, dtype=torch.bfloat16, value_dtype=torch.float16
    )
    positions = torch.arange(40)[None]
    context_kv_materialize(
        context, positions, positions.clone(), weight, gain, keys, values, eps=EPS, theta=1e4
    )
    expected_keys = torch.zeros(keys.shape, dtype=torch.float64)
    expected_values = torch.zeros(values.shape, dtype=torch.float64)
    for layer in range(2):
        for cell in range(40):
            expected_keys[layer, cell], expected_values[layer, cell] = restated(
                context[0, cell], cell, weight[layer], gain[layer], 2, 1e4
            )

    def relative(actual, expected):
        return ((actual.double() - expected).norm() / expected.norm()).item()

    assert relative(keys, expected_keys) <= 3.0e-3
    assert relative(values, expected_values) <= 2.9e-3
    # a value that BF16 cannot hold never reaches the FP16 cells
    torch.testing.assert_close(values.bfloat16().half(), values, rtol=0, atol=0)
    # one rounding: nearest BF16 of the exact K but for FP32 noise at the ties
    wrong = keys != expected_keys.to(torch.bfloat16)
    assert wrong.float().mean() < 2e-3


def test_other_shape_is_refused():
    context, weight, gain, keys, values = setup(2, 1, 3, 16, 2, 4, 6)
    positions = torch.arange(3)[None]
    with pytest.raises(ValueError, match=r"^key_value_weight: expected \[2, 16, 16\], got \[2, 15"):
        context_kv_materialize(
            context, positions, positions, weight[:, :15], gain, keys, values, eps=EPS, theta=1e4
        )
    with pytest.raises(ValueError, match=r"^destinations: expected \[1, 3\] int64"):
        context_kv_materialize(
            context, positions, positions.int(), weight, gain, keys, values, eps=EPS, theta=1e4
        )
