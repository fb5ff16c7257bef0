"""Trains the bundled pair: `python -m models.train PHASE`, from the repository's root.

Phases, in order: `tokenizer` (tokenizer and held-out prompts), `target`, `continuations`,
`dflash2`, `dflash`, `evaluate`; `all` runs them one after the other. A phase that is stopped, or
that reaches `--minutes`, goes on from its checkpoint when it is started again. Minutes on a GPU;
on a CPU everything works as well, with patience or with fewer `--steps` and `--sequences`.
"""

import argparse
import json
from pathlib import Path

import torch

from .training.evaluate import device_name, evaluate, merge_report
from .training.optimise import Limits
from .training.phases import (
    DRAFT_SEQUENCES,
    SEQUENCES,
    WINDOWS,
    Workplace,
    train_draft,
    train_target,
    write_continuations,
)
from .training.places import BUNDLE, MODELS, SCRATCH
from .training.streams import SEED, write_prompts
from .training.tokenizer import build_tokenizer

PHASES = ("tokenizer", "target", "continuations", "dflash2", "dflash", "evaluate")


def parse() -> argparse.Namespace:
    """Returns the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("phase", choices=(*PHASES, "all"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help="checkpoints and data")
    parser.add_argument("--bundle", type=Path, default=BUNDLE, help="where exports go")
    parser.add_argument("--report", type=Path, default=MODELS / "report.json")
    parser.add_argument("--steps", type=int, help="planned steps of the phase, over all runs")
    parser.add_argument("--minutes", type=float, help="stop this run after so long")
    parser.add_argument(
        "--fit", action="store_true", help="plan no more steps than the minutes allow"
    )
    parser.add_argument("--refine", action="store_true", help="go on from the exported draft")
    parser.add_argument("--batch", type=int, help="windows (target) or sequences (drafts) a step")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="continuations to write")
    parser.add_argument("--seed", type=int, default=SEED, help="of the continuations")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--prompts", type=int, help="evaluate on so many only")
    return parser.parse_args()


def run_phase(phase: str, options: argparse.Namespace) -> dict[str, object]:
    """Runs one phase and returns its figures."""
    place = Workplace(options.scratch, options.bundle, torch.device(options.device))
    limits = Limits(options.steps, options.minutes, options.fit)
    place.scratch.mkdir(parents=True, exist_ok=True)
    if phase == "tokenizer":
        build_tokenizer()
        write_prompts()
        return {}
    if phase == "target":
        return train_target(place, limits, options.batch or WINDOWS)
    if phase == "continuations":
        return write_continuations(place, options.sequences, options.seed)
    if phase == "evaluate":
        return evaluate(place, options.temperatures, options.new_tokens, options.prompts)
    return train_draft(phase, place, limits, options.batch or DRAFT_SEQUENCES, options.refine)


def main() -> None:
    """Runs the chosen phases and reports."""
    options = parse()
    for phase in PHASES if options.phase == "all" else (options.phase,):
        figures = run_phase(phase, options)
        if figures:
            part = f"{phase} refined" if options.refine else phase
            merge_report(
                options.report,
                part,
                {"device": device_name(torch.device(options.device)), **figures},
            )
        shown = {name: value for name, value in figures.items() if name != "samples"}
        print(phase, json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
