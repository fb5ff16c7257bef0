"""Eight sessions with secrets of their own: growing prompts, shared prefixes, random cancels.

Every output equals its solo run, so nothing of one session reaches another, and at the end nothing
is left in either service.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest

from outrider.client import ClientError
from tests.system.conftest import greedy, prompt
from verifier.rounds import Rounds
from verifier.scheduler import Engine

SESSIONS, K, COUNT = 8, 3, 12


def session(number: int, requests: int, client, expected) -> int:
    """Runs one session's requests; returns how many were read to their end."""
    chosen = random.Random(number)
    secret = [150 + number] * 3 + prompt(6, seed=100 + number)
    shared = prompt(100, seed=1)
    ids, whole = [*shared, *secret], 0
    for request in range(requests):
        wanted = expected(tuple(ids))
        arguments = {"prompt_ids": ids, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
        if chosen.random() < 0.25:
            stream, tokens = client.stream(**arguments), []
            for delta in stream:
                tokens += delta.token_ids
                if len(tokens) > chosen.randrange(COUNT):
                    stream.cancel()
                    break
            assert tokens == wanted[: len(tokens)]
        else:
            assert list(client.generate(**arguments).token_ids) == wanted
            whole += 1
        if chosen.random() < 0.7 and len(ids) < 180:
            ids = [*ids, *wanted, request % 100]
        elif chosen.random() < 0.5:
            ids = [*shared, *secret, *prompt(chosen.randrange(1, 30), seed=request % 4)]
    return whole


@pytest.mark.parametrize(
    "requests",
    [pytest.param(100, id="100"), pytest.param(500, id="500", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("kind", ["dflash2", "dflash"])
def test_no_secret_crosses_and_every_output_is_its_own(dense, serve, oracle, kind, requests):
    lock = threading.Lock()

    @cache
    def solo(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(greedy(oracle, ids, COUNT))

    def expected(ids: tuple[int, ...]) -> list[int]:
        with lock:  # the oracle is not made for threads
            return list(solo(ids))

    pair, client = serve(
        dense,
        kind,
        draft_tokens=K,
        max_concurrency=SESSIONS,
        max_context=256,
        prefill_chunk=64,
        checkpoint_slots=6,
        checkpoint_host_mib=2,
        kv_pages=20,
    )
    each = -(-requests // SESSIONS)
    with ThreadPoolExecutor(SESSIONS) as pool:
        whole = sum(pool.map(lambda n: session(n, each, client, expected), range(SESSIONS)))
    assert whole > requests // 2
    counters = client.server_info().counters
    assert counters["checkpoint_hits"] > requests // 4
    assert counters["checkpoint_demotions"] > 0
    pair.expect_nothing_left()


# ---- a client that leaves, at every phase -----------------------------------------------------


def read(stream) -> None:
    """Reads to the end, whichever it is."""
    with contextlib.suppress(ClientError):
        for _ in stream:
            pass


class Turns:
    """Counts an engine's turns and holds it at a place of the test's choice."""

    def __init__(self, monkeypatch, engine: Engine, place: object, name: str) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        whole_turn, whole = Engine._turn, getattr(place, name)
        self.count = 0

        def turn(this):
            ran = whole_turn(this)
            self.count += 1
            return ran

        def held(*arguments, **keywords):
            if not self.go_on.is_set():
                self.reached.set()
                self.go_on.wait(20)
            return whole(*arguments, **keywords)

        monkeypatch.setattr(Engine, "_turn", turn)
        monkeypatch.setattr(place, name, held)


def freed_within_two_turns(pair, turns: Turns, request_id: str) -> None:
    """Lets the engine go on and counts its turns until nothing of the request is left."""
    engine = pair.verifier.engine
    first = turns.count
    turns.go_on.set()
    deadline = time.monotonic() + 20
    while any(name == request_id for name, _ in list(engine._live)):
        engine.wake()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    # the turn that was held, and two more at most
    assert turns.count - first <= 3


@pytest.mark.parametrize(
    ("phase", "place", "name"),
    [
        ("prefill", Rounds, "prefill"),
        ("draft", Rounds, "draft"),
        ("verify", Rounds, "verify"),
        ("accept", Rounds, "accept"),
        ("preview", Rounds, "preview"),
        ("commit", Rounds, "commit"),
        ("publish", Rounds, "publish"),
    ],
)
def test_a_client_that_leaves_is_forgotten_within_two_turns(
    dense, serve, monkeypatch, phase, place, name
):
    pair, client = serve(dense, "dflash2", draft_tokens=K, prefill_chunk=16, checkpoint_slots=2)
    turns = Turns(monkeypatch, pair.verifier.engine, place, name)
    stream = client.stream(
        prompt_ids=prompt(60), max_tokens=300, temperature=0, ignore_eos=True, request_id="leaves"
    )
    reader = threading.Thread(target=read, args=(stream,))
    reader.start()
    assert turns.reached.wait(20), phase
    stream.cancel()
    # the server has to hear of it before the engine goes on
    sinks = [ticket.sink for ticket in pair.verifier.engine._live.values()]
    deadline = time.monotonic() + 20
    while not all(sink.gone for sink in sinks):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    freed_within_two_turns(pair, turns, "leaves")
    reader.join(10)
    pair.expect_nothing_left()


def test_a_sample_that_waits_or_is_paused_is_forgotten_too(dense, serve, monkeypatch):
    pair, client = serve(
        dense,
        "dflash2",
        draft_tokens=K,
        prefill_chunk=32,
        max_concurrency=1,
        checkpoint_host_mib=4,
    )
    engine = pair.verifier.engine
    first = client.stream(prompt_ids=prompt(20), max_tokens=400, temperature=0, ignore_eos=True)
    next(first)
    waiting = client.stream(
        prompt_ids=prompt(21), max_tokens=5, temperature=0, ignore_eos=True, request_id="waits"
    )
    reader = threading.Thread(target=read, args=(waiting,))
    reader.start()
    while not any(name == "waits" for name, _ in list(engine._live)):
        time.sleep(0.002)
    waiting.cancel()
    while any(name == "waits" for name, _ in list(engine._live)):
        time.sleep(0.002)
    reader.join(10)
    # paused between two turns, and its client gone before it comes back
    whole = Engine._turn
    paused = threading.Event()

    def turn(this):
        if this._resident and not paused.is_set():
            this._pause(this._resident[0])
            assert this._paused[0].snapshot is not None
            assert this._host.free_image_count < this._host.image_count
            first.cancel()
            while not this._paused[0].ticket.sink.gone:
                time.sleep(0.002)
            paused.set()
        return whole(this)

    monkeypatch.setattr(Engine, "_turn", turn)
    assert paused.wait(20)
    pair.expect_nothing_left()
