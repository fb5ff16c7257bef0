"""A verifier under measurement: the real engine, and what its rounds say about themselves.

``python -m bench.rig --records FILE VERIFIER-FLAGS`` serves as ``python -m verifier`` does, with
the same engine, streams and kernels, and writes one JSON line a round. A request may give orders in
its id (`Orders`), which no serving option can:

- **rows**: hold rounds until so many requests of the cell are prefilled and the drafter has caught
  up with each, so that all of a cell's rounds run with all of its rows;
- **synthetic**: do not prefill; let the state, KV and features of the prompt be random values, but
  for the last chunk, which is processed as ever;
- **columns**: let the trees of its rounds have so many columns, 0 for chains, where the verifier
  runs with `--draft-tree-nodes auto`;
- **accept**: let preview and commit see this many accepted proposals, whatever was accepted. Every
  kernel of the round still runs. THE OUTPUT IS THEN NOT THE TARGET'S.

With ``--with-drafter`` a drafter runs in the same process, in threads of its own, over gRPC still.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlencode

import numpy as np
import torch

import drafter.__main__ as drafter_main
import verifier.__main__ as verifier_main
from bench.bandwidth import read_bandwidth
from outrider.tensors import RowBytes, row_bytes
from outrider.v1 import draft_service_pb2 as wire
from verifier.acceptance import LicensedRow
from verifier.blocks import BlockTimes
from verifier.drafter_link import DrafterLink
from verifier.proposals import Drafted, Exchange
from verifier.request import Request
from verifier.rounds import (
    CommittedBlock,
    LicensedBlock,
    PreviewedBlock,
    Proposal,
    Rounds,
    VerifiedBlock,
)
from verifier.sequence import Sequence as Row

HOLD_S = 0.0002  # between looks while rows are gathered
VERBS = ("draft", "verify", "accept", "preview", "commit", "publish")
Returned = TypeVar("Returned")


@dataclass(frozen=True)
class Orders:
    """What a request's id asks of the rig."""

    cell: str
    rows: int = 1
    accept: int | None = None
    synthetic: bool = False
    columns: int = 0

    def request_id(self, index: int) -> str:
        """The id of the cell's ``index``-th request."""
        fields = {name: int(v) for name, v in asdict(self).items() if isinstance(v, int)}
        return f"bench?{urlencode({'cell': self.cell, 'index': index, **fields})}"

    @classmethod
    def of(cls, request: Request) -> Orders | None:
        """The orders in a request's id; None where it gives none."""
        return cls._read(request.request_id)

    @classmethod
    @lru_cache(maxsize=64)
    def _read(cls, request_id: str) -> Orders | None:
        name, _, query = request_id.partition("?")
        if name != "bench":
            return None
        fields = {name: values[0] for name, values in parse_qs(query).items()}
        accept = fields.get("accept")
        return cls(
            cell=fields["cell"],
            rows=int(fields["rows"]),
            accept=None if accept is None else int(accept),
            synthetic=fields["synthetic"] == "1",
            columns=int(fields["columns"]),
        )


class Records:
    """Lines of JSON, kept in memory while rounds run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[dict[str, Any]] = []

    def add(self, **values: Any) -> None:
        """Keeps one line."""
        self._lines.append(values)

    def flush(self) -> None:
        """Writes what was kept; of messages, how many bytes they have."""
        with self._path.open("a") as file:
            for line in self._lines:
                messages = {name: line.pop(name, ()) for name in ("sent", "received")}
                sizes = {f"{k}_bytes": sum(m.ByteSize() for m in v) for k, v in messages.items()}
                shared = sum(row.shared_features.row_count for row in messages["sent"])
                sizes["shared_bytes"] = shared * line.pop("row_bytes", 0)
                file.write(json.dumps(line | sizes) + "\n")
        self._lines.clear()


class MeasuredLink(DrafterLink):
    """A link that remembers its last exchange."""

    sent: tuple[wire.RoundRow, ...] = ()
    reply: wire.RoundReply | None = None
    waited_ns = 0

    @property
    def row_bytes(self) -> int:
        """Size of a feature row."""
        return self._row_bytes

    def exchange(self, *arguments: Any, **options: Any) -> Exchange:
        """See `DrafterLink`."""
        started = time.monotonic_ns()
        try:
            return super().exchange(*arguments, **options)
        finally:
            self.waited_ns = time.monotonic_ns() - started

    def _send_round(self, request: wire.DraftRoundsRequest, *, awaited: bool = False) -> None:
        self.sent = tuple(request.round.rows)
        super()._send_round(request, awaited=awaited)

    def _answer(self, reply: wire.RoundReply) -> wire.RoundReply | None:
        self.reply = reply
        return super()._answer(reply)


class OrderedTrees:
    """Trees as wide as a cell orders."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        self.widths = widths
        self.ordered = 0

    def columns(self, row_count: int, frontier: int) -> int:
        """See `verifier.trees.Trees`."""
        return self.ordered

    def round_ended(self, row_count: int, frontier: int, columns: int, elapsed_ns: int) -> None:
        """Nothing is learned."""

    def committed(self, nodes: int, columns: Sequence[int]) -> None:
        """Nothing is learned."""

    def choices(self) -> dict[str, float]:
        """See `verifier.trees.Trees`."""
        return {}


