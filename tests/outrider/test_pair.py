"""What both services read from a pair's configs, and every pair that they must refuse."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider import pair
from outrider.checkpoint import Checkpoint, CheckpointError
from outrider.pair import DraftFacts, TargetFacts, geometry, mismatches, read_rotary
from outrider.v1 import draft_service_pb2, tensor_pb2

TARGET = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "full_attention_interval": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
}
DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "vocab_size": 160,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_target_layers": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
    "dflash_config": {"block_size": 8, "mask_token_id": 150, "target_layer_ids": [5, 1, 7]},
}
DFLASH2 = {
    **DFLASH,
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "dflash_config": {
        **DFLASH["dflash_config"],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 16,
    },
}


def changed(config: dict[str, Any], **fields: object) -> dict[str, Any]:
    """The config with other fields; a value of `...` removes one, `dflash__x` reaches inside."""
    result = {**config, "dflash_config": dict(config.get("dflash_config", {}))}
    for name, value in fields.items():
        section, key = result, name
        if name.startswith("dflash__"):
            section, key = result["dflash_config"], name.removeprefix("dflash__")
        if value is ...:
            section.pop(key, None)
        else:
            section[key] = value
    return result


def write_target(folder: Path, config: dict[str, Any], *, prefix: str = "model.") -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"{prefix}embed_tokens.weight": torch.randn(160, 64, generator=generator).bfloat16(),
        "lm_head.weight": torch.randn(160, 64, generator=generator).bfloat16(),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def target(tmp_path: Path) -> TargetFacts:
    return TargetFacts.read(Checkpoint(write_target(tmp_path, TARGET)))


def read_target(folder: Path, **fields: object) -> TargetFacts:
    return TargetFacts.read(Checkpoint(write_target(folder, changed(TARGET, **fields))))


# ---- target ------------------------------------------------------------------------------------


def test_a_text_only_export_is_read(target: TargetFacts):
    assert (target.hidden_size, target.vocab_size, target.public_vocab) == (64, 160, 160)
    assert target.layer_types == ("linear_attention",) * 3 + ("full_attention",) + (
        "linear_attention",
    ) * 3 + ("full_attention",)
    assert target.rotary == pair.Rotary(1e7, 0.25, (2, 1, 1))
    assert (target.mixture, target.tied, target.prefix) == (False, False, "model.")
    assert (target.embedding_name, target.head_name) == (
        "model.embed_tokens.weight",
        "lm_head.weight",
    )
    assert target.stop_ids == frozenset()


def test_a_multimodal_release_is_read_from_its_text_section(tmp_path: Path):
    text = {**TARGET, "model_type": "qwen3_5_moe_text", "tie_word_embeddings": True}
    del text["architectures"]
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "vision_config": {"hidden_size": 32},
        "tie_word_embeddings": False,
    }
    write_target(tmp_path, config, prefix="model.language_model.")
    facts = TargetFacts.read(Checkpoint(tmp_path))
    assert facts.mixture
    assert facts.tied, "the text section's word wins"
    assert facts.head_name == facts.embedding_name == "model.language_model.embed_tokens.weight"


def test_both_exports_of_one_target_have_one_digest(tmp_path: Path):
    for name in ("text", "multimodal"):
        (tmp_path / name).mkdir()
    text = read_target(tmp_path / "text", transformers_version="5.24.0", use_cache=True)
    nested = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": TARGET,
    }
    prefix = "model.language_model."
    write_target(tmp_path / "multimodal", nested, prefix=prefix)
    multimodal = TargetFacts.read(Checkpoint(tmp_path / "multimodal"))
    assert text.config_digest == multimodal.config_digest
    assert text.embedding_digest == multimodal.embedding_digest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, r"architectures: expected one of Qwen3_5"),
        ({"architectures": ..., "model_type": ...}, r"architectures: expected .* got nothing"),
        ({"model_type": "qwen3"}, r"model_type: expected .* got 'qwen3'"),
        ({"text_config": 3}, r"text_config: expected an object, got 3"),
        ({"hidden_size": ...}, r"hidden_size: expected an integer .* got nothing"),
        ({"vocab_size": "160"}, r"vocab_size: expected an integer .* got '160'"),
        ({"max_position_embeddings": ...}, r"max_position_embeddings: expected .* got nothing"),
        ({"layer_types": ["full_attention"]}, r"layer_types: expected 8 entries"),
        ({"layer_types": ["mamba"] * 8}, r"layer_types: expected a list of linear_attention"),
        ({"full_attention_interval": ...}, r"full_attention_interval: expected .* got nothing"),
        ({"quantization_config": {"bits": 8}}, r"quantization_config: expected absent"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings: expected true or false"),
        ({"eos_token_id": 160}, r"stop ids: expected ids below 160, got 160"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_a_target_that_cannot_be_served_is_refused(
    tmp_path: Path, fields: dict[str, object], message: str
):
    with pytest.raises(CheckpointError, match=message):
        _ = read_target(tmp_path, **fields).layer_types


def test_the_public_vocabulary_ends_with_the_tokenizer(tmp_path: Path):
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 9, "content": "c"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read_target(tmp_path).public_vocab == 10
    more = {"added_tokens_decoder": {"12": {"content": "d"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(more))
    assert read_target(tmp_path).public_vocab == 13
    more["added_tokens_decoder"]["160"] = {"content": "e"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(more))
    with pytest.raises(CheckpointError, match=r"vocab_size: expected at least the .* 161 ids"):
        read_target(tmp_path)


def test_an_embedding_under_neither_prefix_or_both_is_refused(tmp_path: Path):
    facts = TargetFacts.read(Checkpoint(write_target(tmp_path, TARGET, prefix="transformer.")))
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight, got none"):
        _ = facts.prefix
    embedding = torch.zeros(2, 2)
    both = {f"{p}embed_tokens.weight": embedding.clone() for p in pair.TARGET_PREFIXES}
    save_file(both, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight, got both"):
        _ = TargetFacts.read(Checkpoint(tmp_path)).prefix


# ---- rotary base: nested, at the top, both, neither ----------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1e7},
        {"rope_theta": 1e7, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}},
        {"rope_scaling": {"rope_theta": 1e7, "type": "default", "factor": 1.0}},
        {"rope_theta": 1e7, "rope_parameters": {"rope_theta": 1e7}},
    ],
    ids=["top", "top with null scaling", "nested", "older nested", "both"],
)
def test_a_rotary_base_is_found_wherever_it_is(config: dict[str, Any], caplog):
    assert read_rotary(config, "config").theta == 1e7
    assert not caplog.records


def test_a_nested_rotary_base_beats_the_top_with_a_warning(caplog: pytest.LogCaptureFixture):
    config = {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e7}}
    with caplog.at_level(logging.WARNING):
        assert read_rotary(config, "config").theta == 1e7
    assert "rope_theta" in caplog.text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"rope_theta: expected a base, .* got nothing"),
        ({"rope_parameters": {"rope_type": "default"}}, r"rope_theta: expected a base"),
        ({"rope_theta": -1.0}, r"rope_theta: expected a finite number above 0"),
        ({"rope_parameters": 1e7}, r"rope_parameters: expected an object or null"),
        (
            {"rope_theta": 1e7, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            r"rope_type: expected absent or 'default', got 'yarn'",
        ),
        ({"rope_theta": 1e7, "rope_scaling": {"type": "linear"}}, r"type: expected .* 'linear'"),
        ({"rope_theta": 1e7, "rope_scaling": {"factor": 2}}, r"factor: expected absent or 1.0"),
        (
            {"rope_parameters": {"rope_theta": 1e7}, "rope_scaling": {"rope_theta": 1e6}},
            r"rope_theta: expected 10000000.0 as in rope_parameters, got 1000000.0",
        ),
        (
            {
                "partial_rotary_factor": 0.5,
                "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
            },
            r"partial_rotary_factor: expected 0.25 .* got 0.5",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e7, "mrope_interleaved": False}},
            r"mrope_interleaved: expected absent or True, got False",
        ),
    ],
    ids=[
        "neither",
        "nested without",
        "negative",
        "no section",
        "yarn",
        "linear",
        "factor",
        "two sections",
        "partial",
        "blocked",
    ],
)
def test_a_rotary_embedding_that_is_not_plain_is_refused(config: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        read_rotary(config, "config")


# ---- draft -------------------------------------------------------------------------------------


def test_a_dflash2_config_is_read(target: TargetFacts):
    facts = DraftFacts.read(DFLASH2, target)
    assert facts == DraftFacts(
        format="dflash2",
        target_layer_ids=(5, 1, 7),
        mask_token_id=150,
        layer_types=("sliding_attention", "sliding_attention", "full_attention"),
        layer_causal=(False, False, False),
        window=32,
        block_size=8,
        hidden_size=64,
        vocab_size=160,
        intermediate_size=96,
        head_count=4,
        key_value_head_count=2,
        head_dim=32,
        norm_eps=1e-6,
        rope_theta=1e7,
        max_position=512,
        input_embedding_scale=1.0,
        output_multiplier=1.0,
        final_logit_softcapping=0.0,
        conv_kernel_size=2,
        conv_group_size=16,
        selector_rank=8,
        selector_top_k=16,
    )
    assert (facts.layer_count, facts.full_layer_count) == (3, 1)


def test_a_dflash_config_has_no_selector(target: TargetFacts):
    facts = DraftFacts.read(DFLASH, target)
    assert facts.format == "dflash"
    assert (facts.conv_kernel_size, facts.selector_top_k) == (0, 0)


def test_older_configs_keep_the_fields_at_the_root(target: TargetFacts):
    older = changed(
        DFLASH,
        dflash_config=...,
        rope_parameters=...,
        rope_theta=1e7,
        rope_scaling=None,
        **DFLASH["dflash_config"],
    )
    assert DraftFacts.read(older, target) == DraftFacts.read(DFLASH, target)


def test_a_field_of_the_section_beats_the_root(target: TargetFacts):
    facts = DraftFacts.read(changed(DFLASH, mask_token_id=3, target_layer_ids=[0]), target)
    assert (facts.mask_token_id, facts.target_layer_ids) == (150, (5, 1, 7))


@pytest.mark.parametrize(
    ("fields", "causal"),
    [
        ({}, (False, False, False)),
        ({"is_causal": False}, (False, False, False)),
        ({"is_causal": True}, (True, True, True)),
        ({"dflash__causal": True}, (True, True, True)),
        ({"dflash__causal": False}, (False, False, False)),
        ({"is_causal": False, "dflash__causal": True}, (False, False, False)),
    ],
    ids=["absent", "false", "true", "section true", "section false", "root beats section"],
)
def test_block_causality_is_resolved_by_layer(
    target: TargetFacts, fields: dict[str, object], causal: tuple[bool, ...]
):
    config = changed(DFLASH, **fields)
    assert DraftFacts.read(config, target).layer_causal == causal
    forced = DraftFacts.read(config, target, causal_local_layers=True).layer_causal
    assert forced == (True, True, causal[2]), "local layers alone are forced"


@pytest.mark.parametrize(
    ("fields", "types"),
    [
        ({}, "FFFF"),
        ({"use_sliding_window": False}, "FFFF"),
        ({"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 8}, "FFFS"),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8}, "SSSS"),
        ({"use_sliding_window": True, "sliding_window": 8}, "FFFF"),
    ],
    ids=["absent", "off", "last", "all", "beyond the layers"],
)
def test_absent_layer_types_follow_the_window_fields(
    target: TargetFacts, fields: dict[str, object], types: str
):
    bare = {"num_hidden_layers": 4, "layer_types": ..., "use_sliding_window": ...}
    config = changed(DFLASH, **(bare | {"sliding_window": ...} | fields))
    facts = DraftFacts.read(config, target)
    assert "".join(kind[0].upper() for kind in facts.layer_types) == types
    assert facts.window == (8 if "S" in types else 0)


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"dflash__block_size": 8}, 7),
        ({"dflash__block_size": ..., "block_size": 8}, 7),
        ({"dflash__block_size": 8, "block_size": 8}, 7),
    ],
    ids=["section", "root", "both equal"],
)
def test_the_block_size_sets_the_default_draft_tokens(
    target: TargetFacts, fields: dict[str, object], tokens: int
):
    facts = DraftFacts.read(changed(DFLASH2, **fields), target)
    assert facts.draft_tokens(None) == tokens
    assert facts.draft_tokens(3) == 3


def test_two_block_sizes_are_refused(target: TargetFacts):
    with pytest.raises(CheckpointError, match=r"block_size: expected 16 as at the root, got 8"):
        DraftFacts.read(changed(DFLASH2, block_size=16), target)


def test_without_a_block_size_draft_tokens_must_be_given(target: TargetFacts):
    facts = DraftFacts.read(changed(DFLASH2, dflash__block_size=...), target)
    assert facts.draft_tokens(15) == 15
    with pytest.raises(CheckpointError, match=r"draft tokens: expected a number"):
        facts.draft_tokens(None)


def test_more_draft_tokens_than_trained_with_are_allowed_with_a_warning(
    target: TargetFacts, caplog: pytest.LogCaptureFixture
):
    facts = DraftFacts.read(DFLASH2, target)
    with caplog.at_level(logging.WARNING):
        assert facts.draft_tokens(7) == 7
        assert not caplog.records
        assert facts.draft_tokens(8) == 8
    assert "draft tokens: 8 is more than the 7" in caplog.text


@pytest.mark.parametrize("tokens", [0, -1, 16])
def test_draft_tokens_outside_the_range_are_refused(target: TargetFacts, tokens: int):
    with pytest.raises(CheckpointError, match=rf"draft tokens: expected 1\.\.15, got {tokens}"):
        DraftFacts.read(DFLASH2, target).draft_tokens(tokens)


def test_a_block_narrower_than_the_convolution_is_refused(target: TargetFacts):
    facts = DraftFacts.read(changed(DFLASH2, dflash__conv_kernel_size=4), target)
    assert facts.draft_tokens(3) == 3
    with pytest.raises(CheckpointError, match=r"draft tokens: expected at least 3.*4 taps, got 2"):
        facts.draft_tokens(2)


@pytest.mark.parametrize("mask", [0, 150, 159])
def test_a_mask_row_may_lie_anywhere_in_the_embedding(target: TargetFacts, mask: int):
    config = changed(DFLASH2, dflash__mask_token_id=mask)
    assert DraftFacts.read(config, target).mask_token_id == mask


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ...}, r"architectures: expected exactly one of DFlash"),
        ({"architectures": ["DFlashDraftModel", "DFlash2DraftModel"]}, r"architectures: expected"),
        ({"architectures": ["Qwen3ForCausalLM"]}, r"architectures: expected exactly one of"),
        ({"model_type": "llama"}, r"model_type: expected absent or 'qwen3', got 'llama'"),
        ({"dflash_config": [1]}, r"dflash_config: expected an object"),
        ({"hidden_size": 32}, r"hidden_size: expected absent or 64, got 32"),
        ({"vocab_size": 170}, r"vocab_size: expected absent or 160, got 170"),
        ({"draft_vocab_size": 80}, r"draft_vocab_size: expected absent or 160, got 80"),
        ({"num_target_layers": 9}, r"num_target_layers: expected absent or 8, got 9"),
        ({"dflash__num_target_layers": 9}, r"num_target_layers: expected absent or 8, got 9"),
        ({"dflash__target_layer_ids": ...}, r"target_layer_ids: expected a list .* got nothing"),
        ({"dflash__target_layer_ids": []}, r"target_layer_ids: expected one or more"),
        ({"dflash__target_layer_ids": [1, 1]}, r"target_layer_ids: expected .* distinct"),
        ({"dflash__target_layer_ids": [1, 8]}, r"target_layer_ids: expected .* in 0\.\.7"),
        ({"dflash__target_layer_ids": [-1]}, r"target_layer_ids: expected .* in 0\.\.7"),
        ({"dflash__mask_token_id": ...}, r"mask_token_id: expected .* 0\.\.159, got nothing"),
        ({"dflash__mask_token_id": 160}, r"mask_token_id: expected .* 0\.\.159, got 160"),
        ({"dflash__mask_token_id": -1}, r"mask_token_id: expected .* 0\.\.159, got -1"),
        ({"layer_types": ["full_attention"]}, r"layer_types: expected 3 entries"),
        ({"layer_types": ["linear_attention"] * 3}, r"layer_types: expected a list of sliding"),
        ({"sliding_window": None}, r"sliding_window: expected an integer .* got None"),
        ({"sliding_window": 0}, r"sliding_window: expected an integer .* got 0"),
        ({"use_sliding_window": False}, r"use_sliding_window: expected true or absent"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads: expected a divisor of 4 heads"),
        ({"head_dim": ...}, r"head_dim: expected an integer .* got nothing"),
        ({"head_dim": 33}, r"head_dim: expected an even number, got 33"),
        ({"intermediate_size": ...}, r"intermediate_size: expected"),
        ({"max_position_embeddings": ...}, r"max_position_embeddings: expected"),
        ({"rope_parameters": ...}, r"rope_theta: expected a base"),
        (
            {"rope_parameters": {"rope_theta": 1e7, "mrope_section": [1]}},
            r"mrope_section: expected",
        ),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: expected absent or 1, got 0.5"),
        ({"hidden_act": "gelu"}, r"hidden_act: expected absent or 'silu', got 'gelu'"),
        ({"rms_norm_eps": 0.0}, r"rms_norm_eps: expected a finite number above 0"),
        ({"attention_bias": True}, r"attention_bias: expected absent or False, got True"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config: expected absent"),
        ({"is_causal": "no"}, r"is_causal: expected true or false"),
        ({"dflash__use_swa": True}, r"use_swa: expected absent or False, got True"),
        ({"dflash__swa_window_size": 128}, r"swa_window_size: expected absent, got 128"),
        ({"dflash__attention_sink_bias": True}, r"attention_sink_bias: expected"),
        ({"dflash__attention_value_scale": 2.0}, r"attention_value_scale: expected .* got 2.0"),
        ({"dflash__projector_type": "domino"}, r"projector_type: expected absent"),
        ({"dflash__sample_from_anchor": True}, r"sample_from_anchor: expected .* got True"),
        ({"dflash__input_embedding_scale": 0}, r"input_embedding_scale: expected a finite number"),
        ({"dflash__output_multiplier": -1.0}, r"output_multiplier: expected a finite number"),
        ({"dflash__final_logit_softcapping": -2}, r"final_logit_softcapping: expected"),
        ({"dflash__block_size": 1}, r"block_size: expected an integer of at least 2, got 1"),
        ({"dflash__conv_kernel_size": ...}, r"conv_kernel_size: expected .* got nothing"),
        ({"dflash__conv_group_size": ...}, r"conv_group_size: expected .* got nothing"),
        ({"dflash__conv_group_size": 24}, r"conv_group_size: expected a divisor of hidden_size 64"),
        ({"dflash__selector_rank": ...}, r"selector_rank: expected .* got nothing"),
        ({"dflash__selector_top_k": ...}, r"selector_top_k: expected .* got nothing"),
        ({"dflash__selector_top_k": 17}, r"selector_top_k: expected at most 16, got 17"),
    ],
    ids=lambda v: "-".join(f"{k}={x!r}" for k, x in v.items()) if isinstance(v, dict) else "",
)
def test_a_draft_that_cannot_be_served_is_refused(
    target: TargetFacts, fields: dict[str, object], message: str
):
    with pytest.raises(CheckpointError, match=message):
        DraftFacts.read(changed(DFLASH2, **fields), target)


@pytest.mark.parametrize(
    "field", ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"]
)
def test_a_dflash_config_with_dflash2_fields_is_refused(target: TargetFacts, field: str):
    with pytest.raises(CheckpointError, match=rf"{field}: expected absent, got 2"):
        DraftFacts.read(changed(DFLASH, **{f"dflash__{field}": 2}), target)


@pytest.mark.parametrize("value", [None, 0, 0.0])
def test_a_softcap_of_nothing_is_off(target: TargetFacts, value: float | None):
    config = changed(DFLASH2, dflash__final_logit_softcapping=value)
    assert DraftFacts.read(config, target).final_logit_softcapping == 0.0


def test_scales_are_read(target: TargetFacts):
    config = changed(
        DFLASH2,
        dflash__input_embedding_scale=2.0,
        dflash__output_multiplier=0.25,
        dflash__final_logit_softcapping=20,
    )
    facts = DraftFacts.read(config, target)
    assert facts.input_embedding_scale == 2.0
    assert (facts.output_multiplier, facts.final_logit_softcapping) == (0.25, 20.0)


def test_a_mask_embedding_beside_the_draft_is_refused(target: TargetFacts, tmp_path: Path):
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DFLASH))
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt: expected no embedding"):
        DraftFacts.load(Checkpoint(folder), target)


# ---- geometry ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "int8", ""])
def test_profiles_other_than_two_are_refused(dtype: str):
    with pytest.raises(CheckpointError, match=r"dtype: expected float32 or bfloat16"):
        pair.activation_dtype(dtype)


def test_the_geometry_names_what_the_pair_agrees_on(target: TargetFacts):
    message = geometry(target, DraftFacts.read(DFLASH2, target), "bfloat16")
    assert message.format == draft_service_pb2.DRAFT_FORMAT_DFLASH2
    assert list(message.target_layer_ids) == [5, 1, 7]
    assert message.activation_dtype == tensor_pb2.DTYPE_BFLOAT16
    assert (message.mask_token_id, message.window, message.rope_theta) == (150, 32, 1e7)
    assert (message.layer_count, message.full_layer_count, message.target_layer_count) == (3, 1, 8)
    assert (message.hidden_size, message.vocab_size, message.public_vocab) == (64, 160, 160)
    digests = {
        message.target_config_digest,
        message.tokenizer_digest,
        message.embedding_digest,
        message.head_digest,
    }
    assert {len(digest) for digest in digests} == {32}
    assert len(digests) == 4


def test_a_pair_agrees_with_itself(target: TargetFacts):
    draft = DraftFacts.read(DFLASH2, target)
    assert mismatches(geometry(target, draft, "float32"), geometry(target, draft, "float32")) == []


def test_every_field_of_the_geometry_is_compared(target: TargetFacts):
    draft = replace(DraftFacts.read(DFLASH2, target), projection_digest=bytes(32))
    mine = geometry(target, draft, "float32")
    for entry in mine.DESCRIPTOR.fields:
        theirs = draft_service_pb2.DraftGeometry()
        theirs.CopyFrom(mine)
        theirs.ClearField(entry.name)
        assert [field for field, _, _ in mismatches(mine, theirs)] == [entry.name]


def test_a_mismatch_shows_both_values(target: TargetFacts):
    draft = DraftFacts.read(DFLASH2, target)
    mine, theirs = geometry(target, draft, "float32"), geometry(target, draft, "bfloat16")
    theirs.window = 16
    theirs.target_layer_ids[:] = [0]
    theirs.head_digest = b"\x01\x02"
    assert mismatches(mine, theirs) == [
        ("target_layer_ids", "[5, 1, 7]", "[0]"),
        ("window", "32", "16"),
        ("activation_dtype", "DTYPE_FLOAT32", "DTYPE_BFLOAT16"),
        ("head_digest", mine.head_digest.hex(), "0102"),
    ]


@pytest.mark.parametrize("row", [0, 63, 96, 159])
def test_a_changed_end_row_changes_the_digest(tmp_path: Path, row: int):
    before = TargetFacts.read(Checkpoint(write_target(tmp_path, TARGET)))
    digests = (before.embedding_digest, before.head_digest)
    path = tmp_path / "model.safetensors"
    with Checkpoint(tmp_path) as checkpoint:
        tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names}
    tensors["lm_head.weight"][row, 0] += 1.0
    save_file(tensors, path)
    after = TargetFacts.read(Checkpoint(tmp_path))
    assert after.embedding_digest == digests[0]
    assert after.head_digest != digests[1]


@pytest.mark.parametrize(
    "fields",
    [
        {"num_attention_heads": 8},
        {"rope_parameters": {**TARGET["rope_parameters"], "rope_theta": 1e6}},
        {"full_attention_interval": 2},
        {"tie_word_embeddings": True},
        {"rms_norm_eps": 1e-5},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_changed_config_changes_the_digest(tmp_path: Path, fields: dict[str, object]):
    digest = read_target(tmp_path).config_digest
    assert read_target(tmp_path, **fields).config_digest != digest


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_changed_tokenizer_changes_the_digest(tmp_path: Path, file: str):
    digests = set()
    for content in ("c", "d"):
        added = {"id": 9, "content": content}
        tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [added]}
        config = {"added_tokens_decoder": {"9": added}}
        if file == "tokenizer.json":
            config = {}
        else:
            tokenizer["added_tokens"] = []
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        digests.add(read_target(tmp_path).tokenizer_digest)
    assert len(digests) == 2
