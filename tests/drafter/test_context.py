"""Context memory: rings, coverage, slots, and who holds them."""

from __future__ import annotations

import pytest
import torch

from drafter.context import ContextMemory, ContextPlan, SequenceTable
from outrider.faults import FaultError

CPU = torch.device("cpu")


def memory(window=8, local=1, full=1, sequences=3, max_context=200) -> ContextMemory:
    plan = ContextPlan(
        sequence_count=sequences,
        max_context=max_context,
        window=window if local else 0,
        local_layer_count=local,
        full_layer_count=full,
        key_value_heads=1,
        head_dim=2,
        key_dtype=torch.float32,
        value_dtype=torch.float32,
    )
    return ContextMemory(plan, CPU)


def rows_of(memory, *contexts):
    table = torch.tensor([(c.slot, c.coverage_first, c.frontier) for c in contexts])
    return memory.rows(*table.unbind(1), memory.plan.pages_per_sequence)


def advance(memory, context, count):
    append = memory.append([(context, count)])
    append.commit()
    return append


@pytest.mark.parametrize("window", [1, 8, 64])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 65, 200])
@pytest.mark.parametrize("first", [0, 5, 64])
def test_position_p_lives_in_cell_p_mod_S_of_its_own_ring(window, count, first):
    held = memory(window=window, max_context=512)
    held.open(0)
    context = held.open(first)
    append = advance(held, context, count)
    assert append.positions.tolist() == [list(range(first, first + count))]
    end = first + count
    assert append.ring_cells.tolist() == [
        [context.slot * window + p % window if p >= end - window else -1 for p in range(first, end)]
    ]
    kept = append.ring_cells[append.ring_cells >= 0]
    assert len(set(kept.tolist())) == len(kept) == min(window, count), "no cell is written twice"


def test_a_chunk_longer_than_the_ring_keeps_its_last_S_rows_and_moves_the_frontier_over_all():
    held = memory(window=64, max_context=512)
    context = held.open(0)
    append = advance(held, context, 200)
    assert context.frontier == 200
    assert append.positions[append.ring_cells >= 0].tolist() == list(range(136, 200))


def test_pages_of_two_contexts_never_meet():
    held = memory(sequences=2, max_context=130)
    a, b = held.open(0), held.open(100)
    cells = [advance(held, context, 30).page_cells for context in (a, b)]
    rows = rows_of(held, a, b)
    for context, first, cell, table in zip((a, b), (0, 100), cells, rows.page_tables, strict=True):
        pages = [int(table[p // 64]) * 64 + p % 64 for p in range(first, first + 30)]
        assert cell.tolist() == [pages]
        assert context.frontier == first + 30
    assert not set(rows.page_tables[0].tolist()) & set(rows.page_tables[1].tolist())


def test_a_draft_without_a_kind_of_layer_plans_nothing_for_it():
    assert memory(full=0).key_pages.numel() == 0
    assert memory(local=0).key_rings.numel() == 0
    local_only = memory(full=0)
    context = local_only.open(0)
    assert advance(local_only, context, 4).page_cells.tolist() == [[-1] * 4]
    assert rows_of(local_only, context).page_tables.shape == (1, 0)
    full_only = memory(local=0)
    assert advance(full_only, full_only.open(0), 4).ring_cells.tolist() == [[-1] * 4]


def test_an_append_that_is_not_committed_moves_nothing():
    held = memory()
    context = held.open(3)
    held.append([(context, 5)])
    assert context.frontier == 3


def test_slots_are_reused_and_never_shared():
    held = memory(sequences=3)
    contexts = [held.open(0) for _ in range(3)]
    assert {context.slot for context in contexts} == {0, 1, 2}
    with pytest.raises(FaultError, match="RING_CAPACITY"):
        held.open(0)
    with pytest.raises(FaultError, match="RING_CAPACITY"):
        held.fork(contexts[0])
    held.release(contexts[1])
    assert held.fork(contexts[0]).slot == contexts[1].slot
    assert held.free_count == 0


def test_a_stream_holds_no_more_than_it_reserved():
    held = memory(sequences=3)
    mine, other = SequenceTable(held, 2), SequenceTable(held, 1)
    for sequence_id in (1, 2):
        mine.open(sequence_id, 1, 0)
    with pytest.raises(FaultError, match="at most 2 in this stream"):
        mine.open(3, 1, 0)
    # the one slot left is another stream's by reservation
    other.open(1, 1, 0)
    # a sequence that is opened anew takes its own place
    assert mine.open(2, 2, 7).frontier == 7
    assert len(mine) == 2
    mine.release_all()
    other.release_all()
    assert held.free_count == 3


def test_a_refused_open_leaves_no_older_epoch_behind():
    """The verifier gave the old epoch up when it sent the new one."""
    held = memory(max_context=64)
    table = SequenceTable(held, 2)
    table.open(1, 1, 0)
    with pytest.raises(FaultError, match="RING_CAPACITY"):
        table.open(1, 2, 65)
    assert len(table) == 0
    assert held.free_count == 3
    table.open(1, 3, 64)


def test_remembered_releases_are_bounded():
    table = SequenceTable(memory(), 1)
    for sequence_id in range(5000):
        table.open(sequence_id, 4, 0)
        table.release(sequence_id, 4)
    assert len(table._released) == 1024
    assert table.is_stale(4999, 4)
    assert not table.is_stale(0, 4), "forgotten: it is unknown now"
    assert not table.is_stale(4999, 5)
