"""Draft checkpoints: what is kept, for whom, how long, and that nothing can change it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from drafter.checkpoints import CheckpointSlots, CheckpointTable, CheckpointTables
from drafter.context import Context, ContextCells
from drafter.model import ProposalAsk
from outrider.faults import FaultError

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


@pytest.fixture
def drafting(make_pair, load):
    """A draft with a local and a full layer; two checkpoint slots on the device."""
    tiny = make_pair("dflash", "lf", is_causal=False)
    return load(tiny, max_concurrency=3, max_context=256, checkpoint_slots=2)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def tables_over(drafting, hosts=0, grace=60.0, clock=None):
    slots = CheckpointSlots(drafting.memory, hosts * drafting.memory.plan.slot_bytes)
    counters: Counter[str] = Counter()
    return CheckpointTables(slots, grace, counters, clock or Clock()), slots, counters


def context_with(drafting, features, rows: int, seed: int = 0) -> Context:
    context = drafting.memory.open(0)
    for first in range(0, rows, 64):
        drafting.append((context, features(rows, seed)[first : first + 64]))
    return context


def proposals(drafting, context: Context) -> tuple[list[int], torch.Tensor]:
    block = drafting.block(ProposalAsk(context, 5, 7, 0.0, 1))
    hidden = drafting.model.draft_block(block)
    return drafting.selector.select(hidden, block).tokens[0, :7].tolist(), hidden


def spoil(cells: ContextCells, slots: range, plan) -> None:
    """Makes whatever a slot held before unmistakable."""
    for slot in slots:
        for rings in (cells.key_rings, cells.value_rings):
            rings[:, slot] = torch.nan
        pages = plan.pages_per_sequence
        for run in (cells.key_pages, cells.value_pages):
            run[:, slot * pages : (slot + 1) * pages] = torch.nan


@pytest.mark.parametrize("rows", [3, 8, 70], ids=lambda rows: f"{rows}-rows")
@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_a_restored_context_drafts_what_the_captured_one_would(drafting, features, rows, on_host):
    tables, slots, counters = tables_over(drafting, hosts=2)
    table = tables.claim(A, 1)
    source = context_with(drafting, features, rows)
    wanted, hidden = proposals(drafting, source)
    assert table.capture(1, source) == []
    if on_host:
        # another one takes its place on the device
        other = context_with(drafting, features, 90, seed=4)
        assert table.capture(2, other) == []
        assert counters["checkpoint_demotions"] == 1
        drafting.memory.release(other)
    # the source goes on and ends; others take its slot
    drafting.append((source, features(9, 2)))
    drafting.memory.release(source)
    spoil(drafting.memory.cells, range(3), drafting.memory.plan)
    kept = table.find(1, rows)
    assert kept.cells is (slots.host_cells if on_host else slots.device_cells)
    restored = drafting.memory.fork(kept.context, kept.cells)
    again, hidden_again = proposals(drafting, restored)
    assert again == wanted
    assert torch.equal(hidden_again, hidden)
    # what the restored one goes on to do leaves the checkpoint as it is
    drafting.append((restored, features(20, 3)))
    drafting.memory.release(restored)
    once_more = drafting.memory.fork(kept.context, kept.cells)
    assert torch.equal(proposals(drafting, once_more)[1], hidden)


def test_the_one_whose_loss_costs_least_goes_first(drafting, features):
    tables, _, counters = tables_over(drafting)
    table = tables.claim(A, 2)
    short, long = context_with(drafting, features, 5), context_with(drafting, features, 60)
    table.capture(1, short)
    table.capture(2, long)
    assert table.capture(3, long) == [1], "5 rows are cheaper to lose than 60"
    table.restored(table.find(3, 60))
    assert table.capture(4, short) == [2], "of two equally long ones the one nobody restored"
    assert table.ids == [3, 4]
    assert counters["checkpoint_evictions"] == 2
    with pytest.raises(FaultError, match="CHECKPOINT_NOT_FOUND"):
        table.find(1, 5)


def test_reuse_ages_away(drafting, features):
    tables, _, _ = tables_over(drafting)
    table = tables.claim(A, 2)
    context = context_with(drafting, features, 20)
    table.capture(0, context)
    for _ in range(3):
        table.restored(table.find(0, 20))
    for checkpoint_id in range(1, 10):
        table.capture(checkpoint_id, context)
    assert 0 not in table.ids, "restored once upon a time, and never again"


def test_what_the_device_has_no_room_for_goes_to_the_host_and_only_then_away(drafting, features):
    tables, slots, counters = tables_over(drafting, hosts=2)
    table = tables.claim(A, 2)
    context = context_with(drafting, features, 20)
    evicted = [table.capture(i, context) for i in range(6)]
    assert [len(ids) for ids in evicted] == [0, 0, 0, 0, 1, 1]
    assert counters["checkpoint_demotions"] == 4
    assert len(table) == 4
    assert slots.free_count(slots.device_cells) == slots.free_count(slots.host_cells) == 0
    table.clear()
    assert slots.free_count(slots.device_cells) == slots.free_count(slots.host_cells) == 2


def test_a_table_cannot_take_what_belongs_to_another(drafting, features):
    tables, _, _ = tables_over(drafting, hosts=2)
    mine, other = tables.claim(A, 1), tables.claim(B, 1)
    context = context_with(drafting, features, 20)
    other.capture(1, context)
    for i in range(5):
        mine.capture(i, context)
    assert len(mine) == 2, "one on the device, one in its half of the host slots"
    assert other.ids == [1]
    with pytest.raises(FaultError, match=r"DRAFTER_FULL.*at most 0, got 1"):
        tables.claim(C, 1)
    assert other.ids == [1]


def test_a_table_waits_for_its_verifier_until_the_grace_is_over(drafting, features):
    clock = Clock()
    tables, slots, _ = tables_over(drafting, grace=60.0, clock=clock)
    context = context_with(drafting, features, 20)
    table = tables.claim(A, 2)
    table.capture(7, context)
    tables.leave(table)
    clock.now += 59
    assert tables.claim(A, 2).ids == [7]
    tables.leave(table)
    clock.now += 61
    assert tables.claim(A, 2).ids == []
    assert slots.free_count(slots.device_cells) == 2


def test_a_hello_that_needs_the_slots_ends_the_grace_of_the_oldest(drafting, features):
    clock = Clock()
    tables, _, _ = tables_over(drafting, clock=clock)
    context = context_with(drafting, features, 20)
    for verifier_id in (A, B):
        table: CheckpointTable = tables.claim(verifier_id, 1)
        table.capture(1, context)
        tables.leave(table)
        clock.now += 1
    tables.claim(C, 1).capture(9, context)
    assert tables.claim(B, 1).ids == [1]
    with pytest.raises(FaultError, match="DRAFTER_FULL"):
        tables.claim(A, 1)


def test_a_smaller_share_keeps_the_best(drafting, features):
    tables, slots, _ = tables_over(drafting)
    table = tables.claim(A, 2)
    table.capture(1, context_with(drafting, features, 5))
    table.capture(2, context_with(drafting, features, 60))
    tables.leave(table)
    assert tables.claim(A, 1).ids == [2]
    assert tables.claim(A, 0).ids == []
    assert slots.free_count(slots.device_cells) == 2


def test_without_a_share_nothing_is_kept_and_an_id_is_used_once(drafting, features):
    tables, _, _ = tables_over(drafting)
    context = context_with(drafting, features, 5)
    with pytest.raises(FaultError, match="CHECKPOINT_CAPACITY"):
        tables.claim(A, 0).capture(1, context)
    table = tables.claim(B, 1)
    table.capture(1, context)
    with pytest.raises(FaultError, match="EVENT_INVALID"):
        table.capture(1, context)


def test_memory_for_checkpoints_is_planned(drafting):
    plan = drafting.config.context_plan
    assert plan.slot_count == 5
    assert plan.ring_bytes + plan.page_bytes == 5 * plan.slot_bytes
    assert "(3 sequences + 2 checkpoints)" in plan.arithmetic()
    memory = drafting.memory
    cells = (memory.key_rings, memory.value_rings, memory.key_pages, memory.value_pages)
    assert sum(t.numel() * t.element_size() for t in cells) == plan.ring_bytes + plan.page_bytes
