"""What state costs: checkpoints, forks and host copies; second turns, long prompts, automatic P.

``python -m bench.state`` measures the copies in this process, at the bundled pair's geometry or at
``--geometry`` (a folder with a target's config.json), and serves the bundled pair for the rest:
the second turn of a conversation with and without its first, the largest gap between the tokens of
seven streams while a long prompt is prefilled beside them, and `--draft-policy auto` against plain
decoding on a prompt whose drafts are rejected. ``--json FILE`` keeps the rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.pair import describe, flag_line, served
from drafter.context import Context, ContextCells, ContextPlan
from outrider.checkpoint import bundled
from outrider.client import Client
from outrider.pair import TargetFacts
from outrider.random_weights import open_checkpoint
from verifier.config import TargetConfig
from verifier.host_images import HostImages
from verifier.state import StateImage, TargetState

Row = dict[str, Any]
REPEATS = 15


def timed(function: Callable[[], None], device: torch.device) -> float:
    """Median milliseconds of a call, copies included."""
    times = []
    for _ in range(REPEATS):
        _wait(device)
        started = time.perf_counter()
        function()
        _wait(device)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def target_copies(folder: Path, positions: int, device: torch.device) -> list[Row]:
    """Capture, fork, demote and restore of one sequence's target half."""
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
    source = state.acquire(positions)
    heir = state.acquire(0)
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
    return [_copy_row("target", name, positions, ms, size) for name, ms, size in rows]


def draft_copies(plan: ContextPlan, positions: int, device: torch.device) -> list[Row]:
    """Capture and restore of one sequence's draft half, on the device and from host memory."""
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
    return [_copy_row("draft", name, positions, ms, size) for name, ms in rows]


def _copy_row(half: str, name: str, positions: int, ms: float, size: int) -> Row:
    return {
        "row": f"{half}: {name}",
        "positions": positions,
        "ms": round(ms, 3),
        "mib": round(size / 2**20, 2),
        "gb_per_s": round(size / ms / 1e6, 2),
    }


def second_turn(device: str) -> list[Row]:
    """Time to first token of a second turn, with what is kept of the first and without."""
    document = "\n".join(f"def step_{i}(x):\n    return x + {i * i}\n" for i in range(180))
    rows = []
    for slots in (8, 0):
        flags = (f"--device={device}", f"--checkpoint-slots={slots}", "--max-context=4096")
        with served(*flags) as address, Client(address) as client:
            turns = [{"role": "user", "content": f"Explain:\n{document}"}]
            first = client.generate(messages=turns, max_tokens=32, temperature=0)
            turns += [
                {"role": "assistant", "content": first.text},
                {"role": "user", "content": "Now in one line."},
            ]
            second = client.generate(messages=turns, max_tokens=32, temperature=0)
            rows.append(
                {
                    "row": "second turn" + ("" if slots else ", nothing kept"),
                    "prompt_tokens": second.usage.prompt_tokens,
                    "cached_tokens": second.usage.cached_tokens,
                    "first_ttft_ms": round(first.usage.ttft_ns / 1e6, 1),
                    "ttft_ms": round(second.usage.ttft_ns / 1e6, 1),
                }
            )
    return rows


def long_prompt(device: str, chunk: int, chunks: int) -> list[Row]:
    """Largest gap between tokens of seven streams, with and without a long prompt beside them."""
    flags = (
        f"--device={device}",
        f"--prefill-chunk={chunk}",
        f"--max-context={chunk * chunks + 512}",
        "--max-concurrency=8",
    )
    rows: list[Row] = []
    with served(*flags) as address, Client(address) as client:
        generator = torch.Generator().manual_seed(1)
        prompt = torch.randint(300, 3000, (chunk * chunks,), generator=generator).tolist()
        alone = client.generate(prompt_ids=prompt, max_tokens=1, temperature=0)
        chunk_ms = alone.usage.prefill_ns / 1e6 / chunks
        for beside in (False, True):
            gaps = _gaps_of_seven(client, prompt if beside else None)
            rows.append(
                {
                    "row": f"7 streams{f', a prompt of {chunks} chunks beside' if beside else ''}",
                    "largest_gap_ms": round(max(gaps), 1),
                    "median_gap_ms": round(statistics.median(gaps), 1),
                    "chunk_ms_alone": round(chunk_ms, 1),
                }
            )
    return rows


