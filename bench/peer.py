"""An outside peer's step: transformers' own target of the same geometry, eager, random weights.

``python -m bench.peer --target FOLDER --device cuda`` prints one line of JSON: the median time of a
cached greedy step of one sequence, milliseconds a token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

PROMPT_TOKENS = 1024


def step_ms(target: Path, device: torch.device, steps: int) -> float:
    """Median milliseconds of a step after a prompt of 1,024 tokens, BF16."""
    import transformers

    config = json.loads((target / "config.json").read_text())
    text = config.get("text_config", config)
    kind = "Qwen3_5Moe" if "num_experts" in text else "Qwen3_5"
    settings = getattr(transformers, f"{kind}TextConfig")(**text)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(settings).to(torch.bfloat16)
    model = model.to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(0)
    with torch.inference_mode():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(std=0.02, generator=generator)
        model.model.rotary_emb = type(model.model.rotary_emb)(settings).to(device)
        token = torch.randint(100, (1, PROMPT_TOKENS), device=device)
        out = model(token, use_cache=True, logits_to_keep=1)
        times = []
        for _ in range(steps):
            token = out.logits[:, -1:].argmax(-1)
            started = time.perf_counter()
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            _wait(device)
            times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.peer", description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="a folder with config.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args(argv)
    import transformers

    measured = step_ms(arguments.target, torch.device(arguments.device), arguments.steps)
    print(json.dumps({"transformers": transformers.__version__, "step_ms": measured}))


if __name__ == "__main__":
    main()
