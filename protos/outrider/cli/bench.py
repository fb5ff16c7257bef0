"""`outrider bench serve`: puts load on a running server, and prints, saves and plots its figures.

Every load is run with drafting and without, unless told otherwise: tokens a second mean little
without tokens a round, and nothing without what the same server does plainly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider import security, serving
from outrider.cli import VerbError, wrong_use
from outrider.cli.chart import Line, Panel, svg
from outrider.cli.generate import dialled, reported_errors, shown
from outrider.cli.load import Answer, Ask, Point, Spread, closed_loop, open_loop, summarise
from outrider.client import AsyncClient, GenerateOptions, ModelInfo, ServerInfo

PROMPTS = (
    "def main():",
    "class Queue:\n    def put(self, item):\n",
    "import json\n\ndef load(path):\n",
    "To be, or not to be",
    "def fibonacci(n):\n    if n < 2:\n",
    "class Node:\n    def __init__(self, value):\n",
    "with open(path) as file:\n    for line in file:\n",
    "O Romeo, Romeo! wherefore art thou",
)
DRAFTING = {"on": (True,), "off": (False,), "both": (False, True)}
COLOURS = {True: "#1b7837", False: "#666666"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server, which loads, which requests, and where the figures go."""
    parser.add_argument("what", choices=("serve",), help="what to measure: a running server")
    parser.add_argument(
        "--address",
        default=serving.VERIFIER_LISTEN,
        help="a running verifier (default: %(default)s)",
    )
    security.add_client_arguments(parser)
    load = parser.add_argument_group("the load")
    load.add_argument(
        "--concurrency",
        type=_integers,
        metavar="C,C",
        default="1,2,4,8,16,32",
        help="closed loops: requests at once (default: %(default)s; 0 for none)",
    )
    load.add_argument(
        "--rates",
        type=_numbers,
        metavar="R,R",
        default=(),
        help="open loops: requests a second, at random moments (default: none)",
    )
    load.add_argument(
        "--duration",
        type=float,
        metavar="SECONDS",
        default=10.0,
        help="how long each load asks; the last answers are waited for (default: %(default)s)",
    )
    load.add_argument(
        "--drafting",
        choices=tuple(DRAFTING),
        default="both",
        help="with drafting, without, or each load both ways (default: %(default)s)",
    )
    request = parser.add_argument_group("the requests")
    request.add_argument(
        "--max-tokens", type=int, metavar="N", default=128, help="output (default: %(default)s)"
    )
    request.add_argument(
        "--prompts", type=Path, metavar="FILE", help="one prompt a line (default: eight short ones)"
    )
    request.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="random token ids instead, N a prompt"
    )
    request.add_argument(
        "--temperature", type=float, metavar="X", default=0.0, help="(default: %(default)s)"
    )
    request.add_argument(
        "--seed", type=int, metavar="X", default=1, help="of arrivals, ids and draws (default: 1)"
    )
    request.add_argument(
        "--stop-at-eos",
        action="store_true",
        help="let outputs end by themselves; otherwise all are --max-tokens long",
    )
    request.add_argument(
        "--timeout", type=float, metavar="SECONDS", default=300.0, help="(default: %(default)s)"
    )
    output = parser.add_argument_group("the figures")
    output.add_argument("--json", type=Path, metavar="FILE", help="save them all as JSON")
    output.add_argument("--plot", type=Path, metavar="FILE", help="draw them as SVG")


def run(options: argparse.Namespace) -> int:
    """Prints a row a load as it ends; fails when some load had no answer at all."""
    loads = _loads(options)
    with reported_errors():
        with dialled(serving.dialable(options.address), options) as client:
            model = client.model_info(timeout=options.timeout)
            server = client.server_info(timeout=options.timeout)
        print(f"{model.model_name}, {_described(model, server)}")
        print("\n".join(_table([])))
        points = asyncio.run(_measure(options, model, loads))
    if options.json is not None:
        options.json.write_text(json.dumps(report(options, model, server, points), indent=1) + "\n")
    if options.plot is not None:
        heading = f"{model.model_name}: {_described(model, server)}"
        options.plot.write_text(plot(heading, points))
    mute = [point for point in points if not point.finished]
    if mute:
        raise VerbError(f"{_label(mute[0])}: expected answers, got errors alone: {mute[0].errors}")
    return 0


