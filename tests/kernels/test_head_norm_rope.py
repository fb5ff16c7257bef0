"""Head norm and rotary embedding against the formula in FP64 and against transformers."""

import math

import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
    apply_rotary_pos_emb,
)

from kernels.head_norm_rope import head_norm_rope

EPS, THETA = 1e-6, 1e7


def pair_axis(pair, sections):
    """0 temporal, 1 height, 2 width."""
    if pair % 3 == 1 and pair < 3 * sections[1]:
        return 1
    if pair % 3 == 2 and pair < 3 * sections[2]:
        return 2
    return 0


def formula(x, gain, positions, theta, rotary_dim, sections=None):
    """Element by element in FP64; positions [B, W] or [3, B, W]."""
    x, gain = x.double(), gain.double()
    normed = gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)
    out, half = normed.clone(), rotary_dim // 2
    B, W = x.shape[:2]
    for row in range(B):
        for column in range(W):
            for pair in range(half):
                place = positions[..., row, column]
                if place.ndim:
                    place = place[pair_axis(pair, sections)]
                angle = int(place) * theta ** (-2 * pair / rotary_dim)
                cos, sin = math.cos(angle), math.sin(angle)
                first, second = normed[row, column, :, pair], normed[row, column, :, pair + half]
                out[row, column, :, pair] = first * cos - second * sin
                out[row, column, :, pair + half] = second * cos + first * sin
    return out


@pytest.mark.parametrize(
    ("heads", "D", "rotary_dim"),
    [(1, 2, 2), (4, 64, 16), (3, 32, 32), (2, 256, 64), (2, 10, 6)],
    ids=lambda v: str(v),
)
@pytest.mark.parametrize(("B", "W"), [(1, 1), (2, 5)], ids=["1x1", "2x5"])
def test_equals_formula(heads, D, rotary_dim, B, W):
    torch.manual_seed(0)
    x, gain = torch.randn(B, W, heads, D), torch.randn(D)
    positions = torch.randint(0, 300, (B, W))
    actual = head_norm_rope(x, gain, positions, eps=EPS, theta=THETA, rotary_dim=rotary_dim)
    expected = formula(x, gain, positions, THETA, rotary_dim)
    # an angle of 300 is known to 2e-5 in FP32
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-4)


def test_position_zero_only_norms():
    torch.manual_seed(1)
    x, gain = torch.randn(1, 3, 2, 16), torch.randn(16)
    zero = torch.zeros(1, 3, dtype=torch.int64)
    actual = head_norm_rope(x, gain, zero, eps=EPS, theta=THETA, rotary_dim=8)
    expected = gain * x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS)
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=1e-6)


def test_elements_beyond_rotary_dim_pass_through():
    torch.manual_seed(2)
    x, gain = torch.randn(1, 2, 2, 16), torch.randn(16)
    near, far = torch.tensor([[0, 0]]), torch.tensor([[77, 4000]])
    outs = [head_norm_rope(x, gain, p, eps=EPS, theta=1e4, rotary_dim=6) for p in (near, far)]
    assert torch.equal(outs[0][..., 6:], outs[1][..., 6:])
    assert not torch.equal(outs[0][..., :6], outs[1][..., :6])


