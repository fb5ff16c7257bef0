"""Any sequence of events: against a model of what a context is, and never a crash or a leak."""

from __future__ import annotations

import resource
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.checkpoints import CheckpointSlots, CheckpointTables
from drafter.rounds import DraftRounds
from drafter.selector import Proposals
from outrider import faults, tensors
from outrider.faults import FaultError
from outrider.v1 import draft_service_pb2 as wire

SEQUENCES, LIMIT = 4, 2
CHECKPOINTS, ON_DEVICE, ON_HOST = 6, 2, 1


class CountingGraphs:
    """Proposes the frontier itself, so that a mixed-up row shows."""

    def __init__(self, memory):
        self.memory = memory

    def materialize(self, features, append):
        assert len({id(context) for context, _ in append.contexts}) == len(append.contexts)

    def draft(self, asks):
        tokens = [[ask.context.frontier % 160] * ask.live + [-1] * (7 - ask.live) for ask in asks]
        return Proposals(torch.tensor(tokens), torch.ones(len(asks), dtype=torch.bool)), None


@pytest.fixture(scope="module")
def drafting(make_pair, load):
    return load(
        make_pair("dflash", "lf", is_causal=False),
        max_concurrency=3,
        max_context=64,
        checkpoint_slots=ON_DEVICE,
    )


def rounds_over(drafting):
    """A stream with room for two checkpoints on the device and one more in host memory."""
    graphs, counters = CountingGraphs(drafting.memory), Counter()
    slots = CheckpointSlots(drafting.memory, ON_HOST * drafting.memory.plan.slot_bytes)
    table = CheckpointTables(slots, 0.0, counters).claim(b"v" * 16, ON_DEVICE)
    return DraftRounds(drafting.config, graphs, LIMIT, table, counters), table, slots


@st.composite
def rows_of(draw):
    return {
        "id": draw(st.integers(0, SEQUENCES - 1)),
        "epoch": draw(st.integers(0, 4)),
        # relative to where the model's context stands, mostly right
        "offset": draw(st.sampled_from([0] * 6 + [-1, 1, 30])),
        "count": draw(st.sampled_from([0, 1, 3, 8, 20])),
        "live": draw(st.sampled_from([0, 0, 1, 3, 7])),
        "shift": draw(st.sampled_from([0] * 5 + [-1, 2])),
    }


EVENTS = st.one_of(
    st.tuples(
        st.just("open"), st.integers(0, 3), st.integers(0, 4), st.sampled_from([0, 5, 60, 65])
    ),
    st.tuples(st.just("release"), st.integers(0, 3), st.integers(0, 4)),
    st.tuples(st.just("features"), rows_of()),
    st.tuples(st.just("round"), st.lists(rows_of(), max_size=LIMIT)),
    st.tuples(st.just("fork"), st.integers(0, 3), st.integers(0, 4), st.integers(0, 3)),
    st.tuples(st.just("capture"), st.integers(0, 3), st.sampled_from([0, 0, 0, 1])),
    st.tuples(
        st.just("restore"), st.integers(0, 3), st.integers(0, 4), st.integers(0, CHECKPOINTS)
    ),
    st.tuples(st.just("drop"), st.integers(0, CHECKPOINTS)),
)


class Expected:
    """Sequence id -> [epoch, frontier], and the epochs that were released."""

    def __init__(self):
        self.live: dict[int, list[int]] = {}
        self.released: dict[int, int] = {}
        self.kept: dict[int, int] = {}  # checkpoint id -> frontier

    def is_stale(self, sequence_id, epoch):
        if sequence_id in self.live:
            return epoch < self.live[sequence_id][0]
        return epoch <= self.released.get(sequence_id, -1)

    def replace(self, sequence_id):
        if sequence_id in self.live:
            self.released[sequence_id] = self.live.pop(sequence_id)[0]

    def is_creatable(self, sequence_id, epoch):
        held = self.live.get(sequence_id)
        return not self.is_stale(sequence_id, epoch) and (held is None or epoch > held[0])

    def features(self, sequence_id, epoch, first, count):
        """The reason the rows are refused with, or None once they are in."""
        held = self.live.get(sequence_id)
        if held is None or held[0] != epoch:
            return "SEQUENCE_NOT_FOUND"
        if first != held[1]:
            return "FEATURES_DUPLICATE" if first < held[1] else "FEATURES_GAP"
        if first + count > 64:
            return "RING_CAPACITY"
        held[1] += count
        return None


