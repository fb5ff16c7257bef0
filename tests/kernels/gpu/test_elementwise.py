"""Norms, rotations, activations and the draft's convolution."""

import pytest
import torch

from kernels.cast_together import cast_together
from kernels.dynamic_grouped_conv import finish_add, prepare
from kernels.dynamic_grouped_conv.reference import finish_add as finish_reference
from kernels.dynamic_grouped_conv.reference import prepare as prepare_reference
from kernels.gated_rms_norm import gated_rms_norm
from kernels.gated_rms_norm.reference import gated_rms_norm as gated_reference
from kernels.head_norm_rope import head_norm_rope
from kernels.head_norm_rope.reference import head_norm_rope as rope_reference
from kernels.rms_norm import rms_norm
from kernels.rms_norm.reference import rms_norm as norm_reference
from kernels.swiglu import swiglu
from kernels.swiglu.reference import swiglu as swiglu_reference
from tests.kernels.gpu.shared import BF16, FP32, NAN, ROUNDED

pytestmark = pytest.mark.gpu
LIMIT = {BF16: ROUNDED, FP32: 2e-6}


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("shape", [(8, 16, 5120), (3, 2048), (2049, 5120), (3, 5)], ids=str)
def test_norm(random, distance, shape, dtype):
    x, gain = random(*shape, dtype=dtype), random(shape[-1], dtype=FP32)
    x.view(-1, shape[-1])[1] = NAN
    actual, expected = rms_norm(x, gain, 1e-6), norm_reference(x, gain, 1e-6)
    actual, expected, rows = (t.view(-1, shape[-1]) for t in (actual, expected, x))
    assert distance(actual[2:], expected[2:]) < LIMIT[dtype]
    for row in (0, len(rows) - 1):
        assert torch.equal(rms_norm(rows[row], gain, 1e-6), actual[row])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("shape", [(2, 16, 48, 128), (1, 2048, 32, 128), (2, 3, 2, 20)], ids=str)
def test_gated_norm_of_part_of_wider_columns(random, distance, shape, dtype):
    B, W, heads, D = shape
    x, gain = random(*shape, dtype=dtype), random(D, dtype=FP32)
    gate = random(B, W, heads * D + 96, dtype=dtype)[..., 32:-64].unflatten(-1, (heads, D))
    actual = gated_rms_norm(x, gate, gain, 1e-6)
    assert distance(actual, gated_reference(x, gate, gain, 1e-6)) < LIMIT[dtype]
    alone = gated_rms_norm(x[:, 1:2], gate[:, 1:2], gain, 1e-6)
    assert torch.equal(alone, actual[:, 1:2])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("shape", [(8, 16, 34816), (2048, 34816), (16, 35), (3, 10)], ids=str)
def test_activation(random, distance, shape, dtype):
    shape = (*shape[:-1], shape[-1] // 2 * 2)
    gate_up = random(*shape, dtype=dtype, scale=4)
    actual = swiglu(gate_up)
    assert distance(actual, swiglu_reference(gate_up)) < LIMIT[dtype]
    assert torch.equal(swiglu(gate_up[1:2]), actual[1:2])


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(
    ("heads", "D", "rotary_dim", "sections"),
    [(24, 256, 64, None), (4, 256, 64, (11, 11, 10)), (32, 128, 128, None), (3, 12, 6, None)],
    ids=str,
)
def test_rotation(random, distance, heads, D, rotary_dim, sections, dtype):
    wide = random(2, 17, heads * D + 64, dtype=dtype)
    x, gain = wide[..., 32:-32].unflatten(-1, (heads, D)), random(D, dtype=FP32)
    positions = torch.arange(34, device="cuda").view(2, 17) * 7919
    if sections:
        positions = torch.stack((positions, positions + 5, positions * 3))
    options = {"eps": 1e-6, "theta": 1e7, "rotary_dim": rotary_dim, "sections": sections}
    actual = head_norm_rope(x, gain, positions, **options)
    assert distance(actual, rope_reference(x, gain, positions, **options)) < LIMIT[dtype]
    alone = head_norm_rope(x[1:, 4:5], gain, positions[..., 1:, 4:5], **options)
    assert torch.equal(alone, actual[1:, 4:5])


@pytest.mark.parametrize(
    ("B", "W", "H", "G", "taps"), [(8, 16, 5120, 320, 2), (1, 2, 5120, 320, 2), (3, 7, 36, 3, 3)]
)
def test_grouped_convolution(random, distance, B, W, H, G, taps):
    x, gain, base = random(B, W, H), random(H, dtype=FP32), random(2, taps, H)
    projection, z = random(2 * taps * G, H, scale=H**-0.5), random(B, W, H)
    prepared, delta = prepare(x, gain, base, projection, 1e-6)
    for actual, expected in zip(
        (prepared, delta), prepare_reference(x, gain, base, projection, 1e-6), strict=True
    ):
        assert distance(actual, expected) < ROUNDED
    finished = finish_add(x, z, base, delta)
    assert distance(finished, finish_reference(x, z, base, delta)) < ROUNDED
    for row, width in ((0, W), (B - 1, 1)):
        part = x[row : row + 1, :width]
        alone, alone_delta = prepare(part, gain, base, projection, 1e-6)
        assert torch.equal(alone[0], prepared[row, :width])
        assert torch.equal(alone_delta[0], delta[row, :width])
        again = finish_add(part, z[row : row + 1, :width], base, alone_delta)
        assert torch.equal(again[0], finished[row, :width])


def test_results_arrive_in_their_types_and_nothing_beyond(random):
    ids = torch.randint(0, 248_320, (8, 15, 16), device="cuda")
    finite, law = torch.arange(8, device="cuda") % 2 == 0, random(8, 15, 16, dtype=FP32)
    law[3, 2] = NAN
    sources = [ids[..., 0], finite, ids, law, ids[:0]]
    types = [torch.int32, torch.bool, torch.int32, FP32, torch.int64]
    rooms = [
        torch.ones(s.numel() + 1, dtype=t, device="cuda")
        for s, t in zip(sources, types, strict=True)
    ]
    cast_together(sources, [r[:-1].view(s.shape) for r, s in zip(rooms, sources, strict=True)])
    for source, room in zip(sources, rooms, strict=True):
        expected = source.to(room.dtype).flatten().nan_to_num(9)
        assert torch.equal(room[:-1].nan_to_num(9), expected)
        assert room[-1] == 1