@pytest.mark.parametrize(
    ("sections", "D", "rotary_dim"),
    [((11, 11, 10), 256, 64), ((2, 1, 1), 32, 8), ((3, 3, 2), 64, 16)],
    ids=["11-11-10", "2-1-1", "3-3-2"],
)
class TestThreeAxes:
    def test_interleaved_axes_equal_formula(self, sections, D, rotary_dim):
        torch.manual_seed(3)
        x, gain = torch.randn(2, 3, 2, D), torch.randn(D)
        positions = torch.randint(0, 200, (3, 2, 3))
        actual = head_norm_rope(
            x, gain, positions, eps=EPS, theta=THETA, rotary_dim=rotary_dim, sections=sections
        )
        expected = formula(x, gain, positions, THETA, rotary_dim, sections)
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-4)

    def test_equal_axes_equal_one_dimension(self, sections, D, rotary_dim):
        torch.manual_seed(4)
        x, gain = torch.randn(2, 4, 2, D), torch.randn(D)
        positions = torch.randint(0, 5000, (2, 4))
        rope = {"eps": EPS, "theta": THETA, "rotary_dim": rotary_dim}
        flat = head_norm_rope(x, gain, positions, **rope)
        axes = positions.expand(3, 2, 4)
        assert torch.equal(head_norm_rope(x, gain, axes, sections=sections, **rope), flat)
        assert torch.equal(head_norm_rope(x, gain, positions, sections=sections, **rope), flat)

    def test_equals_the_reference_model(self, sections, D, rotary_dim):
        torch.manual_seed(5)
        config = Qwen3_5TextConfig(
            head_dim=D,
            num_attention_heads=2,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": THETA,
                "partial_rotary_factor": rotary_dim / D,
                "mrope_section": list(sections),
                "mrope_interleaved": True,
            },
        )
        norm = Qwen3_5RMSNorm(D, eps=EPS)
        torch.nn.init.normal_(norm.weight)
        x, positions = torch.randn(2, 6, 2, D), torch.randint(0, 4000, (3, 2, 6))
        cos, sin = Qwen3_5TextRotaryEmbedding(config)(x, positions)
        expected, _ = apply_rotary_pos_emb(norm(x), norm(x), cos, sin, unsqueeze_dim=2)
        actual = head_norm_rope(
            x,
            1 + norm.weight.detach(),
            positions,
            eps=EPS,
            theta=THETA,
            rotary_dim=rotary_dim,
            sections=sections,
        )
        torch.testing.assert_close(actual, expected.detach(), rtol=3e-6, atol=3e-6)


def test_bfloat16_is_rounded_once():
    torch.manual_seed(6)
    x, gain = torch.randn(2, 4, 2, 32).bfloat16(), torch.randn(32)
    positions = torch.randint(0, 100, (2, 4))
    rope = {"eps": EPS, "theta": THETA, "rotary_dim": 16}
    actual = head_norm_rope(x, gain, positions, **rope)
    assert actual.dtype is torch.bfloat16
    wide = head_norm_rope(x.float(), gain, positions, **rope)
    assert torch.equal(actual, wide.bfloat16())


def test_strided_view_equals_its_copy_and_is_left_alone():
    torch.manual_seed(7)
    packed, gain = torch.randn(2, 3, 4, 64), torch.randn(32)
    kept = packed.clone()
    query = packed[..., :32]
    positions = torch.randint(0, 100, (2, 3))
    rope = {"eps": EPS, "theta": THETA, "rotary_dim": 8}
    actual = head_norm_rope(query, gain, positions, **rope)
    assert torch.equal(actual, head_norm_rope(query.contiguous(), gain, positions, **rope))
    assert torch.equal(packed, kept)


def test_heads_with_gains_of_their_own_equal_each_alone():
    torch.manual_seed(8)
    x, gains = torch.randn(2, 3, 4, 16), torch.randn(4, 16)
    positions = torch.randint(0, 100, (2, 3))
    rope = {"eps": EPS, "theta": THETA, "rotary_dim": 8}
    together = head_norm_rope(x, gains, positions, **rope)
    for head, gain in enumerate(gains):
        alone = head_norm_rope(x[:, :, head : head + 1], gain, positions, **rope)
        assert torch.equal(together[:, :, head : head + 1], alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary_dim": 7}, r"rotary_dim: expected even, 2..16, got 7"),
        ({"rotary_dim": 18}, r"rotary_dim: expected even, 2..16, got 18"),
        ({"sections": (2, 2, 1)}, r"sections: expected three counts that sum to 4"),
        (
            {"positions": torch.zeros(3, 1, 2, dtype=torch.int64)},
            r"sections: expected three counts that sum to 4, got None",
        ),
        (
            {"positions": torch.zeros(2, 2, dtype=torch.int64)},
            r"positions: expected \[1, 2\], got \[2, 2\]",
        ),
        ({"gain": torch.ones(8)}, r"gain: expected \[16\], got \[8\]"),
        ({"gain": torch.ones(2, 16)}, r"gain: expected \[1, 16\], got \[2, 16\]"),
    ],
    ids=["odd", "too-wide", "sections", "no-sections", "positions", "gain", "gains"],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments = {
        "x": torch.zeros(1, 2, 1, 16),
        "gain": torch.ones(16),
        "positions": torch.zeros(1, 2, dtype=torch.int64),
        "eps": EPS,
        "theta": THETA,
        "rotary_dim": 8,
    }
    with pytest.raises(ValueError, match=message):
        head_norm_rope(**{**arguments, **change})