def tensor_of(drafting, count):
    return tensors.encode(torch.zeros(count, drafting.config.feature_width))


def reason_of(message):
    return faults.from_status(message.fault).reason if message.HasField("fault") else None


def first_of(expected, row):
    return max(0, expected.live.get(row["id"], [0, 0])[1] + row["offset"])


def check_round(drafting, rounds, expected, index, rows):
    event, wanted = wire.Round(round_index=index), []
    firsts = {}
    for row in rows:
        first = firsts.setdefault(row["id"], first_of(expected, row))
        message = event.rows.add(sequence_id=row["id"], epoch=row["epoch"], first_position=first)
        if row["count"]:
            message.features.CopyFrom(tensor_of(drafting, row["count"]))
        if row["live"]:
            message.proposal.live = row["live"]
            message.proposal.frontier = max(0, first + row["count"] + row["shift"])
    reply = rounds.apply(wire.DraftRoundsRequest(round=event)).round_reply
    seen = set()
    for message in event.rows:
        held = expected.live.get(message.sequence_id)
        known = held is not None and held[0] == message.epoch
        if known and message.sequence_id in seen:
            wanted.append((held[1], "FEATURES_DUPLICATE", None))
            continue
        if known:
            seen.add(message.sequence_id)
        count = message.features.shape[0] if message.HasField("features") else 0
        reason = expected.features(
            message.sequence_id, message.epoch, message.first_position, count
        )
        frontier = held[1] if known else 0
        tokens = None
        if reason is None and message.HasField("proposal"):
            if message.proposal.frontier != frontier:
                reason = "FRONTIER_MISMATCH"
            elif frontier + 8 > 64:
                reason = "RING_CAPACITY"
            else:
                tokens = [frontier] * message.proposal.live
        wanted.append((frontier, reason, tokens))
    got = [
        (
            row.context_frontier,
            reason_of(row),
            list(row.proposal.token_ids) if row.HasField("proposal") else None,
        )
        for row in reply.rows
    ]
    assert reply.round_index == index
    assert got == wanted
    assert [(r.sequence_id, r.epoch) for r in reply.rows] == [
        (r.sequence_id, r.epoch) for r in event.rows
    ]


def check_features(drafting, rounds, expected, row):
    first, count = first_of(expected, row), max(1, row["count"])
    event = wire.Features(
        sequence_id=row["id"],
        epoch=row["epoch"],
        first_position=first,
        rows=tensor_of(drafting, count),
    )
    stale = expected.is_stale(row["id"], row["epoch"])
    wanted = None if stale else expected.features(row["id"], row["epoch"], first, count)
    answer = rounds.apply(wire.DraftRoundsRequest(features=event))
    assert (answer and reason_of(answer.sequence_fault)) == wanted


def check_open(rounds, expected, sequence_id, epoch, coverage):
    event = wire.Open(sequence_id=sequence_id, epoch=epoch, coverage_first=coverage)
    wanted = None
    if expected.is_creatable(sequence_id, epoch):
        expected.replace(sequence_id)
        if len(expected.live) >= LIMIT or coverage > 64:
            wanted = "RING_CAPACITY"
        else:
            expected.live[sequence_id] = [epoch, coverage]
    answer = rounds.apply(wire.DraftRoundsRequest(open=event))
    assert (answer and reason_of(answer.sequence_fault)) == wanted


def check_fork(rounds, expected, sequence_id, epoch, source):
    if sequence_id == source:
        return
    held = expected.live.get(source)
    event = wire.Fork(
        source_sequence_id=source,
        source_epoch=held[0] if held else 1,
        sequence_id=sequence_id,
        epoch=epoch,
        context_frontier=held[1] if held else 0,
    )
    wanted = "SEQUENCE_NOT_FOUND"
    if held and expected.is_creatable(sequence_id, epoch):
        expected.replace(sequence_id)
        wanted = "RING_CAPACITY" if len(expected.live) >= LIMIT else None
        if wanted is None:
            expected.live[sequence_id] = [epoch, held[1]]
    reply = rounds.apply(wire.DraftRoundsRequest(fork=event)).fork_reply
    assert reason_of(reply) == wanted


