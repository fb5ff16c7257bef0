"""`outrider`: one module a verb, imported when its verb is asked for.

The base install runs every verb that only talks to a server; a verb that needs more says which
extra to install.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol, cast

from outrider import __version__

FAILED = 1
USAGE = 2
INTERRUPTED = 130
# what every service needs of the extra `serve`, by import name
SERVE_MODULES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "jinja2",
    "grpc_health",
    "grpc_reflection",
    "structlog",
    "rich",
)


class Verb(Protocol):
    """What a verb's module offers."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Entry:
    """One row of the verb table."""

    module: str
    summary: str


VERBS = {
    "serve": Entry("outrider.cli.serve", "run both services and keep them running"),
    "generate": Entry("outrider.cli.generate", "continue a prompt"),
    "chat": Entry("outrider.cli.chat", "talk to the model"),
    "health": Entry("outrider.cli.health", "say whether a server is ready"),
    "info": Entry("outrider.cli.info", "describe a running server"),
    "top": Entry("outrider.cli.top", "watch both services live, from their metrics"),
    "bench": Entry("outrider.cli.bench", "put load on a running server and report"),
    "check": Entry("outrider.cli.check", "test that drafting leaves the output unchanged"),
    "demo": Entry("outrider.cli.demo", "show a completion with and without drafting"),
}


class VerbError(Exception):
    """Ends a verb with a message and an exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code: 0, 1 for a failure, 2 for wrong use.

    A supervising verb ends with the exit code of the service that ended it.
    """
    # gRPC's core writes notes of its own on standard error; a verb says what matters itself
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    words = list(sys.argv[1:] if arguments is None else arguments)
    name, rest = _verb(words)
    try:
        verb = _load(name)
        parser = argparse.ArgumentParser(
            prog=f"outrider {name}",
            description=f"{VERBS[name].summary}.".capitalize(),
            allow_abbrev=False,
        )
        verb.add_arguments(parser)
        return verb.run(parser.parse_args(_spell_out(rest)))
    except VerbError as error:
        return _complain(name, str(error), error.code)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of our output left; the interpreter must not try to flush it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def require_serve_extra(*further: str) -> None:
    """Refuses to go on when a part of the extra `serve` is not installed.

    Args:
        further: Modules of it that only some verbs need.

    Raises:
        VerbError: With the command that installs it.
    """
    missing = [name for name in (*SERVE_MODULES, *further) if not _installed(name)]
    if missing:
        raise VerbError(
            "running the services needs the extra outrider[serve]: pip install '.[serve]' in a "
            f"checkout (missing: {', '.join(missing)})",
            USAGE,
        )


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


def _verb(words: list[str]) -> tuple[str, list[str]]:
    """The verb and its own words; prints help or version and exits where that is asked for."""
    lines = "\n".join(f"  {name:<10}{entry.summary}" for name, entry in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="outrider",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Lossless speculative decoding, as two gRPC services.",
        epilog=f"verbs:\n{lines}\n\n`outrider VERB --help` lists the flags of a verb.",
    )
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="what to do, see below")
    name: str = parser.parse_args(words[:1]).verb
    return name, words[1:]


def _load(name: str) -> Verb:
    try:
        return cast(Verb, importlib.import_module(VERBS[name].module))  # modules fit by structure
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in SERVE_MODULES:
            require_serve_extra()
        raise


def _spell_out(words: Sequence[str]) -> list[str]:
    """`--logprobs` may stand alone: argparse would take a following prompt for its number."""
    spelt = list(words)
    for index, word in enumerate(words):
        if word == "--":
            break
        alone = index + 1 == len(words) or not words[index + 1].isdecimal()
        if word == "--logprobs" and alone:
            spelt[index] = "--logprobs=0"
    return spelt


def _complain(name: str, message: str, code: int) -> int:
    print(f"outrider {name}: {message}", file=sys.stderr, flush=True)
    return code


def wrong_use(message: str) -> NoReturn:
    """Ends the verb because of how it was called."""
    raise VerbError(message, USAGE)
