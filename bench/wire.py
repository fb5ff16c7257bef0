"""Ways for a round's features to reach the drafter: bytes, and time there and back.

``python -m bench.wire`` sends rounds as the verifier does, over one DraftRounds stream to another
process that takes the features as the drafter does and answers with as many proposals. Ways:

- **tcp**, **unix**: features inside the Round, over loopback or a unix socket;
- **shared**: features in shared memory that both processes map, the Round over tcp without them.

A row is ``--row-bytes`` of features as they are (taps x H), and ``--projected-bytes`` of them
projected (H). With ``--device cuda`` features begin in pinned host memory and end on the device,
and the answer waits for that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from dataclasses import asdict, dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import grpc
import torch

from bench.pair import describe, flag_line
from outrider import serving, tensors
from outrider.v1 import draft_service_pb2 as wire
from outrider.v1 import draft_service_pb2_grpc

WARM_ROUNDS = 30
DRAFT_TOKENS = 7
CANDIDATES = 16
MOST_ROWS = 64  # of one message
MOST_BYTES = serving.MESSAGE_LIMIT - 4096  # of one message's features


@dataclass(frozen=True)
class Line:
    """One way at one size; times are microseconds."""

    way: str
    features: str  # "raw" or "projected"
    sequences: int
    rows: int  # of each sequence
    feature_bytes: int
    round_us: float  # median, from rows in host memory to the reply
    round_90_us: float  # nine tenths are faster
    pack_us: float  # of it, writing the message or the shared memory
    take_us: float  # of it, in the other process: rows to where the draft reads them


# --- the process that takes


class _Taker(draft_service_pb2_grpc.DraftServiceServicer):
    """Takes features and answers every Round with proposals."""

    def __init__(self, device: torch.device, shared: SharedMemory) -> None:
        self._device = device
        self._shared = torch.frombuffer(shared.buf, dtype=torch.bfloat16)
        if device.type == "cuda":
            # pages that the device may read by itself, as pinned memory
            _register(self._shared)
        ids = torch.arange(CANDIDATES, dtype=torch.int32).expand(DRAFT_TOKENS, -1)
        self._proposal = wire.Proposal(token_ids=range(DRAFT_TOKENS))
        self._proposal.conditional.candidate_ids.CopyFrom(tensors.encode(ids))
        self._proposal.conditional.probabilities.CopyFrom(tensors.encode(ids.float()))

    def DraftRounds(
        self, requests: Iterator[wire.DraftRoundsRequest], context: grpc.ServicerContext
    ) -> Iterator[wire.DraftRoundsResponse]:
        """One answer a round."""
        for request in requests:
            started = time.perf_counter_ns()
            rows = [self._take(row) for row in request.round.rows]
            together = rows[0] if len(rows) == 1 else torch.cat(rows)
            if self._device.type == "cuda":
                together = together.to(self._device, non_blocking=True)
                torch.cuda.current_stream().synchronize()
            took = time.perf_counter_ns() - started
            reply = wire.RoundReply(
                rows=[
                    wire.RoundReplyRow(sequence_id=row.sequence_id, proposal=self._proposal)
                    for row in request.round.rows
                ],
                service_ns=took,
            )
            yield wire.DraftRoundsResponse(round_reply=reply)

    def _take(self, row: wire.RoundRow) -> torch.Tensor:
        if row.HasField("features"):
            return tensors.decode(row.features, (None, None), torch.bfloat16)
        # where the rows lie, in elements: first, count and width
        count, width = row.proposal.live, row.proposal.anchor
        return self._shared[row.first_position :][: count * width].view(count, width)


def _register(memory: torch.Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), 0)


def _serve(addresses: Sequence[str], shared_name: str, device: str, ready: Any) -> None:
    shared = SharedMemory(shared_name)
    server = grpc.server(futures.ThreadPoolExecutor(8), options=serving.SERVER_OPTIONS)
    taker = _Taker(torch.device(device), shared)
    draft_service_pb2_grpc.add_DraftServiceServicer_to_server(taker, server)
    bound = [serving.bind(server, address) for address in addresses]
    server.start()
    ready.put(bound)
    server.wait_for_termination()


# --- the process that sends


class _Sender:
    """One stream, as the verifier's: a queue that gRPC drains, and replies in turn."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=serving.CHANNEL_OPTIONS)
        self._outgoing: queue.SimpleQueue[wire.DraftRoundsRequest | None] = queue.SimpleQueue()
        stub = draft_service_pb2_grpc.DraftServiceStub(self._channel)
        self._replies = stub.DraftRounds(iter(self._outgoing.get, None))

    def exchange(self, rows: Sequence[wire.RoundRow]) -> wire.RoundReply:
        """Sends a round and waits for its reply."""
        self._outgoing.put(wire.DraftRoundsRequest(round=wire.Round(rows=rows)))
        return next(self._replies).round_reply

    def close(self) -> None:
        """Ends the stream."""
        self._outgoing.put(None)
        self._channel.close()


