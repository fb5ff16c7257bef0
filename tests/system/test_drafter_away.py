"""The drafter is never needed: absent, lost, hung or back again, requests end with their output."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

import drafter.__main__ as drafter_process
import verifier.__main__ as verifier_process
from drafter.config import DrafterOptions
from drafter.model import DraftModel
from outrider.client import Client
from tests.system.conftest import greedy, prompt
from tests.tiny_pair import Pair
from verifier.options import VerifierOptions
from verifier.target import Target

K = 3


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_drafter(folder: Path, port: int, kind: str = "dflash2") -> drafter_process.Running:
    return drafter_process.start(
        DrafterOptions(
            target=folder / "target",
            draft=folder / kind,
            listen=f"127.0.0.1:{port}",
            draft_tokens=K,
            max_concurrency=2,
            max_context=512,
        )
    )


@pytest.fixture
def alone(dense):
    """A verifier whose drafter is not there yet, and the port it is expected on."""
    port = free_port()
    running = verifier_process.start(
        VerifierOptions(
            target=dense / "target",
            draft=dense / "dflash2",
            drafter=f"127.0.0.1:{port}",
            listen="127.0.0.1:0",
            draft_tokens=K,
            max_concurrency=2,
            max_context=512,
            draft_timeout_ms=1000,
        )
    )
    try:
        with Client(running.address) as client:
            yield running, client, port
    finally:
        running.stop(0)


def test_requests_run_plainly_before_the_drafter_ever_came(dense, alone, oracle):
    _, client, _ = alone
    completion = client.generate(
        prompt_ids=prompt(20), max_tokens=30, temperature=0, ignore_eos=True
    )
    assert list(completion.token_ids) == greedy(oracle, prompt(20), 30)
    assert completion.usage.proposed == 0
    assert completion.usage.rounds == 29
    assert completion.usage.plain_rounds == 28  # the last has room for no proposal
    assert client.server_info().drafter_state == "connecting"


def test_drafting_begins_when_the_drafter_comes_and_ends_when_it_goes(
    dense, alone, oracle, monkeypatch
):
    running, client, port = alone
    # until it may go on, the request takes its time, so that the drafter can come and go meanwhile
    go_on = threading.Event()
    whole = Target.verify

    def unhurried(self, *arguments, **keywords):
        go_on.wait(0.1)
        return whole(self, *arguments, **keywords)

    monkeypatch.setattr(Target, "verify", unhurried)
    expected = greedy(oracle, prompt(20), 400)
    arguments = {
        "prompt_ids": prompt(20),
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
        "return_rounds": True,
    }
    deltas = []
    reader = threading.Thread(
        target=lambda: deltas.extend(client.stream(**arguments)), name="reader"
    )
    reader.start()
    drafter = start_drafter(dense, port)
    pair = Pair(drafter, running)
    pair.wait_for_drafter()
    wait_for_rounds(running, 5)
    drafter.stop(0)
    pair.wait_for_drafter("connecting")
    again = start_drafter(dense, port)
    go_on.set()
    try:
        reader.join(60)
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == expected
        rounds = [r for delta in deltas for r in delta.rounds]
        assert any(r.proposed for r in rounds)
        assert any(not r.proposed for r in rounds)
        Pair(again, running).wait_for_drafter()
        completion = client.generate(**arguments)
        assert list(completion.token_ids) == expected
        assert completion.usage.proposed > 0
        Pair(again, running).expect_idle()
    finally:
        again.stop(0)


def wait_for_rounds(running: verifier_process.Running, count: int) -> None:
    deadline = time.monotonic() + 20
    while running.engine.status().counters.get("drafter_rounds", 0) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_hung_drafter_costs_one_deadline_and_no_request(dense, serve, oracle, monkeypatch):
    pair, client = serve(dense, "dflash2", draft_tokens=K, draft_timeout_ms=200)
    hang = threading.Event()
    whole = DraftModel.draft_block

    def hangs(self, *arguments, **keywords):
        if not hang.is_set():
            hang.wait(5)
        return whole(self, *arguments, **keywords)

    monkeypatch.setattr(DraftModel, "draft_block", hangs)
    completion = client.generate(
        prompt_ids=prompt(20), max_tokens=30, temperature=0, ignore_eos=True
    )
    hang.set()
    assert list(completion.token_ids) == greedy(oracle, prompt(20), 30)
    assert pair.verifier.engine.status().counters["drafter_round_timeouts"] >= 1
    pair.wait_for_drafter()
    drafted = client.generate(prompt_ids=prompt(20), max_tokens=30, temperature=0, ignore_eos=True)
    assert drafted.usage.proposed > 0
    pair.expect_idle()


def test_an_exception_in_the_drafter_is_a_loss_not_an_error(dense, serve, oracle, monkeypatch):
    pair, client = serve(dense, "dflash2", draft_tokens=K)
    whole = DraftModel.draft_block
    calls = []

    def breaks_once(self, *arguments, **keywords):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("planted")
        return whole(self, *arguments, **keywords)

    monkeypatch.setattr(DraftModel, "draft_block", breaks_once)
    completion = client.generate(
        prompt_ids=prompt(20), max_tokens=200, temperature=0, ignore_eos=True
    )
    assert list(completion.token_ids) == greedy(oracle, prompt(20), 200)
    assert pair.verifier.engine.status().counters["drafter_losses"] == 1
    pair.wait_for_drafter()
    pair.expect_idle()


def test_a_draft_of_another_target_is_refused_with_both_values(dense, mixture, oracle):
    """The pair disagrees about the target; the verifier serves plainly and says why."""
    port = free_port()
    drafter = start_drafter(mixture, port)
    running = verifier_process.start(
        VerifierOptions(
            target=dense / "target",
            draft=dense / "dflash2",
            drafter=drafter.address,
            listen="127.0.0.1:0",
            draft_tokens=K,
            max_concurrency=2,
            max_context=512,
        )
    )
    try:
        Pair(drafter, running).wait_for_drafter("refused")
        with Client(running.address) as client:
            detail = client.server_info().drafter_detail
            assert "MODEL_MISMATCH" in detail
            assert "target_config_digest" in detail
            completion = client.generate(
                prompt_ids=prompt(9), max_tokens=10, temperature=0, ignore_eos=True
            )
            assert list(completion.token_ids) == greedy(oracle, prompt(9), 10)
    finally:
        running.stop(0)
        drafter.stop(0)
