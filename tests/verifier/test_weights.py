"""Weights from a folder: both layouts of experts, every stored dtype, and each kind of damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.checkpoint import Checkpoint, CheckpointError
from outrider.pair import TargetFacts
from tests.tiny_target import Variant, save_target
from verifier.config import TargetConfig
from verifier.weights import (
    AttentionWeights,
    GdnWeights,
    MixtureWeights,
    TargetWeights,
    load_weights,
    weight_plan,
)


def read(folder: Path, dtype: torch.dtype = torch.float32, **options: object) -> TargetWeights:
    facts = TargetFacts.read(Checkpoint(folder))
    return load_weights(facts, TargetConfig.read(facts), dtype=dtype, **options)


def rewrite(folder: Path, **changes: Tensor | None) -> None:
    """Changes tensors of a folder; a value of None removes one. `__` stands for a dot."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **{name.replace("__", "."): t for name, t in changes.items()}}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, {"format": "pt"})


def all_tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value if isinstance(value, tuple) else vars(value).values()
    return [tensor for part in parts for tensor in all_tensors(part)]


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    save_target(tmp_path, Variant("dense"))
    return tmp_path


def test_products_of_one_input_are_one_matrix(dense: Path):
    stored = load_file(dense / "model.safetensors")
    weights = read(dense)
    gdn, attention = weights.blocks[0].mixer, weights.blocks[3].mixer
    assert isinstance(gdn, GdnWeights)
    assert isinstance(attention, AttentionWeights)
    at = "model.layers.0.linear_attn.in_proj_"
    parts = [stored[f"{at}{name}.weight"] for name in ("qkv", "z", "a", "b")]
    assert torch.equal(gdn.projection, torch.cat(parts))
    at = "model.layers.3.self_attn."
    heads = stored[f"{at}q_proj.weight"].view(4, 2, 32, 64)
    query, gate = heads[:, 0].flatten(0, 1), heads[:, 1].flatten(0, 1)
    key, value = (stored[f"{at}{name}_proj.weight"] for name in ("k", "v"))
    assert torch.equal(attention.projection, torch.cat([query, key, gate, value]))
    query_gain, key_gain = (1 + stored[f"{at}{name}_norm.weight"] for name in ("q", "k"))
    assert torch.equal(attention.head_gains, torch.stack([query_gain] * 4 + [key_gain] * 2))


def test_zero_centred_norms_become_gains_and_the_gdn_norm_is_plain(dense: Path):
    stored = load_file(dense / "model.safetensors")
    block = read(dense).blocks[0]
    assert torch.equal(block.mixer_gain, 1 + stored["model.layers.0.input_layernorm.weight"])
    assert isinstance(block.mixer, GdnWeights)
    assert torch.equal(block.mixer.norm, stored["model.layers.0.linear_attn.norm.weight"])


def test_gains_decay_and_bias_stay_float32_in_the_bfloat16_profile(dense: Path):
    weights = read(dense, torch.bfloat16)
    assert weights.embedding.dtype == weights.head.dtype == torch.bfloat16
    mixer = weights.blocks[0].mixer
    assert isinstance(mixer, GdnWeights)
    assert mixer.projection.dtype == mixer.conv.dtype == torch.bfloat16
    vectors = [weights.final_gain, weights.blocks[0].mixer_gain]
    vectors += [mixer.a_log, mixer.dt_bias, mixer.norm]
    assert {vector.dtype for vector in vectors} == {torch.float32}


def test_a_gain_is_one_plus_the_stored_value_in_float32(dense: Path):
    # 1 + 2**-12 does not fit BF16
    small = torch.full((64,), 2.0**-12, dtype=torch.bfloat16)
    rewrite(dense, model__norm__weight=small)
    assert torch.equal(read(dense, torch.bfloat16).final_gain, torch.full((64,), 1 + 2.0**-12))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_stored_dtype_is_read(dense: Path, stored: torch.dtype):
    head = torch.arange(160 * 64).view(160, 64).remainder(7).to(stored)
    rewrite(dense, lm_head__weight=head)
    weights = read(dense)
    assert torch.equal(weights.head, head.float())
    assert weights.head.dtype == torch.float32


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path):
    save_target(tmp_path, Variant("tied", text=(("tie_word_embeddings", True),)))
    weights = read(tmp_path)
    assert weights.head is weights.embedding


