"""Tiny random targets: folders as published, and the models that transformers makes of them.

Norms, decay and bias are drawn too: at their initial values a swapped norm or a lost term would
not show.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider.checkpoint import Checkpoint
from outrider.pair import TargetFacts
from verifier.config import TargetConfig
from verifier.state import TargetState
from verifier.target import Target
from verifier.weights import load_weights

TEXT = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
MIXTURE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


@dataclass(frozen=True)
class Variant:
    """One published form of a tiny target."""

    name: str
    mixture: bool = False
    vision: bool = False  # multimodal release: longer prefix, vision and MTP tensors beside
    fused: bool = False  # experts as two 3-D tensors
    text: tuple[tuple[str, Any], ...] = ()  # other values of text fields


def save_target(folder: Path, variant: Variant, *, seed: int = 0) -> None:
    """Writes a random target of this form to `folder`."""
    import transformers as hf

    text = {**TEXT, **(MIXTURE if variant.mixture else {}), **dict(variant.text)}
    if variant.mixture:
        del text["intermediate_size"]
    kind = "Qwen3_5Moe" if variant.mixture else "Qwen3_5"
    if variant.vision:
        config = getattr(hf, f"{kind}Config")(text_config=text, vision_config=VISION)
        config.tie_word_embeddings = text.get("tie_word_embeddings", False)
        model = getattr(hf, f"{kind}ForConditionalGeneration")(config)
    else:
        model = getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}TextConfig")(**text))
    randomise(model, seed)
    model.save_pretrained(folder, save_original_format=not variant.fused)
    if variant.vision:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        save_file({**tensors, "mtp.fc.weight": torch.zeros(64, 128)}, path, {"format": "pt"})


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draws every parameter: logits far from uniform, states that neither vanish nor freeze."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                drawn = torch.rand(parameter.shape, generator=generator) * 2.0
            elif name.endswith("dt_bias"):
                drawn = drawn * 0.5 - 3.0
            elif name.endswith("linear_attn.norm.weight"):
                drawn = 1.0 + 0.2 * drawn
            elif name.endswith("conv1d.weight"):
                drawn = 0.4 * drawn
            elif parameter.ndim == 1:
                drawn = 0.2 * drawn
            else:
                drawn = 0.09 * drawn
            parameter.copy_(drawn)


def load_oracle(folder: Path) -> torch.nn.Module:
    """What transformers makes of the folder's text model, in FP32."""
    import transformers as hf

    config = json.loads((folder / "config.json").read_text())
    kind = "Qwen3_5Moe" if "Moe" in config["architectures"][0] else "Qwen3_5"
    oracle = getattr(hf, f"{kind}ForCausalLM").from_pretrained(folder, dtype=torch.float32)
    return oracle.eval()


def load_target(
    folder: Path,
    *,
    taps: tuple[int, ...] = (0, 2, 3),
    lanes: int = 2,
    max_context: int = 512,
    width: int = 8,
    dtype: torch.dtype = torch.float32,
    page_size: int = 64,
) -> Target:
    """The target under test, read from the same folder."""
    facts = TargetFacts.read(Checkpoint(folder))
    config = TargetConfig.read(facts)
    state = TargetState(
        config, lanes=lanes, max_context=max_context, width=width, dtype=dtype, page_size=page_size
    )
    return Target(config, load_weights(facts, config, dtype=dtype), state, taps)


@dataclass(frozen=True)
class OracleRun:
    """One uncached pass over a sequence."""

    logits: torch.Tensor  # [T, V]
    residuals: torch.Tensor  # [layers, T, H] after each block, before the final norm

    def features(self, taps: tuple[int, ...]) -> torch.Tensor:
        """[T, taps*H]."""
        return torch.cat([self.residuals[block] for block in taps], dim=-1)


def run_oracle(oracle: torch.nn.Module, token_ids: torch.Tensor) -> OracleRun:
    """Logits and residuals [T]; the last residual too, which hidden_states shows normed only."""
    residuals: list[torch.Tensor] = []

    def keep(_module: object, _inputs: object, output: torch.Tensor | tuple) -> None:
        residuals.append(
            (output[0] if isinstance(output, tuple) else output).view(len(token_ids), -1)
        )

    hooks = [layer.register_forward_hook(keep) for layer in oracle.model.layers]
    with torch.inference_mode():
        logits = oracle(token_ids.unsqueeze(0), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return OracleRun(logits, torch.stack(residuals))
