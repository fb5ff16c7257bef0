"""The link against a scripted drafter over real gRPC: pacing, loss, faults and stale answers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import torch

from outrider import faults, serving, tensors
from outrider.faults import FaultError
from outrider.tensors import RowBytes, row_bytes
from outrider.v1 import draft_service_pb2 as wire
from outrider.v1 import draft_service_pb2_grpc, tensor_pb2
from verifier.draft_context import Context
from verifier.drafter_link import DrafterLink
from verifier.drafter_stream import Arrived
from verifier.proposals import POINT_MASSES, Ask, decode_proposal, laws_of

K, S, WIDTH = 3, 8, 6
Answer = Callable[[wire.DraftRoundsRequest], "wire.DraftRoundsResponse | None"]


class ScriptedDrafter(draft_service_pb2_grpc.DraftServiceServicer):
    """Records every event and answers with what the script returns."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.events: list[wire.DraftRoundsRequest] = []
        self.arrived: queue.Queue[str] = queue.Queue()
        self.server = grpc.server(ThreadPoolExecutor(8), options=serving.SERVER_OPTIONS)
        draft_service_pb2_grpc.add_DraftServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.streams: list[grpc.ServicerContext] = []

    def DraftRounds(
        self, request_iterator: Iterator[wire.DraftRoundsRequest], context: grpc.ServicerContext
    ) -> Iterator[wire.DraftRoundsResponse]:
        self.streams.append(context)
        for event in request_iterator:
            self.events.append(event)
            self.arrived.put(event.WhichOneof("event"))
            answer = self.answer(event)
            if answer is not None:
                yield answer

    def of(self, kind: str) -> list:
        return [getattr(e, kind) for e in list(self.events) if e.WhichOneof("event") == kind]

    def wait_for(self, kind: str, count: int = 1) -> list:
        deadline = time.monotonic() + 5
        while len(self.of(kind)) < count:
            assert time.monotonic() < deadline, f"{count} {kind} expected, got {self.of(kind)}"
            self.arrived.get(timeout=5)
        return self.of(kind)


def greedy(event: wire.DraftRoundsRequest) -> wire.DraftRoundsResponse | None:
    """A well-behaved drafter: Welcome, and token 5 P times for whoever asks."""
    match event.WhichOneof("event"):
        case "hello":
            return wire.DraftRoundsResponse(welcome=wire.Welcome(max_context=1000))
        case "round":
            return wire.DraftRoundsResponse(round_reply=reply_to(event.round))
    return None


def reply_to(sent: wire.Round) -> wire.RoundReply:
    reply = wire.RoundReply(round_index=sent.round_index)
    for row in sent.rows:
        answer = reply.rows.add(
            sequence_id=row.sequence_id, epoch=row.epoch, context_frontier=row.first_position
        )
        if row.HasField("proposal"):
            answer.proposal.frontier = row.proposal.frontier
            answer.proposal.token_ids.extend([5] * row.proposal.live)
            answer.proposal.point_mass.SetInParent()
    return reply


def fault_reply(sent: wire.Round, reason: str) -> wire.DraftRoundsResponse:
    reply = wire.RoundReply(round_index=sent.round_index)
    for row in sent.rows:
        answer = reply.rows.add(sequence_id=row.sequence_id, epoch=row.epoch)
        answer.fault.CopyFrom(faults.to_status(FaultError(reason, "scripted")))
    return wire.DraftRoundsResponse(round_reply=reply)


def hello_of() -> wire.Hello:
    geometry = wire.DraftGeometry(public_vocab=100, activation_dtype=tensor_pb2.DTYPE_FLOAT32)
    return wire.Hello(draft_tokens=K, geometry=geometry)


class Setup:
    def __init__(self, answer: Answer, **options: object) -> None:
        self.drafter = ScriptedDrafter(answer)
        hello = hello_of()
        arguments = {
            "row_bytes": 4 * WIDTH,
            "window": S,
            "all_local": True,
            "timeout_ns": 5_000_000_000,
            "backlog_rows": 64,
        } | options
        self.woken = threading.Event()
        self.link = DrafterLink(
            f"127.0.0.1:{self.drafter.port}", hello, on_event=self.woken.set, **arguments
        )
        self.link.start()

    def connect(self) -> None:
        self.until(lambda: self.link.connected)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while True:
            self.link.poll()
            if condition():
                return
            assert time.monotonic() < deadline
            self.woken.wait(0.05)
            self.woken.clear()

    def opened(self, frontier: int, prompt_end: int) -> Context:
        context = self.link.context()
        self.link.ensure_open(context, frontier, prompt_end)
        return context

    def close(self) -> None:
        self.link.stop()
        self.drafter.server.stop(None)