def _gaps_of_seven(client: Client, prompt: Sequence[int] | None) -> list[float]:
    """Milliseconds between the messages of seven streams, while the prompt is prefilled."""
    started, stop = threading.Barrier(8), threading.Event()
    gaps: list[float] = []

    def read(number: int) -> None:
        ids = list(range(300 + number, 340 + number))
        stream = client.stream(prompt_ids=ids, max_tokens=1000, temperature=0, ignore_eos=True)
        next(stream)
        started.wait()
        last = time.perf_counter()
        for _ in stream:
            now = time.perf_counter()
            gaps.append((now - last) * 1e3)
            last = now
            if stop.is_set():
                stream.cancel()
                return

    with ThreadPoolExecutor(7) as pool:
        readers = [pool.submit(read, number) for number in range(7)]
        started.wait()
        if prompt is None:
            time.sleep(3)
        else:
            client.generate(prompt_ids=prompt, max_tokens=1, temperature=0)
        stop.set()
        for reader in readers:
            reader.exception()
    return gaps


def automatic(device: str, tokens: int) -> list[Row]:
    """Tokens a second of rejected drafts: plain, always drafted, and by the automatic policy.

    The three take turns on one server each, so that the machine's moods are shared.
    """
    rows = []
    flags = (f"--device={device}", "--max-concurrency=8", "--max-context=2048")
    with (
        served(*flags) as fixed,
        served(*flags, "--draft-policy=auto") as auto,
        Client(fixed) as fixed_client,
        Client(auto) as auto_client,
    ):
        kinds = {"plain": (fixed_client, 0), "fixed": (fixed_client, 7), "auto": (auto_client, 7)}
        for concurrency in (1, 2, 4, 8):
            rates: dict[str, list[float]] = {kind: [] for kind in kinds}
            for turn in range(5):
                for kind, (client, draft_tokens) in kinds.items():
                    rates[kind].append(_rate(client, draft_tokens, concurrency, tokens, turn))
            medians = {kind: statistics.median(values[1:]) for kind, values in rates.items()}
            rows.append(
                {
                    "row": f"rejected drafts, c={concurrency}",
                    **{f"{kind}_tokens_per_s": round(rate, 1) for kind, rate in medians.items()},
                    "auto_over_plain": round(medians["auto"] / medians["plain"], 3),
                }
            )
    return rows


def _rate(client: Client, draft_tokens: int, concurrency: int, tokens: int, turn: int) -> float:
    """Tokens a second of ``concurrency`` hot samples of noise, which no draft foresees."""
    generator = torch.Generator().manual_seed(turn)
    prompt = torch.randint(300, 3000, (64,), generator=generator).tolist()

    def one(number: int) -> int:
        completion = client.generate(
            prompt_ids=prompt,
            max_tokens=tokens,
            temperature=3.0,
            seed=100 * turn + number,
            ignore_eos=True,
            draft_tokens=draft_tokens,
        )
        return completion.usage.output_tokens

    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        made = sum(pool.map(one, range(concurrency)))
    return made / (time.perf_counter() - started)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.state", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--geometry", type=Path, default=None, help="folder of a target's config")
    parser.add_argument(
        "--positions", type=int, default=3000, help="of the sequence that is copied"
    )
    parser.add_argument("--chunk", type=int, default=56, help="of the long prompt")
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300, help="of a sample of rejected drafts")
    parser.add_argument(
        "--parts",
        nargs="+",
        default=["copies", "turns", "gaps", "auto"],
        choices=("copies", "turns", "gaps", "auto"),
    )
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)
    print(f"{flag_line(['bench.state', *(argv or sys.argv[1:])])}  [{describe()}]")
    device = torch.device(arguments.device)
    rows: list[Row] = []
    if "copies" in arguments.parts:
        folder = arguments.geometry or bundled("target")
        rows += target_copies(folder, arguments.positions, device)
        # a DFlash2 draft: five local layers for a target of 27B, three in the bundled one
        narrow = torch.float32 if device.type == "cpu" else torch.bfloat16
        wide = torch.float32 if device.type == "cpu" else torch.float16
        plan = (
            ContextPlan(2, arguments.positions + 64, 128, 3, 0, 2, 64, narrow, wide)
            if arguments.geometry is None
            else ContextPlan(2, arguments.positions + 64, 2048, 5, 0, 8, 128, narrow, wide)
        )
        rows += draft_copies(plan, arguments.positions, device)
    if "turns" in arguments.parts:
        rows += second_turn(arguments.device)
    if "gaps" in arguments.parts:
        rows += long_prompt(arguments.device, arguments.chunk, arguments.chunks)
    if "auto" in arguments.parts:
        rows += automatic(arguments.device, arguments.tokens)
    for row in rows:
        name, *rest = row.items()
        print(f"{name[1]:<52}" + "  ".join(f"{key} {value}" for key, value in rest))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
