"""What a verifier is started with."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch

from outrider import metrics, security, serving, tracing
from outrider.checkpoint import bundled
from outrider.security import ClientSecurity, ServerSecurity
from outrider.tree_nodes import LEAST_PATHS, MOST_PATHS

# how long a round waits for the drafter: a GPU draft takes a few milliseconds, a draft on a busy
# CPU takes as long as its neighbours let it
DRAFT_TIMEOUT_MS = {"cuda": 250, "cpu": 5000}
PREFILL_CHUNK = {"cuda": 1024, "cpu": 256}
# positions planned for unless --max-context says otherwise
DEFAULT_CONTEXT = {"cuda": 32768, "cpu": 8192}
MOST_CONCURRENCY = 8
MOST_SECONDS = 86400  # of any timeout
CPU = torch.device("cpu")


class OptionError(ValueError):
    """An option that cannot be served, with what was expected and what was given."""


@dataclass(frozen=True)
class VerifierOptions:
    """Resolved options; defaults that depend on the device are filled in by `resolve`."""

    target: Path
    draft: Path
    drafter: str  # gRPC address
    listen: str = serving.VERIFIER_LISTEN
    device: torch.device = CPU
    dtype: str = "float32"  # numeric profile
    load_format: str = "auto"  # or "random": weights are drawn and the output is noise
    draft_tokens: int | None = None  # K; None takes the draft's block_size - 1
    draft_tree_nodes: str = "off"  # or "auto", or columns by the rows of a round, such as "16,12,0"
    draft_tree_paths: int = MOST_PATHS
    max_concurrency: int = 4  # B
    max_context: int | None = None
    prefill_chunk: int = PREFILL_CHUNK["cpu"]
    max_queue: int = 64
    queue_timeout_ms: int = 30_000
    reader_timeout_ms: int = 30_000
    draft_timeout_ms: int = DRAFT_TIMEOUT_MS["cpu"]
    feature_backlog_mib: int | None = None
    shared_memory: bool = True  # for features, where the drafter is on this host
    draft_policy: str = "fixed"  # or "auto": P = 0 where drafting would not pay
    checkpoint_slots: int = 0  # images on the device
    checkpoint_host_mib: int = 0  # host memory for images
    kv_pages: int | None = None  # of all samples and checkpoints; None: every lane to its end
    causal_local_layers: bool = False
    model_name: str | None = None
    model_defaults: bool = False
    gateway: bool = False
    drain_timeout_s: float = 30.0
    max_prompt_bytes: int | None = None  # None chooses by the context
    metrics_listen: str | None = None
    tracing: str = "off"
    security: ServerSecurity = field(default_factory=ServerSecurity)
    drafter_security: ClientSecurity = field(default_factory=ClientSecurity)

    @classmethod
    def resolve(cls, arguments: argparse.Namespace) -> Self:
        """Options from parsed flags.

        Raises:
            OptionError: an extent outside its range, or a device that is not there.
        """
        device = choose_device(arguments.device)
        chunk = arguments.prefill_chunk or PREFILL_CHUNK[device.type]
        timeout_ms = arguments.draft_timeout_ms
        if timeout_ms is None:
            timeout_ms = DRAFT_TIMEOUT_MS[device.type]
        for name, value, first, last in (
            ("--draft-timeout-ms", timeout_ms, 1, MOST_SECONDS * 1000),
            ("--queue-timeout-ms", arguments.queue_timeout_ms, 0, MOST_SECONDS * 1000),
            ("--reader-timeout-ms", arguments.reader_timeout_ms, 1, MOST_SECONDS * 1000),
            ("--max-prompt-bytes", arguments.max_prompt_bytes or 1, 1, serving.MESSAGE_LIMIT),
            ("--drain-timeout", arguments.drain_timeout, 0, MOST_SECONDS),
            ("--max-concurrency", arguments.max_concurrency, 1, MOST_CONCURRENCY),
            ("--prefill-chunk", chunk, 1, 1 << 16),
            ("--max-queue", arguments.max_queue, 0, 1 << 20),
            ("--checkpoint-slots", arguments.checkpoint_slots, 0, 4096),
            ("--checkpoint-host-mib", arguments.checkpoint_host_mib, 0, 1 << 24),
            ("--draft-tree-paths", arguments.draft_tree_paths, LEAST_PATHS, MOST_PATHS),
            ("--kv-pages", 1 if arguments.kv_pages is None else arguments.kv_pages, 1, 1 << 30),
        ):
            if not first <= value <= last:
                raise OptionError(f"{name}: expected {first} to {last}, got {value}")
        return cls(
            target=Path(arguments.target) if arguments.target else bundled("target"),
            draft=Path(arguments.draft) if arguments.draft else bundled("dflash2"),
            drafter=arguments.drafter,
            listen=arguments.listen,
            device=device,
            load_format=arguments.load_format,
            dtype=arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32"),
            draft_tokens=arguments.draft_tokens,
            draft_tree_nodes=arguments.draft_tree_nodes,
            draft_tree_paths=arguments.draft_tree_paths,
            max_concurrency=arguments.max_concurrency,
            max_context=arguments.max_context,
            prefill_chunk=chunk,
            max_queue=arguments.max_queue,
            queue_timeout_ms=arguments.queue_timeout_ms,
            reader_timeout_ms=arguments.reader_timeout_ms,
            draft_timeout_ms=timeout_ms,
            feature_backlog_mib=arguments.feature_backlog_mib,
            shared_memory=arguments.shared_memory == "auto",
            draft_policy=arguments.draft_policy,
            checkpoint_slots=arguments.checkpoint_slots,
            checkpoint_host_mib=arguments.checkpoint_host_mib,
            kv_pages=arguments.kv_pages,
            causal_local_layers=arguments.causal_local_layers,
            model_name=arguments.model_name,
            model_defaults=arguments.model_defaults,
            gateway=choose_gateway(arguments.gateway),
            drain_timeout_s=arguments.drain_timeout,
            max_prompt_bytes=arguments.max_prompt_bytes,
            metrics_listen=arguments.metrics_listen,
            tracing=arguments.tracing,
            security=ServerSecurity.of(arguments),
            drafter_security=security.drafter_channel_security(arguments),
        )


def choose_device(name: str | None) -> torch.device:
    """The device asked for; CUDA if there is one and none was.

    Raises:
        OptionError: the device is unknown or not there.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"--device: expected cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in DRAFT_TIMEOUT_MS:
        raise OptionError(f"--device: expected cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(f"--device: expected one that is there, got {name!r}")
    return device


def choose_gateway(choice: str) -> bool:
    """Whether the gateway's protocol is served: `auto` takes it when its extra is installed.

    Raises:
        OptionError: it was asked for and is not installed.
    """
    installed = importlib.util.find_spec("smg_grpc_proto") is not None
    if choice == "on" and not installed:
        raise OptionError("--gateway: expected the extra outrider[gateway], got none installed")
    return installed and choice != "off"


def parse(arguments: Sequence[str] | None) -> VerifierOptions:
    """Options from a command line; exits with usage on a wrong flag."""
    parser = argparse.ArgumentParser(
        prog="python -m verifier", description="Serves a target model; drafts come from a drafter."
    )
    parser.add_argument("--listen", default=serving.VERIFIER_LISTEN, help="HOST:PORT or unix:PATH")
    parser.add_argument(
        "--drafter",
        default=serving.DRAFTER_LISTEN,
        help="the drafter's address, or several separated by commas",
    )
    serving.add_pair_arguments(parser)
    serving.add_verifier_arguments(parser)
    metrics.add_metrics_argument(parser)
    tracing.add_tracing_argument(parser)
    security.add_server_arguments(parser)
    security.add_drafter_channel_arguments(parser)
    namespace = parser.parse_args(arguments)
    serving.configure_logs(namespace.log_level)
    return VerifierOptions.resolve(namespace)
