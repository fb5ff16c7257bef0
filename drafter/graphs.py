"""The drafter's device work: calls of fixed extents over memory that is planned at start.

Two calls make a round. One materializes feature rows of any sequences; the other runs a masked
block, the head and the selector for all rows that ask. On CUDA each is a graph, captured at start
for a few extents; what is fewer is filled up with dead rows, which change nothing and reach no
result. A round is then two or three copies, two launches and one wait. On the CPU the same
functions run as they are, at the extents that are there.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray

from drafter.config import DraftConfig
from drafter.context import PAGE_SIZE, Append, ContextMemory
from drafter.model import DraftBlock, DraftModel, ProposalAsk
from drafter.selector import Proposals, Selector
from kernels.cast_together import cast_together
from kernels.replay import Replays
from kernels.staging import Staging
from outrider.tensors import RowBytes

FEATURE_ROWS = (8, 16, 32, 64, 128)  # of one materialize graph
BATCHES = (1, 2, 4, 8)  # rows of one draft graph
SHORTEST_CONTEXT = 2048  # positions that the smallest page tables reach; the next reach 4x as far
# a verifier may have eight Features messages and a Round on their way
HOST_BUFFERS = 10
_ALIGNMENT = 16  # bytes
_INTEGERS = (
    "slots",
    "coverage_first",
    "frontiers",
    "anchors",
    "counts",
    "lives",
    "seeds",
    "tree_nodes",
    "tree_paths",
    "most_lines",
)
_FRONTIERS, _ANCHORS, _TREE_PATHS = map(_INTEGERS.index, ("frontiers", "anchors", "tree_paths"))
_NO_LIMIT = 1 << 30


class DraftGraphs:
    """The calls of one drafter, made once, and the buffers they read and write.

    Attributes:
        memory: the contexts.
        replays: the stream that everything is launched on, and how much its graphs take.
        capture_seconds: how long the graphs took.
    """

    def __init__(self, config: DraftConfig, model: DraftModel, selector: Selector) -> None:
        """Allocates all buffers and captures all graphs.

        Raises:
            torch.OutOfMemoryError: the device does not hold them.
        """
        self.memory = model.memory
        self.replays = Replays(config.device)
        self._model = model
        self._selector = selector
        self._extents = Extents(config)
        on_cuda = config.device.type == "cuda"
        self._materializing, self._drafting = (
            Span(self.replays if on_cuda else None) for _ in range(2)
        )
        self._buffers = FeatureBuffers(config, self._extents.feature_rows[-1], self.replays)
        self._blocks = {batch: BlockBuffers(config, batch) for batch in self._extents.batches}
        self._materialize_calls: dict[int, Callable[[], None]] = {}
        # by rows, page table entries, and columns of the trees: 0 in calls without any
        self._draft_calls: dict[tuple[int, int, int], Callable[[], Proposals]] = {}
        self._tree_width = config.tree_nodes
        if on_cuda:
            # weights and contexts were filled on another stream
            torch.cuda.synchronize(config.device)
        started = time.monotonic()
        # the largest first: what they need is then there for the smaller ones
        for rows in reversed(self._extents.feature_rows):
            self._materialize_calls[rows] = self._capture_materialize(rows)
        for pages in reversed(self._extents.pages):
            for batch in reversed(self._extents.batches):
                for tree_width in sorted({0, config.tree_nodes}, reverse=True):
                    call = self._capture_draft(batch, pages, tree_width)
                    self._draft_calls[batch, pages, tree_width] = call
        self.capture_seconds = time.monotonic() - started

    @property
    def buffer_bytes(self) -> int:
        """Device memory of what goes between host and device."""
        return self._buffers.byte_count + sum(block.byte_count for block in self._blocks.values())

    @property
    def pinned_bytes(self) -> int:
        """Host memory that the device copies features from."""
        return self._buffers.pinned_byte_count

    def stream(self) -> AbstractContextManager[object]:
        """Makes the stream current in this thread, as any use of this or of contexts needs it."""
        return self.replays.stream()

    def materialize(self, features: Sequence[RowBytes], append: Append) -> Span:
        """Writes the context keys and values of new positions; does not wait for the device.

        Args:
            features: Projected features of each context in ``append``, [rows, bytes of a row] of
                the activation type, in host memory. They may go when this returns.
            append: Where they go.

        Returns:
            How long it took, until the next call of this.
        """
        most, destinations = self._extents.feature_rows[-1], append.destinations
        first = 0
        for pieces in _parts(features, most):
            end = first + sum(map(len, pieces))
            rows = self._extents.feature_rows_for(end - first)
            self._buffers.write(pieces, destinations[:, first:end], rows)
            if first == 0:
                self._materializing.begin()
            self._buffers.send(end - first)
            self._materialize_calls[rows]()
            first = end
        self._materializing.end()
        return self._materializing

    def draft(self, asks: Sequence[ProposalAsk]) -> tuple[Proposals, Span]:
        """Runs one masked block and waits for what it proposes.

        Args:
            asks: One a row, at least one and no more than the drafter's B.

        Returns:
            Proposals in host memory, one a row, until the next call of this; and how long it took.
        """
        batch = self._extents.batch_for(len(asks))
        pages = self._extents.pages_for(max(ask.context.frontier for ask in asks))
        tree_width = self._tree_width if any(ask.tree_nodes for ask in asks) else 0
        block = self._blocks[batch]
        block.write(asks)
        self._drafting.begin()
        proposals = self._draft_calls[batch, pages, tree_width]()
        self._drafting.end()
        self.replays.wait()
        return proposals, self._drafting

    def _capture_materialize(self, rows: int) -> Callable[[], None]:
        features, destinations = self._buffers.features[:rows], self._buffers.destinations[:, :rows]
        return self.replays.capture(lambda: self._model.materialize(features, destinations))

    def _capture_draft(self, batch: int, pages: int, tree_width: int) -> Callable[[], Proposals]:
        buffers = self._blocks[batch]

        def draft() -> Proposals:
            buffers.send()
            block = buffers.block(self.memory, pages, tree_width)
            hidden = self._model.draft_block(block)
            return buffers.keep(self._selector.select(hidden, block))

        return self.replays.capture(draft)


class Extents:
    """Which extents calls have: a few on CUDA, where each is a graph, and each one on the CPU.

    Attributes:
        feature_rows: rows of the materialize calls, ascending.
        batches: rows of the draft calls, ascending.
        pages: page table entries of the draft calls, ascending; 0 alone without full layers.
    """

    def __init__(self, config: DraftConfig) -> None:
        plan = config.context_plan
        most_rows = max(64, config.max_concurrency * config.width)
        self.feature_rows: Sequence[int] = range(1, most_rows + 1)
        self.batches: Sequence[int] = range(1, config.max_concurrency + 1)
        self.pages: Sequence[int] = (plan.pages_per_sequence,)
        if config.device.type == "cuda":
            self.feature_rows = _up_to(most_rows, FEATURE_ROWS)
            self.batches = _up_to(config.max_concurrency, BATCHES)
            reaches = [SHORTEST_CONTEXT << 2 * step for step in range(16)]
            self.pages = _up_to(plan.pages_per_sequence, [p // PAGE_SIZE for p in reaches])

    def feature_rows_for(self, count: int) -> int:
        """Rows of the call that takes ``count`` of them."""
        return self.feature_rows[bisect_left(self.feature_rows, count)]

    def batch_for(self, count: int) -> int:
        """Rows of the block that takes ``count`` asks."""
        return self.batches[bisect_left(self.batches, count)]

    def pages_for(self, frontier: int) -> int:
        """Page table entries of the block whose contexts end at ``frontier`` or before it."""
        if not self.pages[-1]:
            return 0
        return self.pages[bisect_left(self.pages, -(-frontier // PAGE_SIZE))]


class FeatureBuffers:
    """Feature rows and their destinations on the way to the device: one copy a call.

    The device has one buffer, since calls follow one another on the stream. The host has several,
    so that a message is taken while the copies of earlier ones still wait for the device.

    Attributes:
        features: [rows, H] on the device.
        destinations: [3, rows] int64 on the device.
        byte_count: bytes of one buffer.
    """

    def __init__(self, config: DraftConfig, rows: int, replays: Replays) -> None:
        self._replays = replays
        self._row_bytes = config.feature_width * config.profile.activation.itemsize
        self._header = -(-3 * rows * 8 // _ALIGNMENT) * _ALIGNMENT
        self.byte_count = self._header + rows * self._row_bytes
        apart = config.device.type != "cpu"
        self._device = torch.zeros(self.byte_count, dtype=torch.uint8, device=config.device)
        self.destinations = self._device[: 3 * rows * 8].view(torch.int64).view(3, rows)
        # what no message has filled yet is nobody's cell
        self.destinations.fill_(-1)
        self.features = self._device[self._header :].view(config.profile.activation).view(rows, -1)
        self._host = [self._device]
        self._copied: list[torch.cuda.Event] = []
        if apart:
            self._host = [
                torch.zeros(self.byte_count, dtype=torch.uint8, pin_memory=True)
                for _ in range(HOST_BUFFERS)
            ]
            self._copied = [_event() for _ in self._host]
        self._views = [self._views_of(host.numpy(), rows) for host in self._host]
        self._turn = 0

    @property
    def pinned_byte_count(self) -> int:
        """Host memory that the device copies from."""
        return len(self._copied) * self.byte_count

    def write(self, pieces: Sequence[RowBytes], destinations: NDArray[np.int64], rows: int) -> None:
        """Lays rows out in host memory, and dead rows behind them.

        Args:
            pieces: [*, bytes of a row].
            destinations: [3, live rows] int64.
            rows: Live and dead ones.
        """
        self._turn = (self._turn + 1) % len(self._host)
        if self._copied:
            # long since carried out, unless the device is a whole turn of buffers behind
            self._copied[self._turn].synchronize()
        header, lines = self._views[self._turn]
        live = destinations.shape[1]
        header[:, :live] = destinations
        header[:, live:rows] = -1
        first = 0
        for piece in pieces:
            end = first + len(piece)
            lines[first:end] = piece
            first = end

    def send(self, live: int) -> None:
        """Copies what was laid out to the device, in stream order; of the rows, the first."""
        if self._copied:
            used = self._header + live * self._row_bytes
            self._device[:used].copy_(self._host[self._turn][:used], non_blocking=True)
            self._replays.record(self._copied[self._turn])

    def _views_of(
        self, memory: NDArray[np.uint8], rows: int
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        header = memory[: 3 * rows * 8].view(np.int64).reshape(3, rows)
        return header, memory[self._header :].reshape(rows, self._row_bytes)


class BlockBuffers:
    """What one draft call of B rows reads and what it proposes."""

    def __init__(self, config: DraftConfig, batch: int) -> None:
        self._batch = batch
        self._fixed_width, self._width = config.fixed_width, config.width
        self._inputs = Staging(
            config.device,
            {
                "integers": (torch.int64, (len(_INTEGERS), batch)),
                "tokens": (torch.int64, (batch, config.width)),
                "positions": (torch.int64, (batch, config.width)),
                "temperatures": (torch.float32, (batch,)),
            },
        )
        self._integers = self._inputs.host["integers"].numpy()
        self._temperatures = self._inputs.host["temperatures"].numpy()
        self._tokens = self._inputs.host["tokens"].numpy()
        self._tokens[:] = config.draft.mask_token_id
        self._positions = self._inputs.host["positions"].numpy()
        self._columns = np.arange(config.width)
        # by columns of the trees; on the CPU a selector's results are where they are read already
        self._results: dict[int, Staging] = {}
        if config.device.type != "cpu":
            self._results = {
                tree_width: Staging(config.device, self._result_fields(config, tree_width))
                for tree_width in {0, config.tree_nodes}
            }

    @property
    def byte_count(self) -> int:
        """Device memory."""
        results = sum(staging.byte_count for staging in self._results.values())
        return self._inputs.byte_count + results

    def _result_fields(
        self, config: DraftConfig, tree_width: int
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        positions = (self._batch, tree_width - 1 if tree_width else config.draft_tokens)
        fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "tokens": (torch.int32, positions),
            "finite": (torch.bool, (self._batch,)),
        }
        if config.draft.format == "dflash2":
            candidates = (*positions, config.draft.selector_top_k)
            fields["candidate_ids"] = (torch.int32, candidates)
            fields["probabilities"] = (torch.float32, candidates)
        if tree_width:
            fields["parents"] = (torch.int32, positions)
            fields["lines"] = (torch.int32, (self._batch,))
        return fields

    def write(self, asks: Sequence[ProposalAsk]) -> None:
        """Lays out the inputs in host memory; rows beyond the asks are dead."""
        integers, temperatures = self._integers, self._temperatures
        for row, ask in enumerate(asks):
            context = ask.context
            integers[:, row] = (
                context.slot,
                context.coverage_first,
                context.frontier,
                ask.anchor,
                self._fixed_width or ask.live + 1,
                ask.live,
                # the wire's uint64 seeds travel as int64 bit patterns
                ask.seed - (ask.seed >> 63 << 64),
                ask.tree_nodes,
                max(ask.tree_paths, 1),
                _NO_LIMIT if ask.tree_nodes else ask.live,
            )
            temperatures[row] = ask.temperature
        # slot 0, no context, no live column
        integers[:, len(asks) :] = 0
        integers[_TREE_PATHS, len(asks) :] = 1
        temperatures[len(asks) :] = 0.0
        self._tokens[:, 0] = integers[_ANCHORS]
        np.add(integers[_FRONTIERS, :, None], self._columns, out=self._positions)

    def send(self) -> None:
        """Copies the inputs to the device, in stream order."""
        self._inputs.to_device()

    def block(self, memory: ContextMemory, pages: int, tree_width: int = 0) -> DraftBlock:
        """The inputs on the device, with page tables of so many entries and trees so wide."""
        inputs = dict(zip(_INTEGERS, self._inputs.device["integers"], strict=True))
        return DraftBlock(
            rows=memory.rows(inputs["slots"], inputs["coverage_first"], inputs["frontiers"], pages),
            tokens=self._inputs.device["tokens"],
            positions=self._inputs.device["positions"],
            anchors=inputs["anchors"],
            counts=inputs["counts"],
            lives=inputs["lives"],
            temperatures=self._inputs.device["temperatures"],
            seeds=inputs["seeds"],
            tree_nodes=inputs["tree_nodes"],
            tree_paths=inputs["tree_paths"],
            most_lines=inputs["most_lines"],
            width=self._width,
            tree_width=tree_width,
        )

    def keep(self, proposals: Proposals) -> Proposals:
        """Copies proposals to the host, in stream order; returns them as they are there then."""
        if not self._results:
            return proposals
        tree_width = 0 if proposals.parents is None else proposals.parents.shape[1] + 1
        results = self._results[tree_width]
        found = [getattr(proposals, name) for name in results.device]
        cast_together(found, list(results.device.values()))
        results.to_host()
        return Proposals(**results.host)


class Span:
    """How long the device takes from `begin` to `end`: on CUDA, by its own clock."""

    def __init__(self, replays: Replays | None) -> None:
        self._replays = replays  # None: off CUDA
        self._ends: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if replays is not None:
            self._ends = (_event(timed=True), _event(timed=True))
        self._begin_ns = self._end_ns = 0

    def begin(self) -> None:
        """What is launched from here on counts."""
        if self._replays and self._ends:
            self._replays.record(self._ends[0])
        else:
            self._begin_ns = time.monotonic_ns()

    def end(self) -> None:
        """What was launched so far counts."""
        if self._replays and self._ends:
            self._replays.record(self._ends[1])
        else:
            self._end_ns = time.monotonic_ns()

    def elapsed_ns(self) -> int:
        """Nanoseconds, or 0 while the device has not come to the end; never waits for it."""
        if not self._ends:
            return self._end_ns - self._begin_ns
        begin, end = self._ends
        is_there: bool = end.query()  # type: ignore[no-untyped-call]
        return int(begin.elapsed_time(end) * 1e6) if is_there else 0


def _event(*, timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def _up_to(most: int, extents: Sequence[int]) -> list[int]:
    """The extents below ``most``, and ``most``."""
    return [*(extent for extent in extents if extent < most), most]


def _parts(features: Sequence[RowBytes], most: int) -> Iterator[list[RowBytes]]:
    """All rows in order, in lists of at most ``most``."""
    part: list[RowBytes] = []
    room = most
    for rows in features:
        rest = rows
        while len(rest) > room:
            part.append(rest[:room])
            rest = rest[room:]
            yield part
            part, room = [], most
        part.append(rest)
        room -= len(rest)
    yield part
