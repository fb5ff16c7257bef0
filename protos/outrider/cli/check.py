"""`outrider check`: runs a pair and tests that it publishes what its target alone would.

Greedy: the same tokens with drafting, without it, and with other requests beside; each of them the
best token of the float32 target. Sampled: the first three tokens against the processed law of the
float32 target, proposals against the drafter's q, and the accept rate against the sum of
min(p, q). The float32 target only runs prompts: it shares neither verify, fold, acceptance and
draws nor the drafter with the path under test.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from outrider import serving
from outrider.cli import FAILED, USAGE, VerbError, require_serve_extra
from outrider.cli.evidence import (
    CALL_TIMEOUT_S,
    CONNECT_TIMEOUT_S,
    Outcome,
    Proposer,
    Reference,
    Samples,
    best,
    drafting,
    output_tokens,
    same,
)
from outrider.cli.statistics import Law
from outrider.client import Client, ClientError, Completion, GenerateOptions

if TYPE_CHECKING:
    from drafter.config import DrafterOptions
    from verifier.__main__ import Plan
    from verifier.options import VerifierOptions

SAMPLES_A_CALL = 8
# nats; a first token neither settled nor spread over too many for groups to form
WANTED_ENTROPY = 1.5

LAWS = {
    "temperature 1": Law(),
    "temperature 0.7, top-k 12": Law(temperature=0.7, top_k=12),
    "temperature 1.2, top-p 0.7": Law(temperature=1.2, top_p=0.7),
    "temperature 0.9, min-p 0.1": Law(temperature=0.9, min_p=0.1),
    "penalties, top-k 20": Law(
        presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.3, top_k=20
    ),
}
TEXTS = (
    "The",
    "Once upon a time there was a king who",
    "1. First, read the question.\n2. Then",
    "In the beginning the river ran past the old mill, and the children played on its banks. "
    "Every evening the miller counted his sacks of flour, closed the gate and walked home. " * 5,
)
ID_LENGTHS = (1, 9, 40, 200)  # of random prompts, where the target brings no tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which pair, and how thoroughly."""
    serving.add_pair_arguments(parser)
    parser.set_defaults(log_level="error", max_concurrency=8)
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        default=800,
        help="samples of each sampling setting (default: %(default)s)",
    )
    parser.add_argument(
        "--greedy-tokens",
        type=int,
        metavar="N",
        default=64,
        help="tokens of each greedy completion (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the first sample (default: %(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """Runs every check and prints the table; 1 when one of them fails."""
    require_serve_extra()
    if options.samples < 1 or options.greedy_tokens < 1:
        raise VerbError("--samples, --greedy-tokens: expected at least 1", USAGE)
    serving.configure_logs(options.log_level)
    try:
        outcomes = _check(options)
    except (ValueError, ClientError) as error:
        raise VerbError(str(error)) from error
    _print_table(outcomes)
    failed = sum(outcome.passed is False for outcome in outcomes)
    print(f"{len(outcomes)} checks, {failed} failed")
    return FAILED if failed else 0


def _check(options: argparse.Namespace) -> list[Outcome]:
    """Starts both services, measures, stops them and compares."""
    import torch

    import drafter.__main__ as drafter_process
    import verifier.__main__ as verifier_process
    from outrider.checkpoint import Checkpoint
    from outrider.pair import DraftFacts, TargetFacts
    from verifier.config import TargetConfig

    drafter_options, verifier_options = _pair_options(options)
    if verifier_options.device.type == "cpu":
        torch.set_num_threads(1)
    with (
        Checkpoint(verifier_options.target) as checkpoint,
        Checkpoint(verifier_options.draft) as draft_checkpoint,
    ):
        target = TargetFacts.read(checkpoint)
        draft = DraftFacts.load(
            draft_checkpoint, target, causal_local_layers=options.causal_local_layers
        )
        plan = verifier_process.Plan(verifier_options, TargetConfig.read(target), target, draft)
        _tell("loading the pair")
        drafter = drafter_process.start(drafter_options)
        try:
            verifier = verifier_process.start(replace(verifier_options, drafter=drafter.address))
            try:
                with Client(verifier.address) as client:
                    _wait_for_drafter(client)
                    _tell("loading the float32 target")
                    reference = Reference(plan)
                    prompts = _prompts(client, plan, options.greedy_tokens)
                    outcomes = _greedy(client, reference, prompts, options.greedy_tokens)
                    prompt = _undecided(reference, prompts)
                    sampler = _Sampler(client, prompt, output_tokens(plan))
                    outcomes.append(sampler.again(options.seed))
                    samples = [
                        sampler.draw(name, law, options.samples, options.seed)
                        for name, law in LAWS.items()
                    ]
            finally:
                verifier.stop(0)
            _tell("comparing")
            with Proposer(drafter.address, plan, reference.features(prompt)) as proposer:
                for each in samples:
                    outcomes += each.outcomes(reference, proposer)
        finally:
            drafter.stop(0)
    return outcomes


def _pair_options(options: argparse.Namespace) -> tuple[DrafterOptions, VerifierOptions]:
    """Options of both services, on free ports; the verifier's lack the drafter's address."""
    from drafter.config import DrafterOptions
    from outrider.checkpoint import bundled
    from verifier.options import VerifierOptions, choose_device

    device = choose_device(options.device)
    target = Path(options.target) if options.target else bundled("target")
    draft = Path(options.draft) if options.draft else bundled("dflash2")
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    drafter = DrafterOptions(
        target=target,
        draft=draft,
        listen="127.0.0.1:0",
        device=str(device),
        dtype=dtype,
        draft_tokens=options.draft_tokens,
        draft_tree_nodes=options.draft_tree_nodes,
        max_concurrency=options.max_concurrency,
        max_context=options.max_context,
        proposal_head=options.proposal_head,
        causal_local_layers=options.causal_local_layers,
    )
    verifier = VerifierOptions(
        target=target,
        draft=draft,
        drafter="",
        listen="127.0.0.1:0",
        device=device,
        dtype=dtype,
        draft_tokens=options.draft_tokens,
        draft_tree_nodes=options.draft_tree_nodes,
        max_concurrency=options.max_concurrency,
        max_context=options.max_context,
        causal_local_layers=options.causal_local_layers,
        queue_timeout_ms=int(CALL_TIMEOUT_S * 1000),
    )
    return drafter, verifier


def _wait_for_drafter(client: Client) -> None:
    end = time.monotonic() + CONNECT_TIMEOUT_S
    while (info := client.server_info(timeout=CALL_TIMEOUT_S)).drafter_state != "connected":
        if info.drafter_state == "refused" or time.monotonic() > end:
            raise VerbError(f"the drafter is {info.drafter_state}: {info.drafter_detail}")
        time.sleep(0.05)


def _prompts(client: Client, plan: Plan, greedy_tokens: int) -> list[tuple[int, ...]]:
    """A few prompts of different lengths that leave room for the output."""
    room = plan.max_context - max(greedy_tokens, output_tokens(plan))
    if room < 1:
        raise VerbError("--greedy-tokens: expected fewer than the context holds", USAGE)
    if (plan.options.target / "tokenizer.json").exists():
        prompts = [client.tokenize(text).token_ids for text in TEXTS]
    else:
        drawn = random.Random(0)
        prompts = [
            tuple(drawn.randrange(plan.config.public_vocab) for _ in range(length))
            for length in ID_LENGTHS
        ]
    return [ids[:room] for ids in prompts]


def _undecided(reference: Reference, prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The prompt, or beginning of the longest one, that leaves the right doubt."""
    longest = max(prompts, key=len)
    candidates = [*prompts, *(longest[:length] for length in range(4, min(40, len(longest)), 4))]
    return min(candidates, key=lambda ids: abs(reference.entropy(ids) - WANTED_ENTROPY))


def _greedy(
    client: Client, reference: Reference, prompts: Sequence[tuple[int, ...]], count: int
) -> list[Outcome]:
    def wanted(ids: tuple[int, ...], draft_tokens: int | None = None) -> GenerateOptions:
        return {
            "prompt_ids": ids,
            "max_tokens": count,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 0,
            "draft_tokens": draft_tokens,
            "timeout": CALL_TIMEOUT_S,
        }

    _tell("greedy")
    plain = [client.generate(**wanted(ids, draft_tokens=0)) for ids in prompts]
    drafted = [client.generate(**wanted(ids)) for ids in prompts]
    streams = [client.stream(**wanted(ids)) for ids in prompts]
    together = [stream.completions()[0] for stream in streams]
    setting = f"{len(prompts)} prompts x {count} tokens"
    return [
        drafting(setting, drafted),
        same("greedy, drafted and plain", setting, drafted, plain),
        same("greedy, together and alone", setting, together, drafted),
        *best("plain", reference, prompts, plain),
        *best("drafted", reference, prompts, drafted),
    ]


@dataclass(frozen=True)
class _Sampler:
    """Draws samples of one prompt, every one with a seed of its own."""

    client: Client
    prompt: tuple[int, ...]
    max_tokens: int

    def draw(self, name: str, law: Law, count: int, seed: int) -> Samples:
        """At least ``count`` samples of a law."""
        completions: list[Completion] = []
        while len(completions) < count:
            _tell(f"sampling: {name}: {len(completions)} of {count}", passing=True)
            completions += self._call(law, seed, SAMPLES_A_CALL)
            seed += 1_000_003
        _tell(f"sampling: {name}: {len(completions)}")
        return Samples(name, law, completions, self.prompt)

    def again(self, seed: int) -> Outcome:
        """Whether a seed gives the same tokens again, and without its neighbours."""
        first, second = (self._call(Law(), seed, SAMPLES_A_CALL) for _ in range(2))
        (alone,) = self._call(Law(), seed, 1)
        setting = f"{len(first)} samples"
        return same("seeded, again and alone", setting, [*first, first[0]], [*second, alone])

    def _call(self, law: Law, seed: int, count: int) -> list[Completion]:
        return self.client.samples(
            prompt_ids=self.prompt,
            n=count,
            seed=seed,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            return_rounds=True,
            timeout=CALL_TIMEOUT_S,
            **asdict(law),
        )


def _print_table(outcomes: Sequence[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="outrider check")
    for heading in ("check", "setting", "expected", "observed", "result"):
        table.add_column(heading, overflow="fold")
    verdicts = {True: "[green]ok[/]", False: "[bold red]FAILED[/]", None: "[yellow]skipped[/]"}
    for outcome in outcomes:
        table.add_row(
            outcome.check,
            outcome.setting,
            outcome.expected,
            outcome.observed,
            verdicts[outcome.passed],
        )
    console = Console()
    # a pipe has no width of its own
    Console(width=None if console.is_terminal else 120).print(table)


def _tell(line: str, *, passing: bool = False) -> None:
    """Progress on stderr; a passing line is shown on a terminal alone and overwritten."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="" if passing else "\n", file=sys.stderr, flush=True)
    elif not passing:
        print(line, file=sys.stderr, flush=True)
