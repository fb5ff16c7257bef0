"""Protocol transcripts: readable files, run through the real servicer over loopback gRPC.

A file holds blocks, separated by blank lines: a paragraph (lines that begin with #), commands, a
line of four dashes, and everything the drafter answers to those commands, exactly. A command may
name its stream ("b open seq=1"); without a name it is stream a. The rows of a round are its
indented lines.

What the device would do is scripted: it proposes anchor + 1, anchor + 2, ... and finds a sequence
not finite once NaN features reached it. Everything else is the real thing. With OUTRIDER_REWRITE=1
the answers are written into the files instead of being compared; read the difference before
committing it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from drafter.context import Append, ContextMemory
from drafter.model import ProposalAsk
from drafter.selector import Proposals
from drafter.service import Engine
from outrider import PROTOCOL_REVISION, faults, pair, serving, tensors
from outrider.tensors import RowBytes
from outrider.v1 import draft_service_pb2 as wire
from outrider.v1 import draft_service_pb2_grpc, tensor_pb2

FOLDER = Path(__file__).parent / "transcripts"
BOOM = 666.0  # a feature value that makes the model raise


class ScriptedGraphs:
    """Counts, proposes what follows the anchor, and remembers which slots took NaN."""

    def __init__(self, memory: ContextMemory) -> None:
        self.memory = memory
        self.poisoned: set[int] = set()

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def materialize(self, features: list[RowBytes], append: Append) -> None:
        for each, (context, count) in zip(features, append.contexts, strict=True):
            rows = each.view(np.float32)
            assert len(rows) == count
            if (rows == BOOM).any():
                raise RuntimeError("the model broke")
            if np.isnan(rows).any():
                self.poisoned.add(context.slot)
            elif context.frontier == context.coverage_first:
                self.poisoned.discard(context.slot)

    def draft(self, asks: list[ProposalAsk]) -> tuple[Proposals, None]:
        tokens = torch.tensor([[ask.anchor + 1] for ask in asks]) + torch.arange(7)
        finite = [ask.context.slot not in self.poisoned for ask in asks]
        return Proposals(tokens, torch.tensor(finite)), None


class WatchedEngine(Engine):
    """Counts the streams that have ended, so that a transcript can wait for one."""

    def __init__(self, *arguments: Any) -> None:
        self.ended_count = 0
        self.changed = threading.Condition()
        super().__init__(*arguments)

    def _end(self, stream: Any, fault: Any) -> None:
        super()._end(stream, fault)
        with self.changed:
            self.ended_count += 1
            self.changed.notify_all()

    def wait_for_end(self, end: Callable[[], object]) -> None:
        """Ends a stream and waits until the engine has noticed."""
        with self.changed:
            wanted = self.ended_count + 1
            end()
            assert self.changed.wait_for(lambda: self.ended_count >= wanted, timeout=20)


@dataclass
class Client:
    """One verifier's stream as a transcript drives it."""

    call: Any
    outgoing: queue.SimpleQueue[wire.DraftRoundsRequest | None]
    welcomed: bool = False
    said_anything: bool = False
    ended: bool = False
    round_index: int = 0
    answers: list[str] = field(default_factory=list)

    def send(self, **event: Any) -> None:
        self.said_anything = True
        self.outgoing.put(wire.DraftRoundsRequest(**event))

    def greet(self) -> None:
        """Waits for the answer to the first message."""
        answer = self.receive()
        if answer is not None:
            self.welcomed = True
            self.answers.extend(show(answer))

    def settle(self) -> None:
        """Collects everything that was answered so far, up to the reply to a round of no rows."""
        if self.said_anything and not self.welcomed and not self.ended:
            self.greet()
        if not self.welcomed or self.ended:
            return
        self.round_index += 1
        self.send(round=wire.Round(round_index=self.round_index))
        while (answer := self.receive()) is not None:
            if answer.round_reply.round_index == self.round_index:
                return
            self.answers.extend(show(answer))

    def receive(self) -> wire.DraftRoundsResponse | None:
        try:
            return next(self.call)
        except StopIteration:
            self.answers.append("ended OK")
        except grpc.RpcError as error:
            fault = faults.from_rpc_error(error)
            self.answers.append(f"ended {fault.code.name} {show_fault(fault)}")
        self.ended = True
        return None


