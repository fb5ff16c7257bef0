"""The published figures: tokens a round on held-out prompts, and how chats end."""

import json
import time
from pathlib import Path

import torch
from torch import Tensor

from .export import load_draft, load_target
from .phases import LENGTH, Continuer, Workplace, held_out_losses
from .places import PROMPTS
from .rounds import run_rounds, score_lookup
from .shapes import DRAFTS
from .streams import SEED
from .target import Target
from .tokenizer import IM_END, load_tokenizer

SHOWN = 3


def device_name(device: torch.device) -> str:
    """Returns the device in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def continue_chats(target: Target, chats: list[dict[str, list[int]]]) -> dict[str, object]:
    """Returns how many chat replies end by themselves within the length, at temperature 0.6."""
    lengths = torch.tensor([len(chat["token_ids"]) for chat in chats])
    prompts = torch.zeros(len(chats), LENGTH, dtype=torch.long)
    for row, chat in zip(prompts, chats, strict=True):
        row[: len(chat["token_ids"])] = torch.tensor(chat["token_ids"])
    continuer = Continuer(target, len(chats), LENGTH)
    outputs = continuer.run(prompts, lengths, torch.full((len(chats),), 0.6)).tolist()
    replies = [ids[n:] for ids, n in zip(outputs, lengths.tolist(), strict=True)]
    ended = [reply.index(IM_END) for reply in replies if IM_END in reply]
    samples = [
        load_tokenizer().decode(ids[: n + 80], skip_special_tokens=False)
        for ids, n in zip(outputs, lengths.tolist(), strict=True)
    ]
    return {"chats": len(chats), "ended": len(ended), "samples": samples[:: len(chats) // SHOWN]}


def sample_texts(outputs: Tensor, prompt_tokens: int) -> list[str]:
    """Returns a few continuations as text."""
    chosen = outputs[:: len(outputs) // SHOWN, prompt_tokens:]
    return [load_tokenizer().decode(ids) for ids in chosen.tolist()]


def evaluate(
    place: Workplace, temperatures: list[float], new_tokens: int, prompt_count: int | None
) -> dict[str, object]:
    """Runs both drafts and prompt lookup on the held-out prompts and returns the figures."""
    written = json.loads(PROMPTS.read_text(encoding="utf-8"))
    chosen = written["prompts"]
    chosen = chosen[:: len(chosen) // (prompt_count or len(chosen))]
    prompts = torch.tensor([prompt["token_ids"] for prompt in chosen], device=place.device)
    kinds = [prompt["kind"] for prompt in chosen]
    target = load_target(place.bundle, place.device)
    width = max(shape.block for shape in DRAFTS.values())
    results: dict[str, dict[str, object]] = {}
    samples: dict[str, list[str]] = {}
    for heat in temperatures:
        setting = results[f"temperature {heat:g}"] = {}
        for name in DRAFTS:
            begun = time.perf_counter()
            torch.manual_seed(SEED)
            draft = load_draft(name, place.bundle, place.device)
            tally, outputs = run_rounds(target, draft, prompts, new_tokens, heat)
            setting[name] = tally.figures(kinds)
            print(
                f"T={heat:g} {name} {time.perf_counter() - begun:.0f} s: {setting[name]}",
                flush=True,
            )
        tally = score_lookup(outputs.cpu(), prompts.shape[1], width - 1)
        setting["prompt lookup"] = tally.figures(kinds)
        print(f"T={heat:g} lookup: {setting['prompt lookup']}", flush=True)
        samples[f"temperature {heat:g}"] = sample_texts(outputs, prompts.shape[1])
    return {
        "device": device_name(place.device),
        "precision": "float32 on the bfloat16-rounded weights",
        "prompts": len(kinds),
        "new_tokens": new_tokens,
        "draft_tokens": width - 1,
        "tokens_per_round": results,
        "held_out_nats_per_token": held_out_losses(target),
        "chat": continue_chats(target, written["chat"]),
        "samples": samples,
    }


def merge_report(path: Path, phase: str, figures: dict[str, object]) -> None:
    """Puts a phase's figures into the report."""
    report = json.loads(path.read_text()) if path.exists() else {}
    report[phase] = figures
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n")
