"""A target's config: what is read, and every variant that the maths does not cover."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.checkpoint import Checkpoint, CheckpointError
from outrider.pair import TargetFacts
from verifier.config import MixtureConfig, TargetConfig

DENSE = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "intermediate_size": 17408,
    "vocab_size": 248320,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "eos_token_id": 248044,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
MOE = {
    **DENSE,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
del MOE["intermediate_size"]


def read(folder: Path, config: dict[str, Any], **fields: object) -> TargetConfig:
    """The config with other fields; a value of `...` removes one."""
    merged = {k: v for k, v in {**config, **fields}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(merged))
    return TargetConfig.read(TargetFacts.read(Checkpoint(folder)))


def test_the_dense_release_is_read(tmp_path: Path):
    config = read(tmp_path, DENSE)
    assert (config.layer_count, config.gdn_layer_count, config.full_layer_count) == (64, 48, 16)
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"][:3] == [
        3,
        7,
        11,
    ]
    assert (config.head_count, config.key_value_head_count, config.head_dim) == (24, 4, 256)
    assert (config.rotary_dim, config.rope_theta) == (64, 1e7)
    assert config.conv_channels == 10240
    assert (config.gdn_key_width, config.gdn_value_width) == (2048, 6144)
    assert (config.intermediate_size, config.mixture) == (17408, None)
    assert (config.public_vocab, config.stop_ids) == (248320, {248044})


def test_the_mixture_release_is_read(tmp_path: Path):
    config = read(tmp_path, MOE)
    assert config.intermediate_size is None
    assert config.mixture == MixtureConfig(
        expert_count=256, top_k=8, intermediate_size=512, shared_intermediate_size=512
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"output_gate_type": "swish"},
        {"output_gate_type": "silu"},
        {"attn_output_gate": ...},
        {"hidden_act": ...},
        {"norm_topk_prob": True},
        {"mlp_only_layers": []},
        {"decoder_sparse_step": 1},
        {"attention_dropout": 0.1},
        {"language_model_only": True},
        {"mtp_num_hidden_layers": 1},
    ],
    ids=str,
)
def test_fields_without_effect_are_accepted(tmp_path: Path, fields: dict[str, object]):
    assert read(tmp_path, DENSE, **fields) == read(tmp_path, DENSE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output_gate_type": "sigmoid"}, r"output_gate_type: expected absent or 'swish' or"),
        ({"attn_output_gate": False}, r"attn_output_gate: expected absent or True, got False"),
        ({"hidden_act": "gelu"}, r"hidden_act: expected absent or 'silu'"),
        ({"attention_bias": True}, r"attention_bias: expected absent or False"),
        ({"linear_conv_kernel_dim": 3}, r"linear_conv_kernel_dim: expected absent or 4, got 3"),
        ({"num_key_value_heads": 5}, r"num_key_value_heads: expected a divisor of 24 heads"),
        ({"linear_num_key_heads": 5}, r"linear_num_key_heads: expected a divisor of 48 heads"),
        ({"linear_value_head_dim": ...}, r"linear_value_head_dim: expected .* got nothing"),
        ({"head_dim": ...}, r"head_dim: expected an integer .* got nothing"),
        ({"intermediate_size": ...}, r"intermediate_size: expected .* got nothing"),
        ({"rope_parameters": ...}, r"rope_theta: expected a base"),
        ({"rms_norm_eps": "1e-6"}, r"rms_norm_eps: expected a number, got '1e-6'"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_a_dense_variant_outside_the_maths_is_refused(
    tmp_path: Path, fields: dict[str, object], message: str
):
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, DENSE, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_topk_prob": False}, r"norm_topk_prob: expected absent or True, got False"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers: expected absent or \[\], got \[0\]"),
        ({"decoder_sparse_step": 2}, r"decoder_sparse_step: expected absent or 1, got 2"),
        ({"num_experts": ...}, r"num_experts: expected .* got nothing"),
        ({"num_experts_per_tok": 257}, r"num_experts_per_tok: expected .* 1\.\.256, got 257"),
        ({"moe_intermediate_size": ...}, r"moe_intermediate_size: expected .* got nothing"),
        ({"shared_expert_intermediate_size": 0}, r"shared_expert_intermediate_size: expected"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_a_mixture_variant_outside_the_maths_is_refused(
    tmp_path: Path, fields: dict[str, object], message: str
):
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, MOE, **fields)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"mrope_section": [11, 11, 11]}, r"mrope_section: expected three sections that sum to 32"),
        ({"mrope_section": [16, 16]}, r"mrope_section: expected three sections"),
        ({"partial_rotary_factor": 1.5}, r"head_dim: expected an even count of rotated dim"),
        ({"partial_rotary_factor": 0.01}, r"head_dim: expected an even count of rotated dim"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_a_rotary_layout_that_does_not_fit_the_head_is_refused(
    tmp_path: Path, rope: dict[str, object], message: str
):
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, DENSE, rope_parameters={**DENSE["rope_parameters"], **rope})


def test_an_absent_rotated_share_is_the_familys_quarter(tmp_path: Path):
    config = read(tmp_path, DENSE, rope_parameters={"rope_theta": 1e7})
    assert (config.rotary_dim, config.rope_sections) == (64, None)


def test_older_configs_keep_the_rotated_share_beside(tmp_path: Path):
    older = {"rope_parameters": ..., "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    assert read(tmp_path, DENSE, **older).rotary_dim == 128
