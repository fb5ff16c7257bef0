"""`outrider generate`: continues one prompt, on a running server or on services of its own."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from outrider import security, serving
from outrider.cli import VerbError, serve, wrong_use
from outrider.cli.terminal import Printer, explain, tokens_per_round
from outrider.client import Client, ClientError, Completion, GenerateOptions, TokenLogprobs

MAX_TOKENS = 128
FREE_PORT = "127.0.0.1:0"
# flags of the services that mean something to a client too
FOR_CLIENTS = {"draft_tokens", "log_level", "tls_cert", "tls_key", "tls_ca", "token_file"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """PROMPT, where to run it, sampling, and every flag of `outrider serve`."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text; '-' or none reads stdin")
    parser.add_argument("--prompt-ids", type=token_ids, metavar="ID,ID", help="token ids instead")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    add_server_arguments(parser)
    add_sampling_arguments(parser, MAX_TOKENS)


def run(options: argparse.Namespace) -> int:
    """Streams the completion to standard output."""
    request = generate_options(options)
    prompt = None
    if options.prompt_ids is not None:
        if options.prompt is not None:
            wrong_use("expected PROMPT or --prompt-ids, got both")
        request["prompt_ids"] = options.prompt_ids
    else:
        prompt = options.prompt if options.prompt not in (None, "-") else _standard_input()
    with client_for(options) as client, reported_errors():
        if options.json:
            print(json.dumps(as_json(client.generate(prompt, **request)), allow_nan=False))
        else:
            _stream(client, prompt, request)
    return 0


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """--address, --timeout and every flag of `outrider serve`."""
    parser.add_argument(
        "--address", help="a running verifier; without it both services are started for this call"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="longest wait for a completion"
    )
    serve.add_arguments(parser, FREE_PORT)
    # the services' own news would mix with the text
    parser.set_defaults(log_level="warning")


def add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """How tokens are chosen and when they end; --draft-tokens is a flag of the services too."""
    group = parser.add_argument_group("the completion")
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        default=max_tokens,
        help="most tokens to generate (default: %(default)s)",
    )
    for flag, kind, meaning in (
        ("--temperature", float, "0 is greedy (default: 1)"),
        ("--top-p", float, "mass kept (default: 1)"),
        ("--top-k", int, "candidates kept, 0 for all (default: 0)"),
        ("--min-p", float, "least probability relative to the best (default: 0)"),
        ("--presence-penalty", float, "for tokens generated before (default: 0)"),
        ("--frequency-penalty", float, "for each time a token was generated (default: 0)"),
        ("--repetition-penalty", float, "for tokens of prompt or output (default: 1)"),
        ("--seed", int, "of the random draws (default: the server draws one)"),
    ):
        group.add_argument(flag, type=kind, metavar="X", help=meaning)
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the text; repeatable"
    )
    group.add_argument(
        "--stop-token-ids",
        type=token_ids,
        default=[],
        metavar="ID,ID",
        help="ids that end the text",
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after end-of-text ids")
    group.add_argument(
        "--logprobs",
        type=int,
        nargs="?",
        const=0,
        metavar="N",
        help="report log-probabilities, with N alternatives a token",
    )
    group.add_argument("--no-draft", action="store_true", help="decode plainly, one token a round")
    group.add_argument("--no-trees", action="store_true", help="draft chains alone")


def generate_options(options: argparse.Namespace) -> GenerateOptions:
    """Keywords for the client; what was not given stays absent."""
    return {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "repetition_penalty": options.repetition_penalty,
        "seed": options.seed,
        "max_tokens": options.max_tokens,
        "stop": options.stop,
        "stop_token_ids": options.stop_token_ids,
        "ignore_eos": options.ignore_eos or None,
        "logprobs": options.logprobs,
        "draft_tokens": 0 if options.no_draft else options.draft_tokens,
        "draft_trees": False if options.no_trees else None,
        "timeout": options.timeout,
    }


@contextmanager
def client_for(options: argparse.Namespace) -> Iterator[Client]:
    """A client of --address, or of services that live as long as the `with` block."""
    if options.address is not None:
        _note_unused(options)
        with dialled(options.address, options) as client:
            yield client
        return
    if (options.tls_cert, options.tls_key, options.tls_ca, options.token_file) != (None,) * 4:
        wrong_use("TLS and tokens: expected --address beside them, for a server that asks for them")
    services = argparse.Namespace(**vars(options))
    if options.draft_tokens == 0:
        services.draft_tokens = None  # a matter of the request alone: services have K >= 1
    with serve.running(services) as address, Client(serving.dialable(address)) as client:
        yield client


def dialled(address: str, options: argparse.Namespace) -> Client:
    """A client of a running server, with the TLS files and the token that the flags name."""
    credentials, token = shown(options)
    return Client(address, credentials=credentials, token=token)


def shown(options: argparse.Namespace) -> tuple[grpc.ChannelCredentials | None, str | None]:
    """Credentials and token for a server, from the flags that name their files."""
    try:
        own = security.client_security(options)
        return own.credentials(), own.token()
    except security.SecurityError as error:
        wrong_use(str(error))


@contextmanager
def reported_errors() -> Iterator[None]:
    """Turns what a client raises into the end of the verb."""
    try:
        yield
    except ClientError as error:
        raise VerbError(*explain(error)) from None
    except ValueError as error:
        wrong_use(str(error))


def as_json(completion: Completion) -> dict[str, Any]:
    """The object that --json prints."""
    usage = completion.usage
    return {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
            "rounds": usage.rounds,
            "proposed": usage.proposed,
            "accepted": usage.accepted,
            "accepted_per_position": list(usage.accepted_per_position),
            "tree_rounds": usage.tree_rounds,
            "side_accepted": usage.side_accepted,
            "ttft_ms": usage.ttft_ns / 1e6,
            "draft_ms": usage.draft_ns / 1e6,
            "verify_ms": usage.verify_ns / 1e6,
            "wire_ms": usage.wire_ns / 1e6,
        },
        "rounds": [
            {
                "frontier": each.frontier,
                "proposed": list(each.proposed),
                "accepted": each.accepted,
                "committed": each.committed,
                **(
                    {"parents": list(each.parents), "columns": list(each.columns)}
                    if each.parents
                    else {}
                ),
            }
            for each in completion.rounds
        ],
        "logprobs": [_logprobs(each) for each in completion.logprobs] or None,
    }


