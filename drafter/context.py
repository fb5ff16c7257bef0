"""Draft contexts: memory planned at start, who holds which part of it, and how far each reaches.

A context is what one sequence's committed features have become: keys and values of the draft's
layers for the positions [coverage_first, frontier). Local layers keep them in a cyclic ring of S
cells (position p in cell p mod S, so the live interval is [max(coverage_first, F_ctx - S), F_ctx)),
full layers in pages. Old bytes outside that interval are unreachable and are never cleared.

Everything here counts; the arithmetic on keys and values is in `drafter.model`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.faults import FaultError

PAGE_SIZE = 64
# epochs of released sequences that are remembered, so that late events count as stale
_REMEMBERED_RELEASES = 1024


@dataclass(frozen=True)
class ContextPlan:
    """How much context memory a drafter takes; known before any of it is allocated."""

    sequence_count: int
    max_context: int  # positions of one sequence
    window: int  # S; 0 without local layers
    local_layer_count: int
    full_layer_count: int
    key_value_heads: int
    head_dim: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    checkpoint_slots: int = 0  # contexts kept on the device beside those of live sequences

    @property
    def slot_count(self) -> int:
        """Contexts on the device: those of sequences first, then those of checkpoints."""
        return self.sequence_count + self.checkpoint_slots

    @property
    def pages_per_sequence(self) -> int:
        """Page table entries of one sequence."""
        return -(-self.max_context // PAGE_SIZE) if self.full_layer_count else 0

    @property
    def cell_bytes(self) -> int:
        """Bytes of one position's key and value in one layer."""
        element_bytes = self.key_dtype.itemsize + self.value_dtype.itemsize
        return self.key_value_heads * self.head_dim * element_bytes

    @property
    def ring_bytes(self) -> int:
        """Bytes of all rings."""
        return self.local_layer_count * self.slot_count * self.window * self.cell_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages."""
        positions = self.slot_count * self.pages_per_sequence * PAGE_SIZE
        return self.full_layer_count * positions * self.cell_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one context: its ring in every local layer and its pages in every full one."""
        ring = self.local_layer_count * self.window
        pages = self.full_layer_count * self.pages_per_sequence * PAGE_SIZE
        return (ring + pages) * self.cell_bytes

    def arithmetic(self) -> str:
        """The sum in words, for the message that refuses to start."""
        holders = f"{self.sequence_count} sequences"
        if self.checkpoint_slots:
            holders = f"({holders} + {self.checkpoint_slots} checkpoints)"
        return (
            f"rings {self.local_layer_count} layers x {holders} x "
            f"{self.window} positions x {self.cell_bytes} bytes = {self.ring_bytes}, pages "
            f"{self.full_layer_count} layers x {holders} x "
            f"{self.pages_per_sequence * PAGE_SIZE} positions x {self.cell_bytes} bytes = "
            f"{self.page_bytes}"
        )


@dataclass(eq=False)
class Context:
    """One sequence's part of the context memory. Covers [coverage_first, frontier)."""

    slot: int
    coverage_first: int
    frontier: int  # F_ctx

    def expect(self, first_position: int) -> None:
        """Test-and-set: rows are taken only where the context ends.

        Raises:
            FaultError: FEATURES_DUPLICATE below F_ctx, FEATURES_GAP above it.
        """
        if first_position == self.frontier:
            return
        raise FaultError(
            "FEATURES_DUPLICATE" if first_position < self.frontier else "FEATURES_GAP",
            f"first_position: expected {self.frontier}, got {first_position}",
            expected=self.frontier,
            actual=first_position,
        )

    def expect_frontier(self, frontier: int) -> None:
        """Checks that the context reaches exactly as far as its verifier believes.

        Raises:
            FaultError: FRONTIER_MISMATCH.
        """
        if frontier != self.frontier:
            raise FaultError(
                "FRONTIER_MISMATCH",
                f"frontier: expected {self.frontier}, got {frontier}",
                expected=self.frontier,
                actual=frontier,
            )


