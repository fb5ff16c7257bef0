"""Health of a verifier with and without its drafter, over both services."""

from __future__ import annotations

import queue
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import drafter.__main__ as drafter_process
from drafter.config import DrafterOptions
from outrider import cli, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PATIENCE = 20  # seconds


class Watched:
    """One name's statuses as a watch hears them."""

    def __init__(self, stub: health_pb2_grpc.HealthStub, service: str) -> None:
        self.heard: queue.SimpleQueue[int | str] = queue.SimpleQueue()
        self._call = stub.Watch(health_pb2.HealthCheckRequest(service=service))
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        for each in self._call:
            self.heard.put(each.status)
        self.heard.put("ended")

    def next(self) -> int | str:
        return self.heard.get(timeout=PATIENCE)


def test_the_drafter_has_a_status_of_its_own_and_never_takes_the_verifier_down(dense, serve):
    """F8: health says what is, through a lost drafter and a drain; watches end with it."""
    pair, _ = serve(dense, "dflash2", draft_tokens=3)
    with grpc.insecure_channel(pair.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        own = Watched(stub, serving.GENERATION_SERVICE)
        drafter = Watched(stub, serving.DRAFT_SERVICE)
        assert (own.next(), drafter.next()) == (SERVING, SERVING)
        address = pair.drafter.address
        pair.drafter.stop(0)
        assert drafter.next() == NOT_SERVING
        for name, status in ((serving.GENERATION_SERVICE, SERVING), ("", SERVING)):
            asked = health_pb2.HealthCheckRequest(service=name)
            assert stub.Check(asked, timeout=PATIENCE).status == status
        again = drafter_process.start(
            DrafterOptions(
                target=dense / "target",
                draft=dense / "dflash2",
                listen=address,
                draft_tokens=3,
                max_context=512,
            )
        )
        try:
            assert drafter.next() == SERVING
            pair.verifier.stop(5)
            assert [own.next(), own.next()] == [NOT_SERVING, "ended"], "SERVING all along"
            assert drafter.next() == "ended"
        finally:
            again.stop(0)


def test_names_nobody_serves_are_not_found_on_either_port(dense, serve):
    pair, _ = serve(dense, "dflash2", draft_tokens=3)
    for address in (pair.address, pair.drafter.address):
        with grpc.insecure_channel(address) as channel:
            asked = health_pb2.HealthCheckRequest(service="outrider.v1.Nobody")
            with pytest.raises(grpc.RpcError) as refused:
                health_pb2_grpc.HealthStub(channel).Check(asked, timeout=PATIENCE)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("service", "code", "said"),
    [
        ("", 0, "SERVING"),
        (serving.GENERATION_SERVICE, 0, "SERVING"),
        (serving.DRAFT_SERVICE, 0, "SERVING"),
        ("no.such.Service", 1, "NOT_FOUND"),
    ],
)
def test_the_command_line_asks_for_health(dense, serve, capsys, service, code, said):
    pair, _ = serve(dense)
    assert cli.main(["health", "--address", pair.address, "--service", service]) == code
    shown = capsys.readouterr()
    assert said in (shown.out if code == 0 else shown.err)


def test_the_command_line_says_that_a_drafter_is_away_and_that_nobody_is_there(
    dense, serve, capsys
):
    pair, _ = serve(dense)
    pair.drafter.stop(0)
    pair.wait_for_drafter("connecting")
    asked = ["health", "--address", pair.address, "--service"]
    assert cli.main([*asked, serving.DRAFT_SERVICE]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "NOT_SERVING"
    assert cli.main([*asked, serving.GENERATION_SERVICE]) == 0
    pair.verifier.stop(0)
    assert cli.main(["health", "--address", pair.address, "--timeout", "2"]) == 1
    assert pair.address in capsys.readouterr().err