@dataclass(frozen=True)
class RoundRun:
    """What a round left, by reference."""

    cell: str
    arrival_ns: int
    started_ns: int
    ended_ns: int
    frontiers: list[int]
    block: LicensedBlock
    times: BlockTimes
    waited_ns: int
    sent: tuple[wire.RoundRow, ...]
    reply: wire.RoundReply | None
    verbs_ns: dict[str, int]

    def line(self) -> dict[str, Any]:
        """As a record."""
        reply, drafted = self.reply, self.block.drafted
        return {
            "cell": self.cell,
            "arrival_ns": self.arrival_ns,
            "started_ns": self.started_ns,
            "ended_ns": self.ended_ns,
            "frontiers": self.frontiers,
            "proposed": [0 if each is None else len(each.token_ids) for each in drafted],
            "accepted": [row.accepted for row in self.block.licensed],
            "verify_ns": self.times.verify_ns,
            "previous_commit_ns": self.times.commit_ns,
            "waited_ns": self.waited_ns,
            "draft_ns": 0 if reply is None else reply.draft_ns + reply.materialize_ns,
            "service_ns": 0 if reply is None else reply.service_ns,
            "sent": self.sent,
            "received": () if reply is None else (reply,),
            "verbs_ns": self.verbs_ns,
        }


