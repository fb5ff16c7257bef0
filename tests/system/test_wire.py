"""What two real services say to each other, as readable text files.

A file's first paragraph names the pair. Then come blocks, separated by blank lines: a paragraph
(lines that begin with #), requests to the verifier, a line of four dashes, and all that crossed
the wire between the services: > from the verifier, < from the drafter. A reply stands under the
Round that it answers, whenever it was read. Ids and q are left out: they are the model's, and
other tests compare them. With OUTRIDER_REWRITE=1 the answers are written into the files instead of
being compared; read the difference before committing it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import faults
from outrider.v1 import draft_service_pb2 as wire
from tests.faults.doubles import Foretelling, plant
from tests.system.conftest import greedy, prompt
from verifier.drafter_link import DrafterLink
from verifier.drafter_stream import Stream

FOLDER = Path(__file__).parent / "transcripts"


class Tap:
    """Collects messages on the verifier's side, in the order in which it sent or applied them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self._unanswered = 0
        self._lines: list[list[str]] = []  # one list a message; a Round's holds its reply too
        self._rounds: dict[int, list[str]] = {}
        queue, apply = Stream._queue, DrafterLink._apply

        def queued(stream, request):
            self.add(request)
            queue(stream, request)

        def applied(link, arrived):
            if arrived.message is not None:
                self.add(arrived.message)
            return apply(link, arrived)

        monkeypatch.setattr(Stream, "_queue", queued)
        monkeypatch.setattr(DrafterLink, "_apply", applied)

    def add(self, message: wire.DraftRoundsRequest | wire.DraftRoundsResponse) -> None:
        event = message.WhichOneof("event")
        body = getattr(message, event)
        with self._changed:
            if event == "round_reply":
                self._rounds[body.round_index] += list(reply_lines(body))
                self._unanswered -= 1
                self._changed.notify_all()
                return
            lines = list(LINES[event](body))
            self._lines.append(lines)
            if event == "round":
                self._rounds[body.round_index] = lines
                self._unanswered += 1

    def take(self) -> list[str]:
        """All lines since the last call, once every Round has its reply."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._unanswered == 0, timeout=20)
            lines, self._lines = self._lines, []
        return [line for message in lines for line in message]


def hello_lines(hello: wire.Hello) -> Iterator[str]:
    geometry = hello.geometry
    yield (
        f"> hello B={hello.max_concurrency} K={hello.draft_tokens} "
        f"{wire.DraftFormat.Name(geometry.format)} taps={list(geometry.target_layer_ids)} "
        f"S={geometry.window} layers={geometry.layer_count} full={geometry.full_layer_count}"
    )


def round_lines(round_: wire.Round) -> Iterator[str]:
    yield f"> round {round_.round_index}"
    for row in round_.rows:
        line = f">   seq={row.sequence_id} epoch={row.epoch} first={row.first_position}"
        if row.HasField("features") or row.HasField("shared_features"):
            line += f" rows={row.shared_features.row_count or row.features.shape[0]}"
        if row.HasField("proposal"):
            wanted = row.proposal
            line += f" propose {wanted.live} at={wanted.frontier}"
            line += f" temperature={wanted.temperature:g}" if wanted.temperature else ""
        yield line


def reply_lines(reply: wire.RoundReply) -> Iterator[str]:
    yield f"< reply {reply.round_index}"
    for row in reply.rows:
        line = f"<   seq={row.sequence_id} epoch={row.epoch} frontier={row.context_frontier}"
        outcome = row.WhichOneof("outcome")
        if outcome == "proposal":
            law = row.proposal.WhichOneof("distribution")
            support = list(row.proposal.conditional.candidate_ids.shape)
            line += f" proposal of {len(row.proposal.token_ids)}, "
            line += "point mass" if law == "point_mass" else f"q {support}"
        elif outcome == "fault":
            line += f" fault {faults.from_status(row.fault).reason}"
        yield line


LINES = {
    "hello": hello_lines,
    "welcome": lambda m: [f"< welcome max_context={m.max_context}"],
    "open": lambda m: [f"> open seq={m.sequence_id} epoch={m.epoch} coverage={m.coverage_first}"],
    "features": lambda m: [
        f"> features seq={m.sequence_id} epoch={m.epoch} first={m.first_position} "
        f"rows={m.shared_rows.row_count or m.rows.shape[0]}"
    ],
    "round": round_lines,
    "release": lambda m: [f"> release seq={m.sequence_id} epoch={m.epoch}"],
    "sequence_fault": lambda m: [
        f"< sequence_fault seq={m.sequence_id} epoch={m.epoch} {faults.from_status(m.fault).reason}"
    ],
}


def words(line: str) -> dict[str, float]:
    """NAME=NUMBER words of a line."""
    pairs = (word.split("=") for word in line.split()[1:])
    return {name: float(value) if "." in value else int(value) for name, value in pairs}


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "in messages"])
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_transcript(dense, serve, oracle, monkeypatch, path, shared):
    head, *blocks = path.read_text().strip().split("\n\n")
    kind, *options = head.splitlines()[-1].split()
    settings = words(" ".join(["pair", *options]))
    wrong = settings.pop("wrong", None)
    ids = prompt(settings.pop("prompt", 20))
    if wrong is not None:
        # the target's own continuation, with the proposal of that index spoilt in every round
        plant(monkeypatch, Foretelling([*ids, *greedy(oracle, ids, 60)], wrong=(int(wrong),)))
    tap = Tap(monkeypatch)
    served, client = serve(dense, kind, shared_memory=shared, **settings)
    written = [head]
    for block in blocks:
        lines = block.splitlines()
        at = lines.index("----")
        for line in (line for line in lines[:at] if not line.startswith("#")):
            if line != "hello":
                client.generate(prompt_ids=ids, ignore_eos=True, **words(line))
                served.expect_idle()
        answers = tap.take()
        if not os.environ.get("OUTRIDER_REWRITE"):
            assert answers == lines[at + 1 :], "\n".join(lines[:at])
        written.append("\n".join([*lines[: at + 1], *answers]))
    if os.environ.get("OUTRIDER_REWRITE"):
        path.write_text("\n\n".join(written) + "\n")


def test_there_are_transcripts():
    assert len(list(FOLDER.glob("*.txt"))) >= 3