def show_fault(fault: faults.FaultError) -> str:
    known = {k: v for k, v in sorted(fault.metadata.items()) if len(v) < 40}
    return " ".join([fault.reason, *(f"{name}={value}" for name, value in known.items())])


def show_status(message: Any) -> str:
    if not message.HasField("fault"):
        return ""
    return f" fault {show_fault(faults.from_status(message.fault))}"


def show(answer: wire.DraftRoundsResponse) -> Iterator[str]:
    kind = answer.WhichOneof("event")
    message = getattr(answer, kind)
    match kind:
        case "welcome":
            ids = list(message.checkpoint_ids)
            yield f"welcome max_context={message.max_context} checkpoint_ids={ids}"
        case "round_reply":
            yield "round_reply"
            for row in message.rows:
                text = f"  seq={row.sequence_id} epoch={row.epoch} frontier={row.context_frontier}"
                if row.HasField("proposal"):
                    law = row.proposal.WhichOneof("distribution")
                    ids = list(row.proposal.token_ids)
                    text += f" proposal {ids} {law} at={row.proposal.frontier}"
                yield text + show_status(row)
        case "sequence_fault":
            yield f"sequence_fault seq={message.sequence_id} epoch={message.epoch}" + show_status(
                message
            )
        case "capture_reply":
            evicted = list(message.evicted_checkpoint_ids)
            told = f" evicted={evicted}" if evicted else ""
            yield f"{kind} checkpoint={message.checkpoint_id}{told}{show_status(message)}"
        case "drop_reply":
            yield f"{kind} checkpoint={message.checkpoint_id}"
        case "restore_reply" | "fork_reply":
            yield (
                f"{kind} seq={message.sequence_id} epoch={message.epoch} "
                f"coverage={message.coverage_first}{show_status(message)}"
            )


