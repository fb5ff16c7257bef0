"""Draft contexts that outlive their sequences: kept under an id, on the device or in host memory.

The drafter's half of a prefix checkpoint is a context as it stood: rings, pages, coverage and
frontier. It is copied when it is captured and copied again when it is restored, so that nothing
that happens to a sequence can change it. Each verifier has a table of its own; it outlives the
verifier's stream for a while, so that a broken connection does not cost every prefix.

Whether a checkpoint lies on the device or in host memory is decided here alone. When a place is
needed, the checkpoint goes whose loss costs least: rows to materialize anew, weighed by how often
it was restored, and aged by what has been evicted since (GreedyDual).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from drafter.context import Context, ContextCells, ContextMemory
from outrider.faults import FaultError

FULL_RETRY_MS = 1000
# host slots that a device slot may have behind it, however large the host budget is
_MOST_HOST_SLOTS = 64


@dataclass(eq=False)
class Kept:
    """One checkpoint: a context that nothing mutates, and where it lies."""

    context: Context
    cells: ContextCells
    priority: float = 0.0  # the lowest goes first
    restore_count: int = 0


class CheckpointSlots:
    """The places for checkpoints: slots of the context memory, and slots in host memory.

    Args:
        memory: The contexts of live sequences; its last ``plan.checkpoint_slots`` slots are used.
        host_bytes: Budget of the replicas in host memory; pinned where the contexts are on CUDA.
    """

    def __init__(self, memory: ContextMemory, host_bytes: int) -> None:
        plan = memory.plan
        self.memory = memory
        self.device_count = plan.checkpoint_slots
        self.host_count = min(
            host_bytes // max(1, plan.slot_bytes), _MOST_HOST_SLOTS * self.device_count
        )
        self.device_cells = memory.cells
        self.host_cells = ContextCells(
            plan,
            self.host_count,
            torch.device("cpu"),
            pinned=memory.device.type == "cuda" and self.host_count > 0,
        )
        self._free = {
            self.device_cells: list(range(plan.sequence_count, plan.slot_count)),
            self.host_cells: list(range(self.host_count)),
        }

    def free_count(self, cells: ContextCells) -> int:
        """Free slots of the device cells or of the host cells."""
        return len(self._free[cells])

    def keep(self, cells: ContextCells, source: Context, source_cells: ContextCells) -> Context:
        """Copies a context into a free slot of ``cells``; the caller's quota says there is one."""
        slot = self._free[cells].pop()
        cells.copy(slot, source_cells, source)
        return Context(slot, source.coverage_first, source.frontier)

    def forget(self, kept: Kept) -> None:
        """Gives a slot back."""
        self._free[kept.cells].append(kept.context.slot)


