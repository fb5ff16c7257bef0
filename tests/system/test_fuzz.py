"""Anything may arrive on either port: it gets an error, and everyone else goes on."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as engine_pb

from outrider import serving
from outrider.client import Client
from outrider.faults import REASONS, from_rpc_error
from outrider.shared_memory import FeatureMemory
from outrider.v1 import draft_service_pb2 as wire
from outrider.v1 import draft_service_pb2_grpc, tensor_pb2
from outrider.v1 import generation_service_pb2 as pb
from tests.system.conftest import greedy, prompt
from tests.tiny_pair import Pair, served
from tests.tiny_target import TEXT

K = 3
PATIENCE = 20  # seconds
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
# what a refusal of the sender's own may be; never the server's own failure
BLAMELESS = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DATA_LOSS,
}


@pytest.fixture(scope="module")
def pair(dense) -> Iterator[Pair]:
    # lanes for a second verifier, the fuzzer's own
    with served(
        dense / "target",
        dense / "dflash2",
        draft_tokens=K,
        max_concurrency=2,
        drafter_lanes=4,
        gateway=True,
    ) as pair:
        yield pair


@pytest.fixture
def neighbour(pair, oracle):
    """A request that runs all the while, drafting, and must come out as it should."""
    stop = threading.Event()
    expected = greedy(oracle, prompt(9), 60)

    def run() -> int:
        count = 0
        with Client(pair.address) as client:
            while not stop.is_set() or not count:
                completion = client.generate(
                    prompt_ids=prompt(9), max_tokens=60, temperature=0, ignore_eos=True
                )
                assert list(completion.token_ids) == expected
                assert completion.usage.plain_rounds == 0, "it kept its drafter"
                count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        yield
        stop.set()
        assert running.result(60) > 0
    pair.expect_idle()
    assert pair.verifier.engine.status().counters.get("drafter_losses", 0) == 0


def ports(pair: Pair) -> list[tuple[str, int]]:
    return [
        (host, int(port))
        for host, _, port in (a.rpartition(":") for a in (pair.address, pair.drafter.address))
    ]


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def raw_connections(random: random.Random) -> list[bytes]:
    """Bytes for a fresh connection each: no HTTP/2, broken HTTP/2, and half of a call."""
    noise = [random.randbytes(random.choice([1, 9, 64, 5000])) for _ in range(20)]
    opened = PREFACE + SETTINGS
    broken = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        PREFACE[:10],
        PREFACE,
        opened + SETTINGS[:5],
        opened + frame(0, 0, 0, b"x" * 10),  # DATA of no stream
        opened + frame(1, 4, 1, random.randbytes(40)),  # HEADERS that HPACK cannot read
        opened + frame(1, 4, 2, b"\x82"),  # a stream number that only servers use
        opened + frame(1, 4, 1, b"", length=(1 << 24) - 1),  # a frame that never comes
        opened + frame(8, 0, 0, b"\0\0\0\0"),  # WINDOW_UPDATE of nothing
        opened + frame(8, 0, 0, b"\x7f\xff\xff\xff") * 2,  # and beyond all bounds
        opened + frame(9, 4, 1, b"\x82"),  # CONTINUATION of nothing
        opened + frame(6, 0, 0, b"short"),  # PING of another size
        opened + frame(3, 0, 1, b"\0\0\0\0") * 50,  # RST_STREAM of streams that never were
        opened + frame(4, 0, 0, b"\0\x04\xff\xff\xff\xff"),  # a window beyond 2^31
        opened + b"".join(frame(200, 255, i, b"?") for i in range(50)),  # unknown frames
    ]
    mixed = [opened + random.randbytes(200) for _ in range(20)]
    return [*noise, *broken, *mixed]


@pytest.mark.parametrize("port", [0, 1], ids=["verifier", "drafter"])
def test_bytes_that_are_no_call_end_their_connection_alone(pair, neighbour, port):
    address = ports(pair)[port]
    for sent in raw_connections(random.Random(port)):
        with socket.create_connection(address, timeout=PATIENCE) as connection:
            connection.sendall(sent)
            connection.settimeout(0.05)
            try:
                while connection.recv(65536):
                    pass
            except OSError:
                pass


def mutated(message: bytes, random: random.Random) -> bytes:
    """A message with some of its bytes cut, changed, doubled or grown."""
    data = bytearray(message)
    for _ in range(random.randint(1, 4)):
        match random.randrange(4):
            case 0 if data:
                del data[random.randrange(len(data)) :]
            case 1 if data:
                data[random.randrange(len(data))] = random.randrange(256)
            case 2:
                at = random.randint(0, len(data))
                data[at:at] = random.randbytes(random.randint(1, 12))
            case _:
                data += data[: random.randint(0, 64)]
    return bytes(data)


def ended(call: Callable[[], object]) -> grpc.StatusCode:
    try:
        call()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


OWN, GATEWAY = "outrider.v1.GenerationService", "vllm.grpc.engine.VllmEngine"


def gateway_messages() -> list[tuple[str, bytes]]:
    asked = engine_pb.GenerateRequest(
        request_id="fuzz",
        tokenized=engine_pb.TokenizedInput(input_ids=[1, 2, 3]),
        sampling_params=engine_pb.SamplingParams(
            max_tokens=3, temperature=0.5, top_p=1, repetition_penalty=1, n=1, stop_token_ids=[4]
        ),
        stream=True,
    )
    return [("Generate", asked.SerializeToString())]


def public_messages() -> list[tuple[str, bytes]]:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")], tools_json=["{}"])
    requests = [
        (
            "Generate",
            pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[1, 2, 3]),
                max_tokens=3,
                sampling=pb.Sampling(temperature=0.5, seed=7, logit_bias={3: 1.0}),
                stop=["a"],
                stop_token_ids=[4],
                logprobs=2,
            ),
        ),
        ("Generate", pb.GenerateRequest(chat=chat, max_tokens=2)),
        ("Tokenize", pb.TokenizeRequest(text="x")),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1, 2])),
        ("Abort", pb.AbortRequest(request_id="x")),
    ]
    return [(method, message.SerializeToString()) for method, message in requests]


@pytest.mark.parametrize(
    ("service", "messages"),
    [(OWN, public_messages()), (GATEWAY, gateway_messages())],
    ids=["own", "gateway"],
)
def test_mutated_messages_on_the_public_port_are_answered_or_refused(
    pair, neighbour, service, messages
):
    chance = random.Random(0)
    seen = set()
    with grpc.insecure_channel(pair.address, options=serving.CHANNEL_OPTIONS) as channel:
        for _ in range(60):
            for method, message in messages:
                path = f"/{service}/{method}"
                sent = mutated(message, chance)
                if method == "Generate":
                    call = channel.unary_stream(path)(sent, timeout=PATIENCE)
                    # it may be a valid one that runs for long; the first answer will do
                    code = ended(lambda call=call: next(call, None))
                    call.cancel()
                else:
                    code = ended(
                        lambda path=path, sent=sent: channel.unary_unary(path)(
                            sent, timeout=PATIENCE
                        )
                    )
                assert code not in BLAMELESS, (method, sent)
                seen.add(code)
    assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT} <= seen


class Intruder:
    """A second verifier on the drafter's port, which says what it likes after a proper Hello."""

    def __init__(self, pair: Pair) -> None:
        self.channel = grpc.insecure_channel(pair.drafter.address, options=serving.CHANNEL_OPTIONS)
        self.hello = wire.Hello()
        self.hello.CopyFrom(pair.verifier.engine._link._hello)
        self.hello.verifier_id = b"intruder-is-here"
        self.hello.max_concurrency = 2

    def say(self, *events: bytes | wire.DraftRoundsRequest, hello: bool = True) -> str:
        """How the stream ended, as a fault's reason; "" for a proper end."""
        raw = [e if isinstance(e, bytes) else e.SerializeToString() for e in events]
        if hello:
            raw.insert(0, wire.DraftRoundsRequest(hello=self.hello).SerializeToString())
        call = self.channel.stream_stream("/outrider.v1.DraftService/DraftRounds")
        try:
            for _ in call(iter(raw), timeout=PATIENCE):
                pass
        except grpc.RpcError as error:
            return from_rpc_error(error).reason
        return ""


