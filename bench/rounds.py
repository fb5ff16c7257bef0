"""Tokens per second with and without drafting, side by side in one run.

``python -m bench.rounds --device cpu`` serves the bundled pair through `outrider serve` (two
processes, gRPC on loopback) and streams the held-out prompts, each once plainly and once drafted,
so that both share the machine's moods. transformers' cached greedy step on the same weights runs
in the same process afterwards, as the outside peer. One table, and one JSON with ``--json``.

Tokens a round and tokens per second are reported together: one without the other misleads. With
``--tree-nodes`` trees of so many columns are streamed beside the chain, by the same services.

``--device cuda`` measures rounds instead, cell by cell, against the time that their bytes take: see
``bench.device_rounds``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import device_rounds
from bench.lookup import tokens_per_round
from bench.pair import describe, flag_line, served
from outrider.checkpoint import bundled
from outrider.client import Client, Completion

PROMPTS = Path(__file__).resolve().parent.parent / "models" / "prompts.json"


@dataclass
class Row:
    """One line of the table; times are medians over prompts."""

    name: str
    temperature: float
    concurrency: int
    prompts: int
    output_tokens: int
    tokens_per_second: float
    ms_per_round: float
    tokens_per_round: float
    draft_ms: float
    verify_ms: float
    wire_ms: float
    host_ms: float
    accepted_per_position: list[float]
    lookup_tokens_per_round: float = 0.0
    ratio: float = 0.0  # tokens per second over the plain row's
    round_ratio: float = 0.0  # tokens a round over the chain's
    side_accepted: float = 0.0  # of a round's accepted proposals, off the main chain


def held_out(count: int) -> list[list[int]]:
    """Token ids of the first ``count`` held-out prompts, code and plays alternating."""
    prompts = json.loads(PROMPTS.read_text())["prompts"]
    kinds: dict[str, list[list[int]]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt["kind"], []).append(prompt["token_ids"])
    alternating = [ids for group in zip(*kinds.values(), strict=False) for ids in group]
    return alternating[:count]


@dataclass(frozen=True)
class Way:
    """How a prompt is decoded."""

    draft_tokens: int
    trees: bool = False


def complete(
    client: Client, prompt: Sequence[int], arguments: argparse.Namespace, way: Way
) -> Completion:
    """One completion of fixed length."""
    return client.generate(
        prompt_ids=prompt,
        max_tokens=arguments.new_tokens,
        temperature=arguments.temperature,
        seed=1,
        draft_tokens=way.draft_tokens,
        draft_trees=way.trees,
        ignore_eos=True,
    )


def summarise(
    name: str, completions: Sequence[Completion], seconds: float, arguments: argparse.Namespace
) -> Row:
    """Folds the completions of one setting into a row."""
    usages = [c.usage for c in completions]
    rounds = sum(u.rounds for u in usages)
    decoded = sum(u.output_tokens - 1 for u in usages)
    decode_ms = [(u.total_ns - u.ttft_ns) / 1e6 / max(1, u.rounds) for u in usages if u.rounds]
    draft = sum(u.draft_ns for u in usages) / 1e6 / max(1, rounds)
    verify = sum(u.verify_ns for u in usages) / 1e6 / max(1, rounds)
    wire = sum(u.wire_ns for u in usages) / 1e6 / max(1, rounds)
    mean_round = sum(u.total_ns - u.ttft_ns for u in usages) / 1e6 / max(1, rounds)
    positions = max((len(u.accepted_per_position) for u in usages), default=0)
    return Row(
        name=name,
        temperature=arguments.temperature,
        concurrency=arguments.concurrency,
        prompts=len(completions),
        output_tokens=sum(u.output_tokens for u in usages),
        tokens_per_second=sum(u.output_tokens for u in usages) / seconds,
        ms_per_round=statistics.median(decode_ms),
        tokens_per_round=decoded / max(1, rounds),
        draft_ms=draft,
        verify_ms=verify,
        wire_ms=wire,
        host_ms=max(0.0, mean_round - draft - verify - wire),
        accepted_per_position=[
            sum(u.accepted_per_position[i] for u in usages) / max(1, rounds)
            for i in range(positions)
        ],
        side_accepted=sum(u.side_accepted for u in usages) / max(1, rounds),
    )


def run_pair(draft: str, arguments: argparse.Namespace) -> list[Row]:
    """Plain and drafted rows of one draft, trees too if asked, interleaved prompt by prompt."""
    prompts = held_out(arguments.prompts)
    folder = str(bundled(draft)) if draft in ("dflash2", "dflash") else draft
    flags = [
        f"--draft={folder}",
        f"--device={arguments.device}",
        f"--draft-tokens={arguments.draft_tokens}",
        f"--max-concurrency={max(1, arguments.concurrency)}",
        "--log-level=warning",
    ]
    if arguments.target:
        flags.append(f"--target={arguments.target}")
    ways = {"plain": Way(0), f"{draft} K={arguments.draft_tokens}": Way(arguments.draft_tokens)}
    if arguments.tree_nodes:
        flags += [f"--draft-tree-nodes={arguments.tree_nodes}"]
        flags += [f"--draft-tree-paths={arguments.tree_paths}"]
        ways[f"  N={arguments.tree_nodes}"] = Way(arguments.draft_tokens, trees=True)
    completions: dict[str, list[Completion]] = {name: [] for name in ways}
    seconds = dict.fromkeys(ways, 0.0)
    with served(*flags) as address, Client(address) as client:
        for way in ways.values():  # warm all paths
            complete(client, prompts[0], arguments, way)
        groups = [
            prompts[i : i + arguments.concurrency]
            for i in range(0, len(prompts), arguments.concurrency)
        ]
        for group in groups:
            for name, way in ways.items():
                started = time.perf_counter()
                completions[name].extend(_at_once(client, group, arguments, way))
                seconds[name] += time.perf_counter() - started
    rows = [summarise(name, completions[name], seconds[name], arguments) for name in ways]
    if arguments.temperature <= 0:
        _expect_equal(completions)
        lookups = [
            tokens_per_round(prompt, completion.token_ids, arguments.draft_tokens)
            for prompt, completion in zip(prompts, completions["plain"], strict=True)
        ]
        rows[1].lookup_tokens_per_round = statistics.mean(lookups)
    for row in rows:
        row.ratio = row.tokens_per_second / rows[0].tokens_per_second
        row.round_ratio = row.tokens_per_round / rows[1].tokens_per_round
    return rows


def _expect_equal(completions: dict[str, list[Completion]]) -> None:
    outputs = {name: [c.token_ids for c in done] for name, done in completions.items()}
    for name, output in outputs.items():
        different = sum(a != b for a, b in zip(outputs["plain"], output, strict=True))
        if different:
            raise SystemExit(f"{name}: {different} greedy outputs differ: not a benchmark")


def _at_once(
    client: Client, group: Sequence[Sequence[int]], arguments: argparse.Namespace, way: Way
) -> list[Completion]:
    if len(group) == 1:
        return [complete(client, group[0], arguments, way)]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(group)) as pool:
        return list(pool.map(lambda p: complete(client, p, arguments, way), group))


def transformers_step(arguments: argparse.Namespace, tokens: int = 48, prompts: int = 6) -> float:
    """Median milliseconds of transformers' cached greedy step, float32, one thread."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = arguments.target or bundled("target")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    times = []
    with torch.inference_mode():
        for prompt in held_out(prompts):
            out = model(torch.tensor([prompt]), use_cache=True)
            for _ in range(tokens):
                token = out.logits[:, -1:].argmax(-1)
                started = time.perf_counter()
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
                times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def show(rows: Sequence[Row], peer_ms: float | None) -> None:
    """Prints the table."""
    print(
        f"{'':<16}{'T':>5}{'c':>3}{'tokens/s':>10}{'ratio':>7}{'tok/round':>10}{'lookup':>8}"
        f"{'ms/round':>10}{'draft':>7}{'verify':>8}{'wire':>6}{'host':>6}"
    )
    for row in rows:
        lookup = f"{row.lookup_tokens_per_round:.2f}" if row.lookup_tokens_per_round else ""
        print(
            f"{row.name:<16}{row.temperature:>5.1f}{row.concurrency:>3}"
            f"{row.tokens_per_second:>10.1f}{row.ratio:>7.2f}{row.tokens_per_round:>10.2f}"
            f"{lookup:>8}{row.ms_per_round:>10.2f}{row.draft_ms:>7.2f}{row.verify_ms:>8.2f}"
            f"{row.wire_ms:>6.2f}{row.host_ms:>6.2f}"
        )
        if any(row.accepted_per_position):
            shares = " ".join(f"{share:.3f}" for share in row.accepted_per_position)
            print(f"{'':<16}accepted 1..K: {shares}")
        if row.side_accepted:
            print(
                f"{'':<16}{row.round_ratio:.3f} of the chain's tokens a round; "
                f"{row.side_accepted:.3f} accepted a round off the main chain"
            )
    if peer_ms is not None:
        print(f"transformers cached step: {peer_ms:.2f} ms a token (median, same weights)")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.rounds", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--target", default=None, help="folder of the target (default: bundled)")
    parser.add_argument("--drafts", nargs="+", default=["dflash2", "dflash"])
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=None, metavar="K")
    parser.add_argument(
        "--tree-nodes", type=int, nargs="+", default=[0], metavar="N", help="columns; 0: chains"
    )
    parser.add_argument("--tree-paths", type=int, nargs="+", default=[8], metavar="N")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=160, help="the first comes from prefill")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--concurrency", type=int, nargs="+", default=None, metavar="C")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--json", type=Path, default=None)
    device_rounds.add_arguments(parser)
    arguments = parser.parse_args(argv)
    about = f"{flag_line(['bench.rounds', *(argv or sys.argv[1:])])}  [{describe()}]"
    if arguments.device.startswith("cuda"):
        device_rounds.run(device_rounds.Options.of(arguments), about)
        return
    print(about)
    rows = [
        row
        for draft in arguments.drafts
        for draft_tokens in arguments.draft_tokens or [7]
        for concurrency in arguments.concurrency or [1]
        for tree_nodes in arguments.tree_nodes
        for tree_paths in arguments.tree_paths
        for row in run_pair(
            draft,
            argparse.Namespace(
                **vars(arguments)
                | {
                    "draft_tokens": draft_tokens,
                    "concurrency": concurrency,
                    "tree_nodes": tree_nodes,
                    "tree_paths": tree_paths,
                }
            ),
        )
    ]
    peer_ms = None if arguments.no_peer else transformers_step(arguments)
    show(rows, peer_ms)
    if arguments.json:
        report = {"rows": [asdict(row) for row in rows], "transformers_step_ms": peer_ms}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
