"""`outrider chat`: a conversation; the server renders the checkpoint's chat template."""

from __future__ import annotations

import argparse
import sys

from outrider.cli.generate import (
    add_sampling_arguments,
    add_server_arguments,
    client_for,
    generate_options,
    reported_errors,
)
from outrider.cli.terminal import Printer, explain
from outrider.client import Client, ClientError, GenerateOptions, Message

MAX_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A system message, thinking, and all that `outrider generate` takes but its prompt."""
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether the template opens a thinking block (default: the template's)",
    )
    add_server_arguments(parser)
    add_sampling_arguments(parser, MAX_TOKENS)


def run(options: argparse.Namespace) -> int:
    """Talks until the end of standard input; one turn when that is not a terminal."""
    request = generate_options(options)
    request["enable_thinking"] = options.thinking
    messages: list[Message] = []
    if options.system is not None:
        messages.append({"role": "system", "content": options.system})
    with client_for(options) as client, reported_errors():
        if sys.stdin.isatty():
            _converse(client, messages, request)
        else:
            text = sys.stdin.buffer.read().decode().removesuffix("\n")
            _turn(client, [*messages, {"role": "user", "content": text}], request)
    return 0


def _converse(client: Client, messages: list[Message], request: GenerateOptions) -> None:
    """Turn after turn; Ctrl-C ends a reply, or the conversation when none is being given."""
    print("An empty line is skipped; Ctrl-D ends the conversation.")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line:
            continue
        said: list[Message] = [*messages, {"role": "user", "content": line}]
        try:
            reply = _turn(client, said, request)
        except KeyboardInterrupt:
            print("\n(reply cancelled; not kept)")
            continue
        except ClientError as error:
            print(f"outrider chat: {explain(error)[0]}", file=sys.stderr)
            continue
        messages[:] = [*said, {"role": "assistant", "content": reply}]


def _turn(client: Client, messages: list[Message], request: GenerateOptions) -> str:
    """One reply, printed as it comes; leaving early cancels it."""
    printer = Printer()
    request["messages"] = messages
    with client.stream(**request) as stream:
        for delta in stream:
            printer.delta(delta)
        (completion,) = stream.completions()
    printer.end_line()
    return completion.text
