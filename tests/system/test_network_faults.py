"""Bad networks on either side of the verifier: what is delivered is right, the rest is freed."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from outrider.client import Client, ClientError, Delta, UnavailableError
from tests.faulty_network import Proxy
from tests.system.conftest import greedy, prompt
from tests.tiny_pair import Pair, served

K = 3
# far above what a round takes on a busy host, even over the slow networks below
DRAFT_TIMEOUT_MS = 2000
GREEDY = {"temperature": 0, "ignore_eos": True}
OWN = [("grpc.use_local_subchannel_pool", 1)]


class Net:
    """A served pair with a proxy on either side of the verifier."""

    def __init__(self, pair: Pair, front: Proxy, back: Proxy) -> None:
        self.pair, self.front, self.back = pair, front, back

    def client(self) -> Client:
        return Client(self.front.address, options=OWN)


WAYS = {
    "shared_memory": {"shared_memory": True},
    "rounds_in_memory": {"shared_memory": True, "spin_ms": 500},
    "messages": {"shared_memory": False},
}


@pytest.fixture
def net(dense, request) -> Iterator[Net]:
    yield from _net(dense, **WAYS[request.param])


@pytest.fixture
def front_net(dense) -> Iterator[Net]:
    yield from _net(dense)


def _net(folder, **options: object) -> Iterator[Net]:
    with contextlib.ExitStack() as stack:
        behind: list[Proxy] = []

        def via(address: str) -> str:
            behind.append(stack.enter_context(Proxy(address)))
            return behind[0].address

        pair = stack.enter_context(
            served(
                folder / "target",
                folder / "dflash2",
                draft_tokens=K,
                draft_timeout_ms=DRAFT_TIMEOUT_MS,
                drafter_via=via,
                **options,
            )
        )
        front = stack.enter_context(Proxy(pair.address))
        yield Net(pair, front, behind[0])


def until(condition: Callable[[], object], patience: float = 30) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- between client and verifier


@pytest.mark.parametrize(
    ("delay_s", "rate"), [(0.02, None), (0.0, 30_000.0)], ids=["delay", "throttle"]
)
def test_a_slow_network_to_the_client_changes_nothing_but_time(front_net, oracle, delay_s, rate):
    front_net.front.delay_s, front_net.front.rate = delay_s, rate
    with front_net.client() as client:
        run = client.generate(prompt_ids=prompt(9), max_tokens=80, logprobs=2, **GREEDY)
    assert list(run.token_ids) == greedy(oracle, prompt(9), 80)
    assert run.usage.plain_rounds == 0
    front_net.pair.expect_idle()


@pytest.mark.parametrize("fault", ["cut", "reset"])
def test_a_broken_connection_frees_its_request_and_the_client_goes_on(front_net, oracle, fault):
    with front_net.client() as client, Client(front_net.pair.address) as beside:
        other = beside.stream(prompt_ids=prompt(9, seed=1), max_tokens=400, **GREEDY)
        next(other)
        stream = client.stream(prompt_ids=prompt(9), max_tokens=480, **GREEDY)
        got = [token for _ in range(3) for token in next(stream).token_ids]
        getattr(front_net.front, fault)()
        with pytest.raises(UnavailableError):
            for delta in stream:
                got += delta.token_ids
        assert got == greedy(oracle, prompt(9), 480)[: len(got)], "what came was right"
        again = client.generate(prompt_ids=prompt(9), max_tokens=20, **GREEDY)
        assert list(again.token_ids) == greedy(oracle, prompt(9), 20)
        whole = [token for delta in other for token in delta.token_ids]
        assert whole == greedy(oracle, prompt(9, seed=1), 400)[-len(whole) :], "its neighbour too"
    front_net.pair.expect_idle()


def test_a_half_open_connection_holds_a_lane_no_longer_than_its_deadline(front_net, oracle):
    with front_net.client() as client:
        stream = client.stream(prompt_ids=prompt(9), max_tokens=480, timeout=1.5, **GREEDY)
        next(stream)
        front_net.front.freeze()
        with Client(front_net.pair.address) as beside:
            run = beside.generate(prompt_ids=prompt(9), max_tokens=20, **GREEDY)
            assert list(run.token_ids) == greedy(oracle, prompt(9), 20)
        with pytest.raises(ClientError):
            list(stream)
        front_net.pair.expect_idle()
        front_net.front.thaw()
        run = client.generate(prompt_ids=prompt(9), max_tokens=20, timeout=20, **GREEDY)
        assert list(run.token_ids) == greedy(oracle, prompt(9), 20)


# --- between verifier and drafter


def drafting(net: Net, client: Client, oracle) -> None:
    """Fails unless a fresh request drafts, soon, and comes out as it should."""
    expected = greedy(oracle, prompt(12), 30)

    def drafted() -> bool:
        run = client.generate(prompt_ids=prompt(12), max_tokens=30, **GREEDY)
        assert list(run.token_ids) == expected
        return run.usage.proposed > 0

    until(drafted)


@pytest.mark.parametrize(
    ("net", "fault"),
    [
        *itertools.product(
            ["shared_memory", "messages"], ["delay", "throttle", "cut", "reset", "freeze"]
        ),
        ("rounds_in_memory", "reset"),
        ("rounds_in_memory", "freeze"),
    ],
    indirect=["net"],
)
def test_a_bad_network_to_the_drafter_costs_speed_and_nothing_else(net, oracle, fault):
    expected = greedy(oracle, prompt(20), 300)
    with Client(net.pair.address) as client:
        stream = client.stream(prompt_ids=prompt(20), max_tokens=300, return_rounds=True, **GREEDY)
        deltas: list[Delta] = [next(stream)]
        losses = net.pair.verifier.engine.link.counters["losses"]
        match fault:
            case "delay":
                net.back.delay_s = 0.004
            case "throttle":
                net.back.rate = 100_000.0
            case _:
                getattr(net.back, fault)()
        deltas += stream
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == expected
        lost = net.pair.verifier.engine.link.counters["losses"] - losses
        assert lost == (fault in ("cut", "reset", "freeze"))
        net.back.heal()
        drafting(net, client, oracle)
    net.pair.expect_idle()


@pytest.mark.parametrize("net", list(WAYS), indirect=True)
def test_a_drafter_that_answers_too_late_is_lost_and_found_again(net, oracle):
    with Client(net.pair.address) as client:
        net.back.delay_s = 1.2 * DRAFT_TIMEOUT_MS / 1000
        run = client.generate(prompt_ids=prompt(20), max_tokens=40, **GREEDY)
        assert list(run.token_ids) == greedy(oracle, prompt(20), 40)
        assert net.pair.verifier.engine.link.counters["round_timeouts"] >= 1
        net.back.heal()
        drafting(net, client, oracle)
    net.pair.expect_idle()


# --- F3: ghosts

LEAVER = """
import os, sys
from outrider.client import Client
stream = Client(sys.argv[1]).stream(prompt_ids=[3, 4, 5], max_tokens=480, ignore_eos=True)
next(stream)
print("began", flush=True)
sys.stdin.read()
"""


def test_a_hundred_streams_that_are_dropped_leave_no_ghost(front_net, oracle):
    """F3: by cancelling, by TCP reset, by deadline, by the death of their process."""
    pair, front = front_net.pair, front_net.front
    leavers = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVER, pair.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for leaver in leavers:
        assert leaver.stdout.readline() == "began\n"
        os.kill(leaver.pid, signal.SIGKILL)
    for leaver in leavers:
        leaver.communicate(timeout=20)
    counts = dict.fromkeys(("cancel", "reset", "deadline"), 0)
    with Client(pair.address) as client:
        before = client.generate(prompt_ids=prompt(9), max_tokens=5, **GREEDY).usage.ttft_ns
        for number in range(98):
            way = ("cancel", "reset", "deadline")[number % 3]
            ids = prompt(9, seed=number % 7)
            if way == "reset":
                with front_net.client() as gone:
                    next(gone.stream(prompt_ids=ids, max_tokens=480, **GREEDY))
                    front.reset()
            elif way == "cancel":
                stream = client.stream(prompt_ids=ids, max_tokens=480, **GREEDY)
                next(stream)
                stream.cancel()
            else:
                stream = client.stream(prompt_ids=ids, max_tokens=480, timeout=0.1, **GREEDY)
                with contextlib.suppress(ClientError):
                    list(stream)
            counts[way] += 1
        pair.expect_idle()
        after = client.generate(prompt_ids=prompt(9), max_tokens=5, **GREEDY)
        assert list(after.token_ids) == greedy(oracle, prompt(9), 5)
        assert after.usage.ttft_ns < 10 * before + 200_000_000, "as soon as ever"
    assert sum(counts.values()) + len(leavers) == 100
    pair.expect_idle()