def link_to(*drafters: ScriptedDrafter) -> DrafterLink:
    """A link that has not started, to the first of these that answers."""
    return DrafterLink(
        ",".join(f"127.0.0.1:{drafter.port}" for drafter in drafters),
        hello_of(),
        row_bytes=4 * WIDTH,
        window=S,
        all_local=True,
        timeout_ns=5_000_000_000,
        backlog_rows=64,
        on_event=lambda: None,
    )


@pytest.fixture
def setup() -> Iterator[Callable[..., Setup]]:
    made: list[Setup] = []

    def make(answer: Answer = greedy, **options: object) -> Setup:
        made.append(Setup(answer, **options))
        made[-1].connect()
        return made[-1]

    yield make
    for each in made:
        each.close()


def features(first: int, end: int) -> RowBytes:
    return row_bytes(torch.arange(first, end).float()[:, None].expand(-1, WIDTH))


def ask(context: Context, frontier: int, live: int = K) -> Ask:
    return Ask(context, live=live, frontier=frontier, anchor=7, temperature=0.0, seed=1)


def test_pending_features_ride_in_the_round_and_the_proposal_comes_back(setup):
    s = setup()
    context = s.opened(0, 3)
    s.link.extend(context, 0, features(0, 3))
    exchange = s.link.exchange([ask(context, 3)])
    assert exchange.proposals[context.sequence_id].token_ids == (5, 5, 5)
    (row,) = s.drafter.of("round")[0].rows
    assert (row.first_position, row.proposal.frontier, row.proposal.live) == (0, 3, K)
    assert np.array_equal(
        row_bytes(tensors.decode(row.features, (None, WIDTH), torch.float32, name="rows")),
        features(0, 3),
    )


def test_a_local_draft_opens_S_rows_before_the_prompt_end_and_drops_older_rows(setup):
    s = setup()
    context = s.opened(0, 20)
    s.link.extend(context, 0, features(0, 16))
    s.link.extend(context, 16, features(16, 20))
    s.link.pump(drafting=False)
    s.link.exchange([ask(context, 20)])
    assert s.drafter.of("open")[0].coverage_first == 20 - S
    (sent,) = s.drafter.of("features")
    assert sent.first_position == 12
    assert sent.rows.shape[0] == 8


def test_a_full_layer_wants_every_row(setup):
    s = setup(all_local=False)
    context = s.opened(0, 20)
    s.link.extend(context, 0, features(0, 20))
    s.link.pump(drafting=False)
    s.link.exchange([ask(context, 20)])
    assert s.drafter.of("open")[0].coverage_first == 0
    assert s.drafter.of("features")[0].rows.shape[0] == 20


def test_a_features_message_holds_at_most_64_rows_and_eight_go_before_a_barrier(setup):
    held: list[wire.Round] = []

    def hold_rounds(event):
        if event.WhichOneof("event") == "round":
            held.append(event.round)
            return None
        return greedy(event)

    s = setup(hold_rounds, all_local=False, backlog_rows=5000)
    context = s.opened(0, 900)
    s.link.extend(context, 0, features(0, 900))
    for _ in range(4):
        s.link.pump(drafting=False)
    s.drafter.wait_for("round")
    assert len(s.drafter.of("features")) == 8
    assert len(s.drafter.of("round")) == 1
    assert not s.drafter.of("round")[0].rows
    assert {f.rows.shape[0] for f in s.drafter.of("features")} == {64}


def test_one_features_message_between_rounds_while_a_row_drafts(setup):
    s = setup(all_local=False, backlog_rows=5000)
    behind, drafting = s.opened(0, 300), s.opened(0, 2)
    s.link.extend(behind, 0, features(0, 300))
    s.link.extend(drafting, 0, features(0, 2))
    for step in range(3):
        s.link.pump(drafting=True)
        exchange = s.link.exchange([ask(behind, 300), ask(drafting, 2)])
        assert drafting.sequence_id in exchange.proposals
        assert behind.sequence_id not in exchange.proposals
        assert len(s.drafter.of("features")) == step + 1


def test_a_round_without_proposals_is_not_waited_for_and_stays_single(setup):
    def never(event):
        return None if event.WhichOneof("event") == "round" else greedy(event)

    s = setup(never)
    context = s.opened(0, 1)
    for position in range(3):
        s.link.extend(context, position, features(position, position + 1))
        assert s.link.exchange([ask(context, position + 1, live=0)]).proposals == {}
    s.drafter.wait_for("round")
    assert len(s.drafter.of("round")) == 1


