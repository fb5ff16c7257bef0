"""A round's work on the device: blocks that are verified, accepted and committed in place.

A block is up to B sequences of W columns each, or as wide as its widest tree. What it reads and
writes are buffers that are made at start, one set for every (rows, width) it may have; a round
fills the inputs on the host, sends them in one copy, launches, and reads one small result back. On
CUDA the three steps are captured graphs over those buffers: rows are rounded up to the next
captured count and filled with dead ones, page tables up to the next captured length; neither
changes what a live row computes. On the CPU the same functions run as they are, at the exact number
of rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.replay import Replays
from kernels.speculative_accept import speculative_accept
from kernels.staging import Staging
from kernels.target_distribution import target_distribution
from kernels.tree_accept import tree_accept
from outrider.tensors import RowBytes, row_bytes
from verifier.acceptance import LicensedRow, SamplingTables
from verifier.projection import Projection
from verifier.proposals import POINT_MASSES, Law
from verifier.state import Residency, StateRows
from verifier.target import Forward, Results, Target
from verifier.trees import masks_of

ROW_COUNTS = (1, 2, 4, 8)  # that graphs are captured for
SHORTEST_TABLE = 2048  # positions that the smallest captured page table covers
TABLE_GROWTH = 4  # from one captured length to the next


@dataclass(frozen=True)
class BlockRow:
    """One row of a block, on the host."""

    residency: Residency
    frontier: int  # F: position of column 0
    output_index: int  # tokens generated before column 0
    token_ids: tuple[int, ...]  # a, d_1..d_P
    parents: tuple[int, ...] = ()  # of a tree, what columns 1.. continue; empty for a chain

    @property
    def live(self) -> int:
        """P, or N of a tree."""
        return len(self.token_ids) - 1


@dataclass(frozen=True, eq=False)
class Block:
    """A block on its way from verify to commit; only the newest may go on."""

    rows: tuple[BlockRow, ...]
    buffers: _Buffers
    prefilled: bool  # the prompt's last column: state has moved already


@dataclass
class BlockTimes:
    """Where the last block's time went, ns. On CUDA these are the device's own times."""

    verify_ns: int = 0  # verify and accept
    commit_ns: int = 0  # of the block before


class _Buffers:
    """Everything that blocks of one (rows, width) read and write."""

    def __init__(self, blocks: Blocks, rows: int, width: int) -> None:
        target, device, draft_count = blocks.target, blocks.device, width - 1
        self.row_count, self.width = rows, width
        self.holds_trees = width > blocks.width
        masks = {"masks": (torch.int32, (rows, width))} if self.holds_trees else {}
        columns = {"columns": (torch.int64, (rows, width))} if self.holds_trees else {}
        self.inputs = Staging(
            device,
            {
                "lanes": (torch.int64, (rows,)),
                "slots": (torch.int64, (rows,)),
                "frontiers": (torch.int64, (rows,)),
                "counts": (torch.int64, (rows,)),
                "output_index": (torch.int64, (rows,)),
                "token_ids": (torch.int64, (rows, width)),
                **masks,
            },
        )
        # of the proposals, columns 1..: filled while the target works on them
        self.laws = Staging(
            device,
            {
                "live": (torch.int64, (rows,)),
                "proposals": (torch.int64, (rows, draft_count)),
                "candidate_ids": (torch.int64, (rows, draft_count, blocks.support)),
                "probabilities": (torch.float32, (rows, draft_count, blocks.support)),
            },
        )
        self.kept = Staging(device, {"counts": (torch.int64, (rows,))})
        self.kept_counts = self.kept.host["counts"].numpy()
        self.egress = Staging(
            device,
            {
                "accepted": (torch.int64, (rows,)),
                "finite": (torch.int64, (rows,)),
                "tokens": (torch.int64, (rows, width)),
                **columns,
            },
        )
        staged = self.inputs.host | self.laws.host
        self.host = {name: tensor.numpy() for name, tensor in staged.items()}
        self.results = blocks.results.view(rows, width)
        self.projected = blocks.projected[: rows * width].view(rows, width, -1)
        self.features = blocks.host_features[: rows * width].view(rows, width, -1)
        self.feature_rows = row_bytes(blocks.host_features[: rows * width]).reshape(rows, width, -1)
        self.forward = Forward(
            self.results.logits,
            self.results.hidden,
            self.results.features,
            target.state.record_view(rows, width),
        )
        self.verify: dict[int, Callable[[], None]] = {}  # by pages of a row's table
        self.accept: Callable[[], None] = lambda: blocks.run_accept(self)
        self.commit: Callable[[], None] = lambda: blocks.run_commit(self)

    @property
    def state_rows(self) -> StateRows:
        """Where the rows' state lies, as device tensors."""
        return StateRows(self.inputs.device["lanes"], self.inputs.device["slots"])

    @property
    def masks(self) -> Tensor | None:
        """[B, W] int32 ancestors of every column, on the device; None where all rows are chains."""
        return self.inputs.device.get("masks")

    def accepted_columns(self, row: int, count: int) -> Tensor:
        """Columns 0.. of what a row licensed, the first ``count``, in host memory."""
        columns = self.egress.host.get("columns")
        return torch.arange(count) if columns is None else columns[row, :count]


