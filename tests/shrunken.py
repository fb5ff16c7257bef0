"""The 27B pair with every extent made small: folders of a config.json, for drawn weights."""

from __future__ import annotations

import json
from pathlib import Path

import models

GEOMETRY = Path(models.__file__).parent / "geometry"
# enough to keep every kind of layer, and the 3 V heads a K head of the 27B target
SMALL_TEXT = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "intermediate_size": 96,
    "eos_token_id": 7,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
SMALL_ROPE = {"mrope_section": [2, 1, 1]}
SMALL_DRAFT = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 16,
}


def save_shrunken(folder: Path) -> Path:
    """Writes target/ and dflash2/ below ``folder``."""
    target = json.loads((GEOMETRY / "qwen3.5-27b" / "config.json").read_text())
    target["text_config"] |= SMALL_TEXT
    target["text_config"]["rope_parameters"] |= SMALL_ROPE
    draft = json.loads((GEOMETRY / "qwen3.5-27b-dflash2" / "config.json").read_text())
    draft |= SMALL_DRAFT
    draft["dflash_config"] |= {
        "mask_token_id": 159,
        "target_layer_ids": [0, 2, 3],
        "selector_rank": 8,
    }
    for name, config in (("target", target), ("dflash2", draft)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder
