"""The link against a scripted drafter over real gRPC: pacing, loss, faults and stale answers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from outrider import faults, serving, tensors
from outrider.faults import FaultError
from outrider.v1 import draft_service_pb2 as wire
from outrider.v1 import draft_service_pb2_grpc
from verifier.drafter_link import Ask, Context, DrafterLink, decode_proposal

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


class Setup:
    def __init__(self, answer: Answer, **options: object) -> None:
        self.drafter = ScriptedDrafter(answer)
        hello = wire.Hello(draft_tokens=K, geometry=wire.DraftGeometry(public_vocab=100))
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


def features(first: int, end: int) -> torch.Tensor:
    return torch.arange(first, end).float()[:, None].expand(-1, WIDTH).contiguous()


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
    assert torch.equal(
        tensors.decode(row.features, (None, WIDTH), torch.float32, name="rows"), features(0, 3)
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
    assert torch.equal(
        tensors.decode(s.drafter.of("features")[0].rows, (None, WIDTH), torch.float32, name="x"),
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
    s.link._send_round([])
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
    from verifier.drafter_link import _Arrived

    return _Arrived(link._stream, message)


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
        wire.Hello(draft_tokens=K),
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


def test_q_arrives_bit_for_bit():
    q = torch.softmax(torch.tensor([[10.0, 10.02], [0.1, 3.0]]), 1)
    drafted = decode_proposal(conditional(q.tolist(), [[1, 2], [3, 4]], [2, 3]), 2, 100)
    assert torch.equal(drafted.probabilities, q)
    assert torch.equal(drafted.candidate_ids, torch.tensor([[1, 2], [3, 4]]))


@pytest.mark.parametrize(
    ("q", "ids", "tokens"),
    [
        pytest.param([[0.5, 0.4]], [[1, 2]], [1], id="sum-below-1"),
        pytest.param([[0.5, 0.5]], [[1, 2]], [3], id="token-outside-support"),
        pytest.param([[1.0, 0.0]], [[1, 2]], [2], id="token-with-q-0"),
        pytest.param([[1.5, -0.5]], [[1, 2]], [1], id="negative"),
        pytest.param([[float("nan"), 0.5]], [[1, 2]], [2], id="nan"),
        pytest.param([[0.5, 0.5]], [[1, 200]], [1], id="candidate-outside-vocabulary"),
        pytest.param([[0.5, 0.5]], [[1, 2]], [200], id="id-outside-vocabulary"),
        pytest.param([[0.5, 0.5], [0.5, 0.5]], [[1, 2], [1, 2]], [1, 2], id="more-than-asked"),
    ],
)
def test_a_law_that_cannot_be_what_was_drawn_from_is_refused(q, ids, tokens):
    with pytest.raises(FaultError, match="PROPOSAL_INVALID"):
        decode_proposal(conditional(q, ids, tokens), 1, 100)
