"""Rounds of a pair on a CUDA device, cell by cell, against the time that their bytes take.

A cell is a draft width K (0 for plain steps), the columns of its trees (0 for chains), a number of
sequences c, a context and how many proposals count as accepted. Both services run as their users
run them, as two processes over gRPC (or as two sets of threads in one), with ``bench.rig`` in the
verifier's place; the clients stream from a process of their own. What is measured is written to
``--json`` after each cell, and a cell that is there already is not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from bench.floors import Geometry
from bench.pair import Process, wait_for_link
from bench.rig import Orders
from outrider.client import Client, ClientError
from outrider.tree_nodes import TreeNodes

WARM_ROUNDS = 5  # of a cell, not counted
PLAIN_WIDTH = 7  # K that plain steps run beside where no other is measured
PREFILL_REPEATS = 3  # the first is not counted
CELL_TIMEOUT_S = 120.0
LEAST_ROOM = 2048  # up to here a prompt is as long as the context, beyond it ends there
GEOMETRY = Path(__file__).resolve().parent.parent / "models" / "geometry"


@dataclass(frozen=True)
class Options:
    """What to measure, and how the services run."""

    target: Path
    draft: Path
    load_format: str = "random"
    device: str = "cuda"
    devices: tuple[int, ...] = (0,)  # the verifier's and the drafter's
    dtype: str = "bfloat16"
    processes: str = "two"  # or "one"
    mps: bool = False
    spin_ms: int | None = None  # the drafter's; None: its default
    draft_tokens: tuple[int, ...] = (0, 7, 15)
    tree_nodes: tuple[int, ...] = ()  # columns of trees, beside the chain
    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    contexts: tuple[int, ...] = (1024, 8192, 32768, 131072)
    max_context: int = 0  # 0: the largest context
    simulate_accept: int = 3
    synthetic_context: bool = False
    rounds: int = 40  # of a cell
    prefill: int = 8192  # tokens; 0: not measured
    peer: bool = True
    seconds: float = 3600.0  # no cell starts later
    json: Path | None = None

    @property
    def longest(self) -> int:
        """Positions that a sequence may take."""
        return self.max_context or max(2 * LEAST_ROOM, self.prefill + 256, *self.contexts)

    def trees(self, draft_tokens: int) -> tuple[int, ...]:
        """Columns of trees that are measured at this K.

        Raises:
            SystemExit: one that the services have no graphs for.
        """
        widths = tuple(n for n in self.tree_nodes if n > draft_tokens + 1)
        known = TreeNodes(auto=True).widths(draft_tokens)
        if not set(widths) <= set(known):
            raise SystemExit(f"--tree-nodes: expected of {known} at K={draft_tokens}, got {widths}")
        return widths

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Self:
        """Options from parsed flags."""
        return cls(
            target=Path(arguments.target or GEOMETRY / "qwen3.5-27b"),
            draft=Path(arguments.draft or GEOMETRY / "qwen3.5-27b-dflash2"),
            load_format=arguments.load_format,
            device=arguments.device,
            devices=tuple(arguments.devices),
            processes=arguments.processes,
            mps=arguments.mps,
            spin_ms=arguments.spin_ms,
            draft_tokens=tuple(arguments.draft_tokens or cls.draft_tokens),
            tree_nodes=tuple(n for n in arguments.tree_nodes if n),
            concurrency=tuple(arguments.concurrency or cls.concurrency),
            contexts=tuple(arguments.contexts),
            max_context=arguments.max_context,
            simulate_accept=arguments.simulate_accept,
            synthetic_context=arguments.synthetic_context,
            rounds=arguments.rounds,
            prefill=arguments.prefill,
            peer=not arguments.no_peer,
            seconds=arguments.seconds,
            json=arguments.json,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that only a device run takes."""
    group = parser.add_argument_group("with --device cuda")
    group.add_argument("--draft", default=None, help="folder of the draft (default: 27B DFlash2)")
    group.add_argument("--load-format", choices=("auto", "random"), default="random")
    group.add_argument(
        "--devices", type=int, nargs="+", default=[0], help="the verifier's and the drafter's"
    )
    group.add_argument("--processes", choices=("one", "two"), default="two")
    group.add_argument("--mps", action="store_true", help="run both under CUDA MPS")
    group.add_argument("--spin-ms", type=int, default=None, help="of the drafter; 0: none")
    group.add_argument("--contexts", type=int, nargs="+", default=list(Options.contexts))
    group.add_argument("--max-context", type=int, default=0, help="0: the largest context")
    group.add_argument(
        "--simulate-accept",
        type=int,
        metavar="A",
        default=Options.simulate_accept,
        help="proposals that count as accepted, whatever was (default: %(default)s)",
    )
    group.add_argument(
        "--synthetic-context", action="store_true", help="random state and KV, not a prefill"
    )
    group.add_argument("--rounds", type=int, default=Options.rounds, help="counted rounds a cell")
    group.add_argument(
        "--prefill", type=int, metavar="TOKENS", default=Options.prefill, help="0: none"
    )
    group.add_argument(
        "--seconds", type=float, default=Options.seconds, help="start no cell later than this"
    )