@dataclass(frozen=True)
class Load:
    """One load to put on the server."""

    loop: str
    amount: float
    drafting: bool


def _loads(options: argparse.Namespace) -> list[Load]:
    readers = [each for each in options.concurrency if each]
    if options.duration <= 0 or min((*readers, *options.rates), default=1) <= 0:
        wrong_use("expected loads and a --duration above 0")
    loads = [("closed", amount) for amount in readers]
    loads += [("open", amount) for amount in options.rates]
    if not loads:
        wrong_use("expected --concurrency or --rates, got no load")
    return [Load(*load, drafting) for load in loads for drafting in DRAFTING[options.drafting]]


async def _measure(
    options: argparse.Namespace, model: ModelInfo, loads: Sequence[Load]
) -> list[Point]:
    points: list[Point] = []
    address = serving.dialable(options.address)
    credentials, token = shown(options)
    async with AsyncClient(address, credentials=credentials, token=token) as client:
        for load in loads:
            requests = _Requests(options, model, load.drafting)
            # whatever is done once is done before the clock runs
            await closed_loop(client, requests.short, 1, 0.0)
            answers: list[Answer]
            if load.loop == "closed":
                answers = await closed_loop(client, requests, int(load.amount), options.duration)
            else:
                answers = await open_loop(
                    client, requests, load.amount, options.duration, options.seed
                )
            points.append(summarise(load.loop, load.amount, load.drafting, answers))
            print(_table(points)[-1], flush=True)
    return points


class _Requests:
    """The n-th request of every load, always the same one."""

    def __init__(self, options: argparse.Namespace, model: ModelInfo, drafting: bool) -> None:
        self._options = options
        self._drafting = drafting
        self._public_vocab = model.public_vocab
        self._prompts = PROMPTS if options.prompts is None else _lines(options.prompts)

    def __call__(self, number: int) -> Ask:
        options = self._options
        request: GenerateOptions = {
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "seed": options.seed + number,
            "ignore_eos": not options.stop_at_eos,
            "draft_tokens": None if self._drafting else 0,
            "timeout": options.timeout,
        }
        if options.prompt_tokens is None:
            return self._prompts[number % len(self._prompts)], request
        draw = random.Random(options.seed + number)
        request["prompt_ids"] = draw.choices(range(self._public_vocab), k=options.prompt_tokens)
        return None, request

    def short(self, number: int) -> Ask:
        """A request for very little."""
        prompt, request = self(number)
        return prompt, {**request, "max_tokens": 8}