@dataclass(frozen=True)
class Append:
    """Where the next rows of some contexts go, all rows of all contexts end to end.

    Destinations are int64 [3, rows] in host memory: of each row its position, its cell of the rings
    and its cell of the pages. A cell of -1 keeps nothing: the draft has no layer of that kind, or
    the row falls out of the ring at once.
    """

    contexts: tuple[tuple[Context, int], ...]  # with the rows each takes
    destinations: NDArray[np.int64]

    @property
    def positions(self) -> NDArray[np.int64]:
        """Absolute positions, [1, rows]."""
        return self.destinations[0:1]

    @property
    def ring_cells(self) -> NDArray[np.int64]:
        """Cells of the rings, counted over all sequences, [1, rows]."""
        return self.destinations[1:2]

    @property
    def page_cells(self) -> NDArray[np.int64]:
        """Cells of the pages, counted over all sequences, [1, rows]."""
        return self.destinations[2:3]

    def commit(self) -> None:
        """Moves the frontiers over the rows, once they are materialized."""
        for context, row_count in self.contexts:
            context.frontier += row_count


@dataclass(frozen=True)
class ContextRows:
    """Contexts as device inputs of one batch: int64, one entry a row."""

    slots: Tensor  # [B]
    coverage_first: Tensor  # [B]
    frontiers: Tensor  # [B]
    page_tables: Tensor  # [B, pages a sequence]


