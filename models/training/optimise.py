"""The loop of every phase: AdamW, warm-up and cosine, checkpoints, limits of time."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .capture import captured, mixed_precision

WARM_UP_STEPS = 200
FLOOR = 0.02
TIMED_STEPS = 40
REPORT_EVERY = 100
SAVE_EVERY_S = 120


@dataclass(frozen=True)
class Recipe:
    """What a phase asks of the optimiser."""

    peak: float
    decay: float
    steps: int
    seed: int


@dataclass(frozen=True)
class Limits:
    """How far one run may go.

    steps: planned steps of the whole phase, over all runs; None takes the recipe's.
    minutes: wall time of this run; None for no limit.
    fit: cut the planned steps to what the minutes allow, so that the schedule ends with them.
    """

    steps: int | None = None
    minutes: float | None = None
    fit: bool = False


def rate_at(step: int, steps: int, peak: float) -> float:
    """Returns the learning rate: linear warm-up, then a cosine down to 2 % of the peak."""
    progress = min(1.0, step / steps)
    cosine = FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))
    return peak * cosine * min(1.0, (step + 1) / WARM_UP_STEPS)


class Trainer:
    """Trains one module; state and step survive in a checkpoint."""

    def __init__(self, module: nn.Module, recipe: Recipe, checkpoint: Path) -> None:
        """Resumes from the checkpoint where there is one."""
        self.module, self.recipe, self.checkpoint = module, recipe, checkpoint
        self.device = next(module.parameters()).device
        self.rate = torch.tensor(0.0, device=self.device)
        matrices = [weight for weight in module.parameters() if weight.ndim > 1]
        vectors = [weight for weight in module.parameters() if weight.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": recipe.decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        on_cuda = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.rate, betas=(0.9, 0.95), fused=on_cuda, capturable=on_cuda
        )
        self.step = 0
        self.seconds = 0.0
        if checkpoint.exists():
            self.resume()

    def resume(self) -> None:
        """Takes weights, optimiser state and step from the checkpoint."""
        kept = torch.load(self.checkpoint, map_location=self.device)
        self.module.load_state_dict(kept["module"])
        self.optimizer.load_state_dict(kept["optimizer"])
        # loading copies the rate, and the graph must read the tensor that is written here
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.step, self.seconds = kept["step"], kept["seconds"]

    def save(self) -> None:
        """Writes the checkpoint; the old one stays until the new one is whole."""
        kept = {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(kept, partial)
        partial.replace(self.checkpoint)

    def update(self, draw_loss: Callable[[], Tensor]) -> Tensor:
        """Runs forward, backward, clipping and AdamW. Returns the loss and its companions."""
        self.optimizer.zero_grad(set_to_none=True)
        with mixed_precision(self.device):
            figures = draw_loss()
        figures[0].backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        return figures.detach()

    def train(self, draw_loss: Callable[[], Tensor], limits: Limits) -> dict[str, object]:
        """Runs up to the limits, saves, and returns what was done.

        draw_loss draws its own batch and returns [figures], the loss first.
        """
        begun = time.perf_counter()
        steps = limits.steps or self.recipe.steps
        ends = math.inf if limits.minutes is None else begun + 60 * limits.minutes
        torch.manual_seed(self.recipe.seed + self.step)
        self.module.train()
        self.rate.fill_(rate_at(self.step, steps, self.recipe.peak))
        update = captured(lambda: self.update(draw_loss), self.device)
        first, earlier, saved, average = self.step, self.seconds, begun, None
        timed = time.perf_counter()
        while self.step < steps and time.perf_counter() < ends:
            self.rate.fill_(rate_at(self.step, steps, self.recipe.peak))
            figures = update()
            self.step += 1
            average = figures.clone() if average is None else average.lerp_(figures, 0.02)
            if self.step == first + TIMED_STEPS:
                average.tolist()
                pace = (time.perf_counter() - timed) / TIMED_STEPS
                if limits.fit:
                    steps = min(steps, self.step + int((ends - time.perf_counter()) / pace))
                print(f"{1e3 * pace:.1f} ms a step, {steps} steps planned", flush=True)
            if self.step % REPORT_EVERY == 0:
                shown = " ".join(f"{figure:.3f}" for figure in average.tolist())
                print(
                    f"step {self.step}/{steps} {time.perf_counter() - begun:.0f} s: {shown}",
                    flush=True,
                )
            self.seconds = earlier + time.perf_counter() - begun
            if time.perf_counter() > saved + SAVE_EVERY_S:
                self.save()
                saved = time.perf_counter()
        self.save()
        return {
            "steps": self.step,
            "steps_planned": steps,
            "seconds": round(self.seconds, 1),
            "training_figures": [] if average is None else [round(x, 4) for x in average.tolist()],
        }