def test_fused_and_unfused_experts_are_the_same(tmp_path: Path):
    layers: list[MixtureWeights] = []
    for fused in (False, True):
        folder = tmp_path / str(fused)
        save_target(folder, Variant("mixture", mixture=True, fused=fused))
        names = Checkpoint(folder).names
        assert ("model.layers.0.mlp.experts.gate_up_proj" in names) == fused
        layer = read(folder).blocks[0].feed_forward
        assert isinstance(layer, MixtureWeights)
        layers.append(layer)
    for one, other in zip(*map(all_tensors, layers), strict=True):
        assert torch.equal(one, other)


def test_shards_are_the_same_as_one_file(dense: Path, tmp_path: Path):
    expected = all_tensors(read(dense))
    tensors = load_file(dense / "model.safetensors")
    (dense / "model.safetensors").unlink()
    shards = {"one": {}, "two": {}}
    for index, (name, tensor) in enumerate(tensors.items()):
        shards["two" if index % 3 else "one"][name] = tensor
    for name, shard in shards.items():
        save_file(shard, dense / f"{name}.safetensors")
    weight_map = {name: f"{s}.safetensors" for s, shard in shards.items() for name in shard}
    (dense / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert all(map(torch.equal, all_tensors(read(dense)), expected))


def test_vision_and_mtp_tensors_are_left_unread(tmp_path: Path):
    save_target(tmp_path, Variant("multimodal", vision=True))
    names = Checkpoint(tmp_path).names
    assert any(name.startswith("model.visual.") for name in names)
    assert any(name.startswith("mtp.") for name in names)
    reports: list[tuple[int, int]] = []
    read(tmp_path, progress=lambda done, total: reports.append((done, total)))
    total = sum(not name.startswith(("model.visual.", "mtp.")) for name in names)
    assert reports == [(done, total) for done in range(1, total + 1)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model__layers__2__mlp__up_proj__weight": None},
            r"model\.layers\.2\.mlp\.up_proj\.weight: expected \[96, 64\], got no such tensor",
        ),
        (
            {"model__layers__0__self_attn__q_proj__bias": torch.zeros(256)},
            r"model\.layers\.0\.self_attn\.q_proj\.bias: expected no such tensor, got \[256\]",
        ),
        (
            {"model__layers__1__linear_attn__conv1d__weight": torch.zeros(128, 1, 3)},
            r"conv1d\.weight: expected \[128, 1, 4\], got \[128, 1, 3\]",
        ),
        (
            {"lm_head__weight": torch.zeros(160, 64).to(torch.float8_e4m3fn)},
            r"lm_head\.weight: expected one of F32, BF16, F16, got F8_E4M3",
        ),
        (
            {"visual__patch_embed": torch.zeros(1)},
            r"visual\.patch_embed: expected no such tensor",
        ),
    ],
    ids=["missing", "extra", "misshaped", "quantized head", "unknown prefix"],
)
def test_a_tensor_that_does_not_fit_is_named(
    dense: Path, changes: dict[str, Tensor | None], message: str
):
    rewrite(dense, **changes)
    with pytest.raises(CheckpointError, match=message):
        read(dense)


def test_a_head_beside_a_tied_embedding_is_refused(dense: Path):
    config = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: expected no such tensor"):
        read(dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "variant",
    [
        Variant("dense"),
        Variant("tied", text=(("tie_word_embeddings", True),)),
        Variant("mixture", mixture=True),
    ],
    ids=lambda v: v.name,
)
def test_the_plan_is_what_loading_takes(tmp_path: Path, variant: Variant, dtype: torch.dtype):
    save_target(tmp_path, variant)
    facts = TargetFacts.read(Checkpoint(tmp_path))
    config = TargetConfig.read(facts)
    unique = {t.data_ptr(): t.nbytes for t in all_tensors(read(tmp_path, dtype))}
    assert sum(size for _, size in weight_plan(facts, config, dtype)) == sum(unique.values())