class ContextCells:
    """Keys and values of ``slot_count`` contexts, on a device or in host memory.

    A slot is a ring in every local layer and a fixed run of pages in every full layer.

    Attributes:
        key_rings, value_rings: [local layers, slots, S, Hkv, D].
        key_pages, value_pages: [full layers, slots * pages a sequence, 64, Hkv, D].
    """

    def __init__(
        self, plan: ContextPlan, slot_count: int, device: torch.device, *, pinned: bool = False
    ) -> None:
        cell = (plan.key_value_heads, plan.head_dim)
        ring = (plan.local_layer_count, slot_count, plan.window, *cell)
        self._pages_per_slot = plan.pages_per_sequence
        page = (plan.full_layer_count, slot_count * self._pages_per_slot, PAGE_SIZE, *cell)

        def cells(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

        self.key_rings = cells(ring, plan.key_dtype)
        self.value_rings = cells(ring, plan.value_dtype)
        self.key_pages = cells(page, plan.key_dtype)
        self.value_pages = cells(page, plan.value_dtype)

    def copy(self, slot: int, source: ContextCells, context: Context) -> None:
        """Copies a context that lies in ``source`` into a slot of these cells.

        Copies to and from pinned memory are only queued; later work on the device is behind them.
        """
        for ours, theirs in (
            (self.key_rings, source.key_rings),
            (self.value_rings, source.value_rings),
        ):
            ours[:, slot].copy_(theirs[:, context.slot], non_blocking=True)
        used = -(-context.frontier // PAGE_SIZE) if self._pages_per_slot else 0
        first, source_first = slot * self._pages_per_slot, context.slot * self._pages_per_slot
        for ours, theirs in (
            (self.key_pages, source.key_pages),
            (self.value_pages, source.value_pages),
        ):
            ours[:, first : first + used].copy_(
                theirs[:, source_first : source_first + used], non_blocking=True
            )


class ContextMemory:
    """All rings and pages of a drafter, and which slots are free for sequences.

    The slots from ``plan.sequence_count`` on belong to checkpoints, as `drafter.checkpoints` says.

    Attributes:
        key_rings, value_rings: [local layers, slots, S, Hkv, D].
        key_pages, value_pages: [full layers, pages, 64, Hkv, D].
    """

    def __init__(self, plan: ContextPlan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self.cells = ContextCells(plan, plan.slot_count, device)
        self.key_rings, self.value_rings = self.cells.key_rings, self.cells.value_rings
        self.key_pages, self.value_pages = self.cells.key_pages, self.cells.value_pages
        page_count = plan.slot_count * plan.pages_per_sequence
        self._page_tables = torch.arange(page_count, device=device).view(
            plan.slot_count, plan.pages_per_sequence
        )
        self._free_slots = list(range(plan.sequence_count - 1, -1, -1))

    @property
    def free_count(self) -> int:
        """Sequences that could be opened now."""
        return len(self._free_slots)

    def open(self, coverage_first: int) -> Context:
        """Takes an empty context that starts at ``coverage_first``.

        Raises:
            FaultError: RING_CAPACITY when every slot is taken or the start lies beyond the range.
        """
        self._expect_in_range("coverage_first", coverage_first)
        if not self._free_slots:
            raise FaultError(
                "RING_CAPACITY",
                f"contexts: expected at most {self.plan.sequence_count} at once",
                limit=self.plan.sequence_count,
            )
        return Context(self._free_slots.pop(), coverage_first, coverage_first)

    def release(self, context: Context) -> None:
        """Gives a context's slot back."""
        self._free_slots.append(context.slot)

    def fork(self, source: Context, cells: ContextCells | None = None) -> Context:
        """Takes a context with the same content, coverage and frontier.

        Args:
            source: The context to continue.
            cells: Where it lies; None is this memory.

        Raises:
            FaultError: RING_CAPACITY.
        """
        copy = self.open(source.coverage_first)
        copy.frontier = source.frontier
        self.cells.copy(copy.slot, cells or self.cells, source)
        return copy

    def expect_room(self, context: Context, row_count: int) -> None:
        """Checks that ``row_count`` rows at the frontier stay within the context's range.

        Raises:
            FaultError: RING_CAPACITY.
        """
        self._expect_in_range("context end", context.frontier + row_count)

    def append(self, pieces: Sequence[tuple[Context, int]]) -> Append:
        """Lays out the next rows: (context, row count) for each context, all distinct."""
        window, sequence_cells = self.plan.window, self.plan.pages_per_sequence * PAGE_SIZE
        # at most some hundred rows, for which plain numbers are faster than arrays of a few each
        places: list[int] = []
        ring_cells: list[int] = []
        page_cells: list[int] = []
        for context, row_count in pieces:
            first, end = context.frontier, context.frontier + row_count
            places += range(first, end)
            # a piece longer than the ring keeps only its last S rows
            kept = min(row_count, window)
            ring_cells += [-1] * (row_count - kept)
            if kept:
                ring, begin = context.slot * window, (end - kept) % window
                unbroken = min(kept, window - begin)
                ring_cells += range(ring + begin, ring + begin + unbroken)
                ring_cells += range(ring, ring + kept - unbroken)
            pages = context.slot * sequence_cells
            page_cells += range(pages + first, pages + end) if sequence_cells else [-1] * row_count
        destinations = np.array([places, ring_cells, page_cells], dtype=np.int64)
        return Append(tuple(pieces), destinations)

    def rows(
        self, slots: Tensor, coverage_first: Tensor, frontiers: Tensor, page_count: int
    ) -> ContextRows:
        """Contexts as inputs of one batch.

        Args:
            slots: [B] int64, on the device, as the other two.
            coverage_first: [B].
            frontiers: [B], none beyond ``page_count`` pages.
            page_count: Entries of the page tables that may be needed.
        """
        tables = self._page_tables[:, :page_count].index_select(0, slots)
        return ContextRows(slots, coverage_first, frontiers, tables)

    def _expect_in_range(self, name: str, position: int) -> None:
        limit = self.plan.max_context
        if position > limit:
            raise FaultError(
                "RING_CAPACITY",
                f"{name}: expected at most {limit}, got {position}",
                limit=limit,
                actual=position,
            )


class SequenceTable:
    """The sequences of one stream by id, each under its newest epoch."""

    def __init__(self, memory: ContextMemory, limit: int) -> None:
        self._memory = memory
        self._limit = limit  # B of the stream
        self._live: dict[int, tuple[int, Context]] = {}
        self._released: OrderedDict[int, int] = OrderedDict()  # epochs, oldest release first

    def __len__(self) -> int:
        return len(self._live)

    def is_stale(self, sequence_id: int, epoch: int) -> bool:
        """Whether an event of this epoch comes after the sequence was created anew or released."""
        if sequence_id in self._live:
            return epoch < self._live[sequence_id][0]
        return epoch <= self._released.get(sequence_id, -1)

    def is_creatable(self, sequence_id: int, epoch: int) -> bool:
        """Whether a sequence may be created under this epoch: it is newer than any before."""
        live = self._live.get(sequence_id)
        return not self.is_stale(sequence_id, epoch) and (live is None or epoch > live[0])

    def find(self, sequence_id: int, epoch: int) -> Context:
        """The context of a live sequence.

        Raises:
            FaultError: SEQUENCE_NOT_FOUND when there is none of this epoch.
        """
        live = self._live.get(sequence_id)
        if live is None:
            raise FaultError(
                "SEQUENCE_NOT_FOUND",
                f"sequence_id: expected an open sequence, got {sequence_id}",
                sequence_id=sequence_id,
            )
        if live[0] != epoch:
            raise FaultError(
                "SEQUENCE_NOT_FOUND",
                f"epoch: expected {live[0]} for sequence {sequence_id}, got {epoch}",
                sequence_id=sequence_id,
                expected=live[0],
                actual=epoch,
            )
        return live[1]

    def open(self, sequence_id: int, epoch: int, coverage_first: int) -> Context:
        """Creates a sequence with an empty context, in place of its older epoch.

        Raises:
            FaultError: RING_CAPACITY.
        """
        self._make_room(sequence_id)
        return self._adopt(sequence_id, epoch, self._memory.open(coverage_first))

    def fork(
        self,
        sequence_id: int,
        epoch: int,
        source: Context,
        cells: ContextCells | None = None,
    ) -> Context:
        """Creates a sequence that continues another context, in place of its older epoch.

        Args:
            sequence_id: The sequence to create.
            epoch: Its epoch; newer than any before.
            source: The context to continue.
            cells: Where it lies; None is the memory of live sequences.

        Raises:
            FaultError: RING_CAPACITY, or SEQUENCE_NOT_FOUND for an epoch that is not newer.
        """
        if not self.is_creatable(sequence_id, epoch):
            raise FaultError(
                "SEQUENCE_NOT_FOUND",
                f"epoch: expected a newer one for sequence {sequence_id}, got {epoch}",
                sequence_id=sequence_id,
                actual=epoch,
            )
        self._make_room(sequence_id)
        return self._adopt(sequence_id, epoch, self._memory.fork(source, cells))

    def release(self, sequence_id: int, epoch: int) -> None:
        """Frees a sequence of this or an older epoch. Idempotent."""
        live = self._live.get(sequence_id)
        if live is not None and live[0] > epoch:
            return
        self._released[sequence_id] = max(epoch, self._released.pop(sequence_id, -1))
        if len(self._released) > _REMEMBERED_RELEASES:
            self._released.popitem(last=False)
        if live is not None:
            del self._live[sequence_id]
            self._memory.release(live[1])

    def release_all(self) -> None:
        """Frees every sequence, as the stream's end does."""
        for _, context in self._live.values():
            self._memory.release(context)
        self._live.clear()

    def _make_room(self, sequence_id: int) -> None:
        replaced = self._live.get(sequence_id)
        if replaced is not None:
            self.release(sequence_id, replaced[0])
        if len(self._live) >= self._limit:
            raise FaultError(
                "RING_CAPACITY",
                f"sequences: expected at most {self._limit} in this stream",
                limit=self._limit,
            )

    def _adopt(self, sequence_id: int, epoch: int, context: Context) -> Context:
        self._live[sequence_id] = (epoch, context)
        return context


def expect_once(sequence_id: int, seen: set[int]) -> None:
    """Checks that a round names a sequence for the first time, and remembers it.

    Raises:
        FaultError: FEATURES_DUPLICATE: the first row of the sequence stands.
    """
    if sequence_id in seen:
        raise FaultError(
            "FEATURES_DUPLICATE",
            f"sequence_id: expected once a round, got {sequence_id} again",
            sequence_id=sequence_id,
        )
    seen.add(sequence_id)
