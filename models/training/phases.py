"""The phases of training: the target, its continuations, the drafts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from .capture import captured, mixed_precision
from .draft import Draft
from .export import (
    export_draft,
    export_target,
    load_target,
    load_weights,
    round_to_bfloat16,
)
from .optimise import Limits, Recipe, Trainer
from .shapes import DRAFTS, TARGET
from .streams import SEED, load_streams
from .target import DeltaState, Target
from .tokenizer import PUBLIC_VOCAB

WINDOW = 512
WINDOWS = 48
TARGET_RECIPE = Recipe(peak=3e-3, decay=0.1, steps=2800, seed=SEED)
TARGET_DROPOUT = 0.1

LENGTH = 320
SEQUENCES = 32768
LANES = 2048
PROMPT_LENGTHS = (32, 128)
# (temperature, share of the lanes); 0 is greedy
TEMPERATURES = ((0.0, 0.5), (0.6, 0.3), (1.0, 0.2))

DRAFT_RECIPES = {
    "dflash2": Recipe(peak=2e-3, decay=0.05, steps=12000, seed=SEED + 1),
    "dflash": Recipe(peak=2e-3, decay=0.05, steps=16000, seed=SEED + 2),
}
DRAFT_SEQUENCES = 64
ANCHORS = 32
# most anchors lie in the first new tokens, before greedy text begins to loop
EARLY = 96
EARLY_SHARE = 0.7
# stands for temperature 0, so that greedy labels need no case of their own
COLDEST = 0.02


@dataclass(frozen=True)
class Workplace:
    """Where a run keeps its checkpoints and puts its exports, and the device it uses."""

    scratch: Path
    bundle: Path
    device: torch.device


def held_out_losses(target: Target) -> dict[str, float]:
    """Returns nats a token on held-out text, by kind, over windows of 512 without overlap."""
    losses = {}
    target.eval()
    for kind, stream in load_streams().held_out.items():
        windows = stream[: (len(stream) - 1) // WINDOW * WINDOW + 1]
        inputs, labels = (
            part.reshape(-1, WINDOW).to(target.embedding.device)
            for part in (windows[:-1], windows[1:])
        )
        total = 0.0
        with torch.no_grad():
            for batch, expected in zip(inputs.split(16), labels.split(16), strict=True):
                logits = target.logits(target(batch)[0])
                total += functional.cross_entropy(
                    logits.flatten(0, 1), expected.flatten(), reduction="sum"
                ).item()
        losses[kind] = round(total / labels.numel(), 4)
    return losses


def train_target(place: Workplace, limits: Limits, windows: int = WINDOWS) -> dict[str, object]:
    """Trains the target on random windows of the training text and exports it."""
    torch.manual_seed(SEED)
    target = Target(TARGET, TARGET_DROPOUT).to(place.device)
    stream = load_streams().train.to(place.device)
    trainer = Trainer(target, TARGET_RECIPE, place.scratch / "target.pt")
    offsets = torch.arange(WINDOW + 1, device=place.device)

    def draw_loss() -> Tensor:
        starts = torch.randint(len(stream) - WINDOW, (windows, 1), device=place.device)
        ids = stream[starts + offsets]
        logits = target.logits(target(ids[:, :-1])[0])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        return loss[None]

    done = trainer.train(draw_loss, limits)
    round_to_bfloat16(target)
    export_target(target, place.bundle)
    seen = done["steps"] * windows * WINDOW
    counts = {"tokens": seen, "epochs": round(seen / len(stream), 2)}
    return {**done, **counts, "held_out": held_out_losses(target)}


class Continuer:
    """Continues prompts of mixed lengths and temperatures, one position of every lane a step."""

    def __init__(self, target: Target, lanes: int, length: int) -> None:
        """Allocates the lanes' state and captures the step."""
        device = target.embedding.device
        self.target, self.states = target, target.empty_states(lanes, length)
        self.token_ids = torch.zeros(lanes, length, dtype=torch.long, device=device)
        self.prompt_lengths = torch.ones(lanes, dtype=torch.long, device=device)
        self.temperatures = torch.zeros(lanes, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.advance = captured(self.step, device)

    def step(self) -> Tensor:
        """Reads one position; writes the next one where the prompt has ended."""
        current = self.token_ids.index_select(1, self.position)[:, 0]
        with mixed_precision(current.device):
            logits = self.target.step(current, self.position, self.states)
        logits = logits[:, :PUBLIC_VOCAB].float()
        noise = -torch.empty_like(logits).exponential_().log()
        choice = (logits + self.temperatures[:, None] * noise).argmax(-1)
        self.position.add_(1)
        given = self.token_ids.index_select(1, self.position)[:, 0]
        chosen = torch.where(self.position < self.prompt_lengths, given, choice)
        self.token_ids.index_copy_(1, self.position, chosen[:, None])
        return self.position

    @torch.no_grad()
    def run(self, prompts: Tensor, prompt_lengths: Tensor, temperatures: Tensor) -> Tensor:
        """Returns token ids [lanes, length]. prompts [lanes, length], right of them ignored."""
        self.token_ids.copy_(prompts)
        self.prompt_lengths.copy_(prompt_lengths)
        self.temperatures.copy_(temperatures)
        self.position.zero_()
        for state in self.states:
            if isinstance(state, DeltaState):
                state.columns.zero_()
                state.matrices.zero_()
        for _ in range(self.token_ids.shape[1] - 1):
            self.advance()
        return self.token_ids.clone()


@torch.no_grad()
def write_continuations(
    place: Workplace, sequences: int = SEQUENCES, seed: int = SEED
) -> dict[str, object]:
    """Lets the frozen target continue windows of the training text; the drafts learn from it."""
    torch.manual_seed(seed)
    target = load_target(place.bundle, place.device)
    stream = load_streams().train.to(place.device)
    lanes = min(LANES, sequences)
    continuer = Continuer(target, lanes, LENGTH)
    values, shares = (torch.tensor(x, device=place.device) for x in zip(*TEMPERATURES, strict=True))
    kept: dict[str, list[Tensor]] = {"token_ids": [], "prompt_lengths": [], "temperatures": []}
    for _ in range(sequences // lanes):
        starts = torch.randint(len(stream) - LENGTH, (lanes, 1), device=place.device)
        windows = stream[starts + torch.arange(LENGTH, device=place.device)]
        lengths = torch.randint(*PROMPT_LENGTHS, (lanes,), device=place.device)
        temperatures = values[torch.multinomial(shares, lanes, replacement=True)]
        kept["token_ids"].append(continuer.run(windows, lengths, temperatures).short().cpu())
        kept["prompt_lengths"].append(lengths.cpu())
        kept["temperatures"].append(temperatures.cpu())
    torch.save({name: torch.cat(x) for name, x in kept.items()}, place.scratch / "continued.pt")
    return {"sequences": sequences // lanes * lanes, "length": LENGTH, "seed": seed}


@dataclass(frozen=True)
class DraftExamples:
    """What a draft learns from: the target's own continuations, and the target's view of them.

    token_ids [N, T], prompt_lengths and temperatures [N]; hidden [N, T, H] final-normed and
    features [N, T, taps * H], both bfloat16.
    """

    token_ids: Tensor
    prompt_lengths: Tensor
    temperatures: Tensor
    hidden: Tensor
    features: Tensor

    @classmethod
    @torch.no_grad()
    def read(cls, path: Path, target: Target, taps: tuple[int, ...]) -> "DraftExamples":
        """Reads continuations and runs the target over them once."""
        device = target.embedding.device
        kept = {name: x.to(device) for name, x in torch.load(path).items()}
        views = []
        for batch in kept["token_ids"].split(256):
            with mixed_precision(device):
                views.append([x.to(torch.bfloat16) for x in target(batch.long(), taps)])
        hidden, features = (torch.cat(parts) for parts in zip(*views, strict=True))
        return cls(**kept, hidden=hidden, features=features)

    def draw_anchors(self, rows: Tensor, width: int) -> Tensor:
        """Returns positions [rows, anchors] in the continued part, most of them early."""
        first = self.prompt_lengths[rows, None]
        room = self.token_ids.shape[1] - width + 1 - first
        extent = (rows.shape[0], ANCHORS)
        early = torch.rand(extent, device=rows.device) < EARLY_SHARE
        span = torch.where(early, room.clamp_max(EARLY), room)
        return first + (torch.rand(extent, device=rows.device) * span).long()

    def next_laws(self, rows: Tensor, positions: Tensor, head: Tensor) -> Tensor:
        """Returns the target's distribution after each position, at the temperature of the text.

        rows [R], positions [R, A, K], head [V, H] -> float32 [R, A, K, V].
        """
        hidden = self.hidden[rows[:, None, None], positions].to(head.dtype)
        heat = self.temperatures[rows, None, None, None].clamp_min(COLDEST)
        return (functional.linear(hidden, head).float() / heat).softmax(-1)


def draft_loss(
    draft: Draft, embedding: Tensor, examples: DraftExamples, sequences: int
) -> Callable[[], Tensor]:
    """Returns the function that draws anchors and returns [loss, unary, edge, first right].

    Cross-entropy with the target's distribution of each next token given the text before it;
    nearer tokens weigh more. Labels that are distributions have far less noise than sampled
    tokens. DFlash2 adds the cross-entropy of its edge scores given the true predecessor, over the
    candidates; a true token that is no candidate takes the last slot.
    """
    shape = draft.shape
    device = embedding.device
    weights = torch.exp(-torch.arange(shape.block - 1, device=device) / 4)
    weights = weights / weights.mean()
    offsets = torch.arange(shape.block, device=device)
    head = embedding[:PUBLIC_VOCAB]

    def mean_loss(scores: Tensor, laws: Tensor) -> Tensor:
        loss = functional.cross_entropy(
            scores.flatten(0, -2).float(), laws.flatten(0, -2), reduction="none"
        )
        return (loss.view(laws.shape[:-1]) * weights).mean()

    def draw() -> Tensor:
        rows = torch.randint(len(examples.token_ids), (sequences,), device=device)
        anchors = examples.draw_anchors(rows, shape.block)
        positions = anchors[..., None] + offsets
        window = examples.token_ids[rows[:, None, None], positions].long()
        with torch.no_grad():
            laws = examples.next_laws(rows, positions[..., :-1], head)
        block = draft.embed_block(embedding, window[..., 0], shape.block)
        hidden = draft(block, examples.features[rows].float(), anchors)[..., 1:, :]
        logits = functional.linear(hidden, head)
        unary = mean_loss(logits, laws)
        right = (logits[..., 0, :].argmax(-1) == window[..., 1]).float().mean()
        if not shape.selector_rank:
            return torch.stack((unary, unary.detach(), right))
        before, after = window[..., :-1], window[..., 1:]
        candidates = logits.detach().topk(shape.top_k).indices
        missing = (candidates != after[..., None]).all(-1)
        candidates[..., -1] = torch.where(missing, after, candidates[..., -1])
        chances = laws.gather(-1, candidates)
        chances = chances / chances.sum(-1, keepdim=True).clamp_min(1e-9)
        scores = logits.gather(-1, candidates)
        edge = mean_loss(draft.candidate_selector(hidden, before, scores, candidates), chances)
        return torch.stack((unary + edge, unary.detach(), edge.detach(), right))

    return draw


def train_draft(
    name: str, place: Workplace, limits: Limits, sequences: int, refine: bool
) -> dict[str, object]:
    """Trains one draft on the frozen target's continuations and exports it.

    Refining starts from the exported draft, at half the rate, usually on other continuations.
    """
    recipe = DRAFT_RECIPES[name]
    torch.manual_seed(recipe.seed)
    draft = Draft(DRAFTS[name])
    checkpoint = place.scratch / f"{name}.pt"
    if refine:
        load_weights(draft, place.bundle / name / "model.safetensors")
        checkpoint = place.scratch / f"{name}-refined.pt"
        recipe = replace(recipe, peak=recipe.peak / 2, seed=recipe.seed + 1000)
    draft.to(place.device)
    target = load_target(place.bundle, place.device)
    examples = DraftExamples.read(place.scratch / "continued.pt", target, draft.shape.taps)
    trainer = Trainer(draft, recipe, checkpoint)
    done = trainer.train(draft_loss(draft, target.embedding, examples, sequences), limits)
    round_to_bfloat16(draft)
    export_draft(name, draft, place.bundle)
    return done