class CheckpointTable:
    """The checkpoints of one verifier by id, within its share of the slots."""

    def __init__(self, slots: CheckpointSlots, counters: Counter[str]) -> None:
        self._slots = slots
        self._counters = counters
        self._kept: dict[int, Kept] = {}
        self._age = 0.0
        self.device_limit = self._host_limit = 0
        self.has_stream = False
        self.expires_at = 0.0  # without a stream, seconds of the monotonic clock

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def ids(self) -> list[int]:
        """What is held, ascending."""
        return sorted(self._kept)

    def resize(self, device_limit: int) -> None:
        """Sets the share; what no longer fits moves to host memory or goes."""
        self.device_limit = device_limit
        planned = max(1, self._slots.device_count)
        self._host_limit = self._slots.host_count * device_limit // planned
        while len(self._on(self._slots.host_cells)) > self._host_limit:
            self._evict(self._cheapest(self._slots.host_cells))
        while len(self._on(self._slots.device_cells)) > device_limit:
            self._make_room()

    def capture(self, checkpoint_id: int, source: Context) -> list[int]:
        """Keeps a copy of a live context; returns the ids that were evicted for it.

        Raises:
            FaultError: CHECKPOINT_CAPACITY without a share; EVENT_INVALID for an id in use.
        """
        if not self.device_limit:
            raise FaultError(
                "CHECKPOINT_CAPACITY", "checkpoint slots: expected a free one, got 0", limit=0
            )
        if checkpoint_id in self._kept:
            raise FaultError(
                "EVENT_INVALID",
                f"checkpoint_id: expected an unused one, got {checkpoint_id}",
                field="checkpoint_id",
                actual=checkpoint_id,
            )
        evicted = []
        if len(self._on(self._slots.device_cells)) >= self.device_limit:
            evicted = self._make_room()
        cells = self._slots.device_cells
        kept = Kept(self._slots.keep(cells, source, self._slots.memory.cells), cells)
        self._kept[checkpoint_id] = kept
        self._weigh(kept)
        self._counters["captures"] += 1
        return evicted

    def find(self, checkpoint_id: int, frontier: int) -> Kept:
        """A checkpoint that is about to be restored.

        Raises:
            FaultError: CHECKPOINT_NOT_FOUND, or FRONTIER_MISMATCH where it reaches elsewhere.
        """
        kept = self._kept.get(checkpoint_id)
        if kept is None:
            raise FaultError(
                "CHECKPOINT_NOT_FOUND",
                f"checkpoint_id: expected one that is held, got {checkpoint_id}",
                checkpoint_id=checkpoint_id,
            )
        kept.context.expect_frontier(frontier)
        return kept

    def restored(self, kept: Kept) -> None:
        """Counts a restore: the checkpoint has proved useful."""
        kept.restore_count += 1
        self._weigh(kept)
        self._counters["restores"] += 1

    def drop(self, checkpoint_id: int) -> None:
        """Forgets a checkpoint. Idempotent."""
        kept = self._kept.pop(checkpoint_id, None)
        if kept is not None:
            self._slots.forget(kept)

    def clear(self) -> None:
        """Forgets all of them."""
        for checkpoint_id in self.ids:
            self.drop(checkpoint_id)

    def _on(self, cells: ContextCells) -> dict[int, Kept]:
        return {i: kept for i, kept in self._kept.items() if kept.cells is cells}

    def _cheapest(self, cells: ContextCells) -> int:
        held = self._on(cells)
        return min(held, key=lambda i: (held[i].priority, i))

    def _weigh(self, kept: Kept) -> None:
        plan, context = self._slots.memory.plan, kept.context
        rows = context.frontier - context.coverage_first
        # a draft of local layers needs S rows however long the prefix is
        cost = rows if plan.full_layer_count else min(rows, plan.window)
        kept.priority = self._age + (1 + kept.restore_count) * cost

    def _make_room(self) -> list[int]:
        """Frees a device slot by moving its checkpoint to host memory; returns what was evicted."""
        leaving = self._cheapest(self._slots.device_cells)
        if not self._host_limit:
            return self._evict(leaving)
        evicted = []
        if len(self._on(self._slots.host_cells)) >= self._host_limit:
            other = self._cheapest(self._slots.host_cells)
            if self._kept[leaving].priority < self._kept[other].priority:
                return self._evict(leaving)
            evicted = self._evict(other)
        kept, host = self._kept[leaving], self._slots.host_cells
        moved = self._slots.keep(host, kept.context, kept.cells)
        self._slots.forget(kept)
        kept.context, kept.cells = moved, host
        self._counters["checkpoint_demotions"] += 1
        return evicted

    def _evict(self, checkpoint_id: int) -> list[int]:
        self._age = max(self._age, self._kept[checkpoint_id].priority)
        self.drop(checkpoint_id)
        self._counters["checkpoint_evictions"] += 1
        return [checkpoint_id]


class CheckpointTables:
    """Every verifier's table, those included whose verifier may yet come back.

    Args:
        slots: All places.
        grace: Seconds that a table outlives its verifier's stream.
        counters: Counts captures, restores and evictions.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        slots: CheckpointSlots,
        grace: float,
        counters: Counter[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots = slots
        self._grace = grace
        self._counters = counters
        self._clock = clock
        self._tables: dict[bytes, CheckpointTable] = {}

    @property
    def planned(self) -> int:
        """Device slots in all."""
        return self._slots.device_count

    def claim(self, verifier_id: bytes, wanted: int) -> CheckpointTable:
        """The table of a verifier whose stream begins, with what is still held for it.

        Tables without a stream give way, the one that has been alone for longest first.

        Raises:
            FaultError: DRAFTER_FULL when the tables of other streams leave fewer than ``wanted``.
        """
        self._expire()
        others = {key: each for key, each in self._tables.items() if key != verifier_id}
        left = self.planned - sum(each.device_limit for each in others.values() if each.has_stream)
        if wanted > left:
            raise FaultError(
                "DRAFTER_FULL",
                f"checkpoint_slots: expected at most {left}, got {wanted}",
                field="checkpoint_slots",
                expected=left,
                actual=wanted,
                retry_after_ms=FULL_RETRY_MS,
            )
        alone = sorted(
            (key for key, each in others.items() if not each.has_stream),
            key=lambda key: others[key].expires_at,
        )
        while sum(each.device_limit for each in others.values()) + wanted > self.planned:
            del others[alone[0]]
            self._remove(alone.pop(0))
        table = self._tables.setdefault(verifier_id, CheckpointTable(self._slots, self._counters))
        table.has_stream = True
        table.resize(wanted)
        return table

    def leave(self, table: CheckpointTable) -> None:
        """The verifier's stream has ended; its checkpoints stay for the time of grace."""
        table.has_stream = False
        table.expires_at = self._clock() + self._grace
        self._expire()

    def _expire(self) -> None:
        now = self._clock()
        for verifier_id, table in list(self._tables.items()):
            if not table.has_stream and (not len(table) or table.expires_at <= now):
                self._remove(verifier_id)

    def _remove(self, verifier_id: bytes) -> None:
        self._tables.pop(verifier_id).clear()