def _in_message(features: Sequence[torch.Tensor]) -> list[wire.RoundRow]:
    return [
        wire.RoundRow(sequence_id=index, features=tensors.encode(rows))
        for index, rows in enumerate(features)
    ]


def _in_shared(features: Sequence[torch.Tensor], shared: torch.Tensor) -> list[wire.RoundRow]:
    messages, first = [], 0
    for index, rows in enumerate(features):
        shared[first : first + rows.numel()].copy_(rows.view(-1))
        where = wire.ProposalRequest(live=len(rows), anchor=rows.shape[1])
        messages.append(wire.RoundRow(sequence_id=index, first_position=first, proposal=where))
        first += rows.numel()
    return messages


def measure(
    way: str, sender: _Sender, shared: torch.Tensor, features: Sequence[torch.Tensor], rounds: int
) -> tuple[list[float], list[float], list[float]]:
    """Microseconds of each round: there and back, packing, taking."""
    there_and_back, packing, taking = [], [], []
    for _ in range(WARM_ROUNDS + rounds):
        started = time.perf_counter_ns()
        rows = _in_shared(features, shared) if way == "shared" else _in_message(features)
        packed = time.perf_counter_ns()
        reply = sender.exchange(rows)
        ended = time.perf_counter_ns()
        there_and_back.append((ended - started) / 1e3)
        packing.append((packed - started) / 1e3)
        taking.append(reply.service_ns / 1e3)
    return there_and_back[WARM_ROUNDS:], packing[WARM_ROUNDS:], taking[WARM_ROUNDS:]


def run(arguments: argparse.Namespace) -> list[Line]:
    """Every way at every size, in turns, so that all share the machine's moods."""
    sizes = {"raw": arguments.row_bytes, "projected": arguments.projected_bytes}
    most = max(arguments.sequences) * max(arguments.rows) * max(sizes.values())
    shared_memory = SharedMemory(create=True, size=most)
    pinned = arguments.device == "cuda"
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Queue()
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        addresses = ["127.0.0.1:0", f"unix:{folder}/wire"]
        taker = spawn.Process(
            target=_serve, args=(addresses, shared_memory.name, arguments.device, ready)
        )
        taker.start()
        try:
            tcp, unix = ready.get(timeout=120)
            senders = {"tcp": _Sender(tcp), "unix": _Sender(unix), "shared": _Sender(tcp)}
            shared = torch.frombuffer(shared_memory.buf, dtype=torch.bfloat16)
            for sequences, rows, (kind, row_bytes) in itertools.product(
                arguments.sequences, arguments.rows, sizes.items()
            ):
                if sequences * rows * max(sizes.values()) > MOST_BYTES:
                    continue
                drawn = torch.randn(sequences, rows, row_bytes // 2).bfloat16()
                features = list(drawn.pin_memory() if pinned else drawn)
                for way, sender in senders.items():
                    times = measure(way, sender, shared, features, arguments.rounds)
                    lines.append(_line(way, kind, features, times))
            for sender in senders.values():
                sender.close()
        finally:
            taker.terminate()
            taker.join()
            del shared
            shared_memory.close()
            shared_memory.unlink()
    return lines


def _line(
    way: str,
    kind: str,
    features: Sequence[torch.Tensor],
    times: tuple[list[float], list[float], list[float]],
) -> Line:
    there_and_back, packing, taking = times
    return Line(
        way=way,
        features=kind,
        sequences=len(features),
        rows=len(features[0]),
        feature_bytes=sum(rows.numel() * 2 for rows in features),
        round_us=statistics.median(there_and_back),
        round_90_us=statistics.quantiles(there_and_back, n=10)[-1],
        pack_us=statistics.median(packing),
        take_us=statistics.median(taking),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.wire", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 64], help="of each sequence")
    parser.add_argument("--row-bytes", type=int, default=51200, help="of raw features")
    parser.add_argument("--projected-bytes", type=int, default=10240)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args(argv)
    if max(arguments.rows) > MOST_ROWS:
        parser.error(f"--rows: expected at most {MOST_ROWS}")
    print(f"{flag_line(['bench.wire', *(argv or sys.argv[1:])])}  [{describe()}]")
    lines = run(arguments)
    print(f"{'way':<8}{'features':<11}{'c':>3}{'rows':>6}{'KB':>9}", end="")
    print(f"{'us':>9}{'us, 90 %':>10}{'pack':>8}{'take':>8}")
    for line in lines:
        print(
            f"{line.way:<8}{line.features:<11}{line.sequences:>3}{line.rows:>6}"
            f"{line.feature_bytes / 1e3:>9.1f}{line.round_us:>9.0f}{line.round_90_us:>10.0f}"
            f"{line.pack_us:>8.0f}{line.take_us:>8.0f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")


if __name__ == "__main__":
    main()
