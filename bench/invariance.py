"""Whether tokens depend on what else runs: drafting on and off, K, neighbours, and a second run.

``python -m bench.invariance --device cuda`` serves the bundled pair, once for each of two block
widths, and compares greedy outputs with drafting off and on, at several K, in company and alone,
and twice; then seeded samples in company, alone and twice at the same K; and both over trees. With
``--target FOLDER`` it then loads that geometry with drawn weights and plants errors in a plain
run's own tokens, and branches around some of them, so that every accepted count occurs. It prints
one line a comparison and exits 1 when a token differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.pair import describe, flag_line, served
from bench.planted import GREEDY, load_blocks, plain_run, planted_run
from outrider.checkpoint import bundled
from outrider.client import Client

PROMPTS = Path(__file__).resolve().parent.parent / "models" / "prompts.json"
COMPANY = 8  # sequences at once
WIDTHS = {7: (1, 3, 7), 15: (15,)}  # K of a server, and the K of requests to it
TREES = {7: 16, 15: 32}  # columns of a server's trees, by its K
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 11}


@dataclass
class Verdict:
    """How many comparisons held."""

    failed: int = 0

    def compare(
        self, name: str, actual: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
    ) -> None:
        """Prints one line."""
        different = [i for i, (a, w) in enumerate(zip(actual, wanted, strict=True)) if a != w]
        self.failed += bool(different)
        tokens = sum(len(output) for output in actual)
        line = f"{'differs' if different else 'equal  '}  {name}: {len(actual)} outputs, "
        line += f"{tokens} tokens"
        if different:
            first = different[0]
            pairs = zip(actual[first], wanted[first], strict=False)
            place = next((i for i, (a, w) in enumerate(pairs) if a != w), -1)
            line += f"; {len(different)} differ, the first in output {first} at token {place}"
        print(line, flush=True)


def held_out(count: int) -> list[list[int]]:
    """Held-out prompts; beyond the file's own, shorter beginnings of the same."""
    prompts = [p["token_ids"] for p in json.loads(PROMPTS.read_text())["prompts"]]
    while len(prompts) < count:
        prompts += [ids[: max(8, 2 * len(ids) // 3)] for ids in prompts[-112:]]
    return prompts[:count]


def complete(
    client: Client,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    draft_tokens: int,
    together: int,
    *,
    trees: bool = False,
    **sampling: float,
) -> list[tuple[int, ...]]:
    """Outputs of every prompt, ``together`` at a time."""

    def one(prompt: Sequence[int]) -> tuple[int, ...]:
        completion = client.generate(
            prompt_ids=prompt,
            max_tokens=tokens,
            draft_tokens=draft_tokens,
            draft_trees=trees,
            ignore_eos=True,
            **{"temperature": 0.0, **sampling},
        )
        return tuple(completion.token_ids)

    with ThreadPoolExecutor(together) as pool:
        return list(pool.map(one, prompts))


def pair(arguments: argparse.Namespace, verdict: Verdict) -> None:
    """The bundled pair through both services."""
    prompts, few = held_out(arguments.prompts), held_out(arguments.prompts)[: arguments.few]
    tokens = arguments.new_tokens
    plain: list[tuple[int, ...]] = []
    for width, draft_counts in WIDTHS.items():
        flags = (
            f"--device={arguments.device}",
            f"--draft={bundled(arguments.draft)}",
            f"--draft-tokens={width}",
            f"--max-concurrency={COMPANY}",
            f"--draft-tree-nodes={TREES[width] if arguments.draft == 'dflash2' else 'off'}",
            "--log-level=warning",
        )
        with served(*flags) as address, Client(address) as client:
            started = time.monotonic()
            together = complete(client, prompts, tokens, 0, COMPANY)
            if plain:
                verdict.compare(f"plain, server K={width} against the first", together, plain)
            plain = plain or together
            for count in draft_counts:
                drafted = complete(client, prompts, tokens, count, COMPANY)
                verdict.compare(f"K={count} in company, against plain", drafted, plain)
            widest = draft_counts[-1]
            alone = complete(client, few, tokens, 0, 1)
            verdict.compare("plain alone, against company", alone, plain[: len(few)])
            for run in ("alone", "alone again"):
                drafted = complete(client, few, tokens, widest, 1)
                verdict.compare(f"K={widest} {run}, against plain", drafted, plain[: len(few)])
            again = complete(client, few, tokens, widest, COMPANY)
            verdict.compare(f"K={widest} in company again", again, plain[: len(few)])
            sampled = complete(client, few, tokens, widest, COMPANY, **SAMPLED)
            for run in ("alone", "alone again"):
                solo = complete(client, few[:16], tokens, widest, 1, **SAMPLED)
                verdict.compare(f"seeded samples, K={widest}, {run}", solo, sampled[:16])
            if arguments.draft == "dflash2":
                branching(arguments, client, width, plain, verdict)
            print(f"server K={width}: {time.monotonic() - started:.0f} s", flush=True)


def branching(
    arguments: argparse.Namespace,
    client: Client,
    width: int,
    plain: Sequence[tuple[int, ...]],
    verdict: Verdict,
) -> None:
    """Trees of one server: greedy ones against plain decoding, seeded ones against themselves."""
    prompts, tokens = held_out(arguments.prompts), arguments.new_tokens
    few = prompts[: arguments.few]
    name = f"K={width}, trees of {TREES[width]}"
    together = complete(client, prompts, tokens, width, COMPANY, trees=True)
    verdict.compare(f"{name}, in company, against plain", together, plain)
    alone = complete(client, few, tokens, width, 1, trees=True)
    verdict.compare(f"{name}, alone, against plain", alone, plain[: len(few)])
    sampled = complete(client, few, tokens, width, COMPANY, trees=True, **SAMPLED)
    for run in ("alone", "alone again"):
        solo = complete(client, few[:16], tokens, width, 1, trees=True, **SAMPLED)
        verdict.compare(f"seeded samples, {name}, {run}", solo, sampled[:16])
    usage = client.server_info().counters
    print(f"{name}: {usage['tree_rounds']} rounds, {usage['side_accepted']} branches off the chain")


def geometry(arguments: argparse.Namespace, verdict: Verdict) -> None:
    """A geometry with drawn weights, against planted proposals."""
    blocks, chunk = load_blocks(
        arguments.target,
        arguments.target_draft,
        torch.device(arguments.device),
        rows=COMPANY,
        draft_tokens=15,
        tree_nodes="32",
    )
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(0, blocks.tables.public_vocab, (40 + 97 * i,), generator=generator).tolist()
        for i in range(arguments.geometry_prompts)
    ]
    tokens = arguments.geometry_tokens
    plain = [plain_run(blocks, prompt, GREEDY, tokens, chunk) for prompt in prompts]
    again = [plain_run(blocks, prompts[0], GREEDY, tokens, chunk)]
    verdict.compare("geometry: plain again", again, plain[:1])
    for count in (1, 3, 7, 15):
        for name, some in (("alone", 1), ("in company", len(prompts))):
            run = planted_run(blocks, prompts[:some], plain[:some], count, GREEDY, tokens, chunk)
            verdict.compare(
                f"geometry: planted K={count} {name}, {run.rounds} rounds, kept "
                f"{min(run.kept_counts)}..{max(run.kept_counts)} ({len(run.kept_counts)} counts)",
                run.outputs,
                plain[:some],
            )
    for count in (7, 15):
        for name, some in (("alone", 1), ("in company", len(prompts))):
            run = planted_run(
                blocks, prompts[:some], plain[:some], count, GREEDY, tokens, chunk, branches=True
            )
            verdict.compare(
                f"geometry: branches K={count} {name}, {run.rounds} rounds, "
                f"{run.moved} columns moved",
                run.outputs,
                plain[:some],
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the comparisons."""
    parser = argparse.ArgumentParser(prog="python -m bench.invariance", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--draft", default="dflash2", help="bundled draft (default: dflash2)")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--few", type=int, default=50, help="prompts that run alone and twice")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--no-pair", action="store_true", help="leave the bundled pair out")
    parser.add_argument("--target", type=Path, default=None, help="folder of a geometry")
    parser.add_argument("--target-draft", type=Path, default=None, help="its draft's folder")
    parser.add_argument("--geometry-prompts", type=int, default=6)
    parser.add_argument("--geometry-tokens", type=int, default=256)
    arguments = parser.parse_args(argv)
    print(f"{flag_line(['bench.invariance', *(argv or sys.argv[1:])])}  [{describe()}]")
    verdict = Verdict()
    if not arguments.no_pair:
        pair(arguments, verdict)
    if arguments.target is not None:
        geometry(arguments, verdict)
    print(f"{verdict.failed} comparisons differ")
    sys.exit(1 if verdict.failed else 0)


if __name__ == "__main__":
    main()
