"""What residents wait for: between two of their rounds runs at most one chunk's worth of others."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes import until
from tests.system.conftest import prompt
from verifier.blocks import Blocks
from verifier.rounds import Rounds
from verifier.sequence import Ticket

CHUNK = 16
PAIR = {"draft_tokens": 3, "prefill_chunk": CHUNK, "max_concurrency": 4, "max_context": 2048}
GREEDY = {"temperature": 0, "ignore_eos": True}


class Turns:
    """What the engine ran, in order, and a hold before the first round that others wait beside."""

    def __init__(self, monkeypatch, residents: int) -> None:
        self.ran: list[tuple[str, int]] = []  # "call" and its columns, or "round" and its rows
        self.go_on = threading.Event()
        whole_round, prefill, replay = Rounds.run, Blocks.prefill, Blocks.replay

        def run(rounds, rows):
            if len(rows) >= residents:
                rounds.deliver()
                assert self.go_on.wait(30)
            self.ran.append(("round", len(rows)))
            return whole_round(rounds, rows)

        def prefilled(blocks, residency, token_ids, *rest, **options):
            self.ran.append(("call", len(token_ids)))
            return prefill(blocks, residency, token_ids, *rest, **options)

        def replayed(blocks, residency, token_ids, first):
            self.ran.append(("call", len(token_ids)))
            return replay(blocks, residency, token_ids, first)

        monkeypatch.setattr(Rounds, "run", run)
        monkeypatch.setattr(Blocks, "prefill", prefilled)
        monkeypatch.setattr(Blocks, "replay", replayed)

    def between_rounds(self, residents: int) -> list[list[int]]:
        """Columns of the calls before each round of so many residents, from the first such on."""
        calls: list[list[int]] = [[]]
        for kind, count in self.ran:
            if kind == "call":
                calls[-1].append(count)
            elif count >= residents:
                calls.append([])
        return calls[1:-1]


def start_residents(client, count: int) -> list:
    streams = [
        client.stream(prompt_ids=prompt(5, seed=i), max_tokens=500, **GREEDY) for i in range(count)
    ]
    for stream in streams:
        next(stream)
    return streams


def test_at_most_one_chunk_runs_between_two_rounds_of_residents(dense, serve, monkeypatch):
    """A prompt of 64 chunks, and short ones behind it."""
    turns = Turns(monkeypatch, residents=2)
    pair, client = serve(dense, "dflash2", **PAIR)
    residents = start_residents(client, 2)
    long, short = prompt(64 * CHUNK), [prompt(3 + i, seed=i) for i in range(8)]
    with ThreadPoolExecutor(9) as pool:
        others = [
            pool.submit(client.generate, prompt_ids=ids, max_tokens=2, **GREEDY)
            for ids in (long, *short)
        ]
        until(lambda: len(pair.verifier.engine._live) == 11, "all of them queued")
        turns.go_on.set()
        for each in others:
            each.result()
    for each in residents:
        each.cancel()
    between = [calls for calls in turns.between_rounds(2) if calls]
    assert sum(map(sum, between)) >= len(long), "the prompt was prefilled beside the residents"
    assert len(between) >= 64
    assert max(map(sum, between)) <= CHUNK
    assert max(map(len, between)) <= 4, "a call costs a round's weights, however few its columns"
    pair.expect_nothing_left()


def test_a_replay_does_not_stall_the_residents_beside_it(dense, serve, monkeypatch):
    """What was generated before a pause goes through blocks of W columns, each a round's cost."""
    turns = Turns(monkeypatch, residents=3)
    turns.go_on.set()
    pressed = {"kv_pages": 9, "max_concurrency": 3, "max_context": 512, "prefill_chunk": 128}
    pair, client = serve(dense, "dflash2", **PAIR | pressed)
    with ThreadPoolExecutor(3) as pool:
        # the last is the youngest; it is paused when it has generated as much as the others
        work = [
            pool.submit(client.generate, prompt_ids=prompt(30, seed=i), max_tokens=count, **GREEDY)
            for i, count in enumerate((300, 220, 200))
        ]
        for each in work:
            each.result()
    assert client.server_info().counters["pauses"] >= 1
    replayed = [count for kind, count in turns.ran if kind == "call" and count == 4]
    assert len(replayed) > 8, "tokens were replayed, W at a time"
    runs, run = [], 0
    for kind, _ in turns.ran:
        run = run + 1 if kind == "call" else 0
        runs.append(run)
    assert max(runs) <= 4
    pair.expect_nothing_left()


def test_what_a_round_published_does_not_wait_for_a_chunk(dense, serve, monkeypatch):
    turns = Turns(monkeypatch, residents=1)
    waiting: list[int] = []  # for their clients, as a chunk begins
    told = [0]
    publish, prefill = Ticket.publish, Blocks.prefill

    def published(*arguments):
        told[0] += 1
        return publish(*arguments)

    def prefilled(*arguments, **options):
        waiting.append(len(pair.verifier.engine._rounds._outbox))
        return prefill(*arguments, **options)

    monkeypatch.setattr(Ticket, "publish", published)
    monkeypatch.setattr(Blocks, "prefill", prefilled)
    pair, client = serve(dense, "dflash2", **PAIR)
    (resident,) = start_residents(client, 1)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(client.generate, prompt_ids=prompt(20 * CHUNK), max_tokens=1, **GREEDY)
        until(lambda: len(pair.verifier.engine._live) == 2, "the prompt queued")
        turns.go_on.set()
        long.result()
    resident.cancel()
    assert told[0] > 20
    assert len(waiting) > 20
    assert set(waiting) == {0}
    pair.expect_nothing_left()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_short_prompts_share_a_turn(dense, serve, monkeypatch, count):
    """So that a burst of them is not admitted one a round."""
    turns = Turns(monkeypatch, residents=1)
    pair, client = serve(dense, "dflash2", **PAIR | {"max_concurrency": 8})
    (resident,) = start_residents(client, 1)
    with ThreadPoolExecutor(count) as pool:
        work = [
            pool.submit(client.generate, prompt_ids=prompt(3, seed=i), max_tokens=2, **GREEDY)
            for i in range(count)
        ]
        until(lambda: len(pair.verifier.engine._live) == 1 + count, "all of them queued")
        turns.go_on.set()
        for each in work:
            each.result()
    resident.cancel()
    between = [calls for calls in turns.between_rounds(1) if calls]
    assert between[0] == [3] * min(4, count)
    pair.expect_nothing_left()


def test_lanes_run_together_where_each_prompt_reaches_into_its_last_page(dense, serve, monkeypatch):
    """There are pages for every lane's longest context; nobody waits for one beyond that."""
    turns = Turns(monkeypatch, residents=2)
    pair, client = serve(dense, "dflash2", **PAIR | {"max_concurrency": 2, "max_context": 192})
    with ThreadPoolExecutor(2) as pool:
        work = [
            pool.submit(client.generate, prompt_ids=prompt(140, seed=i), max_tokens=40, **GREEDY)
            for i in range(2)
        ]
        until(lambda: client.server_info().resident_requests == 2, "both run")
        turns.go_on.set()
        for each in work:
            each.result()
    pair.expect_nothing_left()
