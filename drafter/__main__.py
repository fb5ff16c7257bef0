"""Starts a drafter: `python -m drafter --listen ADDRESS`."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path

import grpc
import structlog
import torch

from drafter.config import SPIN_MS, DraftConfig, DrafterOptions, choose_device
from drafter.context import ContextMemory
from drafter.graphs import DraftGraphs
from drafter.metrics import DrafterMetrics
from drafter.model import DraftModel
from drafter.selector import selector_for
from drafter.service import DraftService, Engine
from drafter.weights import load_weights, weight_plan
from outrider import metrics, pair, security, serving, tracing
from outrider.checkpoint import Checkpoint, bundled
from outrider.metrics import Endpoint
from outrider.random_weights import open_checkpoint
from outrider.tracing import Tracer

log = structlog.get_logger("outrider.drafter")

# a stream holds a thread for its life, and so does a health watch; the rest is for short calls
CALL_THREADS = 64
DRAIN_SECONDS = 5.0


class Running:
    """A drafter that serves.

    Attributes:
        address: Where it listens, with the real port.
        telemetry: What it tells of itself.
    """

    def __init__(
        self,
        address: str,
        server: grpc.Server,
        service: DraftService,
        health: serving.Health,
        telemetry: Telemetry,
    ) -> None:
        self.address = address
        self.telemetry = telemetry
        self._server = server
        self._service = service
        self._health = health
        self._stopped = threading.Event()

    def stop(self, grace: float | None = None) -> None:
        """Drains: finishes queued rounds, ends every stream with DRAINING, closes the port.

        Args:
            grace: Seconds that calls may take to end before they are cancelled. Idempotent.
        """
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._health.close()
        self._service.drain()
        self._server.stop(DRAIN_SECONDS if grace is None else grace).wait()
        self._service.close()
        self.telemetry.close()

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until the server has stopped, or for `timeout` seconds."""
        self._server.wait_for_termination(timeout)


class Telemetry:
    """Metrics, the port that shows them, and spans.

    Raises:
        MetricsError: The port for metrics is taken.
        TracingError: Spans were asked for and cannot be made.
    """

    def __init__(self, options: DrafterOptions) -> None:
        self.metrics = DrafterMetrics()
        self.tracer = Tracer.chosen("outrider-drafter", options.tracing)
        listen = options.metrics_listen
        self._endpoint = None if listen is None else Endpoint(self.metrics, listen)
        self.address = None if self._endpoint is None else self._endpoint.address

    def close(self) -> None:
        """Closes the port and sends what spans are left."""
        if self._endpoint is not None:
            self._endpoint.close()
        self.tracer.close()


def start(options: DrafterOptions) -> Running:
    """Checks the pair, listens, loads, and serves when it returns.

    While weights load, health says NOT_SERVING and calls are refused with LOADING.

    Raises:
        CheckpointError: A folder that cannot be used, naming what is wrong with it.
        ValueError: An option out of range, or a plan that does not fit the device.
        AddressError: The address is taken.
    """
    target_folder = options.target or bundled("target")
    draft_folder = options.draft or bundled("dflash2")
    with (
        open_checkpoint(target_folder, options.load_format) as target,
        open_checkpoint(draft_folder, options.load_format) as draft,
    ):
        config = DraftConfig.read(options, target, draft)
        server = grpc.server(
            futures.ThreadPoolExecutor(CALL_THREADS, thread_name_prefix="draft-call"),
            options=serving.SERVER_OPTIONS,
            interceptors=(options.security.guard().sync(),),
        )
        service = DraftService()
        service.register(server)
        health = serving.Health(server, serving.DRAFT_SERVICE)
        serving.add_reflection(server, serving.DRAFT_SERVICE)
        address = serving.bind(server, options.listen, options.security.credentials())
        server.start()
        weakness = options.security.weakness(address)
        if weakness is not None:
            log.warning("port_exposed", address=address, weakness=weakness)
        telemetry: Telemetry | None = None
        try:
            telemetry = Telemetry(options)
            engine, plan = _load(config, options, target, draft, telemetry)
            service.attach(engine)
        except BaseException:
            health.close()
            server.stop(0).wait()
            if telemetry is not None:
                telemetry.close()
            raise
    health.set_ready(True)
    log.info(
        "drafter_ready",
        address=address,
        metrics_address=telemetry.address,
        format=config.draft.format,
        draft_tokens=config.draft_tokens,
        tree_nodes=config.tree_nodes,
        max_concurrency=config.max_concurrency,
        max_context=config.max_context,
        device=str(config.device),
        dtype=config.dtype,
        layer_causal=list(config.draft.layer_causal),
        load_format=options.load_format,
        **plan,
    )
    if options.load_format == "random":
        log.warning("random_weights", effect="proposals are noise; for benchmarks only")
    return Running(address, server, service, health, telemetry)