class MeasuredRounds(Rounds):
    """Rounds that follow `Orders` and leave a record each."""

    records: Records
    link: MeasuredLink

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._begun: set[str] = set()
        self._verbs = dict.fromkeys(VERBS, 0)
        self._block: LicensedBlock | None = None  # of the last round, as commit saw it
        self._rounds_run: list[RoundRun] = []
        self._features: RowBytes | None = None
        if self.trees is not None:
            self.trees = OrderedTrees(self.trees.widths)
        state = self.blocks.target.state
        generator = torch.Generator(state.gdn.device).manual_seed(0)
        for layer in (*state.key_pages, *state.value_pages):
            layer.normal_(generator=generator)
        if state.gdn.is_cuda:
            # the engine works in a stream of its own
            torch.cuda.synchronize(state.gdn.device)

    # ---- a prompt that is not processed -------------------------------------------------------

    def prefill(self, sequence: Row) -> None:
        """See `Rounds`."""
        orders = Orders.of(sequence.request)
        if orders is not None and orders.synthetic:
            self._skip_to_last_chunk(sequence)
        super().prefill(sequence)

    def _skip_to_last_chunk(self, sequence: Row) -> None:
        first, end = sequence.frontier, (sequence.prompt_end - 1) // self.chunk * self.chunk
        if first >= end:
            return
        state, slot = self.blocks.target.state, sequence.residency.state_slot
        state.gdn[:, slot].normal_(std=0.1)
        state.conv_history[:, slot].normal_()
        context = sequence.context
        if context is not None:
            self.link.ensure_open(context, first, sequence.needed)
            wanted = self.link.wanted_from(context, sequence.needed)
            if wanted is not None and wanted < end:
                self.link.extend(context, wanted, self._feature_rows(end - wanted))
        sequence.frontier = end

    def _feature_rows(self, count: int) -> RowBytes:
        """Random rows as the drafter takes them; all alike, so that they take no memory."""
        if self._features is None:
            dtype = self.blocks.target.dtype
            row = torch.randn(1, self.link.row_bytes // dtype.itemsize).to(dtype)
            self._features = row_bytes(row)
        return np.broadcast_to(self._features, (count, self._features.shape[1]))

    # ---- a round ------------------------------------------------------------------------------

    def run(self, rows: Sequence[Row]) -> None:
        """See `Rounds`."""
        orders = Orders.of(rows[0].request)
        if orders is None:
            super().run(rows)
            return
        if orders.cell not in self._begun and not self._gathered(rows, orders.rows):
            self.take_arrived()
            self.link.pump(drafting=False)
            time.sleep(HOLD_S)
            return
        self._begun.add(orders.cell)
        frontiers = [row.frontier for row in rows]
        self.link.sent, self.link.reply, self.link.waited_ns = (), None, 0
        if isinstance(self.trees, OrderedTrees):
            self.trees.ordered = orders.columns
        started = time.monotonic_ns()
        super().run(rows)
        assert self._block is not None
        # lines are made of it later, under the device's work: here it would be a part of the round
        self._rounds_run.append(
            RoundRun(
                orders.cell,
                min(row.request.arrival_ns for row in rows),
                started,
                time.monotonic_ns(),
                frontiers,
                self._block,
                self.blocks.times,
                self.link.waited_ns,
                self.link.sent,
                self.link.reply,
                self._verbs.copy(),
            )
        )
        if all(row.finished for row in rows):
            self._note()
            self.records.add(cell=orders.cell, ended=True)
            self.records.flush()

    def deliver(self) -> None:
        """See `Rounds`."""
        super().deliver()
        self._note()

    def _note(self) -> None:
        for run in self._rounds_run:
            self.records.add(**run.line(), row_bytes=self.link.row_bytes)
        self._rounds_run.clear()

    def _gathered(self, rows: Sequence[Row], wanted: int) -> bool:
        caught_up = all(r.context is None or not self.link.has_backlog(r.context) for r in rows)
        return len(rows) >= wanted and caught_up

    def draft(self, rows: tuple[Row, ...]) -> Proposal:
        """See `Rounds`."""
        return self._timed("draft", super().draft, rows)

    def verify(self, proposal: Proposal) -> VerifiedBlock:
        """See `Rounds`."""
        return self._timed("verify", super().verify, proposal)

    def preview(self, licensed: LicensedBlock) -> PreviewedBlock:
        """See `Rounds`."""
        return self._timed("preview", super().preview, licensed)

    def commit(self, previewed: PreviewedBlock) -> CommittedBlock:
        """See `Rounds`."""
        return self._timed("commit", super().commit, previewed)

    def publish(self, committed: CommittedBlock) -> None:
        """See `Rounds`."""
        self._timed("publish", super().publish, committed)

    def _timed(self, name: str, verb: Callable[[Any], Returned], argument: Any) -> Returned:
        started = time.monotonic_ns()
        try:
            return verb(argument)
        finally:
            self._verbs[name] = time.monotonic_ns() - started

    def accept(self, source: Any) -> LicensedBlock:
        """See `Rounds`."""
        block = self._timed("accept", super().accept, source)
        if not isinstance(source, VerifiedBlock):
            return block
        licensed = [
            simulated(allowed, drafted, Orders.of(row.request))
            for allowed, drafted, row in zip(block.licensed, block.drafted, block.rows, strict=True)
        ]
        # not by replace, which takes longer: what is added here counts as the verifier's own
        self._block = LicensedBlock(block.source, block.rows, tuple(licensed), block.drafted)
        return self._block


def simulated(allowed: LicensedRow, drafted: Drafted | None, orders: Orders | None) -> LicensedRow:
    """What preview and commit see instead of ``allowed`` when orders say how much is accepted."""
    if orders is None or orders.accept is None or drafted is None or not allowed.finite:
        return allowed
    # of a tree, columns of the main chain
    accepted = min(orders.accept, len(drafted.token_ids))
    tokens = (*drafted.token_ids[:accepted], allowed.token_ids[-1])
    columns = tuple(range(1, accepted + 1)) if drafted.parents else ()
    return LicensedRow(tokens, accepted, (), allowed.finite, columns)


class MeasuredPlan(verifier_main.Plan):
    """A plan that tells the records what it holds."""

    records: Records

    def summary(self) -> dict[str, object]:
        """See `Plan`."""
        summary = super().summary()
        self.records.add(plan=summary)
        self.records.flush()
        return summary


def describe_device(device: torch.device) -> dict[str, str]:
    """Name and driver."""
    if device.type != "cuda":
        return {"name": "cpu"}
    import subprocess

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    shown = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return {"name": torch.cuda.get_device_name(device), "nvidia_smi": shown.strip()}


def install(records: Records) -> None:
    """Puts the measured parts in the place of those that `verifier.__main__` builds with."""
    MeasuredRounds.records = MeasuredPlan.records = records
    verifier_main.Rounds = MeasuredRounds  # type: ignore[misc]
    verifier_main.DrafterLink = MeasuredLink  # type: ignore[misc]
    verifier_main.Plan = MeasuredPlan  # type: ignore[misc]


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until a signal."""
    parser = argparse.ArgumentParser(prog="python -m bench.rig", description=__doc__)
    parser.add_argument("--records", type=Path, required=True, help="JSON lines are added here")
    parser.add_argument("--with-drafter", metavar="FLAGS", help="a drafter's command line")
    own, flags = parser.parse_known_args(argv)
    records = Records(own.records)
    install(records)
    print("bench.rig: A BENCHMARK: accepted counts and contexts may be invented", file=sys.stderr)
    inside = None
    if own.with_drafter is not None:
        options, _ = drafter_main.parse(shlex.split(own.with_drafter))
        inside = drafter_main.start(options)
        flags = [*flags, f"--drafter={inside.address}"]
    from verifier.options import parse

    device = parse(flags).device
    records.add(device=describe_device(device), read_bytes_per_second=read_bandwidth(device))
    try:
        return verifier_main.main(flags)
    finally:
        if inside is not None:
            inside.stop(0)


if __name__ == "__main__":
    sys.exit(main())
