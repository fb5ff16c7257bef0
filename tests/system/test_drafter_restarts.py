"""A drafter process that is killed, frozen and replaced while one request runs.

The pair is the bundled one, whose drafts are accepted: what comes back must draft as well as what
was lost. The verifier takes its time only while the drafter is away.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import verifier.__main__ as verifier_process
from outrider.checkpoint import bundled
from outrider.cli import demo
from outrider.client import Client, Completion
from tests.system.test_drafter_away import free_port
from verifier.options import VerifierOptions
from verifier.outbox import Outbox
from verifier.rounds import Rounds

GREEDY = {"temperature": 0, "ignore_eos": True, "return_rounds": True}


class DrafterProcess:
    """`python -m drafter` on one port, as often as it takes."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "drafter", "--device=cpu", "--log-level=error"]
        self.process = subprocess.Popen(
            [*command, f"--listen=127.0.0.1:{self.port}"], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline().startswith("ready ")

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()
            self.process = None


class Watch:
    """What the engine did, seen from a test: proposals accepted so far, and a brake."""

    def __init__(self, monkeypatch) -> None:
        self.accepted = 0
        self.hurry = threading.Event()
        whole, account = Rounds.verify, Outbox._account

        def unhurried(rounds, proposal):
            if not rounds.link.connected:
                self.hurry.wait(0.15)
            return whole(rounds, proposal)

        def accounted(outbox, row, kept):
            self.accepted += kept.accepted
            return account(outbox, row, kept)

        monkeypatch.setattr(Rounds, "verify", unhurried)
        monkeypatch.setattr(Outbox, "_account", accounted)


def until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def verifier_at(drafter: str, **options) -> Iterator[tuple[verifier_process.Running, Client]]:
    running = verifier_process.start(
        VerifierOptions(
            target=bundled("target"),
            draft=bundled("dflash2"),
            drafter=drafter,
            listen="127.0.0.1:0",
            max_context=4096,
            **{"draft_timeout_ms": 2000} | options,
        )
    )
    try:
        with Client(running.address) as client:
            yield running, client
    finally:
        running.stop(0)


def in_background(client: Client, count: int) -> tuple[threading.Thread, list[Completion]]:
    results: list[Completion] = []
    thread = threading.Thread(
        target=lambda: results.append(client.generate(demo.PROMPT, max_tokens=count, **GREEDY))
    )
    thread.start()
    return thread, results


def expect_as_good(interrupted: Completion, whole: Completion) -> None:
    """What was proposed at the same frontiers, and how much of it was accepted."""
    uninterrupted = {r.frontier: r for r in whole.rounds if r.proposed}
    pairs = [
        (r, uninterrupted[r.frontier])
        for r in interrupted.rounds
        if r.proposed and r.frontier in uninterrupted
    ]
    assert len(pairs) > 20
    # rows are materialized in other groups, so a near tie may go the other way
    same = sum(a.proposed == b.proposed for a, b in pairs)
    assert same >= 0.98 * len(pairs)
    lengths = [sum(r.accepted for r in side) / len(pairs) for side in zip(*pairs, strict=True)]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.03)


@pytest.mark.parametrize(
    "kills",
    [pytest.param(2, id="2"), pytest.param(10, id="10", marks=pytest.mark.slow)],
)
def test_a_killed_drafter_comes_back_within_the_request_and_drafts_as_well(monkeypatch, kills):
    drafter, watch = DrafterProcess(free_port()), Watch(monkeypatch)
    with verifier_at(f"127.0.0.1:{drafter.port}") as (running, client):
        try:
            drafter.start()
            until(lambda: running.engine.status().drafter_state == "connected")
            thread, results = in_background(client, 3900)
            for _ in range(kills):
                seen = watch.accepted
                until(lambda seen=seen: watch.accepted > seen)
                assert thread.is_alive(), "the request is to outlast the kills"
                drafter.kill()
                until(lambda: running.engine.status().drafter_state == "connecting")
                drafter.start()
                until(lambda: running.engine.status().drafter_state == "connected")
            watch.hurry.set()
            thread.join(240)
            (interrupted,) = results
            counters = running.engine.status().counters
            assert counters["drafter_losses"] == kills
            assert counters["drafter_reseeds"] == kills
            whole = client.generate(demo.PROMPT, max_tokens=3900, **GREEDY)
            plain = client.generate(demo.PROMPT, max_tokens=400, draft_tokens=0, **GREEDY)
            assert interrupted.token_ids == whole.token_ids
            assert interrupted.token_ids[:400] == plain.token_ids
            expect_as_good(interrupted, whole)
        finally:
            drafter.kill()


def test_a_frozen_drafter_costs_one_deadline_and_another_address_takes_over(monkeypatch):
    first, second = DrafterProcess(free_port()), DrafterProcess(free_port())
    watch = Watch(monkeypatch)
    addresses = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
    with verifier_at(addresses, draft_timeout_ms=1000) as (running, client):
        try:
            first.start()
            until(lambda: running.engine.status().drafter_state == "connected")
            thread, results = in_background(client, 600)
            until(lambda: watch.accepted > 0)
            first.signal(signal.SIGSTOP)
            until(lambda: running.engine.status().drafter_state == "connecting")
            second.start()
            until(lambda: running.engine.status().drafter_state == "connected")
            seen = watch.accepted
            until(lambda: watch.accepted > seen)
            watch.hurry.set()
            thread.join(120)
            (completion,) = results
            counters = running.engine.status().counters
            assert counters["drafter_round_timeouts"] == 1
            plain = client.generate(demo.PROMPT, max_tokens=600, draft_tokens=0, **GREEDY)
            assert completion.token_ids == plain.token_ids
        finally:
            first.kill()
            second.kill()