class Transcript:
    """Runs the blocks of one file against one server."""

    def __init__(self, engine: WatchedEngine, service: Any, stub: Any, width: int) -> None:
        self.engine = engine
        self.service = service
        self.stub = stub
        self.width = width
        self.clients: dict[str, Client] = {}

    def run(self, lines: list[str]) -> list[str]:
        commands: list[list[str]] = []
        for line in lines:
            if line.startswith(" "):
                commands[-1].append(line.strip())
            else:
                commands.append([line])
        answers: list[str] = []
        for head, *rows in commands:
            first, *rest = head.split()
            name, words = (first, rest) if len(first) == 1 else ("a", [first, *rest])
            fields = dict(word.split("=", 1) for word in words[1:])
            if words[0] in ("contexts", "checkpoints", "info"):
                answers += self.settle()
            answers += getattr(self, f"do_{words[0]}")(name, fields, rows) or []
        answers += self.settle()
        return answers or ["ok"]

    def settle(self) -> list[str]:
        """What all streams answered since the last time."""
        answers = []
        for name, client in self.clients.items():
            client.settle()
            prefix = "" if name == "a" else f"{name} "
            answers += [prefix + answer for answer in client.answers]
            client.answers.clear()
        return answers

    def client(self, name: str) -> Client:
        client = self.clients.get(name)
        if client is None or client.ended:
            outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
            call = self.stub.DraftRounds(iter(outgoing.get, None), timeout=60)
            client = self.clients[name] = Client(call, outgoing)
        return client

    def do_hello(self, name: str, fields: dict[str, str], rows: list[str]) -> None:
        geometry = wire.DraftGeometry()
        geometry.CopyFrom(self.engine.geometry)
        hello = wire.Hello(
            protocol_revision=PROTOCOL_REVISION,
            verifier_id=fields.pop("verifier", name).encode() * 16,
            max_concurrency=int(fields.pop("B", 2)),
            draft_tokens=self.engine.config.draft_tokens,
            geometry=geometry,
            max_context=512,
            max_message_bytes=serving.MESSAGE_LIMIT,
        )
        for field_name, text in fields.items():
            holder = hello if field_name in hello.DESCRIPTOR.fields_by_name else hello.geometry
            if field_name == "target_layer_ids":
                del holder.target_layer_ids[:]
                holder.target_layer_ids.extend(int(part) for part in text.split(","))
            elif field_name.endswith(("_digest", "_id")) and not text.isdigit():
                setattr(holder, field_name, text.encode())
            else:
                value = float(text) if field_name == "rope_theta" else int(text)
                setattr(holder, field_name, value)
        client = self.client(name)
        client.send(hello=hello)
        # streams race each other; a transcript says which Hello came first
        if not client.welcomed:
            client.greet()

    def do_open(self, name: str, fields: dict[str, str], rows: list[str]) -> None:
        event = wire.Open(
            sequence_id=int(fields["seq"]),
            epoch=int(fields.get("epoch", 1)),
            coverage_first=int(fields.get("coverage", 0)),
        )
        self.client(name).send(open=event)

    def tensor(self, fields: dict[str, str]) -> tensor_pb2.Tensor:
        count, width = int(fields["rows"]), int(fields.get("width", self.width))
        dtype = getattr(torch, fields.get("dtype", "float32"))
        values = torch.full((count, width), float(fields.get("value", 0)), dtype=dtype)
        message = tensors.encode(values)
        if "shape" in fields:
            message.shape[:] = [int(extent) for extent in fields["shape"].split("x")]
        if "bytes" in fields:
            message.data = bytes(int(fields["bytes"]))
        return message

    def do_features(self, name: str, fields: dict[str, str], rows: list[str]) -> None:
        event = wire.Features(
            sequence_id=int(fields["seq"]),
            epoch=int(fields.get("epoch", 1)),
            first_position=int(fields["first"]),
            rows=self.tensor(fields),
        )
        self.client(name).send(features=event)

    def do_round(self, name: str, fields: dict[str, str], rows: list[str]) -> None:
        client = self.client(name)
        client.round_index += int(fields.get("skip", 1))
        event = wire.Round(round_index=client.round_index)
        for line in rows:
            given = dict(word.split("=", 1) for word in line.split())
            row = event.rows.add(
                sequence_id=int(given["seq"]),
                epoch=int(given.get("epoch", 1)),
                first_position=int(given["first"]),
            )
            if "rows" in given:
                row.features.CopyFrom(self.tensor(given))
            if "propose" in given:
                row.proposal.live = int(given["propose"])
                frontier = int(given["first"]) + int(given.get("rows", 0))
                row.proposal.frontier = int(given.get("at", frontier))
                row.proposal.anchor = int(given.get("anchor", 10))
                row.proposal.temperature = float(given.get("temperature", 0))
        client.send(round=event)

    def do_release(self, name: str, fields: dict[str, str], rows: list[str]) -> None:
        event = wire.Release(sequence_id=int(fields["seq"]), epoch=int(fields.get("epoch", 1)))
        self.client(name).send(release=event)

    def do_fork(self, name: str, fields: dict[str, str], rows: list[str]) -> None:
        event = wire.Fork(
            source_sequence_id=int(fields["source"]),
            source_epoch=int(fields.get("source_epoch", 1)),
            sequence_id=int(fields["seq"]),
            epoch=int(fields.get("epoch", 1)),
            context_frontier=int(fields["frontier"]),
        )
        self.client(name).send(fork=event)

    def do_capture(self, name: str, fields: dict[str, str], rows: list[str]) -> None:
        event = wire.Capture(
            checkpoint_id=int(fields["checkpoint"]),
            sequence_id=int(fields["seq"]),
            epoch=int(fields.get("epoch", 1)),
            context_frontier=int(fields["frontier"]),
        )
        self.client(name).send(capture=event)

    def do_restore(self, name: str, fields: dict[str, str], rows: list[str]) -> None:
        event = wire.Restore(
            checkpoint_id=int(fields["checkpoint"]),
            sequence_id=int(fields["seq"]),
            epoch=int(fields.get("epoch", 1)),
            context_frontier=int(fields["frontier"]),
        )
        self.client(name).send(restore=event)

    def do_drop(self, name: str, fields: dict[str, str], rows: list[str]) -> None:
        self.client(name).send(drop=wire.Drop(checkpoint_id=int(fields["checkpoint"])))

    def do_unknown(self, name: str, fields: dict[str, str], rows: list[str]) -> None:
        client = self.client(name)
        client.said_anything = True
        # field 100, which this revision does not know
        client.outgoing.put(wire.DraftRoundsRequest.FromString(b"\xa2\x06\x00"))

    def do_close(self, name: str, fields: dict[str, str], rows: list[str]) -> None:
        """The verifier has no more to say."""
        self.engine.wait_for_end(lambda: self.client(name).outgoing.put(None))

    def do_cancel(self, name: str, fields: dict[str, str], rows: list[str]) -> None:
        """The verifier is gone."""
        self.engine.wait_for_end(self.clients.pop(name).call.cancel)

    def do_drain(self, name: str, fields: dict[str, str], rows: list[str]) -> None:
        self.service.drain()

    def do_contexts(self, name: str, fields: dict[str, str], rows: list[str]) -> list[str]:
        """Every context that is held, stream by stream."""
        lines = []
        window = self.engine.config.draft.window
        for stream in self.engine._streams:
            verifier = stream.verifier_id[:1].decode()
            for sequence_id, (epoch, context) in stream.rounds._sequences._live.items():
                first = max(context.coverage_first, context.frontier - window)
                lines.append(
                    f"{verifier}: seq={sequence_id} epoch={epoch} frontier={context.frontier} "
                    f"live=[{first},{context.frontier})"
                )
        return sorted(lines) or ["no contexts"]

    def do_checkpoints(self, name: str, fields: dict[str, str], rows: list[str]) -> list[str]:
        """Every checkpoint that is held, verifier by verifier."""
        tables = self.engine._checkpoints._tables.items()
        lines = [f"{verifier[:1].decode()}: checkpoints {table.ids}" for verifier, table in tables]
        return sorted(lines) or ["no checkpoints"]

    def do_info(self, name: str, fields: dict[str, str], rows: list[str]) -> list[str]:
        try:
            info = self.stub.GetDraftInfo(wire.GetDraftInfoRequest())
        except grpc.RpcError as error:
            fault = faults.from_rpc_error(error)
            return [f"info {fault.code.name} {show_fault(fault)}"]
        wanted = fields.get("counters", "").split(",")
        counters = [f"{name}={info.counters[name]}" for name in wanted if name]
        return [
            " ".join([f"info streams={info.stream_count} free={info.free_sequences}", *counters])
        ]