class Blocks:
    """Verifies, accepts and commits blocks of proposals, and prefills prompts.

    Args:
        target: The target model and its state.
        tables: Sampling parameters and counts by lane.
        projection: What features become before they leave the device.
        replays: The stream and the graphs.
        lanes: B.
        width: W.
        tree_widths: By the rows of a block, the columns it may have beside 1 and W; none: chains.
        support: Candidates of a proposal's law, 1 for point masses.
        chunk: Most columns of a prefill.
    """

    def __init__(
        self,
        target: Target,
        tables: SamplingTables,
        projection: Projection,
        replays: Replays,
        *,
        lanes: int,
        width: int,
        support: int,
        chunk: int,
        tree_widths: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.target = target
        self.tables = tables
        self.projection = projection
        self.replays = replays
        self.support = support
        self.width = width
        self.device = target.device
        self.times = BlockTimes()
        self.capture_seconds = 0.0
        self._on_cuda = self.device.type == "cuda"
        largest = rounded_up(lanes) if self._on_cuda else lanes
        self._tree_widths = dict(tree_widths or {})
        columns = most_columns(largest, width, self._tree_widths)
        self.results = Results.empty(target, columns, 1)
        row_width = projection.width
        self.host_features = torch.empty(
            (columns, row_width), dtype=target.dtype, pin_memory=self._on_cuda
        )
        self.projected = torch.empty_like(self.host_features, device=self.device)
        if self._on_cuda:
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._prefill_rows = [
            _HostRows((chunk, row_width), target.dtype) if self._on_cuda else None for _ in range(2)
        ]
        state = target.state
        self._table_lengths = table_lengths(state.page_tables.shape[1], state.page_size)
        self._buffers: dict[tuple[int, int], _Buffers] = {}
        self._newest: Block | None = None
        self._clock = _Clock(replays if self._on_cuda else None)
        if self._on_cuda:
            self._capture(largest)

    @property
    def runs_beside_host(self) -> bool:
        """Whether `verify` returns while the device still computes."""
        return self._on_cuda

    # ---- start --------------------------------------------------------------------------------

    def plan(self) -> list[tuple[str, int]]:
        """What was allocated here, as (what, bytes)."""
        staged = [
            staging.byte_count
            for buffers in self._buffers.values()
            for staging in (buffers.inputs, buffers.laws, buffers.kept, buffers.egress)
        ]
        return [
            *self.results.plan(),
            ("block: projected features", self.projected.nbytes),
            ("block: inputs and outcomes", sum(staged)),
            ("graphs", self.replays.byte_count),
        ]

    def _capture(self, largest: int) -> None:
        """Captures every graph a round may need, the largest first: the rest fits in its pool."""
        started = time.monotonic()
        for rows in [count for count in reversed(ROW_COUNTS) if count <= largest]:
            for width in reversed(self._widths(rows)):
                buffers = self._of(rows, width)
                for pages in reversed(self._table_lengths):
                    run = self._verify_function(buffers, pages)
                    buffers.verify[pages] = self.replays.capture(run)
                buffers.accept = self.replays.capture(buffers.accept)
                buffers.commit = self.replays.capture(buffers.commit)
        self.replays.wait()
        self.capture_seconds = time.monotonic() - started

    def _widths(self, rows: int) -> list[int]:
        """Columns that a block of so many rows may have, ascending."""
        return sorted({1, self.width, *self._tree_widths.get(rows, ())})

    def _of(self, rows: int, width: int) -> _Buffers:
        buffers = self._buffers.get((rows, width))
        if buffers is None:
            buffers = self._buffers[rows, width] = _Buffers(self, rows, width)
        return buffers

    # ---- what runs on the device: reads and writes buffers, and may be captured ------------------

    def _verify_function(self, buffers: _Buffers, pages: int) -> Callable[[], None]:
        def run() -> None:
            buffers.inputs.to_device()
            inputs = buffers.inputs.device
            self.target.verify(
                buffers.state_rows,
                inputs["token_ids"],
                inputs["frontiers"],
                inputs["counts"],
                ancestors=buffers.masks,
                results=buffers.results,
                page_count=pages,
                features_ready=lambda: self._fetch_features(buffers),
            )
            if self._on_cuda:
                torch.cuda.current_stream().wait_stream(self._side)

        return run

    def _fetch_features(self, buffers: _Buffers) -> None:
        """Projects the features; the host gets them beside the blocks that are still to come."""
        # to a place of its own: what the projection returns may be taken for the next block's work
        # before the copy has read it
        buffers.projected.copy_(self.projection(buffers.results.features))
        if not self._on_cuda:
            buffers.features.copy_(buffers.projected)
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            buffers.features.copy_(buffers.projected, non_blocking=True)

    def run_accept(self, buffers: _Buffers) -> None:
        """Compares the block's proposals with p and reads the outcome back."""
        buffers.laws.to_device()
        inputs, egress = buffers.inputs.device, buffers.egress.device
        live, proposals = buffers.laws.device["live"], buffers.laws.device["proposals"]
        p = target_distribution(
            buffers.results.logits,
            proposals,
            live + 1,
            self.tables.rows(inputs["lanes"], inputs["output_index"]),
            public_vocab=self.tables.public_vocab,
            ancestors=buffers.masks,
        )
        law = buffers.laws.device["candidate_ids"], buffers.laws.device["probabilities"]
        keys = self.tables.seeds(inputs["lanes"]), inputs["frontiers"]
        if buffers.masks is None:
            tokens, accepted = speculative_accept(p, proposals, live, *law, *keys)
        else:
            tokens, accepted, columns = tree_accept(p, proposals, live, buffers.masks, *law, *keys)
            egress["columns"].copy_(columns)
        egress["tokens"].copy_(tokens)
        egress["accepted"].copy_(accepted)
        # NaN in one live column is NaN in all of the row's
        egress["finite"].copy_(p[:, 0, 0].isfinite())
        buffers.egress.to_host()

    def run_commit(self, buffers: _Buffers) -> None:
        """Adopts the kept columns of every row: state, continuation and counts."""
        buffers.kept.to_device()
        kept = buffers.kept.device["counts"]
        if buffers.holds_trees:
            frontiers, columns = (
                buffers.inputs.device["frontiers"],
                buffers.egress.device["columns"],
            )
            self.target.compact(buffers.state_rows, buffers.forward, frontiers, columns)
        self.target.commit(buffers.state_rows, buffers.forward, kept)
        self._count(buffers)

    def _count(self, buffers: _Buffers) -> None:
        self.tables.count(
            buffers.inputs.device["lanes"],
            buffers.egress.device["tokens"],
            buffers.kept.device["counts"],
        )

    # ---- a round ------------------------------------------------------------------------------

    def verify(self, rows: Sequence[BlockRow]) -> Block:
        """Runs the target causally over every row's [a, d_1..d_P]; its GDN state is not touched."""
        count = rounded_up(len(rows)) if self._on_cuda else len(rows)
        columns = max(row.live for row in rows) + 1
        if any(row.parents for row in rows):
            columns = max(columns, self.width + 1)  # narrower ones have no masks
        width = next(width for width in self._widths(count) if width >= columns)
        buffers = self._of(count, width)
        self._clock.mark("verify")
        self._fill(buffers, rows)
        self._verifying(buffers, rows)()
        return self._begin(Block(tuple(rows), buffers, prefilled=False))

    def _verifying(self, buffers: _Buffers, rows: Sequence[BlockRow]) -> Callable[[], None]:
        """The captured verify whose page tables are long enough."""
        if not self._on_cuda:
            return self._verify_function(buffers, self.target.state.page_tables.shape[1])
        end = max(row.frontier + len(row.token_ids) for row in rows)
        needed = -(-end // self.target.state.page_size)
        return buffers.verify[next(pages for pages in self._table_lengths if pages >= needed)]

    def _fill(self, buffers: _Buffers, rows: Sequence[BlockRow]) -> None:
        """Writes the rows into the inputs on the host, dead rows after them."""
        host, count = buffers.host, len(rows)
        # a dead row copies the first one but for its count, so that whatever it reads exists and,
        # in a mixture, it asks for no other experts
        filled = [*rows, *[rows[0]] * (buffers.row_count - count)]
        host["lanes"][:] = [row.residency.lane for row in filled]
        host["slots"][:] = [row.residency.state_slot for row in filled]
        host["frontiers"][:] = [row.frontier for row in filled]
        host["output_index"][:] = [row.output_index for row in filled]
        host["counts"][:] = [len(row.token_ids) for row in filled]
        host["counts"][count:] = 0
        width = buffers.width
        # dead columns carry the anchor: any valid id will do, they have no effect
        host["token_ids"][:] = [
            (*row.token_ids, *(row.token_ids[0],) * (width - len(row.token_ids))) for row in filled
        ]
        if buffers.holds_trees:
            host["masks"][:] = [masks_of(row.parents or range(row.live), width) for row in filled]

    def _fill_laws(
        self, buffers: _Buffers, rows: Sequence[BlockRow], laws: Sequence[Law | None]
    ) -> None:
        """Writes what proposals were drawn from, on the host; a row without a law accepts none.

        A point mass is a law with one candidate of probability 1, so that laws have one form.
        """
        host = buffers.host
        # nor does a dead row: in a tree, what its copies of proposals move is another row's
        host["live"][:] = 0
        if buffers.width == 1:
            return
        host["proposals"][:] = host["token_ids"][:, 1:]
        host["candidate_ids"][:] = 0
        host["probabilities"][:] = 0.0
        for index, (row, law) in enumerate(zip(rows, laws, strict=True)):
            if law is None:
                continue
            live = host["live"][index] = row.live
            if law.candidate_ids is None or law.probabilities is None:
                host["candidate_ids"][index, :live, 0] = row.token_ids[1:]
                host["probabilities"][index, :live, 0] = 1.0
            else:
                support = law.candidate_ids.shape[1]
                host["candidate_ids"][index, :live, :support] = law.candidate_ids.numpy()
                host["probabilities"][index, :live, :support] = law.probabilities.numpy()

    def accept(
        self,
        block: Block,
        logprobs: Sequence[int | None],
        laws: Sequence[Law | None] | None = None,
    ) -> list[LicensedRow]:
        """What the target licenses for each row; the round's one wait for the device.

        Args:
            block: The newest one.
            logprobs: For each row, how many alternatives it wants; None for no logprobs.
            laws: For each row, what its proposals were drawn from; None has none of them accepted.
                Without any, every proposal is a point mass.
        """
        self._expect_newest(block)
        buffers = block.buffers
        self._fill_laws(buffers, block.rows, laws or [POINT_MASSES] * len(block.rows))
        buffers.accept()
        self._clock.mark("accepted")
        self._clock.wait("accepted")
        self.times = BlockTimes(
            verify_ns=self._clock.between("verify", "accepted"),
            commit_ns=self._clock.between("commit", "committed"),
        )
        egress = buffers.egress.host
        accepted, finite = egress["accepted"].tolist(), egress["finite"].tolist()
        tokens = egress["tokens"].tolist()
        licensed = []
        for index in range(len(block.rows)):
            token_ids = tuple(tokens[index][: accepted[index] + 1]) if finite[index] else ()
            wanted, logits = logprobs[index], buffers.results.logits[index]
            columns: tuple[int, ...] = ()
            if block.rows[index].parents and token_ids:
                branch = buffers.accepted_columns(index, len(token_ids))
                columns = tuple(branch[1:].tolist())
                logits = logits if wanted is None else logits[branch.to(self.device)]
            reported = (
                self.tables.logprobs(logits, token_ids, wanted)
                if wanted is not None and token_ids
                else ()
            )
            licensed.append(
                LicensedRow(token_ids, accepted[index], reported, bool(finite[index]), columns)
            )
        return licensed

    def commit(self, block: Block, kept: Sequence[int]) -> None:
        """Adopts the first ``kept`` columns of every row, all rows at once; 0 leaves a row alone.

        KV needs nothing: it is already in place.
        """
        self._expect_newest(block)
        self._newest = None
        buffers = block.buffers
        counts = buffers.kept_counts
        counts[:] = 0
        counts[: len(kept)] = kept
        self._clock.mark("commit")
        if block.prefilled:
            buffers.kept.to_device()
            self._count(buffers)
        else:
            buffers.commit()
        self._clock.mark("committed")

    def features(self, block: Block, row: int, kept: int) -> RowBytes:
        """The projected features of a row's first ``kept`` columns, in host memory.

        The next block overwrites them. Of a tree they are the accepted columns, in order.
        """
        rows: RowBytes = block.buffers.feature_rows[row]
        if not block.rows[row].parents:
            return rows[:kept]
        columns = block.buffers.accepted_columns(row, kept).numpy()
        return rows.take(columns, axis=0)

    def _begin(self, block: Block) -> Block:
        self._newest = block
        return block

    def _expect_newest(self, block: Block) -> None:
        # a block's buffers, records among them, belong to the next one from its verify on
        assert block is self._newest

    # ---- prefill ------------------------------------------------------------------------------

    def prefill(
        self,
        residency: Residency,
        token_ids: Sequence[int],
        first: int,
        *,
        last: bool,
        features_from: int | None,
    ) -> tuple[Block | None, HostRows]:
        """Processes prompt positions [first, first + T) of one sequence and adopts them.

        Args:
            residency: Whose state moves on.
            token_ids: T tokens, at most a chunk.
            first: Position of the first.
            last: Whether the prompt ends here; then its first token may be accepted.
            features_from: Position from which on features are wanted; None for none.

        Returns:
            The block to accept after the last chunk, and the projected features on their way to
            the host.
        """
        count = len(token_ids)
        columns = torch.tensor(token_ids, pin_memory=self._on_cuda)
        forward = self.target.prefill(
            residency, columns.to(self.device, non_blocking=True), first, want_logits=last
        )
        skipped = count if features_from is None else min(count, max(0, features_from - first))
        features = self._host_rows(self._projected(forward.features[0, skipped:]), first + skipped)
        if forward.logits is None:
            return None, features
        block = self._prompt_end(residency, int(token_ids[-1]), first + count, forward.logits)
        return block, features

    def _projected(self, features: Tensor) -> Tensor:
        if not len(features):
            return features.new_empty(0, self.projection.width)
        return self.projection(features)

    def first_token(self, residency: Residency, token_id: int, end: int) -> Block:
        """The block to accept of a prompt that was restored whole, as `prefill` would return it.

        Args:
            residency: Whose state stands at the prompt's end.
            token_id: The prompt's last token.
            end: Positions of the prompt.
        """
        return self._prompt_end(residency, token_id, end, self.target.next_logits(residency))

    def _prompt_end(self, residency: Residency, token_id: int, end: int, logits: Tensor) -> Block:
        """A block of the prompt's last column, whose state has moved already."""
        buffers = self._of(1, 1)
        buffers.results.logits.copy_(logits)
        self._clock.mark("verify")
        row = BlockRow(residency, end - 1, 0, (token_id,))
        self._fill(buffers, [row])
        buffers.inputs.to_device()
        return self._begin(Block((row,), buffers, prefilled=True))

    def replay(self, residency: Residency, token_ids: Sequence[int], first: int) -> RowBytes:
        """Processes tokens [first, first + T) that are known, T <= W, as a round would.

        Returns:
            Their projected features in host memory, which the next block overwrites.
        """
        row = BlockRow(residency, first, 0, tuple(token_ids))
        block = self.verify([row])
        buffers, count = block.buffers, len(token_ids)
        kept = torch.zeros(buffers.row_count, dtype=torch.int64)
        kept[0] = count
        # not the captured commit: that one counts the tokens too
        self.target.commit(buffers.state_rows, buffers.forward, kept)
        self._newest = None
        self.replays.wait()
        return self.features(block, 0, count)

    def _host_rows(self, features: Tensor, first: int) -> HostRows:
        slot = self._prefill_rows[0]
        if slot is None:
            return HostRows(first, features, None)
        self._prefill_rows.reverse()
        return slot.fetch(first, features)


@dataclass(frozen=True)
class HostRows:
    """Feature rows on their way to host memory."""

    first: int  # position of the first row
    _rows: Tensor
    _arrived: torch.cuda.Event | None

    @property
    def are_there(self) -> bool:
        """Whether `arrived` would not wait: the device has processed their positions."""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def arrived(self) -> RowBytes:
        """Waits for them; they are the caller's own."""
        if self._arrived is None:
            return row_bytes(self._rows)
        self._arrived.synchronize()
        return row_bytes(self._rows).copy()


class _HostRows:
    """Pinned room for a chunk's features."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype) -> None:
        self._memory = torch.empty(shape, dtype=dtype, pin_memory=True)

    def fetch(self, first: int, features: Tensor) -> HostRows:
        rows = self._memory[: len(features)]
        rows.copy_(features, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return HostRows(first, rows, arrived)


class _Clock:
    """Marks in the stream of work, from which a round's times are read after its wait."""

    def __init__(self, replays: Replays | None) -> None:
        self._replays = replays  # None: off CUDA
        self._marks: dict[str, int | torch.cuda.Event] = {}

    def mark(self, name: str) -> None:
        """What was launched so far ends here."""
        if self._replays is None:
            self._marks[name] = time.monotonic_ns()
            return
        event = self._marks.get(name)
        if not isinstance(event, torch.cuda.Event):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._marks[name] = event
        self._replays.record(event)

    def wait(self, name: str) -> None:
        """Blocks until the device has reached the mark."""
        event = self._marks[name]
        if isinstance(event, torch.cuda.Event):
            event.synchronize()

    def between(self, first: str, end: str) -> int:
        """Nanoseconds from one mark to a later one; 0 before both were set."""
        a, b = self._marks.get(first), self._marks.get(end)
        if isinstance(a, torch.cuda.Event) and isinstance(b, torch.cuda.Event):
            return int(a.elapsed_time(b) * 1e6)
        return b - a if isinstance(a, int) and isinstance(b, int) else 0


def rounded_up(row_count: int) -> int:
    """The captured number of rows that holds ``row_count``."""
    return next(count for count in ROW_COUNTS if count >= row_count)


def most_columns(rows: int, width: int, tree_widths: Mapping[int, Sequence[int]]) -> int:
    """Columns of the largest block, over all of its rows."""
    trees = [count * max(widths) for count, widths in tree_widths.items() if widths]
    return max([rows * width, *trees])


def table_lengths(whole: int, page_size: int) -> list[int]:
    """Pages of a row's table that graphs are captured for, ascending, up to the ``whole`` table."""
    lengths, positions = [], SHORTEST_TABLE
    while positions // page_size < whole:
        lengths.append(positions // page_size)
        positions *= TABLE_GROWTH
    return [*lengths, whole]