def _load(
    config: DraftConfig,
    options: DrafterOptions,
    target: Checkpoint,
    draft: Checkpoint,
    telemetry: Telemetry,
) -> tuple[Engine, dict[str, object]]:
    """Allocates everything; the plan for the log has sizes in MiB."""
    if config.device.type == "cuda" and config.device.index is not None:
        # pinned memory belongs to the device that is current
        torch.cuda.set_device(config.device)
    contexts = config.context_plan
    sizes = [
        *weight_plan(config),
        ("rings", contexts.ring_bytes),
        ("pages", contexts.page_bytes),
    ]
    available = serving.memory_bytes(str(config.device))
    if sum(size for _, size in sizes) > available:
        raise ValueError(_arithmetic(sizes, available))
    geometry = pair.geometry(config.target, config.draft, config.dtype)
    try:
        with serving.LoadingProgress("drafter") as progress:
            weights = load_weights(config, target, draft, options.proposal_head, progress.update)
        model = DraftModel(config.draft, weights, ContextMemory(contexts, config.device))
        graphs = DraftGraphs(config, model, selector_for(config, weights))
    except torch.OutOfMemoryError as error:
        # how much graphs take is known once they are there
        raise ValueError(f"{_arithmetic(sizes, available)} + buffers and graphs") from error
    sizes += [("buffers", graphs.buffer_bytes), ("graphs", graphs.replays.byte_count)]
    plan: dict[str, object] = {
        "mib": {what: round(size / 2**20, 1) for what, size in sizes},
        "pinned_mib": round(graphs.pinned_bytes / 2**20, 1),
        "graph_count": graphs.replays.graph_count,
        "capture_s": round(graphs.capture_seconds, 2),
    }
    engine = Engine(
        config,
        geometry,
        graphs,
        telemetry.metrics,
        telemetry.tracer,
        spin_ns=options.spin_ms * 1_000_000,
    )
    return engine, plan


def _arithmetic(sizes: Sequence[tuple[str, int]], available: int) -> str:
    """The sum in words, for the message that refuses to start."""
    needed = sum(size for _, size in sizes)
    terms = " + ".join(f"{what} {size}" for what, size in sizes)
    return f"memory: expected at most {available} bytes, got {terms} = {needed}"


def parse(argv: Sequence[str] | None = None) -> tuple[DrafterOptions, str]:
    """The options of a command line, and the log level."""
    parser = argparse.ArgumentParser(prog="python -m drafter", description=__doc__)
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        default=serving.DRAFTER_LISTEN,
        help="HOST:PORT, port 0 for a free one, or unix:PATH (default: %(default)s)",
    )
    serving.add_pair_arguments(parser)
    serving.add_drafter_arguments(parser)
    metrics.add_metrics_argument(parser)
    tracing.add_tracing_argument(parser)
    security.add_server_arguments(parser)
    flags = parser.parse_args(argv)
    device = str(choose_device(flags.device))
    options = DrafterOptions(
        target=Path(flags.target) if flags.target else None,
        draft=Path(flags.draft) if flags.draft else None,
        listen=flags.listen,
        device=device,
        load_format=flags.load_format,
        dtype=flags.dtype or ("float32" if device == "cpu" else "bfloat16"),
        draft_tokens=flags.draft_tokens,
        draft_tree_nodes=flags.draft_tree_nodes,
        max_concurrency=flags.max_concurrency,
        max_context=flags.max_context,
        proposal_head=flags.proposal_head,
        checkpoint_slots=flags.checkpoint_slots,
        checkpoint_host_mib=flags.checkpoint_host_mib,
        checkpoint_grace=flags.checkpoint_grace,
        spin_ms=SPIN_MS[device.partition(":")[0]] if flags.spin_ms is None else flags.spin_ms,
        causal_local_layers=flags.causal_local_layers,
        security=security.ServerSecurity.of(flags),
        metrics_listen=flags.metrics_listen,
        tracing=flags.tracing,
    )
    return options, flags.log_level


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal, then drains. Prints `ready ADDRESS` when it serves."""
    termination = serving.Termination()
    serving.keep_freed_memory()
    try:
        options, log_level = parse(argv)
        serving.configure_logs(log_level)
        if options.device == "cpu":
            # verifier and drafter take turns on one host; idle threads of one would spin on the
            # cores of the other
            torch.set_num_threads(1)
        running = start(options)
    except ValueError as error:
        print(f"drafter: {error}", file=sys.stderr)
        return 2
    serving.spare_what_is_loaded()
    serving.announce_ready(running.address)
    termination.wait()
    running.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
