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
        return self.local_layer_count * self.sequence_count * self.window * self.cell_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages."""
        positions = self.sequence_count * self.pages_per_sequence * PAGE_SIZE
        return self.full_layer_count * positions * self.cell_bytes

    def arithmetic(self) -> str:
        """The sum in words, for the message that refuses to start."""
        return (
            f"rings {self.local_layer_count} layers x {self.sequence_count} sequences x "
            f"{self.window} positions x {self.cell_bytes} bytes = {self.ring_bytes}, pages "
            f"{self.full_layer_count} layers x {self.sequence_count} sequences x "
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
    destinations: Tensor

    @property
    def positions(self) -> Tensor:
        """Absolute positions, [1, rows]."""
        return self.destinations[0:1]

    @property
    def ring_cells(self) -> Tensor:
        """Cells of the rings, counted over all sequences, [1, rows]."""
        return self.destinations[1:2]

    @property
    def page_cells(self) -> Tensor:
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


class ContextMemory:
    """All rings and pages of a drafter, and which slots are free.

    A slot is a ring in every local layer and a fixed run of pages in every full layer.

    Attributes:
        key_rings, value_rings: [local layers, sequences, S, Hkv, D].
        key_pages, value_pages: [full layers, pages, 64, Hkv, D].
    """

    def __init__(self, plan: ContextPlan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        cell = (plan.key_value_heads, plan.head_dim)
        ring = (plan.local_layer_count, plan.sequence_count, plan.window, *cell)
        page_count = plan.sequence_count * plan.pages_per_sequence
        page = (plan.full_layer_count, page_count, PAGE_SIZE, *cell)
        self.key_rings = torch.zeros(ring, dtype=plan.key_dtype, device=device)
        self.value_rings = torch.zeros(ring, dtype=plan.value_dtype, device=device)
        self.key_pages = torch.zeros(page, dtype=plan.key_dtype, device=device)
        self.value_pages = torch.zeros(page, dtype=plan.value_dtype, device=device)
        self._page_tables = torch.arange(page_count, device=device).view(
            plan.sequence_count, plan.pages_per_sequence
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

    def fork(self, source: Context) -> Context:
        """Takes a context with the same content, coverage and frontier.

        Raises:
            FaultError: RING_CAPACITY.
        """
        copy = self.open(source.coverage_first)
        copy.frontier = source.frontier
        for rings in (self.key_rings, self.value_rings):
            rings[:, copy.slot] = rings[:, source.slot]
        page_count = self.plan.pages_per_sequence
        used = -(-source.frontier // PAGE_SIZE)
        if page_count:
            for pages in (self.key_pages, self.value_pages):
                runs = pages.view(len(pages), -1, page_count, *pages.shape[2:])
                runs[:, copy.slot, :used] = runs[:, source.slot, :used]
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
        destinations = np.full((3, sum(row_count for _, row_count in pieces)), -1, dtype=np.int64)
        first = 0
        for context, row_count in pieces:
            positions, ring_cells, page_cells = destinations[:, first : first + row_count]
            positions[:] = np.arange(context.frontier, context.frontier + row_count)
            if window:
                # a piece longer than the ring keeps only its last S rows
                ring_cells[-window:] = context.slot * window + positions[-window:] % window
            if sequence_cells:
                page_cells[:] = context.slot * sequence_cells + positions
            first += row_count
        return Append(tuple(pieces), torch.from_numpy(destinations))

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

    def fork(self, sequence_id: int, epoch: int, source: Context) -> Context:
        """Creates a sequence that continues another one's context, in place of its older epoch.

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
        return self._adopt(sequence_id, epoch, self._memory.fork(source))

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


def no_checkpoint_slot() -> FaultError:
    """The answer to a capture: no slot for checkpoints is planned."""
    return FaultError(
        "CHECKPOINT_CAPACITY", "checkpoint slots: expected a free one, got 0 planned", limit=0
    )


def no_such_checkpoint(checkpoint_id: int) -> FaultError:
    """The answer to a restore: nothing is kept."""
    return FaultError(
        "CHECKPOINT_NOT_FOUND",
        f"checkpoint_id: expected one that is held, got {checkpoint_id}",
        checkpoint_id=checkpoint_id,
    )