def check_capture(rounds, expected, sequence_id, shift):
    held = expected.live.get(sequence_id)
    # an id in use would end the stream
    checkpoint_id = next(i for i in range(CHECKPOINTS + 1) if i not in expected.kept)
    event = wire.Capture(
        checkpoint_id=checkpoint_id,
        sequence_id=sequence_id,
        epoch=held[0] if held else 1,
        context_frontier=(held[1] if held else 0) + shift,
    )
    reply = rounds.apply(wire.DraftRoundsRequest(capture=event)).capture_reply
    if held is None:
        assert reason_of(reply) == "SEQUENCE_NOT_FOUND"
    elif shift:
        assert reason_of(reply) == "FRONTIER_MISMATCH"
    else:
        assert reason_of(reply) is None
        expected.kept[checkpoint_id] = held[1]
        most = ON_DEVICE + ON_HOST
        assert len(reply.evicted_checkpoint_ids) == max(0, len(expected.kept) - most)
        for evicted in reply.evicted_checkpoint_ids:
            assert evicted != checkpoint_id
            del expected.kept[evicted]


def check_restore(rounds, expected, sequence_id, epoch, checkpoint_id):
    event = wire.Restore(
        checkpoint_id=checkpoint_id,
        sequence_id=sequence_id,
        epoch=epoch,
        context_frontier=expected.kept.get(checkpoint_id, 0),
    )
    wanted = None
    if checkpoint_id not in expected.kept:
        wanted = "CHECKPOINT_NOT_FOUND"
    elif not expected.is_creatable(sequence_id, epoch):
        wanted = "SEQUENCE_NOT_FOUND"
    else:
        expected.replace(sequence_id)
        if len(expected.live) >= LIMIT:
            wanted = "RING_CAPACITY"
        else:
            expected.live[sequence_id] = [epoch, expected.kept[checkpoint_id]]
    reply = rounds.apply(wire.DraftRoundsRequest(restore=event)).restore_reply
    assert reason_of(reply) == wanted


@settings(max_examples=150, deadline=None)
@given(events=st.lists(EVENTS, max_size=25))
def test_contexts_follow_their_events(drafting, events):
    (rounds, table, slots), expected, index = rounds_over(drafting), Expected(), 0
    try:
        for kind, *arguments in events:
            if kind == "open":
                check_open(rounds, expected, *arguments)
            elif kind == "release":
                sequence_id, epoch = arguments
                event = wire.Release(sequence_id=sequence_id, epoch=epoch)
                assert rounds.apply(wire.DraftRoundsRequest(release=event)) is None
                if sequence_id not in expected.live:
                    epoch = max(epoch, expected.released.get(sequence_id, -1))
                    expected.released[sequence_id] = epoch
                elif expected.live[sequence_id][0] <= epoch:
                    del expected.live[sequence_id]
                    epoch = max(epoch, expected.released.get(sequence_id, -1))
                    expected.released[sequence_id] = epoch
            elif kind == "features":
                check_features(drafting, rounds, expected, *arguments)
            elif kind == "fork":
                check_fork(rounds, expected, *arguments)
            elif kind == "capture":
                check_capture(rounds, expected, *arguments)
            elif kind == "restore":
                check_restore(rounds, expected, *arguments)
            elif kind == "drop":
                expected.kept.pop(arguments[0], None)
                event = wire.Drop(checkpoint_id=arguments[0])
                reply = rounds.apply(wire.DraftRoundsRequest(drop=event)).drop_reply
                assert reply.checkpoint_id == arguments[0]
            else:
                index += 1
                check_round(drafting, rounds, expected, index, *arguments)
            assert drafting.memory.free_count == 3 - len(expected.live)
            assert table.ids == sorted(expected.kept)
    finally:
        rounds.close()
    assert drafting.memory.free_count == 3
    assert table.ids == sorted(expected.kept), "checkpoints outlive the stream"
    table.clear()
    free = [slots.free_count(cells) for cells in (slots.device_cells, slots.host_cells)]
    assert free == [ON_DEVICE, ON_HOST]