def _lines(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        wrong_use(f"--prompts: expected a text file, got {error}")
    prompts = tuple(line for line in lines if line.strip())
    if not prompts:
        wrong_use(f"--prompts: expected a prompt a line, got none in {path}")
    return prompts


# --- figures on their way out

_COLUMNS = (
    ("load", 8),
    ("drafting", 9),
    ("requests/s", 11),
    ("tokens/s", 9),
    ("x plain", 8),
    ("tokens/round", 13),
    ("TTFT ms p50 p90 p99", 25),
    ("inter-token ms p50 p90 p99", 27),
    ("gap ms p50 p99", 18),
    ("errors", 0),
)


def _table(points: Sequence[Point]) -> list[str]:
    """The heading, and a row a point."""
    rows = ["".join(name.ljust(width) for name, width in _COLUMNS).rstrip()]
    for point in points:
        cells = (
            _label(point),
            "on" if point.drafting else "off",
            f"{point.requests_per_second:.2f}",
            f"{point.tokens_per_second:.1f}",
            _figure(speedup(point, points)),
            _figure(point.tokens_per_round),
            _spread(point.ttft, "p50", "p90", "p99"),
            _spread(point.inter_token, "p50", "p90", "p99"),
            _spread(point.gap, "p50", "p99"),
            ", ".join(f"{reason} {n}" for reason, n in sorted(point.errors.items())) or "-",
        )
        padded = zip(cells, _COLUMNS, strict=True)
        rows.append("".join(cell.ljust(width) for cell, (_, width) in padded).rstrip())
    return rows


def speedup(point: Point, points: Sequence[Point]) -> float | None:
    """Tokens a second over those of the same load without drafting, where that has been run."""
    for plain in points:
        same = (plain.loop, plain.load) == (point.loop, point.load)
        if same and point.drafting and not plain.drafting and plain.tokens_per_second:
            return point.tokens_per_second / plain.tokens_per_second
    return None


def _label(point: Point) -> str:
    return f"c={point.load:g}" if point.loop == "closed" else f"{point.load:g}/s"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _spread(spread: Spread | None, *names: str) -> str:
    if spread is None:
        return "-"
    return " ".join(f"{getattr(spread, name):.1f}".rjust(7) for name in names)


def _described(model: ModelInfo, server: ServerInfo) -> str:
    return (
        f"{server.dtype} on {server.device}, B={server.max_concurrency}, {model.draft_format} "
        f"K={model.draft_tokens}, drafter {server.drafter_state}, version {server.version}"
    )


def report(
    options: argparse.Namespace, model: ModelInfo, server: ServerInfo, points: Sequence[Point]
) -> dict[str, Any]:
    """The object that --json saves; figures in ms, rates a second."""
    aside = ("json", "plot", "tls_cert", "tls_key", "tls_ca", "token_file")
    asked = {name: value for name, value in vars(options).items() if name not in aside}
    return {
        "asked": {n: str(v) if isinstance(v, Path) else v for n, v in asked.items()},
        "model": asdict(model),
        "server": asdict(server),
        "points": [
            asdict(point)
            | {
                "requests_per_second": point.requests_per_second,
                "tokens_per_second": point.tokens_per_second,
            }
            for point in points
        ],
    }


def plot(heading: str, points: Sequence[Point]) -> str:
    """An SVG: a row of panels a kind of loop, drafting on and off in each panel."""
    kinds = (("closed", "requests at once"), ("open", "requests a second"))
    rows = [(x_title, [p for p in points if p.loop == loop]) for loop, x_title in kinds]
    return svg(heading, [_panels(x_title, mine) for x_title, mine in rows if mine])


def _panels(x_title: str, points: Sequence[Point]) -> list[Panel]:
    loads = list(dict.fromkeys(point.load for point in points))
    found = {(point.load, point.drafting): point for point in points}
    ways = [way for way in (True, False) if any(point.drafting == way for point in points)]

    def panel(title: str, name: str, *spreads: str) -> Panel:
        lines = [
            Line(
                f"drafting {'on' if way else 'off'} {spread}".rstrip(),
                [_value(found.get((load, way)), name, spread) for load in loads],
                COLOURS[way],
                dashed=spread == "p99",
            )
            for way in ways
            for spread in spreads or ("",)
        ]
        return Panel(title, x_title, [f"{load:g}" for load in loads], lines)

    return [
        panel("tokens a second", "tokens_per_second"),
        panel("time to first token, ms", "ttft", "p50", "p99"),
        panel("time between tokens, ms", "inter_token", "p50", "p99"),
        panel("tokens a round", "tokens_per_round"),
    ]


def _value(point: Point | None, name: str, spread: str) -> float | None:
    figure = None if point is None else getattr(point, name)
    if spread and figure is not None:
        figure = getattr(figure, spread)
    return None if figure is None else float(figure)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))
