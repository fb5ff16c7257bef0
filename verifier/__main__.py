"""Starts a verifier: `python -m verifier --listen ADDRESS --drafter ADDRESS`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc.aio
import structlog
import torch

import outrider
from kernels.replay import Replays
from outrider import guard, pair, serving
from outrider.checkpoint import Checkpoint
from outrider.metrics import Endpoint
from outrider.pair import DraftFacts, TargetFacts
from outrider.random_weights import open_checkpoint
from outrider.tracing import Tracer
from outrider.tree_nodes import TreeNodes
from outrider.v1 import draft_service_pb2 as wire
from verifier import memory
from verifier.acceptance import SamplingTables
from verifier.blocks import Blocks, most_columns, rounded_up, table_lengths
from verifier.checkpoints import Checkpoints
from verifier.config import TargetConfig
from verifier.draft_policy import DraftPolicy
from verifier.drafter_link import DrafterLink
from verifier.host_images import STAGED_PAGES, HostImages, host_room
from verifier.memory import BlockExtents
from verifier.metrics import VerifierMetrics
from verifier.options import DEFAULT_CONTEXT, OptionError, VerifierOptions, parse
from verifier.projection import Projection, projection_plan
from verifier.rounds import Rounds
from verifier.scheduler import Engine
from verifier.service import Backend, GenerationService, ModelFacts, ServerFacts, build_server
from verifier.state import PAGE_SIZE, TargetState, state_plan
from verifier.target import Target
from verifier.text import Text
from verifier.tree_policy import TreePolicy
from verifier.trees import ListedTrees, Trees, tree_widths
from verifier.weights import load_weights, weight_plan

log = structlog.get_logger("outrider.verifier")

PROFILES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLOSE_GRACE_S = 1.0

R = TypeVar("R")
FurtherServices = Mapping[str, Callable[[grpc.aio.Server, GenerationService], None]]


class Running:
    """A verifier that serves: an asyncio server on a thread of its own, and the engine.

    Attributes:
        address: Where it listens, with the real port.
        engine: The engine, for status and tests.
        metrics: What is counted.
        metrics_address: Where that is shown; None nowhere.
    """

    def __init__(self, options: VerifierOptions, further: FurtherServices) -> None:
        self._options = options
        self._further = further
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server", daemon=True)
        self._thread.start()
        self.metrics = VerifierMetrics()
        self.tracer = Tracer.chosen("outrider-verifier", options.tracing)
        self.metrics_address: str | None = None
        self._endpoint: Endpoint | None = None
        self._service = GenerationService(self.metrics)
        self._stopped = threading.Event()
        self._server: Any = None
        self.engine: Engine | None = None
        try:
            self.address = self._call(self._listen())
        except BaseException:
            self._close_loop()
            raise

    async def _listen(self) -> str:
        if self._options.metrics_listen is not None:
            self._endpoint = Endpoint(self.metrics, self._options.metrics_listen)
            self.metrics_address = self._endpoint.address
        demands = self._options.security
        self._server = build_server(self._service, further=self._further, guard=demands.guard())
        address = serving.bind(self._server, self._options.listen, demands.credentials())
        await self._server.start()
        weakness = demands.weakness(address)
        if weakness is not None:
            log.warning("port_exposed", address=address, weakness=weakness)
        return address

    def open(self, engine: Engine, backend: Backend) -> None:
        """Begins to answer; until then calls get LOADING and health says NOT_SERVING."""
        self.engine = engine
        engine.start()

        async def opened() -> None:
            self._service.open(backend)

        self._call(opened())

    def stop(self, grace: float | None = None) -> None:
        """Drains: no new requests, running ones may finish within ``grace`` seconds. Idempotent."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        grace = self._options.drain_timeout_s if grace is None else grace

        async def close_health() -> None:
            self._service.close()

        self._call(close_health())
        if self.engine is not None:
            self.engine.drain(grace)
            self.engine.stop()
        self._call(self._server.stop(CLOSE_GRACE_S))
        self._close_loop()
        self.tracer.close()

    def drafter_connected(self, connected: bool) -> None:
        """Passes on to health whether the drafter is there; for the engine thread."""
        with contextlib.suppress(RuntimeError):  # the loop closes before the engine's last words
            self._loop.call_soon_threadsafe(self._service.drafter_connected, connected)

    def wait(self, timeout: float | None = None) -> None:
        """Blocks until it has stopped, or for ``timeout`` seconds."""
        self._stopped.wait(timeout)

    def _call(self, work: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _close_loop(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._loop.is_running():
            self._loop.close()


def start(options: VerifierOptions) -> Running:
    """Checks the pair, listens, loads, and serves when it returns.

    Raises:
        CheckpointError: A folder that cannot be used, naming what is wrong with it.
        OptionError: An option out of range, or a plan that does not fit.
        AddressError: The address is taken.
    """
    with (
        open_checkpoint(options.target, options.load_format) as checkpoint,
        open_checkpoint(options.draft, options.load_format) as draft_checkpoint,
    ):
        target = TargetFacts.read(checkpoint)
        config = TargetConfig.read(target)
        draft = DraftFacts.load(
            draft_checkpoint, target, causal_local_layers=options.causal_local_layers
        )
        plan = Plan(options, config, target, draft)
        running = Running(options, further_services(options, checkpoint))
        try:
            engine, backend = plan.build(checkpoint, draft_checkpoint, running)
        except BaseException:
            running.stop(0)
            raise
    running.open(engine, backend)
    log.info(
        "verifier_ready",
        address=running.address,
        metrics_address=running.metrics_address,
        **plan.summary(),
    )
    if options.load_format == "random":
        log.warning("random_weights", effect="the output is noise; for benchmarks only")
    return running


def further_services(options: VerifierOptions, checkpoint: Checkpoint) -> FurtherServices:
    """What is served beside the public service: the gateway's protocol, if it is wanted."""
    if not options.gateway:
        return {}
    from verifier import gateway  # the extra may not be installed

    folder = gateway.TargetFolder.read(checkpoint, model_defaults=options.model_defaults)
    return {serving.GATEWAY_SERVICE: partial(gateway.add_to_server, folder)}


class Plan:
    """What will be allocated and served, decided before anything is.

    Raises:
        CheckpointError: a numeric profile or K that the pair does not have.
        OptionError: context or message size that the pair cannot serve.
    """

    def __init__(
        self,
        options: VerifierOptions,
        config: TargetConfig,
        target: TargetFacts,
        draft: DraftFacts,
    ) -> None:
        self.options, self.config, self.target, self.draft = options, config, target, draft
        pair.activation_dtype(options.dtype)  # refuses every other profile by name
        self.dtype = PROFILES[options.dtype]
        self.draft_tokens = draft.draft_tokens(options.draft_tokens)
        self.width = self.draft_tokens + 1
        lanes = options.max_concurrency
        # graphs are captured for a few numbers of rows; dead ones fill them up
        row_counts = [
            rounded_up(count) if options.device.type == "cuda" else count
            for count in range(1, lanes + 1)
        ]
        self.tree_nodes = TreeNodes.parse(options.draft_tree_nodes)
        self.tree_nodes.expect_served(self.draft_tokens, draft.selector_top_k)
        self.tree_widths = tree_widths(self.tree_nodes, self.draft_tokens, row_counts)
        # records have room for the block with most columns, whatever its rows
        self.block_width = max(self.width, self.tree_nodes.most(self.draft_tokens))
        columns = most_columns(row_counts[-1], self.width, self.tree_widths)
        self.block_rows = -(-columns // self.block_width)
        longest = min(config.max_position, DEFAULT_CONTEXT[options.device.type])
        self.max_context = longest if options.max_context is None else options.max_context
        if not self.width <= self.max_context <= config.max_position:
            raise OptionError(
                f"--max-context: expected {self.width} to {config.max_position}, "
                f"got {self.max_context}"
            )
        self.row_bytes = draft.hidden_size * self.dtype.itemsize
        round_bytes = options.max_concurrency * self.width * self.row_bytes
        if round_bytes >= serving.MESSAGE_LIMIT:
            raise OptionError(
                f"a round's features: expected less than the message limit of "
                f"{serving.MESSAGE_LIMIT} bytes, got {options.max_concurrency} x {self.width} x "
                f"{self.row_bytes} = {round_bytes}"
            )
        extents = self.block_extents(row_counts, columns)
        chunk = options.prefill_chunk
        staged, on_host = self.host_image_sizes()
        self.sizes = [
            *weight_plan(target, config, self.dtype),
            *projection_plan(draft, self.dtype),
            *self.state_sizes(options.kv_pages, options.checkpoint_slots),
            *memory.sampling_plan(lanes, config.vocab_size),
            *memory.block_plan(config, extents, self.dtype),
            *staged,
            *memory.reserves(config, extents, chunk, self.dtype),
        ]
        self.host_sizes = [*memory.pinned_plan(extents, chunk, self.dtype), *on_host]
        self.expect_memory()

    def expect_memory(self) -> None:
        """Checks both plans against what there is.

        Raises:
            OptionError: with every term of the sum that does not fit.
        """
        device = str(self.options.device)
        on_host = serving.memory_bytes("cpu")
        plans = [("memory", self.sizes, serving.memory_bytes(device))]
        if self.options.device.type == "cpu":
            plans = [("memory", [*self.sizes, *self.host_sizes], on_host)]
        else:
            plans.append(("host memory", self.host_sizes, on_host))
        for where, sizes, available in plans:
            refused = memory.refusal(sizes, available, where)
            if refused is not None:
                raise OptionError(refused)

    def block_extents(self, row_counts: Sequence[int], columns: int) -> BlockExtents:
        """How large blocks are, and how many graphs are captured for them."""
        kinds = [
            (rows, width)
            for rows in sorted(set(row_counts))
            for width in sorted({1, self.width, *self.tree_widths.get(rows, ())})
        ]
        # verify for every length of page table, accept and commit
        lengths = len(table_lengths(-(-self.max_context // PAGE_SIZE), PAGE_SIZE))
        on_cuda = self.options.device.type == "cuda"
        return BlockExtents(
            columns=columns,
            kinds=kinds,
            support=max(1, self.draft.selector_top_k),
            feature_width=len(self.draft.target_layer_ids) * self.config.hidden_size,
            row_width=self.draft.hidden_size,
            graph_count=len(kinds) * (lengths + 2) if on_cuda else 0,
        )

    def state_sizes(self, page_count: int | None, image_count: int) -> memory.Sizes:
        """What the target's state takes with so many pages and images."""
        return state_plan(
            self.config,
            lanes=self.options.max_concurrency,
            max_context=self.max_context,
            width=self.block_width,
            dtype=self.dtype,
            block_rows=self.block_rows,
            page_size=PAGE_SIZE,
            page_count=page_count,
            image_count=image_count,
        )

    def host_image_sizes(self) -> tuple[memory.Sizes, memory.Sizes]:
        """What checkpoints and paused samples in host memory take: on the device, on the host."""
        options = self.options

        def taken(pages: int, images: int) -> int:
            return sum(size for _, size in self.state_sizes(pages, images))

        image_bytes, page_bytes = (taken(*more) - taken(0, 0) for more in ((0, 1), (1, 0)))
        images, pages = host_room(
            options.checkpoint_host_mib << 20,
            image_bytes=image_bytes,
            page_bytes=page_bytes,
            device_images=options.checkpoint_slots,
            longest_pages=-(-self.max_context // PAGE_SIZE),
        )
        return [("staged pages", min(STAGED_PAGES, pages) * page_bytes)], [
            ("host: checkpoints and paused samples", images * image_bytes + pages * page_bytes),
            ("host: feature rows at most", self.feature_row_bytes(images)),
        ]

    def build(
        self, checkpoint: Checkpoint, draft_checkpoint: Checkpoint, running: Running
    ) -> tuple[Engine, Backend]:
        """Loads weights, allocates state and wires the engine."""
        options = self.options
        try:
            blocks = self.load_blocks(checkpoint, draft_checkpoint)
        except torch.OutOfMemoryError as error:
            raise OptionError(
                f"memory: expected room for {memory.arithmetic(self.sizes)} bytes, and others took "
                f"of it meanwhile or the reserves were too small: {error}"
            ) from error
        text = Text.load(checkpoint)
        link = DrafterLink(
            options.drafter,
            self.hello(),
            row_bytes=self.row_bytes,
            window=self.draft.window,
            all_local=self.draft.full_layer_count == 0,
            timeout_ns=options.draft_timeout_ms * 1_000_000,
            backlog_rows=self.backlog_rows(),
            share_memory=options.shared_memory,
            on_event=lambda: engine.wake(),  # noqa: PLW0108 - the engine comes later
            on_connection=running.drafter_connected,
            credentials=options.drafter_security.credentials("--drafter-tls"),
            metadata=guard.bearer(options.drafter_security.token()),
        )
        rounds = Rounds(
            blocks,
            link,
            draft_tokens=self.draft_tokens,
            max_context=self.max_context,
            chunk=options.prefill_chunk,
            policy=DraftPolicy() if options.draft_policy == "auto" else None,
            trees=self.trees(),
            tree_paths=options.draft_tree_paths,
            metrics=running.metrics,
        )
        state = blocks.target.state
        host = HostImages(state, options.checkpoint_host_mib << 20)
        engine = Engine(
            rounds,
            state,
            Checkpoints(state, host, link),
            host,
            text,
            lanes=options.max_concurrency,
            max_queue=options.max_queue,
            queue_timeout_ns=options.queue_timeout_ms * 1_000_000,
            tracer=running.tracer,
        )
        backend = Backend.of(
            engine,
            text,
            self.model_facts(),
            ServerFacts(
                options.max_concurrency,
                options.max_queue,
                str(options.device),
                options.dtype,
                options.load_format,
            ),
            generation_config=checkpoint.generation_config if options.model_defaults else None,
            max_prompt_bytes=options.max_prompt_bytes,
            reader_timeout_ms=options.reader_timeout_ms,
            keeps_prefixes=options.checkpoint_slots > 0,
        )
        return engine, backend

    def load_blocks(self, checkpoint: Checkpoint, draft_checkpoint: Checkpoint) -> Blocks:
        """Loads weights, allocates all memory and captures the graphs of a round."""
        options, config = self.options, self.config
        with serving.LoadingProgress("target") as progress:
            weights = load_weights(
                self.target,
                config,
                dtype=self.dtype,
                device=options.device,
                progress=progress.update,
            )
        state = TargetState(
            config,
            lanes=options.max_concurrency,
            max_context=self.max_context,
            width=self.block_width,
            dtype=self.dtype,
            device=options.device,
            block_rows=self.block_rows,
            page_count=options.kv_pages,
            image_count=options.checkpoint_slots,
        )
        tables = SamplingTables(
            options.max_concurrency, config.vocab_size, config.public_vocab, options.device
        )
        blocks = Blocks(
            Target(config, weights, state, self.draft.target_layer_ids),
            tables,
            Projection.load(draft_checkpoint, self.draft, dtype=self.dtype, device=options.device),
            Replays(options.device),
            lanes=options.max_concurrency,
            width=self.width,
            support=max(1, self.draft.selector_top_k),
            chunk=options.prefill_chunk,
            tree_widths=self.tree_widths,
        )
        # of what was reserved, what was taken
        self.sizes = list({**dict(self.sizes), **dict(blocks.plan())}.items())
        self.captured = (blocks.replays.graph_count, round(blocks.capture_seconds, 1))
        return blocks

    def trees(self) -> Trees | None:
        """Who chooses how wide the trees of a round are; None where all are chains."""
        if self.tree_nodes.off:
            return None
        if self.tree_nodes.auto:
            return TreePolicy(self.tree_nodes.widths(self.draft_tokens))
        return ListedTrees(self.tree_nodes, self.draft_tokens)

    def hello(self) -> wire.Hello:
        """The first message of every stream to the drafter."""
        return wire.Hello(
            protocol_revision=outrider.PROTOCOL_REVISION,
            verifier_id=uuid.uuid4().bytes,
            max_concurrency=self.options.max_concurrency,
            draft_tokens=self.draft_tokens,
            checkpoint_slots=self.options.checkpoint_slots,
            tree_nodes=self.tree_nodes.most(self.draft_tokens),
            tree_paths=0 if self.tree_nodes.off else self.options.draft_tree_paths,
            geometry=pair.geometry(self.target, self.draft, self.options.dtype),
            max_context=self.max_context,
            max_message_bytes=serving.MESSAGE_LIMIT,
        )

    def feature_row_bytes(self, host_images: int) -> int:
        """Most host memory of feature rows: unsent ones, and S to build a lost context again."""
        rows = self.backlog_rows() + self.draft.window + self.options.prefill_chunk
        samples = self.options.max_concurrency
        # checkpoints hold their last S rows, by reference where they overlap
        kept = (self.options.checkpoint_slots + host_images) * self.draft.window
        return (samples * rows + kept) * self.row_bytes

    def backlog_rows(self) -> int:
        """Unsent feature rows that one sequence may hold: its share of the backlog memory."""
        least = max(self.draft.window, self.width)
        if self.options.feature_backlog_mib is None:
            # a prompt's last two chunks arrive at once, behind rows too few for a Features message
            return max(least, 2 * self.options.prefill_chunk + self.width)
        share = (self.options.feature_backlog_mib << 20) // self.options.max_concurrency
        rows = share // self.row_bytes
        if rows < least:
            raise OptionError(
                f"--feature-backlog-mib: expected room for {least} rows of {self.row_bytes} bytes "
                f"for each of {self.options.max_concurrency} sequences, got {rows}"
            )
        return rows

    def model_facts(self) -> ModelFacts:
        """What GetModelInfo tells."""
        return ModelFacts(
            model_name=self.options.model_name or self.options.target.resolve().name,
            architecture=self.target.architecture,
            vocab_size=self.config.vocab_size,
            public_vocab=self.config.public_vocab,
            max_context=self.max_context,
            eos_token_ids=self.config.stop_ids,
            layer_count=self.config.layer_count,
            hidden_size=self.config.hidden_size,
            draft_format=self.draft.format,
            draft_tokens=self.draft_tokens,
            target_layer_ids=self.draft.target_layer_ids,
        )

    def summary(self) -> dict[str, object]:
        """The plan for the log, sizes in MiB."""
        return {
            "device": str(self.options.device),
            "dtype": self.options.dtype,
            "load_format": self.options.load_format,
            "draft_format": self.draft.format,
            "draft_tokens": self.draft_tokens,
            "draft_tree_nodes": str(self.tree_nodes),
            "max_concurrency": self.options.max_concurrency,
            "max_context": self.max_context,
            "graphs": self.captured[0],
            "capture_seconds": self.captured[1],
            "mib": {what: round(size / 2**20, 1) for what, size in (*self.sizes, *self.host_sizes)},
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal, then drains. Prints `ready ADDRESS` when it serves."""
    termination = serving.Termination()
    serving.keep_freed_memory()
    try:
        options = parse(argv)
        torch.set_num_threads(1 if options.device.type == "cpu" else torch.get_num_threads())
        running = start(options)
    except ValueError as error:
        print(f"verifier: {error}", file=sys.stderr)
        return 2
    serving.spare_what_is_loaded()
    serving.announce_ready(running.address)
    termination.wait()
    running.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