def field_values(field):
    if field.type == field.TYPE_MESSAGE:
        values = messages(field.message_type)
    elif field.type == field.TYPE_BYTES:
        values = st.sampled_from([b"", b"\0" * 3, b"\0" * 768, b"\xff" * 1536])
    elif field.type == field.TYPE_FLOAT:
        values = st.sampled_from([0.0, 1.0, -1.0, float("nan"), float("inf")])
    elif field.type == field.TYPE_ENUM:
        values = st.integers(0, 9)
    elif field.type == field.TYPE_STRING:
        values = st.just("x")
    elif field.type in (field.TYPE_UINT32, field.TYPE_UINT64, field.TYPE_FIXED64):
        values = st.sampled_from([0, 1, 2, 7, 2**32 - 1])
    elif field.type == field.TYPE_DOUBLE:
        values = st.just(1e7)
    elif field.type == field.TYPE_INT32:
        values = st.sampled_from([0, 1, 159, 160, -1, 2**31 - 1])
    else:
        values = st.sampled_from([0, 1, 2, 64, 192, -1, 2**63 - 1, -(2**63)])
    return st.lists(values, max_size=3) if field.is_repeated else values


@st.composite
def messages(draw, descriptor):
    from google.protobuf import message_factory

    message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if not draw(st.integers(0, 2)):
            continue
        value = draw(field_values(field))
        if (field.is_repeated and field.type == field.TYPE_MESSAGE) or field.is_repeated:
            getattr(message, field.name).extend(value)
        elif field.type == field.TYPE_MESSAGE:
            getattr(message, field.name).CopyFrom(value)
        else:
            setattr(message, field.name, value)
    return message


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_an_arbitrary_message_is_answered_or_refused_and_leaks_nothing(drafting, data):
    rounds, _, _ = rounds_over(drafting)
    rounds.apply(wire.DraftRoundsRequest(open=wire.Open(sequence_id=1, epoch=1)))
    try:
        for _ in range(3):
            request = data.draw(messages(wire.DraftRoundsRequest.DESCRIPTOR))
            answer = rounds.apply(request)
            assert (answer is not None) or not request.HasField("round")
    except FaultError as fault:
        assert fault.reason in ("EVENT_INVALID", "TENSOR_SHAPE")
    finally:
        rounds.close()
    assert drafting.memory.free_count == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("draft_format", ["dflash", "dflash2"])
def test_twenty_thousand_sampled_rounds_grow_nothing(make_pair, load, features, draft_format):
    """Eight sequences, K = 15, temperature 1, contexts opened anew as they reach their end."""
    loaded = load(
        make_pair(draft_format, "lf", is_causal=False),
        max_concurrency=8,
        draft_tokens=15,
        max_context=512,
    )
    counters: Counter[str] = Counter()
    table = CheckpointTables(CheckpointSlots(loaded.memory, 0), 0.0, counters).claim(b"", 0)
    rounds = DraftRounds(loaded.config, loaded.graphs, 8, table, counters)
    rows, epochs, frontiers = features(16), [0] * 8, [512] * 8
    resident = []
    with torch.inference_mode():
        for index in range(1, 20_001):
            event = wire.Round(round_index=index)
            for sequence_id in range(8):
                count = (index * 7 + sequence_id * 5) % 16 + 1
                if frontiers[sequence_id] + count + 16 > 512:
                    epochs[sequence_id] += 1
                    frontiers[sequence_id] = 0
                    opened = wire.Open(sequence_id=sequence_id, epoch=epochs[sequence_id])
                    assert rounds.apply(wire.DraftRoundsRequest(open=opened)) is None
                row = event.rows.add(
                    sequence_id=sequence_id,
                    epoch=epochs[sequence_id],
                    first_position=frontiers[sequence_id],
                    features=tensors.encode(rows[:count]),
                )
                frontiers[sequence_id] += count
                row.proposal.frontier = frontiers[sequence_id]
                row.proposal.live = (index + sequence_id) % 15 + 1
                row.proposal.temperature = 1.0
                row.proposal.seed = index
            reply = rounds.apply(wire.DraftRoundsRequest(round=event)).round_reply
            assert all(row.HasField("proposal") for row in reply.rows)
            if index % 4000 == 0:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                resident.append(pages * resource.getpagesize())
    assert counters["proposals"] == 160_000
    assert resident[-1] - resident[0] < 16 * 2**20, resident