def blocks(text: str) -> Iterator[tuple[list[str], list[str], list[str]]]:
    """(paragraph, commands, answers) of each block."""
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        paragraph = [line for line in lines if line.startswith("#")]
        rest = lines[len(paragraph) :]
        dashes = rest.index("----") if "----" in rest else len(rest)
        yield paragraph, rest[:dashes], rest[dashes + 1 :]


@pytest.fixture
def transcript(make_pair, load, serve) -> Transcript:
    tiny = make_pair("dflash", "lf", is_causal=False)
    drafting = load(tiny, draft_tokens=7, max_concurrency=4, max_context=256, checkpoint_slots=3)
    geometry = pair.geometry(drafting.config.target, drafting.config.draft, "float32")
    engine = WatchedEngine(drafting.config, geometry, ScriptedGraphs(drafting.memory))
    service, channel = serve(engine)
    stub = draft_service_pb2_grpc.DraftServiceStub(channel)
    return Transcript(engine, service, stub, drafting.config.feature_width)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_transcript(transcript: Transcript, path: Path):
    written = []
    for paragraph, commands, expected in blocks(path.read_text()):
        answers = transcript.run(commands) if commands else []
        if not os.environ.get("OUTRIDER_REWRITE"):
            assert answers == expected, "\n".join([*paragraph, *commands])
        written.append([*paragraph, *commands, *(["----", *answers] if commands else [])])
    if os.environ.get("OUTRIDER_REWRITE"):
        path.write_text("\n\n".join("\n".join(lines) for lines in written) + "\n")


def test_there_are_transcripts():
    assert len(list(FOLDER.glob("*.txt"))) >= 8