def test_an_unanswered_round_expires_and_the_link_connects_again(setup):
    unanswered = []

    def silent_first(event):
        if event.WhichOneof("event") == "round" and not unanswered:
            unanswered.append(event.round)
            return None
        return greedy(event)

    s = setup(silent_first, timeout_ns=100_000_000)
    context = s.opened(0, 2)
    s.link.extend(context, 0, features(0, 2))
    assert s.link.exchange([ask(context, 2)]).proposals == {}
    assert not s.link.connected
    assert not context.is_open
    s.connect()
    s.link.ensure_open(context, 5, 2)
    assert (context.epoch, context.coverage_first) == (2, 5)
    assert context.sequence_id in s.link.exchange([ask(context, 5)]).proposals
    assert s.link.counters["round_timeouts"] == 1
    assert s.drafter.of("round")[-1].round_index == 1, "it counts within a stream"


@pytest.mark.parametrize("reason", ["SEQUENCE_NOT_FOUND", "FEATURES_GAP", "FRONTIER_MISMATCH"])
def test_a_lost_context_is_opened_again_with_the_next_epoch(setup, reason):
    faulted: list[int] = []

    def fault_once(event):
        if event.WhichOneof("event") == "round" and not faulted:
            faulted.append(1)
            return fault_reply(event.round, reason)
        return greedy(event)

    s = setup(fault_once)
    context = s.opened(0, 2)
    s.link.extend(context, 0, features(0, 2))
    assert s.link.exchange([ask(context, 2)]).proposals == {}
    assert not context.is_open
    s.link.ensure_open(context, 3, 2)
    assert s.link.exchange([ask(context, 3)]).proposals[context.sequence_id].token_ids == (5, 5, 5)
    assert [o.epoch for o in s.drafter.of("open")] == [1, 2]
    assert s.link.counters[f"fault_{reason.lower()}"] == 1


def test_a_proposal_fault_leaves_the_context_open(setup):
    faulted: list[int] = []

    def fault_once(event):
        if event.WhichOneof("event") == "round" and not faulted:
            faulted.append(1)
            return fault_reply(event.round, "PROPOSAL_NOT_FINITE")
        return greedy(event)

    s = setup(fault_once)
    context = s.opened(0, 0)
    assert s.link.exchange([ask(context, 0)]).proposals == {}
    assert context.is_open
    assert context.sequence_id in s.link.exchange([ask(context, 0)]).proposals


def test_an_unsolicited_fault_closes_only_its_sequence(setup):
    def refuse_open(event):
        if event.WhichOneof("event") == "open" and event.open.sequence_id == 1:
            fault = faults.to_status(FaultError("RING_CAPACITY", "scripted"))
            return wire.DraftRoundsResponse(
                sequence_fault=wire.SequenceFault(
                    sequence_id=1, epoch=event.open.epoch, fault=fault
                )
            )
        return greedy(event)

    s = setup(refuse_open)
    refused, fine = s.opened(0, 0), s.opened(0, 0)
    s.until(lambda: not refused.is_open)
    exchange = s.link.exchange([ask(refused, 0), ask(fine, 0)])
    assert set(exchange.proposals) == {fine.sequence_id}
    s.link.ensure_open(refused, 0, 0)
    assert not refused.is_open, "capacity faults are not retried at once"


def test_rows_of_an_older_epoch_are_dropped_and_counted(setup):
    def old_epoch(event):
        answer = greedy(event)
        if event.WhichOneof("event") == "round":
            for row in answer.round_reply.rows:
                row.epoch -= 1
        return answer

    s = setup(old_epoch)
    context = s.opened(0, 0)
    assert s.link.exchange([ask(context, 0)]).proposals == {}
    assert s.link.counters["stale_rows"] == 1


def test_a_backlog_beyond_its_share_opens_again_S_rows_back(setup):
    s = setup(all_local=False, backlog_rows=16)
    context = s.opened(0, 100)
    s.link.extend(context, 0, features(0, 10))
    s.link.extend(context, 10, features(10, 40))
    assert context.epoch == 2
    assert (context.coverage_first, context.unsent_rows) == (40 - S, S)
    assert s.link.counters["backlog_reopens"] == 1
    s.link.pump(drafting=False)
    s.drafter.wait_for("features")
    assert np.array_equal(
        row_bytes(
            tensors.decode(s.drafter.of("features")[0].rows, (None, WIDTH), torch.float32, name="x")
        ),
        features(32, 40),
    )


