"""Shapes of the bundled pair, and the published config files that state them."""

from dataclasses import dataclass

from .tokenizer import AUDIO_START, END_OF_TEXT, IM_END, PUBLIC_VOCAB, VOCAB_SIZE

EPS = 1e-6
THETA = 1e7
MAX_POSITIONS = 4096


@dataclass(frozen=True)
class TargetShape:
    """Extents of the hybrid target: three gated delta-rule layers, then one attention layer."""

    vocab: int = VOCAB_SIZE
    hidden: int = 256
    layers: int = 8
    intermediate: int = 768
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 16
    key_heads: int = 4
    value_heads: int = 8
    delta_dim: int = 32
    conv_taps: int = 4

    @property
    def layer_types(self) -> list[str]:
        """The mixer of each layer, as the config names it."""
        return [
            "full_attention" if (layer + 1) % 4 == 0 else "linear_attention"
            for layer in range(self.layers)
        ]

    def config(self) -> dict[str, object]:
        """Returns the published text-only config."""
        half = self.rotary_dim // 2
        section = [half - 2 * (half // 3), half // 3, half // 3]
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "bos_token_id": None,
            "dtype": "bfloat16",
            "eos_token_id": END_OF_TEXT,
            "full_attention_interval": 4,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "layer_types": self.layer_types,
            "linear_conv_kernel_dim": self.conv_taps,
            "linear_key_head_dim": self.delta_dim,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_value_head_dim": self.delta_dim,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": MAX_POSITIONS,
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 0,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": END_OF_TEXT,
            "rms_norm_eps": EPS,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": section,
                "partial_rotary_factor": self.rotary_dim / self.head_dim,
                "rope_theta": THETA,
                "rope_type": "default",
            },
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": self.vocab,
        }

    def generation_config(self) -> dict[str, object]:
        """Returns the published generation defaults."""
        return {
            "bos_token_id": END_OF_TEXT,
            "do_sample": True,
            "eos_token_id": [IM_END, END_OF_TEXT],
            "pad_token_id": END_OF_TEXT,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
        }


@dataclass(frozen=True)
class DraftShape:
    """Extents of a draft. `selector_rank` 0 means DFlash: no convolution and no selector."""

    architecture: str
    layer_types: tuple[str, ...]
    mask_token_id: int
    selector_rank: int = 0
    vocab: int = VOCAB_SIZE
    hidden: int = 256
    intermediate: int = 768
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int = 128
    block: int = 8
    target_layers: int = 8
    taps: tuple[int, ...] = (1, 4, 7)
    conv_taps: int = 2
    conv_group: int = 16
    top_k: int = 16

    def config(self) -> dict[str, object]:
        """Returns the published draft config."""
        drafting: dict[str, object] = {
            "block_size": self.block,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.taps),
        }
        if self.selector_rank:
            drafting |= {
                "conv_group_size": self.conv_group,
                "conv_kernel_size": self.conv_taps,
                "selector_rank": self.selector_rank,
                "selector_top_k": self.top_k,
            }
        return {
            "architectures": [self.architecture],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "dflash_config": drafting,
            "dtype": "bfloat16",
            "eos_token_id": END_OF_TEXT,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "is_causal": False,
            "layer_types": list(self.layer_types),
            "max_position_embeddings": MAX_POSITIONS,
            "max_window_layers": len(self.layer_types),
            "model_type": "qwen3",
            "num_attention_heads": self.heads,
            "num_hidden_layers": len(self.layer_types),
            "num_key_value_heads": self.kv_heads,
            "num_target_layers": self.target_layers,
            "rms_norm_eps": EPS,
            "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
            "sliding_window": self.window,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": True,
            "vocab_size": self.vocab,
        }


LOCAL, FULL = "sliding_attention", "full_attention"
TARGET = TargetShape()
# the two masks of the family: a public token's row, and the first reserved row
DRAFTS = {
    "dflash2": DraftShape("DFlash2DraftModel", (LOCAL, LOCAL, LOCAL), AUDIO_START, 64),
    "dflash": DraftShape("DFlashDraftModel", (LOCAL, LOCAL, FULL), PUBLIC_VOCAB),
}
