"""Exports in the published formats, and the way back."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from .draft import Draft
from .shapes import DRAFTS, TARGET
from .target import Target


def round_to_bfloat16(module: nn.Module) -> None:
    """Rounds every parameter to what the export will hold."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(weight.to(torch.bfloat16))


def write_json(path: Path, fields: dict[str, object]) -> None:
    """Writes indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def write_weights(folder: Path, module: nn.Module) -> None:
    """Writes model.safetensors in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in module.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def export_target(target: Target, bundle: Path) -> None:
    """Writes the target's weights and configs; the tokenizer's files are made on their own."""
    folder = bundle / "target"
    write_weights(folder, target)
    write_json(folder / "config.json", target.shape.config())
    write_json(folder / "generation_config.json", target.shape.generation_config())


def export_draft(name: str, draft: Draft, bundle: Path) -> None:
    """Writes a draft's weights and config."""
    write_weights(bundle / name, draft)
    write_json(bundle / name / "config.json", draft.shape.config())


def load_weights(module: nn.Module, path: Path) -> None:
    """Loads an export into float32 parameters; every name must be there."""
    module.load_state_dict({name: t.float() for name, t in load_file(path).items()})


def load_target(bundle: Path, device: torch.device) -> Target:
    """Returns the exported target, frozen, in float32."""
    target = Target(TARGET)
    load_weights(target, bundle / "target" / "model.safetensors")
    return target.to(device).eval().requires_grad_(False)


def load_draft(name: str, bundle: Path, device: torch.device) -> Draft:
    """Returns an exported draft, frozen, in float32."""
    draft = Draft(DRAFTS[name])
    load_weights(draft, bundle / name / "model.safetensors")
    return draft.to(device).eval().requires_grad_(False)