def test_a_backlog_that_stays_full_does_not_reopen_at_every_row(setup):
    s = setup(all_local=False, backlog_rows=S)
    context = s.opened(0, 100)
    for position in range(40):
        s.link.extend(context, position, features(position, position + 1))
        assert context.unsent_rows <= S
    assert s.link.counters["backlog_reopens"] <= 40 / (S - 3 * S // 4) + 1


def test_eight_features_messages_are_unanswered_at_most_whatever_is_answered_late(setup):
    held: list[wire.Round] = []

    def hold_rounds(event):
        if event.WhichOneof("event") == "round":
            held.append(event.round)
            return None
        return greedy(event)

    s = setup(hold_rounds, all_local=False, backlog_rows=5000)
    first, second = s.opened(0, 900), s.opened(0, 900)
    s.link.extend(first, 0, features(0, 256))
    s.link.pump(drafting=False)
    assert len(s.drafter.wait_for("features", 4)) == 4
    s.link._send_round(s.link._stream.begin_round())
    s.link.extend(second, 0, features(0, 900))
    s.link.pump(drafting=False)
    s.drafter.wait_for("features", 8)
    s.drafter.wait_for("round")
    # the Round answers the four before it, not the four behind it
    arrived = wire.DraftRoundsResponse(round_reply=reply_to(held[0]))
    s.link._apply(_arrived(s.link, arrived))
    s.link.pump(drafting=False)
    s.drafter.wait_for("features", 12)
    assert len(s.drafter.of("features")) == 12


def _arrived(link, message):
    return Arrived(link._stream, message)


def test_nothing_is_asked_beyond_the_drafters_context(setup):
    s = setup()
    context = s.opened(996, 0)
    assert context.sequence_id in s.link.exchange([ask(context, 996)]).proposals
    s.link.ensure_open(context, 997, 0)
    assert s.link.exchange([ask(context, 997)]).proposals == {}
    s.drafter.wait_for("release")
    assert not s.link.drafts_at(997)


def test_a_prompt_beyond_the_drafters_context_opens_nothing(setup):
    s = setup()
    context = s.opened(0, 997)
    assert (context.is_open, context.out_of_range) == (False, True)
    assert s.link.counters["sequences_out_of_range"] == 1
    assert not s.drafter.of("open")


def test_release_frees_once_and_unknown_contexts_are_no_error(setup):
    s = setup()
    context = s.opened(0, 0)
    s.link.release(context)
    s.link.release(context)
    s.drafter.wait_for("release")
    assert len(s.drafter.of("release")) == 1


def test_a_mismatch_is_a_refusal_and_rounds_stay_plain():
    class Refusing(ScriptedDrafter):
        def DraftRounds(self, request_iterator, context):
            faults.abort(
                context, FaultError("MODEL_MISMATCH", "hidden_size: expected 5120, got 1024")
            )

    drafter = Refusing(greedy)
    link = DrafterLink(
        f"127.0.0.1:{drafter.port}",
        hello_of(),
        row_bytes=4 * WIDTH,
        window=S,
        all_local=True,
        timeout_ns=10**9,
        backlog_rows=8,
        on_event=lambda: None,
    )
    link.start()
    deadline = time.monotonic() + 5
    while link.state != "refused" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert link.state == "refused"
    assert "5120" in link.detail
    context = link.context()
    link.ensure_open(context, 0, 0)
    assert link.exchange([ask(context, 0)]).proposals == {}
    link.stop()
    drafter.server.stop(None)


def conditional(q: list[list[float]], ids: list[list[int]], tokens: list[int]) -> wire.Proposal:
    return wire.Proposal(
        frontier=0,
        token_ids=tokens,
        conditional=wire.Conditional(
            candidate_ids=tensors.encode(torch.tensor(ids, dtype=torch.int32)),
            probabilities=tensors.encode(torch.tensor(q)),
        ),
    )


def asking(live: int) -> Ask:
    return Ask(Context(1), live, frontier=0, anchor=0, temperature=1.0, seed=0)


def laws(*proposals: wire.Proposal, vocab: int = 100) -> list[object]:
    """What comes of the laws of proposals of one token each."""
    return laws_of([decode_proposal(each, asking(1), vocab) for each in proposals], vocab)


def test_q_arrives_bit_for_bit():
    q = torch.softmax(torch.tensor([[10.0, 10.02], [0.1, 3.0]]), 1)
    proposal = conditional(q.tolist(), [[1, 2], [3, 4]], [2, 3])
    drafted = decode_proposal(proposal, asking(2), 100)
    assert drafted.token_ids == (2, 3)
    (law,) = laws_of([drafted], 100)
    assert torch.equal(law.probabilities, q)
    assert torch.equal(law.candidate_ids, torch.tensor([[1, 2], [3, 4]]).int())


def test_an_unsound_law_takes_no_other_along():
    sound = conditional([[0.5, 0.5]], [[1, 2]], [1])
    unsound = conditional([[0.5, 0.4]], [[1, 2]], [1])
    wide = conditional([[0.5, 0.25, 0.25]], [[1, 2, 3]], [3])
    malformed = conditional([[0.5, 0.5]], [[1, 2]], [1])
    malformed.conditional.probabilities.data = b"1234567"
    point = wire.Proposal(token_ids=[7], point_mass=wire.PointMass())
    outcomes = laws(sound, unsound, wide, malformed, point, sound)
    assert [o.reason if isinstance(o, FaultError) else "law" for o in outcomes] == [
        "law",
        "PROPOSAL_INVALID",
        "law",
        "TENSOR_SHAPE",
        "law",
        "law",
    ]
    assert outcomes[4] is POINT_MASSES
    assert laws_of([None], 100) == [None]
    assert laws_of([], 100) == []


@pytest.mark.parametrize(
    ("q", "ids", "tokens"),
    [
        pytest.param([[0.5, 0.4]], [[1, 2]], [1], id="sum-below-1"),
        pytest.param([[0.5, 0.5]], [[1, 2]], [3], id="token-outside-support"),
        pytest.param([[1.0, 0.0]], [[1, 2]], [2], id="token-with-q-0"),
        pytest.param([[1.5, -0.5]], [[1, 2]], [1], id="negative"),
        pytest.param([[float("nan"), 0.5]], [[1, 2]], [2], id="nan"),
        pytest.param([[0.5, 0.5]], [[1, 200]], [1], id="candidate-outside-vocabulary"),
    ],
)
def test_a_law_that_cannot_be_what_was_drawn_from_is_refused(q, ids, tokens):
    (outcome,) = laws(conditional(q, ids, tokens))
    assert isinstance(outcome, FaultError)
    assert outcome.reason == "PROPOSAL_INVALID"


@pytest.mark.parametrize(
    ("tokens", "live"), [([200], 1), ([-1], 1), ([1, 2], 1), ([], 1), ([1], 2)]
)
def test_tokens_that_were_not_asked_for_are_refused(tokens, live):
    proposal = conditional([[0.5, 0.5]] * len(tokens), [[1, 2]] * len(tokens), tokens)
    with pytest.raises(FaultError, match="PROPOSAL_INVALID"):
        decode_proposal(proposal, asking(live), 100)


# ---- a drafter that comes back ----------------------------------------------------------------


class Restartable:
    """A drafter that forgets everything each time its stream is cut."""

    def __init__(self, setup, **options):
        self.s = setup(**options)

    def cut(self):
        self.s.drafter.streams[-1].cancel()
        self.s.until(lambda: not self.s.link.connected)
        self.s.connect()


def sent_rows(drafter, epoch):
    """(first, end) of every run of rows that went out under an epoch."""
    return [
        (f.first_position, f.first_position + f.rows.shape[0])
        for f in drafter.of("features")
        if f.epoch == epoch
    ]


def test_after_a_loss_the_last_S_rows_are_sent_again_and_drafting_resumes(setup):
    lost = Restartable(setup)
    s = lost.s
    context = s.opened(0, 3)
    s.link.extend(context, 0, features(0, 3))
    for first in range(3, 30, 3):
        assert context.sequence_id in s.link.exchange([ask(context, first)]).proposals
        s.link.extend(context, first, features(first, first + 3))
    lost.cut()
    assert not context.is_open
    # rows that are committed meanwhile count too
    s.link.extend(context, 30, features(30, 31))
    s.link.ensure_open(context, 31, 3)
    assert context.coverage_first == 31 - S
    s.link.pump(drafting=True)
    assert context.sequence_id in s.link.exchange([ask(context, 31)]).proposals
    (run,) = sent_rows(s.drafter, context.epoch)
    assert run == (31 - S, 31)
    (again,) = [f for f in s.drafter.of("features") if f.epoch == context.epoch]
    assert np.array_equal(
        row_bytes(tensors.decode(again.rows, (None, WIDTH), torch.float32, name="x")),
        features(31 - S, 31),
    )
    assert s.link.counters["reseeds"] == 1


def test_a_prompt_in_prefill_keeps_what_it_will_need(setup):
    """With the drafter away the rows before needed - S are of no use, the others are kept."""
    lost = Restartable(setup)
    s = lost.s
    context = s.link.context()
    assert s.link.wanted_from(context, 40) == 40 - S
    s.link.extend(context, 32, features(32, 36))
    s.link.extend(context, 36, features(36, 40))
    s.link.ensure_open(context, 40, 40)
    assert (context.coverage_first, context.unsent_rows) == (32, 8)


def test_a_draft_of_full_layers_alone_keeps_nothing_and_starts_cold(setup):
    lost = Restartable(setup, all_local=False, window=0)
    s = lost.s
    context = s.opened(0, 6)
    s.link.extend(context, 0, features(0, 6))
    s.link.pump(drafting=False)
    s.link.exchange([ask(context, 6)])
    assert s.link.feature_bytes == 0
    lost.cut()
    s.link.ensure_open(context, 6, 6)
    assert (context.coverage_first, context.unsent_rows) == (6, 0)


def test_the_rows_that_are_kept_are_bounded(setup):
    s = setup()
    context = s.opened(0, 5)
    for position in range(200):
        s.link.extend(context, position, features(position, position + 1))
        if position % 3 == 0:
            s.link.pump(drafting=False)
            s.link.exchange([ask(context, position + 1)])
        assert len(context.rows) <= S + K + 1
    assert s.link.feature_bytes == len(context.rows) * WIDTH * 4
    s.link.release(context)
    assert s.link.feature_bytes == 0


def test_another_address_takes_over(setup):
    second = ScriptedDrafter(greedy)
    first = ScriptedDrafter(greedy)
    link = link_to(first, second)
    link.start()
    try:
        until(link, lambda: link.connected)
        context = link.context()
        link.ensure_open(context, 0, 4)
        link.extend(context, 0, features(0, 4))
        assert link.exchange([ask(context, 4)]).proposals
        first.server.stop(None)
        until(link, lambda: not link.connected)
        until(link, lambda: link.connected)
        link.ensure_open(context, 4, 4)
        assert link.exchange([ask(context, 4)]).proposals
        assert sum(row.features.shape[0] for row in second.of("round")[0].rows) == 4
    finally:
        link.stop()
        second.server.stop(None)


def until(link, condition):
    deadline = time.monotonic() + 20
    while True:
        link.poll()
        if condition():
            return
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---- checkpoints ------------------------------------------------------------------------------


def keeping(event):
    """A drafter that confirms whatever it is asked to keep."""
    match event.WhichOneof("event"):
        case "capture":
            reply = wire.CaptureReply(checkpoint_id=event.capture.checkpoint_id)
            return wire.DraftRoundsResponse(capture_reply=reply)
        case "restore":
            reply = wire.RestoreReply(
                checkpoint_id=event.restore.checkpoint_id,
                sequence_id=event.restore.sequence_id,
                epoch=event.restore.epoch,
                coverage_first=2,
            )
            return wire.DraftRoundsResponse(restore_reply=reply)
        case "fork":
            reply = wire.ForkReply(sequence_id=event.fork.sequence_id, epoch=event.fork.epoch)
            return wire.DraftRoundsResponse(fork_reply=reply)
        case "drop":
            return wire.DraftRoundsResponse(
                drop_reply=wire.DropReply(checkpoint_id=event.drop.checkpoint_id)
            )
    return greedy(event)


def kinds(drafter):
    return [e.WhichOneof("event") for e in list(drafter.events)]


def test_a_capture_waits_for_its_rows_and_a_message_ends_there(setup):
    s = setup(keeping)
    context = s.opened(0, 5)
    s.link.extend(context, 0, features(0, 5))
    assert s.link.capture(context, 7, 5)
    assert not s.link.holds(7), "present on the reply, not before"
    s.link.extend(context, 5, features(5, 7))
    s.link.pump(drafting=True)
    assert context.sequence_id in s.link.exchange([ask(context, 7)]).proposals
    s.until(lambda: s.link.holds(7))
    assert kinds(s.drafter) == ["hello", "open", "features", "capture", "round"]
    (captured,) = s.drafter.of("capture")
    assert (captured.context_frontier, captured.epoch) == (5, 1)
    assert sent_rows(s.drafter, 1) == [(0, 5)]
    assert s.drafter.of("round")[0].rows[0].first_position == 5


def test_a_half_that_an_unanswered_capture_may_have_evicted_is_nothing_to_count_on(setup):
    answering = True

    def slow(event):
        return keeping(event) if answering or event.WhichOneof("event") != "capture" else None

    s = setup(slow)
    context = s.opened(0, 5)
    s.link.extend(context, 0, features(0, 5))
    s.link.capture(context, 7, 5)
    s.link.pump(drafting=False)
    s.until(lambda: s.link.holds(7))
    rows = s.link.tail(context)
    assert s.link.continues(7, 5, rows, 0)
    answering = False
    s.link.capture(context, 8, 5)
    assert s.link.holds(7)
    assert not s.link.continues(7, 5, rows, 0)


def test_a_row_that_waits_for_a_capture_is_not_in_the_round(setup):
    s = setup(keeping)
    first, second = s.opened(0, 2), s.opened(0, 2)
    for checkpoint_id, context in enumerate((first, second)):
        s.link.extend(context, 0, features(0, 2))
        s.link.capture(context, checkpoint_id, 2)
    s.link.pump(drafting=True)
    exchange = s.link.exchange([ask(first, 2), ask(second, 2)])
    assert set(exchange.proposals) == {first.sequence_id}
    s.link.pump(drafting=True)
    exchange = s.link.exchange([ask(first, 2), ask(second, 2)])
    assert set(exchange.proposals) == {first.sequence_id, second.sequence_id}


def test_a_context_that_ends_is_captured_first_and_then_released(setup):
    s = setup(keeping)
    context = s.opened(0, 3)
    s.link.extend(context, 0, features(0, 3))
    assert s.link.capture(context, 1, 3)
    s.link.release(context)
    s.drafter.wait_for("release")
    assert kinds(s.drafter) == ["hello", "open", "features", "capture", "release"]
    s.until(lambda: s.link.holds(1))


def test_a_capture_for_which_there_is_no_room_is_skipped(setup):
    def mute(event):
        return None if event.WhichOneof("event") == "round" else keeping(event)

    s = setup(mute, all_local=False, backlog_rows=5000)
    context = s.opened(0, 900)
    s.link.extend(context, 0, features(0, 900))
    s.link.capture(context, 1, 900)
    s.link.pump(drafting=False)
    s.link.release(context)
    s.drafter.wait_for("release")
    assert not s.drafter.of("capture")
    assert s.link.counters["captures_skipped"] == 1


def test_nothing_is_captured_without_all_of_the_rows(setup):
    s = setup(keeping)
    closed = s.link.context()
    assert not s.link.capture(closed, 1, 0)
    late = s.opened(20, 0)
    assert not s.link.capture(late, 1, 19)
    assert s.link.capture(late, 2, 20) is False, "no row has come yet"


def test_a_refused_capture_and_an_evicted_one_are_absent(setup):
    def full(event):
        if event.WhichOneof("event") == "capture" and event.capture.checkpoint_id == 2:
            fault = faults.to_status(FaultError("CHECKPOINT_CAPACITY", "scripted"))
            return wire.DraftRoundsResponse(
                capture_reply=wire.CaptureReply(checkpoint_id=2, fault=fault)
            )
        answer = keeping(event)
        if event.WhichOneof("event") == "capture" and event.capture.checkpoint_id == 3:
            answer.capture_reply.evicted_checkpoint_ids.append(1)
        return answer

    s = setup(full)
    context = s.opened(0, 1)
    s.link.extend(context, 0, features(0, 1))
    for checkpoint_id in (1, 2):
        s.link.capture(context, checkpoint_id, 1)
    s.link.pump(drafting=False)
    s.until(lambda: s.link.holds(1) and s.link.counters["fault_checkpoint_capacity"] == 1)
    s.link.capture(context, 3, 1)
    s.until(lambda: s.link.holds(3))
    assert [s.link.holds(i) for i in (1, 2, 3)] == [False, False, True]


def test_a_restored_context_goes_on_at_its_frontier(setup):
    s = setup(keeping)
    source = s.opened(0, 10)
    s.link.extend(source, 0, features(0, 10))
    s.link.capture(source, 1, 10)
    rows = source.rows.tail(S)
    s.link.release(source)
    s.until(lambda: s.link.holds(1))
    context = s.link.context()
    s.link.restore(context, 1, rows, coverage_first=0, needed=14)
    s.link.ensure_open(context, 10, 14)
    s.link.extend(context, 10, features(10, 14))
    assert context.sequence_id in s.link.exchange([ask(context, 14)]).proposals
    assert context.coverage_first == 2, "as the drafter says"
    assert len(s.drafter.of("open")) == 1
    assert s.drafter.of("round")[-1].rows[0].first_position == 10
    assert s.drafter.of("restore")[0].context_frontier == 10


def test_a_checkpoint_that_is_gone_costs_a_reseed(setup):
    def gone(event):
        if event.WhichOneof("event") == "restore":
            fault = faults.to_status(FaultError("CHECKPOINT_NOT_FOUND", "scripted"))
            return wire.DraftRoundsResponse(
                restore_reply=wire.RestoreReply(
                    checkpoint_id=1,
                    sequence_id=event.restore.sequence_id,
                    epoch=event.restore.epoch,
                    fault=fault,
                )
            )
        return keeping(event)

    s = setup(gone)
    source = s.opened(0, 10)
    s.link.extend(source, 0, features(0, 10))
    s.link.capture(source, 1, 10)
    rows = source.rows.tail(S)
    s.link.release(source)
    s.until(lambda: s.link.holds(1))
    context = s.link.context()
    s.link.restore(context, 1, rows, coverage_first=0, needed=14)
    s.until(lambda: not context.is_open)
    assert not s.link.holds(1)
    s.link.ensure_open(context, 10, 14)
    assert (context.coverage_first, context.unsent_rows) == (14 - S, S - 4)
    s.link.extend(context, 10, features(10, 14))
    s.link.pump(drafting=True)
    assert context.sequence_id in s.link.exchange([ask(context, 14)]).proposals


def test_a_local_draft_that_has_left_the_checkpoint_behind_restores_nothing(setup):
    s = setup(keeping)
    source = s.opened(0, 4)
    s.link.extend(source, 0, features(0, 4))
    s.link.capture(source, 1, 4)
    rows = source.rows.tail(S)
    s.link.release(source)
    s.until(lambda: s.link.holds(1))
    context = s.link.context()
    s.link.restore(context, 1, rows, coverage_first=0, needed=5 + S)
    assert not context.is_open
    s.link.ensure_open(context, 4, 5 + S)
    assert context.coverage_first == 5


def test_a_fork_shares_what_its_source_has_not_sent(setup):
    s = setup(keeping)
    source = s.opened(0, 2)
    s.link.extend(source, 0, features(0, 2))
    fork = s.link.fork(source)
    assert (fork.is_open, fork.unsent_rows) == (True, 2)
    s.link.extend(fork, 2, features(2, 3))
    proposals = s.link.exchange([ask(source, 2), ask(fork, 3)]).proposals
    assert set(proposals) == {source.sequence_id, fork.sequence_id}
    assert kinds(s.drafter) == ["hello", "open", "fork", "round"]
    assert [row.features.shape[0] for row in s.drafter.of("round")[0].rows] == [2, 3]


def test_welcome_says_which_draft_halves_are_left(setup):
    forgotten: list[int] = []

    def forgetful(event):
        if event.WhichOneof("event") == "hello" and forgotten:
            return wire.DraftRoundsResponse(
                welcome=wire.Welcome(max_context=1000, checkpoint_ids=[1, 99])
            )
        return keeping(event)

    lost = Restartable(setup, answer=forgetful)
    s = lost.s
    context = s.opened(0, 1)
    s.link.extend(context, 0, features(0, 1))
    s.link.capture(context, 1, 1)
    s.link.capture(context, 2, 1)
    s.link.pump(drafting=False)
    s.until(lambda: s.link.holds(1) and s.link.holds(2))
    forgotten.append(2)
    lost.cut()
    assert (s.link.holds(1), s.link.holds(2)) == (True, False)
    (dropped,) = s.drafter.wait_for("drop")
    assert dropped.checkpoint_id == 99, "one that the verifier does not know"


def test_drop_reaches_captures_wherever_they_are(setup):
    s = setup(keeping)
    context = s.opened(0, 1)
    s.link.extend(context, 0, features(0, 1))
    s.link.capture(context, 1, 1)
    s.link.drop(1)
    s.link.pump(drafting=False)
    s.link.exchange([ask(context, 1)])
    assert not s.drafter.of("capture")
    s.link.capture(context, 2, 1)
    s.link.drop(2)
    s.drafter.wait_for("drop")
    s.until(lambda: s.link.exchange([ask(context, 1)]).proposals)
    assert not s.link.holds(2), "its reply came after the drop"


def test_a_call_that_does_not_end_is_left_behind_and_the_next_dial_connects(monkeypatch):
    """It is cancelled for its silence, and goes on blocking its reader all the same."""
    import verifier.drafter_stream as module

    release, hung = threading.Event(), []

    class Hung:
        def __iter__(self):
            release.wait(30)
            # a Welcome of a stream that was given up must not bring it back
            yield wire.DraftRoundsResponse(welcome=wire.Welcome(max_context=7))

        def cancel(self):
            pass

    class Stream(module.Stream):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            if not hung:
                self.call.cancel()
                self.call = Hung()
                hung.append(self)

    monkeypatch.setattr(module, "Stream", Stream)
    monkeypatch.setattr(module, "WELCOME_TIMEOUT_S", 0.1)
    monkeypatch.setattr(module, "ABANDON_S", 0.1)
    drafter = ScriptedDrafter(greedy)
    link = link_to(drafter)
    link.start()
    try:
        until(link, lambda: link.connected)
        assert link.counters["abandoned_calls"] == 1
        release.set()
        time.sleep(0.1)
        link.poll()
        context = link.context()
        link.ensure_open(context, 0, 4)
        link.extend(context, 0, features(0, 4))
        assert link.exchange([ask(context, 4)]).proposals
        assert link._stream is not hung[0]
    finally:
        link.stop()
        drafter.server.stop(None)