@dataclass(frozen=True)
class Cell:
    """One line of the table."""

    draft_tokens: int  # K; 0 is a plain step
    concurrency: int
    context: int
    accept: int = 0
    tree_nodes: int = 0  # columns; 0 is a chain

    @property
    def columns(self) -> int:
        """Of a round."""
        return self.tree_nodes or self.draft_tokens + 1

    @property
    def proposed(self) -> int:
        """Proposals of a row's round."""
        return self.columns - 1

    def key(self, way: str) -> str:
        """Its name in the JSON; ``way`` says how the services run."""
        tree = f" N={self.tree_nodes}" if self.tree_nodes else ""
        size = f"c={self.concurrency} n={self.context}"
        return f"{way} K={self.draft_tokens}{tree} {size} A={self.accept}"


# --- services


@dataclass(frozen=True)
class Pair:
    """Both services, running."""

    address: str
    records: Path
    start_s: float


@contextlib.contextmanager
def running(options: Options, draft_tokens: int) -> Iterator[Pair]:
    """Starts the services at one K and stops them at the end."""
    on_verifier, on_drafter = (
        f"cuda:{number}" if options.device.startswith("cuda") else options.device
        for number in (options.devices[0], options.devices[-1])
    )
    common = [
        f"--target={options.target}",
        f"--draft={options.draft}",
        f"--load-format={options.load_format}",
        f"--draft-tokens={draft_tokens}",
        f"--max-concurrency={max(options.concurrency)}",
        f"--max-context={options.longest}",
        f"--dtype={options.dtype}",
        # all widths at once: the rig chooses among them, cell by cell
        f"--draft-tree-nodes={'auto' if options.trees(draft_tokens) else 'off'}",
        "--log-level=warning",
    ]
    # a port that is free now: both load at the same time, and the verifier dials until it answers
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    drafter = [f"--listen=127.0.0.1:{port}", f"--device={on_drafter}", *common]
    if options.spin_ms is not None:
        drafter.append(f"--spin-ms={options.spin_ms}")
    verifier = ["--listen=127.0.0.1:0", f"--device={on_verifier}", *common]
    started = time.monotonic()
    processes: list[Process] = []
    environment = {"OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        if options.mps:
            environment |= stack.enter_context(mps())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-bench-"))
        records = Path(folder) / "records.jsonl"
        rig = [sys.executable, "-m", "bench.rig", f"--records={records}"]
        stack.callback(lambda: [process.stop() for process in reversed(processes)])
        if options.processes == "one":
            rig += ["--with-drafter", shlex.join(drafter)]
        else:
            processes.append(Process([sys.executable, "-m", "drafter", *drafter], environment))
            verifier.append(f"--drafter=127.0.0.1:{port}")
        processes.append(Process([*rig, *verifier], environment))
        address = [process.wait_ready() for process in processes][-1]
        wait_for_link(address)
        yield Pair(address, records, time.monotonic() - started)


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """CUDA MPS for the children, where it can be had; the environment that they need for it."""
    with tempfile.TemporaryDirectory(prefix="outrider-mps-") as folder:
        names = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        control = ["nvidia-cuda-mps-control"]
        environment = os.environ | names
        try:
            subprocess.run([*control, "-d"], check=True, env=environment, timeout=20)
        except (OSError, subprocess.SubprocessError) as error:
            raise SystemExit(f"--mps: MPS cannot be started here: {error}") from error
        try:
            yield names
        finally:
            subprocess.run(
                control, input="quit\n", text=True, check=False, env=environment, timeout=20
            )


# --- cells


def cells_of(options: Options) -> dict[int, list[Cell]]:
    """What to measure, by the K that the services run with; plain steps run with the first."""
    drafting = [width for width in options.draft_tokens if width] or [PLAIN_WIDTH]
    planned: dict[int, list[Cell]] = {}
    for width in drafting:
        cells = []
        measured = {width} & set(options.draft_tokens)
        if width == drafting[0]:
            measured |= {0} & set(options.draft_tokens)
        for draft_tokens in sorted(measured):
            for context in options.contexts:
                for concurrency in options.concurrency:
                    accept = min(options.simulate_accept, draft_tokens)
                    cells.append(Cell(draft_tokens, concurrency, context, accept))
                    cells += [
                        Cell(draft_tokens, concurrency, context, accept, columns)
                        for columns in options.trees(width)
                        if draft_tokens
                    ]
                    first = context == min(options.contexts)
                    if draft_tokens > accept and first and concurrency in (1, 8):
                        cells.append(Cell(draft_tokens, concurrency, context, draft_tokens))
        planned[width] = cells
    return planned


def run_cell(client: Client, pair: Pair, cell: Cell, options: Options) -> dict[str, Any]:
    """Streams a cell's requests and summarises the records they left."""
    orders = Orders(
        cell=f"{time.monotonic_ns()}",
        rows=cell.concurrency,
        accept=cell.accept if cell.draft_tokens else None,
        synthetic=options.synthetic_context,
        columns=cell.tree_nodes,
    )
    # the last rounds of a budget propose less, so there is one block more of it than is counted
    budget = 2 + (cell.accept + 1) * (options.rounds + WARM_ROUNDS + 1) + cell.columns
    length = cell.context if cell.context <= LEAST_ROOM else cell.context - budget
    with ThreadPoolExecutor(cell.concurrency) as pool:
        work = [
            pool.submit(_stream, client, orders, index, length, budget, cell.draft_tokens)
            for index in range(cell.concurrency)
        ]
        gaps = [gap for each in work for gap in each.result()]
    rounds = [
        record
        for record in _records(pair.records, orders.cell)
        if len(record["proposed"]) == cell.concurrency
        and all(count == cell.proposed for count in record["proposed"])
    ][WARM_ROUNDS : WARM_ROUNDS + options.rounds + 1]
    if len(rounds) < 3:
        raise RuntimeError(f"{cell}: only {len(rounds)} rounds of {cell.proposed} proposals")
    return summarise(cell, rounds, gaps)


def _stream(
    client: Client, orders: Orders, index: int, length: int, budget: int, draft_tokens: int
) -> list[float]:
    """One request; the seconds between its deltas."""
    source = random.Random(index)
    arrivals = []
    with client.stream(
        prompt_ids=[source.randrange(100) for _ in range(length)],
        request_id=orders.request_id(index),
        max_tokens=budget,
        temperature=0.0,
        ignore_eos=True,
        draft_tokens=draft_tokens,
        timeout=CELL_TIMEOUT_S,
    ) as stream:
        for _ in stream:
            arrivals.append(time.perf_counter())
    return [b - a for a, b in pairwise(arrivals)]


def _records(path: Path, cell: str) -> list[dict[str, Any]]:
    """A cell's rounds, once its last line is there."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found = [line for line in lines if line.get("cell") == cell]
        if found and found[-1].get("ended"):
            return found[:-1]
        time.sleep(0.02)
    raise RuntimeError(f"{path}: the cell left no records")


def summarise(
    cell: Cell, rounds: Sequence[dict[str, Any]], gaps: Sequence[float]
) -> dict[str, Any]:
    """Medians over a cell's rounds, milliseconds.

    A round lasts from its start to the next one's. The device's own times are those of verify with
    accept, of the fold before it, and of the draft; wire is what the verifier waited for a proposal
    beyond the drafter's device time, and host is the rest.
    """
    pairs = list(pairwise(rounds))

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    wall = median([(b["started_ns"] - a["started_ns"]) / 1e6 for a, b in pairs])
    verify = median([r["verify_ns"] / 1e6 for r in rounds])
    draft = median([r["draft_ns"] / 1e6 for r in rounds])
    waited = median([r["waited_ns"] / 1e6 for r in rounds]) if cell.draft_tokens else 0.0
    wire = max(0.0, waited - draft)
    return {
        "rounds": len(pairs),
        "wall_ms": wall,
        "client_ms": median([gap * 1e3 for gap in gaps]) if gaps else 0.0,
        "verify_ms": verify,
        "fold_ms": median([b["previous_commit_ns"] / 1e6 for _, b in pairs]),
        "draft_ms": draft,
        "drafter_host_ms": median([r["service_ns"] / 1e6 for r in rounds]) - draft,
        "wire_ms": wire,
        "host_ms": wall - verify - draft - wire,
        "beyond_device_ms": wall - verify - draft,
        "verbs_ms": {
            name: median([r["verbs_ns"][name] / 1e6 for r in rounds])
            for name in rounds[0]["verbs_ns"]
        },
        "accepted": median([median(r["accepted"]) for r in rounds]),
        "frontier": median([median(r["frontiers"]) for r in rounds]),
        "sent_bytes": median([r["sent_bytes"] for r in rounds]),
        "shared_bytes": median([r["shared_bytes"] for r in rounds]),
        "received_bytes": median([r["received_bytes"] for r in rounds]),
        "tokens_per_second": cell.concurrency * (cell.accept + 1) / wall * 1e3,
    }


def run_prefill(client: Client, pair: Pair, length: int, draft_tokens: int) -> dict[str, Any]:
    """Prefills a whole prompt: seconds until the drafter's context has reached its end."""
    seconds, first_token = [], []
    for repeat in range(PREFILL_REPEATS):
        orders = Orders(cell=f"{time.monotonic_ns()}", rows=1)
        source = random.Random(repeat)
        done = client.generate(
            prompt_ids=[source.randrange(100) for _ in range(length)],
            request_id=orders.request_id(0),
            max_tokens=4 * (draft_tokens + 1),
            temperature=0.0,
            ignore_eos=True,
            draft_tokens=draft_tokens,
            timeout=CELL_TIMEOUT_S,
        )
        records = _records(pair.records, orders.cell)
        drafted = next((r for r in records if any(r["proposed"])), None)
        if drafted is None:
            raise RuntimeError("nothing was proposed")
        # its reply says that the context has caught up
        reached = drafted["started_ns"] + drafted["waited_ns"] - drafted["arrival_ns"]
        if repeat:
            seconds.append(reached / 1e9)
            first_token.append(done.usage.ttft_ns / 1e9)
    reached_s, first_s = statistics.median(seconds), statistics.median(first_token)
    return {
        "tokens": length,
        "context_s": reached_s,
        "first_token_s": first_s,
        "tokens_per_second": length / reached_s,
        "tokens_per_second_to_first_token": length / first_s,
    }


# --- the report


class Report:
    """What was measured so far, kept in a file after every cell."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.values: dict[str, Any] = {"cells": {}}
        if path is not None and path.exists():
            self.values |= json.loads(path.read_text())

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        """Cells by key."""
        cells: dict[str, dict[str, Any]] = self.values["cells"]
        return cells

    def keep(self, **values: Any) -> None:
        """Adds values and writes all of it."""
        self.values |= values
        if self._path is not None:
            written = self._path.with_suffix(".partial")
            written.write_text(json.dumps(self.values, indent=1) + "\n")
            written.replace(self._path)


def way_of(options: Options) -> str:
    """How the services run, in a word or two."""
    words = [f"{options.processes}-process", *(["mps"] if options.mps else [])]
    if options.spin_ms is not None:
        words.append(f"spin-{options.spin_ms}")
    return "+".join([*words, *(["two-gpus"] if len(set(options.devices)) > 1 else [])])


def run(options: Options, about: str) -> None:
    """Measures every cell that is not in the file yet, and prints the table."""
    # services are stopped on the way out, also when this is ended from outside
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        _run(options, about)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: Options, about: str) -> None:
    report = Report(options.json)
    geometry = Geometry(options.target, options.draft, options.load_format, options.dtype)
    way = way_of(options)
    report.keep(about=about)
    print(
        "SIMULATED: accepted counts are given, not earned"
        + (", and contexts are random values" if options.synthetic_context else "")
    )
    stop_at = time.monotonic() + options.seconds
    for width, cells in cells_of(options).items():
        waiting = [cell for cell in cells if "wall_ms" not in report.cells.get(cell.key(way), {})]
        prefill_key = f"prefill {way} {options.prefill}"
        prefill = options.prefill and prefill_key not in report.values
        if not (waiting or prefill) or time.monotonic() > stop_at:
            continue
        with running(options, width) as pair, Client(pair.address) as client:
            facts = [json.loads(line) for line in pair.records.read_text().splitlines()]
            for fact in facts:
                report.keep(**{f"{name} K={width}": value for name, value in fact.items()})
            report.keep(
                read_bytes_per_second=next(
                    f["read_bytes_per_second"] for f in facts if "read_bytes_per_second" in f
                )
            )
            print(f"K={width}: ready after {pair.start_s:.1f} s", flush=True)
            if prefill:
                try:
                    report.keep(**{prefill_key: run_prefill(client, pair, options.prefill, width)})
                except (ClientError, RuntimeError) as error:
                    print(f"{prefill_key}: {error}", flush=True)
            for cell in waiting:
                if time.monotonic() > stop_at:
                    break
                _measure(client, pair, cell, options, report, geometry)
    if options.peer and "peer" not in report.values:
        report.keep(peer=_peer(options))
    show(report, way)


def _measure(
    client: Client,
    pair: Pair,
    cell: Cell,
    options: Options,
    report: Report,
    geometry: Geometry,
) -> None:
    try:
        measured = run_cell(client, pair, cell, options)
    except (ClientError, RuntimeError) as error:
        measured = {"error": str(error)}
    else:
        size = geometry.round_bytes(
            cell.concurrency,
            cell.columns,
            measured["frontier"],
            drafted=cell.draft_tokens > 0,
        )
        floor = size.milliseconds(report.values["read_bytes_per_second"])
        measured |= {
            "floor_ms": floor,
            "ratio": measured["wall_ms"] / floor,
            "bytes": vars(size),
        }
    report.cells[cell.key(way_of(options))] = vars(cell) | measured
    report.keep()
    print(f"{cell.key(way_of(options))}: {measured.get('wall_ms', measured)}", flush=True)


def _peer(options: Options) -> dict[str, Any]:
    """transformers' own step at the same geometry, in a process of its own."""
    if importlib.util.find_spec("transformers") is None:
        return {"error": "transformers is not installed here"}
    command = [sys.executable, "-m", "bench.peer", f"--target={options.target}"]
    command.append(f"--device={options.device}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-500:]}
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


COLUMNS = (
    ("wall", "wall_ms"),
    ("floor", "floor_ms"),
    ("ratio", "ratio"),
    ("verify", "verify_ms"),
    ("fold", "fold_ms"),
    ("draft", "draft_ms"),
    ("wire", "wire_ms"),
    ("host", "host_ms"),
    ("beyond", "beyond_device_ms"),
    ("client", "client_ms"),
)


def show(report: Report, way: str) -> None:
    """Prints the table; milliseconds a round, KB on the wire."""
    values = report.values
    print(f"\n{values['about']}")
    bandwidth = values.get("read_bytes_per_second", 0.0)
    print(f"read bandwidth {bandwidth / 1e12:.2f} TB/s, {way}")
    for name in sorted(values):
        if name.startswith(("plan", "device", "prefill", "peer")):
            print(f"{name}: {json.dumps(values[name])}")
    heads = "".join(f"{head:>8}" for head, _ in COLUMNS)
    print(f"{'K':>3}{'N':>4}{'c':>3}{'context':>8}{'A':>4}{heads}", end="")
    print(f"{'KB out':>8}{'shared':>8}{'KB in':>7}{'tok/s':>8}")
    for key, cell in report.cells.items():
        if not key.startswith(f"{way} "):
            continue
        line = "{draft_tokens:>3}{tree_nodes:>4}{concurrency:>3}{context:>8}{accept:>4}".format(
            **{"tree_nodes": 0} | cell
        )
        if "error" in cell:
            print(f"{line}  {cell['error']}")
            continue
        line += "".join(f"{cell[name]:>8.2f}" for _, name in COLUMNS)
        line += f"{cell['sent_bytes'] / 1e3:>8.1f}{cell['shared_bytes'] / 1e3:>8.1f}"
        line += f"{cell['received_bytes'] / 1e3:>7.1f}"
        print(f"{line}{cell['tokens_per_second']:>8.1f}")
