"""`outrider info`: describes a running server, its pair and its drafter."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from outrider import security, serving
from outrider.cli.generate import dialled, reported_errors

TIMEOUT = 10.0  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server, and how to print it."""
    parser.add_argument(
        "--address",
        default=serving.VERIFIER_LISTEN,
        help="a running verifier (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    security.add_client_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Prints both descriptions."""
    with dialled(serving.dialable(options.address), options) as client, reported_errors():
        described = {
            "model": asdict(client.model_info(timeout=TIMEOUT)),
            "server": asdict(client.server_info(timeout=TIMEOUT)),
        }
    if options.json:
        print(json.dumps(described))
        return 0
    for heading, facts in described.items():
        print(heading)
        for name, value in facts.items():
            print(f"  {name:<20} {_shown(value)}")
    if described["server"]["load_format"] == "random":
        print("the weights are drawn, not read: the output is noise, and only its speed is real")
    return 0


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in sorted(value.items())) or "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value) or "-"