def _logprobs(each: TokenLogprobs) -> dict[str, Any]:
    return {
        "logprob": _finite(each.logprob),
        "top_token_ids": list(each.top_token_ids),
        "top_logprobs": [_finite(value) for value in each.top_logprobs],
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity; null stands for a token the law excludes."""
    return value if math.isfinite(value) else None


def _stream(client: Client, prompt: str | None, request: GenerateOptions) -> None:
    printer = Printer()
    with client.stream(prompt, **request) as stream:
        for delta in stream:
            printer.delta(delta)
        (completion,) = stream.completions()
    printer.end_line()
    for index, each in enumerate(completion.logprobs):
        print(f"{completion.token_ids[index]}\t{each.logprob:.6f}", end="")
        for token_id, logprob in zip(each.top_token_ids, each.top_logprobs, strict=True):
            print(f"\t{token_id}:{logprob:.6f}", end="")
        print()
    if sys.stderr.isatty():
        usage = completion.usage
        print(
            f"[{usage.output_tokens} tokens, {usage.rounds} rounds, "
            f"{tokens_per_round(usage):.2f} tokens a round, {completion.finish_reason}]",
            file=sys.stderr,
        )


def token_ids(text: str) -> list[int]:
    """Ids separated by commas or blanks."""
    return [int(word) for word in text.replace(",", " ").split()]


def _standard_input() -> str:
    """The prompt from standard input, less one final line break."""
    if sys.stdin is None or sys.stdin.isatty():
        wrong_use("expected PROMPT, --prompt-ids or text on standard input")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        wrong_use(f"standard input: expected UTF-8, got {error}")


def _note_unused(options: argparse.Namespace) -> None:
    """Says which flags only matter to services of one's own."""
    parser = argparse.ArgumentParser(add_help=False)
    serve.add_arguments(parser, FREE_PORT)
    unused = [
        action.option_strings[0]
        for action in parser._actions
        if action.dest not in FOR_CLIENTS and getattr(options, action.dest) != action.default
    ]
    if unused:
        print(
            f"outrider: --address is given, so {', '.join(unused)} has no effect",
            file=sys.stderr,
        )
