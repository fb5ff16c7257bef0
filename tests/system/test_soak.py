"""Requests of all kinds over networks that fail in all ways, for a while; then everything adds up.

The short run is part of the suite; `make soak` runs the long one and prints its report.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import drafter.__main__ as drafter_process
from drafter.config import DrafterOptions
from outrider.client import Client, ClientError
from tests.faulty_network import FAULTS, Proxy
from tests.system.conftest import greedy, prompt
from tests.tiny_pair import Pair, served

K = 3
CLIENTS = 6
TOKENS = 60
OWN = [("grpc.use_local_subchannel_pool", 1)]
MEMORY_GROWTH_MIB = 150  # of the whole test process, clients and oracles in it


@dataclass
class Report:
    """What a soak found."""

    requests: Counter[str] = field(default_factory=Counter)  # by what the client meant to do
    endings: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong_outputs: int = 0
    lost_tokens: int = 0  # counted by Usage, and never delivered
    rounds: int = 0
    proposed: int = 0
    memory_start_mib: float = 0.0
    memory_end_mib: float = 0.0


class Soak:
    """One pair, a proxy on either side of its verifier, and everything that happens to them."""

    def __init__(self, folder: Path, pair: Pair, front: Proxy, back: Proxy, seed: int) -> None:
        self.folder, self.pair, self.front, self.back = folder, pair, front, back
        self.seed = seed
        self.report = Report()
        self.expected: dict[tuple[int, int], list[int]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def run(self, seconds: float) -> None:
        """All of it, and back to health."""
        threads = [
            threading.Thread(target=self._ask, args=(number,), daemon=True)
            for number in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        chance = random.Random(self.seed)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._fault(chance)
        self._stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs"

    def _fault(self, chance: random.Random) -> None:
        if chance.random() < 0.05:
            self.report.faults["drafter restarted"] += 1
            self._restart_drafter()
        name, proxy = chance.choice((("front", self.front), ("back", self.back)))
        fault = chance.choice(FAULTS)
        self.report.faults[f"{name} {fault}"] += 1
        proxy.inject(fault, chance)
        time.sleep(chance.uniform(0.02, 0.4))
        proxy.heal()
        time.sleep(chance.uniform(0.0, 0.3))

    def _restart_drafter(self) -> None:
        address = self.pair.drafter.address
        self.pair.drafter.stop(0)
        self.pair.drafter = drafter_process.start(
            DrafterOptions(
                target=self.folder / "target",
                draft=self.folder / "dflash2",
                listen=address,
                draft_tokens=K,
                max_context=512,
                checkpoint_slots=4,
            )
        )

    # ---- clients

    def _ask(self, number: int) -> None:
        chance = random.Random(self.seed * 1000 + number)
        while not self._stop.is_set():
            # half of them by way of the bad network
            address = chance.choice((self.front.address, self.pair.address))
            with Client(address, options=OWN) as client:
                for _ in range(chance.randint(1, 5)):
                    self._one(client, chance)

    def _one(self, client: Client, chance: random.Random) -> None:
        key = chance.choice(list(self.expected))
        kind = chance.choice(("whole", "whole", "leave", "deadline", "dawdle", "plain"))
        got: list[int] = []
        counted = None
        options = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}
        options["timeout"] = 0.15 if kind == "deadline" else 20
        if kind == "plain":
            options["draft_tokens"] = 0
        try:
            stream = client.stream(prompt_ids=prompt(*key), **options)
            with stream:
                for delta in stream:
                    got += delta.token_ids
                    if delta.finish is not None:
                        counted = delta.finish.usage
                    if kind == "dawdle":
                        time.sleep(0.005)
                    if kind == "leave" and len(got) > 10:
                        break
            ending = "finished" if counted is not None else "left"
        except ClientError as error:
            ending = error.reason
        with self._lock:
            report = self.report
            report.requests[kind] += 1
            report.endings[ending] += 1
            report.wrong_outputs += got != self.expected[key][: len(got)]
            if counted is not None:
                report.lost_tokens += abs(counted.output_tokens - len(got))
                report.wrong_outputs += len(got) != TOKENS
                report.rounds += counted.rounds
                report.proposed += counted.proposed


def memory_mib() -> float:
    """Resident memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.parametrize(
    "seconds",
    [8, pytest.param(240, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
    ids=["short", "long"],
)
def test_after_a_soak_nothing_is_wrong_lost_or_left_behind(dense, oracle, seconds):
    with contextlib.ExitStack() as stack:
        back: list[Proxy] = []

        def via(address: str) -> str:
            back.append(stack.enter_context(Proxy(address)))
            return back[0].address

        pair = stack.enter_context(
            served(
                dense / "target",
                dense / "dflash2",
                draft_tokens=K,
                draft_timeout_ms=500,
                checkpoint_slots=4,
                prefill_chunk=16,
                drafter_via=via,
            )
        )
        front = stack.enter_context(Proxy(pair.address))
        soak = Soak(dense, pair, front, back[0], seed=seconds)
        for length, seed in ((5, 0), (20, 0), (20, 1), (40, 0)):
            soak.expected[length, seed] = greedy(oracle, prompt(length, seed), TOKENS)
        report = soak.report
        with Client(pair.address) as client:
            client.generate(prompt_ids=prompt(5), max_tokens=TOKENS, temperature=0)
            report.memory_start_mib = memory_mib()
            soak.run(seconds)
            pair.wait_for_drafter()
            pair.expect_idle()  # no lane, slot, page or context is left behind
            report.memory_end_mib = memory_mib()
            survivor = client.generate(
                prompt_ids=prompt(20), max_tokens=TOKENS, temperature=0, ignore_eos=True
            )
            assert list(survivor.token_ids) == soak.expected[20, 0]
            assert survivor.usage.proposed > 0
            counters = client.server_info().counters
        for name, value in vars(report).items():
            print(f"{name:<18}", dict(value) if isinstance(value, Counter) else value)
        assert report.wrong_outputs == report.lost_tokens == 0
        assert counters.get("failed_rounds", 0) == counters.get("failed_turns", 0) == 0
        assert report.endings["finished"] >= CLIENTS and report.proposed > 0
        assert sum(report.faults.values()) > seconds / 2
        # whoever was told of an end was told by a fault of the table, never INTERNAL
        assert not report.endings.keys() & {"INTERNAL", "LOGITS_NOT_FINITE"}
        assert report.memory_end_mib - report.memory_start_mib < MEMORY_GROWTH_MIB
