"""What state costs: checkpoints, forks and host copies; second turns, long prompts, automatic P.

``python -m bench.state`` measures the copies in this process and serves the pair for the rest: the
second turn of a conversation with and without its first; the largest gap between the tokens of
seven streams while a long prompt is prefilled beside them (`bench.gaps`); and ``--draft-policy
auto`` against plain decoding on a prompt whose drafts are rejected. The pair is the bundled one, or
with ``--geometry`` and ``--geometry-draft`` folders of configs, whose weights are drawn.
``--json FILE`` keeps the rows as they come; no part, and no repetition of one, starts after
``--seconds``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import gaps
from bench.gaps import FEW_IDS
from bench.pair import describe, flag_line, services
from drafter.config import DraftConfig, DrafterOptions
from drafter.context import Context, ContextCells, ContextPlan
from outrider.checkpoint import bundled
from outrider.client import Client, Usage
from outrider.pair import TargetFacts
from outrider.random_weights import open_checkpoint
from verifier.config import TargetConfig
from verifier.host_images import HostImages
from verifier.options import PREFILL_CHUNK
from verifier.state import StateImage, TargetState

Row = dict[str, Any]
REPEATS = 15
DRAFT_TOKENS = 7
WARM_CALLS = 2
TURN_TOKENS = 3200  # of a first turn without a tokenizer

PARTS = ("copies", "turns", "gaps", "auto")
DOCUMENT = "\n".join(f"def step_{i}(x):\n    return x + {i * i}\n" for i in range(180))


@dataclass(frozen=True)
class Pair:
    """What is measured."""

    target: Path
    draft: Path
    drawn: bool  # of a geometry: no weights and no tokenizer

    @classmethod
    def of(cls, geometry: Path | None, draft: Path | None) -> Pair:
        """The bundled pair, or the folders of a geometry."""
        if geometry is None:
            return cls(bundled("target"), bundled("dflash2"), drawn=False)
        beside = geometry.with_name(f"{geometry.name}-dflash2")
        return cls(geometry, draft or beside, drawn=True)

    @property
    def load_format(self) -> str:
        """Of both."""
        return "random" if self.drawn else "auto"

    @property
    def flags(self) -> list[str]:
        """Of both services."""
        return [
            f"--target={self.target}",
            f"--draft={self.draft}",
            f"--load-format={self.load_format}",
            f"--draft-tokens={DRAFT_TOKENS}",
        ]

    def context_plan(self, positions: int, device: torch.device) -> ContextPlan:
        """Of a drafter with two sequences."""
        options = DrafterOptions(
            dtype="float32" if device.type == "cpu" else "bfloat16",
            max_concurrency=2,
            max_context=positions,
        )
        with (
            open_checkpoint(self.target, self.load_format) as target,
            open_checkpoint(self.draft, self.load_format) as draft,
        ):
            return DraftConfig.read(options, target, draft).context_plan

    def two_turns(self, client: Client) -> tuple[Usage, Usage]:
        """A conversation of 3,200 tokens; of ids alone where there is no tokenizer."""
        if self.drawn:
            ids = torch.randint(
                1, FEW_IDS, (TURN_TOKENS,), generator=torch.Generator().manual_seed(2)
            )
            first = client.generate(prompt_ids=ids.tolist(), max_tokens=32, temperature=0)
            longer = [*ids.tolist(), *first.token_ids, *range(1, 20)]
            second = client.generate(prompt_ids=longer, max_tokens=32, temperature=0)
            return first.usage, second.usage
        turns = [{"role": "user", "content": f"Explain:\n{DOCUMENT}"}]
        first = client.generate(messages=turns, max_tokens=32, temperature=0)
        turns += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "Now in one line."},
        ]
        second = client.generate(messages=turns, max_tokens=32, temperature=0)
        return first.usage, second.usage


@dataclass(frozen=True)
class Times:
    """Medians over some calls, ms."""

    held: float  # until the call returns: how long it holds the engine's thread
    done: float  # until the device has finished it


def timed(function: Callable[[], None], device: torch.device) -> Times:
    """Times of a call whose copies may outlast it."""
    held, done = [], []
    for _ in range(WARM_CALLS + REPEATS):
        _wait(device)
        started = time.perf_counter()
        function()
        held.append((time.perf_counter() - started) * 1e3)
        _wait(device)
        done.append((time.perf_counter() - started) * 1e3)
    return Times(statistics.median(held[WARM_CALLS:]), statistics.median(done[WARM_CALLS:]))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def target_copies(
    folder: Path, positions: int, device: torch.device, *, scattered: bool
) -> list[Row]:
    """Capture, fork, demote and restore of one sequence's target half.

    Args:
        folder: Of the target.
        positions: Of the sequence.
        device: Where it lies.
        scattered: Whether pages lie in any order, as on a server that has run for long.
    """
    with open_checkpoint(folder, "random") as checkpoint:
        config = TargetConfig.read(TargetFacts.read(checkpoint))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pages = -(-positions // 64)
    state = TargetState(
        config,
        lanes=2,
        max_context=positions + 64,
        width=8,
        dtype=dtype,
        device=device,
        page_count=3 * pages + 4,
        image_count=2,
    )
    image_bytes = state.gdn[:, 0].nbytes + state.conv_history[:, 0].nbytes
    page_bytes = state.key_pages[:, 0].nbytes + state.value_pages[:, 0].nbytes
    # half of a host budget goes to images at most
    host = HostImages(state, 2 * max(2 * image_bytes, image_bytes + (pages + 1) * page_bytes))
    if scattered:
        for free in (state._free_pages, host._free_pages):
            random.Random(0).shuffle(free)
    source, heir = state.acquire(positions), state.acquire(0)
    assert source is not None
    assert heir is not None

    def capture() -> None:
        image = state.capture(source, positions)
        assert image is not None
        state.forget(image)

    def resume(source_image: StateImage) -> None:
        assert state.resume(heir, source_image, positions)
        state.drop_pages(heir.pages)
        heir.pages.clear()

    image = state.capture(source, positions)
    assert image is not None

    def demote() -> None:
        stored = host.store(image)
        assert stored is not None
        host.forget(stored)

    stored = host.store(image)
    assert stored is not None

    def restore() -> None:
        assert host.load(stored, heir, positions)
        state.drop_pages(heir.pages)
        heir.pages.clear()

    cut = page_bytes if positions % 64 else 0
    whole = image_bytes + len(image.pages) * page_bytes
    host.forget(stored)
    rows = [
        ("capture", timed(capture, device), image_bytes),
        ("fork, or hit on the device", timed(lambda: resume(image), device), image_bytes + cut),
        ("demote to host memory", timed(demote, device), whole),
    ]
    stored = host.store(image)
    assert stored is not None
    rows.append(("hit in host memory", timed(restore, device), whole))
    if scattered:
        rows = [(f"{name}, scattered pages", *rest) for name, *rest in rows if "host" in name]
    return [_copy_row("target", name, positions, times, size) for name, times, size in rows]


def draft_copies(pair: Pair, positions: int, device: torch.device) -> list[Row]:
    """Capture and restore of one sequence's draft half, on the device and from host memory."""
    plan = pair.context_plan(positions + 64, device)
    cells = ContextCells(plan, 2, device)
    host = ContextCells(plan, 1, torch.device("cpu"), pinned=device.type == "cuda")
    context = Context(0, 0, positions)
    size = plan.local_layer_count * plan.window * plan.cell_bytes
    size += plan.full_layer_count * -(-positions // 64) * 64 * plan.cell_bytes
    rows = [
        ("capture, restore, fork", timed(lambda: cells.copy(1, cells, context), device)),
        ("demote to host memory", timed(lambda: host.copy(0, cells, context), device)),
        ("restore from host memory", timed(lambda: cells.copy(1, host, context), device)),
    ]
    return [_copy_row("draft", name, positions, times, size) for name, times in rows]


def _copy_row(half: str, name: str, positions: int, times: Times, size: int) -> Row:
    return {
        "row": f"{half}: {name}",
        "positions": positions,
        "ms": round(times.done, 3),
        "held_ms": round(times.held, 3),
        "mib": round(size / 2**20, 2),
        "gb_per_s": round(size / times.done / 1e6, 2),
    }


def second_turn(device: str, pair: Pair) -> list[Row]:
    """Time to first token of a second turn, with what is kept of the first and without."""
    rows = []
    for slots in (8, 0):
        common = (f"--device={device}", f"--checkpoint-slots={slots}", "--max-context=4096")
        with (
            services([*common, *pair.flags, "--log-level=warning"]) as running,
            Client(running.address) as client,
        ):
            # once for the memory and the kernels that come with the first
            client.generate(
                prompt_ids=[1 + i % 100 for i in range(300)], max_tokens=4, temperature=0
            )
            first, second = pair.two_turns(client)
            rows.append(
                {
                    "row": "second turn" + ("" if slots else ", nothing kept"),
                    "prompt_tokens": second.prompt_tokens,
                    "cached_tokens": second.cached_tokens,
                    "first_ttft_ms": round(first.ttft_ns / 1e6, 1),
                    "ttft_ms": round(second.ttft_ns / 1e6, 1),
                }
            )
    return rows


@dataclass
class Turns:
    """What one concurrency has shown so far."""

    ratios: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    auto: list[float] = field(default_factory=list)
    rounds: int = 0  # of the automatic policy
    drafted: int = 0  # of these, with proposals
    cpu_s: dict[str, float] = field(default_factory=lambda: {"plain": 0.0, "auto": 0.0})

    def row(self, concurrency: int) -> Row:
        """Medians, and the quartiles of the ratio."""
        low, middle, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return {
            "row": f"rejected drafts, c={concurrency}",
            "auto_over_plain": round(middle, 3),
            "quartiles": [round(low, 3), round(high, 3)],
            "pairs": len(self.ratios),
            "plain_tokens_per_s": round(statistics.median(self.plain), 1),
            "auto_tokens_per_s": round(statistics.median(self.auto), 1),
            "drafted_share": round(self.drafted / max(1, self.rounds), 4),
            "cpu_plain_over_auto": round(self.cpu_s["plain"] / max(0.01, self.cpu_s["auto"]), 3),
        }


def automatic(device: str, pair: Pair, tokens: int, repeats: int, until: float) -> Iterator[Row]:
    """Tokens a second of rejected drafts, by the automatic policy against plain decoding.

    Both run on one server and take turns, first the one and then the other first; a ratio is that
    of two neighbours, so that the machine's moods are shared. Processor time of both services is
    compared too, since others beside them hardly change it; on a GPU it says nothing. Until the
    time is up, and at least twice.
    """
    common = (f"--device={device}", "--max-concurrency=8", "--max-context=2048")
    with (
        services([*common, *pair.flags, "--log-level=warning"], ["--draft-policy=auto"]) as running,
        Client(running.address) as client,
    ):
        widths = (1, 2, 4, 8)
        seen = {width: Turns() for width in widths}
        for repeat in range(repeats + 1):
            if repeat > 2 and time.monotonic() > until:
                break
            for width in widths:
                order = ("plain", "auto") if repeat % 2 else ("auto", "plain")
                rates = {}
                for kind in order:
                    cpu_s = running.cpu_seconds
                    usages, seconds = _burst(client, kind, width, tokens, repeat)
                    seen[width].cpu_s[kind] += (running.cpu_seconds - cpu_s) * bool(repeat)
                    rates[kind] = sum(usage.output_tokens for usage in usages) / seconds
                    if kind == "auto" and repeat:
                        seen[width].rounds += sum(usage.rounds for usage in usages)
                        proposed = sum(usage.proposed for usage in usages)
                        seen[width].drafted += proposed // DRAFT_TOKENS
                # the first tells the policy what rounds cost, once for a server's life
                if repeat:
                    seen[width].plain.append(rates["plain"])
                    seen[width].auto.append(rates["auto"])
                    seen[width].ratios.append(rates["auto"] / rates["plain"])
        for width in widths:
            yield seen[width].row(width)


def _burst(
    client: Client, kind: str, concurrency: int, tokens: int, repeat: int
) -> tuple[list[Usage], float]:
    """Hot samples of noise, which no draft foresees, and the seconds that they took."""
    generator = torch.Generator().manual_seed(repeat)
    prompt = torch.randint(1, FEW_IDS, (64,), generator=generator).tolist()

    def one(number: int) -> Usage:
        return client.generate(
            prompt_ids=prompt,
            max_tokens=tokens,
            temperature=3.0,
            seed=100 * repeat + number,
            ignore_eos=True,
            draft_tokens=DRAFT_TOKENS if kind == "auto" else 0,
        ).usage

    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        usages = list(pool.map(one, range(concurrency)))
    return usages, time.perf_counter() - started


class Report:
    """Rows, printed and kept as they come."""

    def __init__(self, path: Path | None, about: str) -> None:
        self._path = path
        self._kept: dict[str, Any] = {"about": about, "rows": []}

    def add(self, rows: Iterable[Row]) -> None:
        """Takes rows one by one."""
        for row in rows:
            name, *rest = row.items()
            print(f"{name[1]:<52}" + "  ".join(f"{k} {v}" for k, v in rest), flush=True)
            self._kept["rows"].append(row)
            if self._path is not None:
                self._path.write_text(json.dumps(self._kept, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.state", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--geometry", type=Path, default=None, help="folder of a target's config")
    parser.add_argument(
        "--geometry-draft", type=Path, default=None, help="of its draft's (default: its DFlash2)"
    )
    parser.add_argument(
        "--positions", type=int, default=3000, help="of the sequence that is copied"
    )
    parser.add_argument(
        "--chunk", type=int, default=None, help="of the long prompt (default: the device's own)"
    )
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300, help="of a sample of rejected drafts")
    parser.add_argument("--repeats", type=int, default=12, help="of plain beside automatic")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing later")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)
    until = time.monotonic() + arguments.seconds
    about = f"{flag_line(['bench.state', *(argv or sys.argv[1:])])}  [{describe()}]"
    print(about)
    report = Report(arguments.json, about)
    device = torch.device(arguments.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as the services do
    pair = Pair.of(arguments.geometry, arguments.geometry_draft)
    chunk = arguments.chunk or PREFILL_CHUNK[device.type]
    parts: dict[str, Callable[[], Iterable[Row]]] = {
        "copies": lambda: [
            *target_copies(pair.target, arguments.positions, device, scattered=False),
            *target_copies(pair.target, arguments.positions, device, scattered=True),
            *draft_copies(pair, arguments.positions, device),
        ],
        "turns": lambda: second_turn(arguments.device, pair),
        "gaps": lambda: gaps.measure(
            arguments.device, pair.flags, chunk, arguments.chunks, longer=not pair.drawn
        ),
        "auto": lambda: automatic(
            arguments.device, pair, arguments.tokens, arguments.repeats, until
        ),
    }
    for name in PARTS:
        if name in arguments.parts:
            if time.monotonic() > until:
                print(f"{name}: no time left")
                continue
            report.add(parts[name]())


if __name__ == "__main__":
    main()
