"""`outrider demo`: streams one completion, then the same prompt without drafting, and compares."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from outrider.cli import FAILED, USAGE, VerbError
from outrider.cli.generate import (
    add_sampling_arguments,
    add_server_arguments,
    client_for,
    generate_options,
    reported_errors,
)
from outrider.cli.terminal import Printer, tokens_per_round
from outrider.client import Client, Completion, GenerateOptions, Usage

MAX_TOKENS = 128
TURNS = 3
PROMPT = '''class Queue:
    """A first-in, first-out queue."""

    def __init__(self, maxsize=0):
        self.maxsize = maxsize
        self._items = []

    def empty(self):
        """Return True if the queue is empty."""
'''


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """PROMPT and all that `outrider generate` takes beside it; greedy unless said otherwise."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", default=PROMPT, help="text")
    add_server_arguments(parser)
    add_sampling_arguments(parser, MAX_TOKENS)
    parser.set_defaults(temperature=0.0)


def run(options: argparse.Namespace) -> int:
    """Streams with drafting, repeats without, prints the summary."""
    if not options.prompt:
        raise VerbError("PROMPT: expected at least one character, got none", USAGE)
    request = generate_options(options)
    with client_for(options) as client, reported_errors():
        _warm(client, options.prompt, request)
        drafted = [_show(client, options.prompt, request)]
        plain = [client.generate(options.prompt, **_plainly(request))]
        # by turns, so that both sides meet the same machine
        for _ in range(TURNS - 1):
            drafted.append(client.generate(options.prompt, **request))
            plain.append(client.generate(options.prompt, **_plainly(request)))
    print()
    print(summary(drafted, plain))
    differs = options.temperature == 0 and drafted[0].token_ids != plain[0].token_ids
    return FAILED if differs else 0


def summary(drafted_runs: Sequence[Completion], plain_runs: Sequence[Completion]) -> str:
    """What drafting did, in a few lines; speeds are medians over the runs."""
    drafted, plain = drafted_runs[0], plain_runs[0]
    usage = drafted.usage
    positions = ", ".join(
        f"{count / usage.rounds:.0%}" for count in usage.accepted_per_position if usage.rounds
    )
    fast = statistics.median(tokens_per_second(run.usage) for run in drafted_runs)
    slow = statistics.median(tokens_per_second(run.usage) for run in plain_runs)
    lines = [
        f"tokens                 {usage.output_tokens} ({drafted.finish_reason})",
        f"tokens per second      {fast:.1f}",
        f"rounds                 {usage.rounds}",
        f"accept length          {tokens_per_round(usage):.2f} tokens a round",
        f"accepted per position  {positions or '-'} of rounds",
        f"without drafting       {slow:.1f} tokens per second; "
        f"drafting is {fast / slow if slow else 0.0:.2f} times as fast",
    ]
    if drafted.token_ids == plain.token_ids:
        lines.append("output                 the same tokens with and without drafting")
    else:
        lines.append(
            "output                 other tokens without drafting (of the same law if sampled)"
        )
    return "\n".join(lines)


def tokens_per_second(usage: Usage) -> float:
    """Decode speed: tokens after the first, by the time after the first."""
    elapsed = usage.total_ns - usage.ttft_ns
    return (usage.output_tokens - 1) * 1e9 / elapsed if elapsed > 0 else 0.0


def _warm(client: Client, prompt: str, request: GenerateOptions) -> None:
    """Both paths once, briefly, so that neither run pays for first use."""
    short: GenerateOptions = {**request, "max_tokens": 8}
    for each in (short, _plainly(short)):
        client.generate(prompt, **each)


def _plainly(request: GenerateOptions) -> GenerateOptions:
    return {**request, "draft_tokens": 0}


def _show(client: Client, prompt: str, request: GenerateOptions) -> Completion:
    printer = Printer()
    print(prompt, end="", flush=True)
    with client.stream(prompt, **request) as stream:
        for delta in stream:
            printer.delta(delta)
        (completion,) = stream.completions()
    printer.end_line()
    printer.legend()
    return completion
