"""Drawn weights: the same whoever draws them, wherever and in what pieces, and of a sound scale."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from outrider import random_weights
from outrider.checkpoint import CheckpointError
from outrider.random_weights import RandomCheckpoint, open_checkpoint

MATRIX, NAME = (48, 5, 16), "model.layers.0.mlp.down_proj.weight"


def checkpoint(folder: Path, architecture: str = "Qwen3_5ForCausalLM") -> RandomCheckpoint:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    opened = open_checkpoint(folder, "random")
    assert isinstance(opened, RandomCheckpoint)
    return opened


def drawn(folder: Path, name: str, shape: tuple[int, ...], **options: str) -> torch.Tensor:
    opened = checkpoint(folder, **options)
    opened.expect({name: shape})
    return opened.tensor(name).float()


def test_two_checkpoints_draw_the_same_and_two_tensors_do_not(tmp_path: Path):
    one, other = drawn(tmp_path, NAME, MATRIX), drawn(tmp_path, NAME, MATRIX)
    assert torch.equal(one, other)
    beside = drawn(tmp_path, NAME.replace("0", "1"), MATRIX)
    assert (one == beside).float().mean() < 0.01


def test_an_element_depends_on_its_index_alone(tmp_path: Path, monkeypatch):
    opened = checkpoint(tmp_path)
    opened.expect({NAME: MATRIX})
    whole = opened.tensor(NAME)
    assert torch.equal(opened.rows(NAME, 7, 19), whole[7:19])
    for chunk in (1, 3 * 80, 1 << 10):
        monkeypatch.setattr(random_weights, "_CHUNK", chunk)
        assert torch.equal(opened.tensor(NAME), whole)


def test_strided_and_wider_destinations_hold_the_same_elements(tmp_path: Path):
    opened = checkpoint(tmp_path)
    opened.expect({NAME: MATRIX})
    whole = opened.tensor(NAME)
    column_major = torch.empty(80, 48).t()
    opened.copy_into(column_major, NAME)
    assert torch.equal(column_major, whole.float().view(48, 80))
    split = torch.empty(3, 16, 80).transpose(0, 1).reshape(16, 3, 80).transpose(0, 1)
    opened.copy_into(split.transpose(0, 1), NAME)
    assert torch.equal(split.transpose(0, 1).reshape(48, 80), whole.float().view(48, 80))


def test_the_draw_itself_does_not_change(tmp_path: Path):
    """What an earlier version drew, so that two versions of a service still agree."""
    values = drawn(tmp_path, "lm_head.weight", (2, 4))
    # SplitMix64 by hand, in Python's integers
    import hashlib

    key = int.from_bytes(hashlib.sha256(b"outrider 1lm_head.weight").digest()[:8], "little")
    for index, value in enumerate(values.flatten().tolist()):
        word = (key + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        word ^= word >> 31
        expected = ((word >> 40) / 2**23 - 1) * math.sqrt(3 / 4)
        assert value == pytest.approx(expected, rel=2**-8)


@pytest.mark.parametrize(
    ("name", "shape", "low", "high"),
    [
        ("model.layers.0.linear_attn.A_log", (4096,), 0.0, math.log(16)),
        ("model.layers.0.linear_attn.dt_bias", (4096,), -6.9, -2.3),
        ("model.layers.0.input_layernorm.weight", (4096,), -0.1, 0.1),
        ("model.layers.0.linear_attn.norm.weight", (4096,), 0.9, 1.1),
        ("lm_head.weight", (64, 300), -0.1, 0.1),
    ],
    ids=["A_log", "dt_bias", "zero-centred", "plain", "matrix"],
)
def test_each_kind_of_tensor_lies_where_a_model_s_does(tmp_path: Path, name, shape, low, high):
    values = drawn(tmp_path, name, shape)
    rounded = 2.0**-8 * max(abs(low), abs(high))  # to BF16
    assert low - rounded <= values.min() < values.max() <= high + rounded
    middle, width = (low + high) / 2, high - low
    assert abs(values.mean() - middle) < 0.03 * width
    assert values.max() - values.min() > 0.9 * width
    # uniform: its variance is a twelfth of its width squared
    assert float(values.var()) == pytest.approx(width**2 / 12, rel=0.05)


def test_a_draft_s_norms_are_plain(tmp_path: Path):
    norms = drawn(
        tmp_path, "layers.0.input_layernorm.weight", (512,), architecture="DFlashDraftModel"
    )
    assert norms.min() > 0.8


def test_a_tensor_exists_only_once_it_is_expected_and_with_one_shape(tmp_path: Path):
    opened = checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"no tensor named lm_head\.weight"):
        opened.tensor("lm_head.weight")
    opened.expect({"lm_head.weight": (4, 8)})
    assert opened.names == {"lm_head.weight"}
    opened.expect({"lm_head.weight": (4, 8)})
    with pytest.raises(CheckpointError, match=r"expected \[8, 4\], got \[4, 8\]"):
        opened.expect({"lm_head.weight": (8, 4)})
    with pytest.raises(CheckpointError, match=r"within \[0, 4\), got \[3, 5\)"):
        opened.rows("lm_head.weight", 3, 5)


def test_another_load_format_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="load_format: expected auto or random, got 'zero'"):
        open_checkpoint(tmp_path, "zero")