def event(**arm: object) -> wire.DraftRoundsRequest:
    return wire.DraftRoundsRequest(**arm)


def tensor(dtype: int, shape: list[int], data: bytes) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=dtype, shape=shape, data=data)


WIDTH = TEXT["hidden_size"]
OPEN = event(open=wire.Open(sequence_id=1, epoch=1))
F32 = tensor_pb2.DTYPE_FLOAT32
WRONG_ROWS = {
    "another dtype": tensor(tensor_pb2.DTYPE_BFLOAT16, [1, WIDTH], bytes(2 * WIDTH)),
    "no dtype": tensor(0, [1, WIDTH], bytes(4 * WIDTH)),
    "a dtype of the future": tensor(99, [1, WIDTH], bytes(4 * WIDTH)),
    "a huge shape": tensor(F32, [1 << 62, WIDTH], bytes(4 * WIDTH)),
    "a shape whose product wraps": tensor(F32, [1 << 32, 1 << 32], b""),
    "a negative shape": tensor(F32, [-1, WIDTH], bytes(4 * WIDTH)),
    "many dimensions": tensor(F32, [1] * 5000, bytes(4)),
    "no dimension": tensor(F32, [], bytes(4)),
    "no bytes": tensor(F32, [1, WIDTH], b""),
    "a byte too many": tensor(F32, [1, WIDTH], bytes(4 * WIDTH + 1)),
    "another width": tensor(F32, [1, WIDTH - 1], bytes(4 * (WIDTH - 1))),
    "more rows than a message holds": tensor(F32, [65, WIDTH], bytes(65 * 4 * WIDTH)),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
@pytest.mark.parametrize("place", ["features", "round"])
def test_wrong_tensors_end_the_sender_s_stream_alone(pair, neighbour, name, place):
    rows = WRONG_ROWS[name]
    if place == "features":
        sent = event(features=wire.Features(sequence_id=1, epoch=1, rows=rows))
    else:
        row = wire.RoundRow(sequence_id=1, epoch=1, features=rows)
        sent = event(round=wire.Round(round_index=1, rows=[row]))
    reason = Intruder(pair).say(OPEN, sent)
    assert reason in {"TENSOR_SHAPE", "EVENT_INVALID"}


def test_events_that_no_verifier_sends_end_the_sender_s_stream_alone(pair, neighbour):
    intruder = Intruder(pair)
    row = wire.RoundRow(sequence_id=1, epoch=1)
    asked = wire.RoundRow(sequence_id=1, epoch=1)
    asked.proposal.live = 1 << 31
    for events in (
        [b"\xff\xff\xff"],
        [event()],
        [b"\xfa\x7f\x00"],  # an arm of the future
        [event(hello=intruder.hello)],
        [event(round=wire.Round(round_index=0))],
        [event(round=wire.Round(round_index=1 << 63))],
        [event(round=wire.Round(round_index=1, rows=[row] * 3))],
        [OPEN, event(round=wire.Round(round_index=1, rows=[asked]))],
    ):
        assert intruder.say(*events) in {"EVENT_INVALID", "TENSOR_SHAPE"}, events
    assert intruder.say(b"\xff", hello=False) == "EVENT_INVALID"
    assert intruder.say(OPEN, hello=False) == "EVENT_INVALID"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory here")
def test_memory_that_is_not_there_or_not_as_said_is_never_read(pair, neighbour):
    outside = wire.SharedRows(first_row=1 << 62, row_count=4)
    intruder = Intruder(pair)
    sent = event(features=wire.Features(sequence_id=1, epoch=1, shared_rows=outside))
    row = wire.RoundRow(sequence_id=1, epoch=1, shared_features=outside)
    for name in ("", "outrider-" + "0" * 32, "../../etc/passwd", "x" * 4096, "/etc/passwd"):
        for row_count in (0, 1, (1 << 64) - 1):
            intruder.hello.shared_memory.CopyFrom(
                wire.SharedMemoryOffer(name=name, key=bytes(16), row_count=row_count)
            )
            assert intruder.say(OPEN, sent) == "EVENT_INVALID", "nothing was shared"
            round_ = event(round=wire.Round(round_index=1, rows=[row]))
            assert intruder.say(OPEN, round_) == "EVENT_INVALID"
    memory = FeatureMemory(row_bytes=4 * WIDTH, round_rows=8, message_rows=64, messages=8)
    try:
        offer = memory.offer()
        intruder.hello.shared_memory.CopyFrom(offer)
        for where in (
            outside,
            wire.SharedRows(first_row=offer.row_count, row_count=1),
            wire.SharedRows(first_row=0, row_count=0),
            wire.SharedRows(first_row=0, row_count=65),
            wire.SharedRows(first_row=0, row_count=(1 << 32) - 1),
        ):
            sent = event(features=wire.Features(sequence_id=1, epoch=1, shared_rows=where))
            assert intruder.say(OPEN, sent) in {"TENSOR_SHAPE", "EVENT_INVALID"}, where
    finally:
        memory.unlink()


def test_mutated_streams_on_the_inner_port_never_harm_the_verifier_s_own(pair, neighbour):
    chance = random.Random(1)
    intruder = Intruder(pair)
    rows = tensor(F32, [2, WIDTH], random.Random(2).randbytes(8 * WIDTH))
    row = wire.RoundRow(sequence_id=1, epoch=1, features=rows)
    row.proposal.MergeFrom(wire.ProposalRequest(frontier=2, anchor=5, live=2, temperature=0.5))
    proper = [
        OPEN,
        event(round=wire.Round(round_index=1, rows=[row])),
        event(features=wire.Features(sequence_id=1, epoch=1, first_position=2, rows=rows)),
        event(release=wire.Release(sequence_id=1, epoch=1)),
    ]
    assert intruder.say(*proper) == ""
    reasons = set()
    for _ in range(80):
        events = [each.SerializeToString() for each in proper]
        index = chance.randrange(len(events))
        events[index] = mutated(events[index], chance)
        reasons.add(intruder.say(*events))
    hello = event(hello=intruder.hello).SerializeToString()
    for _ in range(20):
        reasons.add(intruder.say(mutated(hello, chance), OPEN, hello=False))
    assert reasons - {""} <= REASONS.keys() - {"INTERNAL"}, reasons
    assert len(reasons) > 2


def test_a_stream_of_junk_in_many_threads_leaves_the_drafter_to_its_verifier(pair, neighbour):
    chance = random.Random(3)
    seeds = [chance.randrange(1 << 30) for _ in range(8)]

    def flood(seed: int) -> None:
        mine = random.Random(seed)
        intruder = Intruder(pair)
        intruder.hello.verifier_id = mine.randbytes(16)
        for _ in range(8):
            # most find no room, some a wrong event: either way their stream is the only one to end
            assert intruder.say(OPEN, mine.randbytes(64)) in REASONS.keys() - {"INTERNAL"}

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(flood, seeds))
    stub = draft_service_pb2_grpc.DraftServiceStub(Intruder(pair).channel)
    info = stub.GetDraftInfo(wire.GetDraftInfoRequest(), timeout=PATIENCE)
    assert info.stream_count == 1
