"""TLS, mutual TLS and tokens on both ports and between the services."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import drafter.__main__ as drafter_process
import verifier.__main__ as verifier_process
from drafter.config import DrafterOptions
from outrider import cli, serving
from outrider.client import AsyncClient, Client, UnauthenticatedError, UnavailableError
from outrider.security import ClientSecurity, ServerSecurity
from outrider.v1 import draft_service_pb2 as wire
from outrider.v1 import draft_service_pb2_grpc
from tests.certificates import Authority
from tests.system.conftest import greedy, prompt
from tests.tiny_pair import Pair
from verifier.options import VerifierOptions

K = 3
TOKEN, DRAFTER_TOKEN = "public-token", "inner-token"


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("theirs"), "stranger")


@contextlib.contextmanager
def secured(
    folder: Path,
    drafter: ServerSecurity,
    channel: ClientSecurity,
    verifier: ServerSecurity,
    state: str = "connected",
) -> Iterator[Pair]:
    common = {
        "target": folder / "target",
        "draft": folder / "dflash2",
        "draft_tokens": K,
        "max_context": 256,
        "listen": "127.0.0.1:0",
    }
    behind = drafter_process.start(DrafterOptions(**common, security=drafter))
    try:
        front = verifier_process.start(
            VerifierOptions(
                **common, drafter=behind.address, security=verifier, drafter_security=channel
            )
        )
        try:
            pair = Pair(behind, front)
            pair.wait_for_drafter(state)
            yield pair
        finally:
            front.stop(0)
    finally:
        behind.stop(0)


def drafts(client: Client, oracle) -> None:
    completion = client.generate(prompt_ids=prompt(9), max_tokens=20, temperature=0)
    assert list(completion.token_ids) == greedy(oracle, prompt(9), 20)
    assert completion.usage.proposed > 0


def refused(client: Client, detail: str) -> None:
    """Fails unless the verifier says, soon, that its drafter refused it by that."""
    deadline = time.monotonic() + 20
    while not client.server_info().drafter_detail.startswith(detail):
        assert time.monotonic() < deadline, client.server_info().drafter_detail
        time.sleep(0.02)


@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "mutual"])
def test_both_ports_speak_tls_and_the_pair_drafts_over_it(
    dense, oracle, authority, stranger, mutual
):
    own, inner, caller = map(authority.issue, ("verifier", "drafter", "caller"))
    demanded = authority.ca if mutual else None
    shown = (caller.certificate, caller.key) if mutual else (None, None)
    ours = ClientSecurity(authority.ca, *shown)
    with secured(
        dense,
        ServerSecurity(inner.certificate, inner.key, demanded),
        ours,
        ServerSecurity(own.certificate, own.key, demanded),
    ) as pair:
        with Client(pair.address, credentials=ours.credentials()) as client:
            drafts(client, oracle)
        wrong = [None, ClientSecurity(stranger.ca).credentials()]
        if mutual:
            alien = stranger.issue("alien")
            wrong += [
                ClientSecurity(authority.ca).credentials(),
                ClientSecurity(authority.ca, alien.certificate, alien.key).credentials(),
            ]
        for address in (pair.address, pair.drafter.address):
            for credentials in wrong:
                with (
                    Client(address, credentials=credentials) as client,
                    pytest.raises(UnavailableError),
                ):
                    client.model_info(timeout=10)
        # bytes that are no TLS, and half a handshake
        for address in (pair.address, pair.drafter.address):
            host, _, port = address.rpartition(":")
            for sent in (b"PRI * HTTP/2.0", random.Random(0).randbytes(600), b"\x16\x03\x01\x02"):
                with socket.create_connection((host, int(port)), timeout=10) as connection:
                    connection.sendall(sent)
        with Client(pair.address, credentials=ours.credentials()) as client:
            drafts(client, oracle)


def test_a_drafter_that_the_verifier_does_not_trust_is_not_used(dense, oracle, authority, stranger):
    inner = stranger.issue("impostor")
    with (
        secured(
            dense,
            ServerSecurity(inner.certificate, inner.key),
            ClientSecurity(authority.ca),
            ServerSecurity(),
            "connecting",
        ) as pair,
        Client(pair.address) as client,
    ):
        completion = client.generate(prompt_ids=prompt(9), max_tokens=20, temperature=0)
        assert list(completion.token_ids) == greedy(oracle, prompt(9), 20)
        assert completion.usage.proposed == 0
        refused(client, "UNREACHABLE")
        assert client.server_info().drafter_state == "connecting"


def test_tokens_guard_both_ports_and_the_link_shows_its_own(dense, oracle, tmp_path, capsys):
    public, inner = tmp_path / "public", tmp_path / "inner"
    public.write_text(f"{TOKEN}\n")
    inner.write_text(f"{DRAFTER_TOKEN}\n")
    with secured(
        dense,
        ServerSecurity(token_file=inner),
        ClientSecurity(token_file=inner),
        ServerSecurity(token_file=public),
    ) as pair:
        with Client(pair.address, token=TOKEN) as client:
            drafts(client, oracle)
        for token in (None, DRAFTER_TOKEN):
            with Client(pair.address, token=token) as client:
                with pytest.raises(UnauthenticatedError) as refused:
                    client.generate(prompt_ids=prompt(9))
                assert refused.value.reason == "TOKEN_INVALID"
        with grpc.insecure_channel(pair.drafter.address) as channel:
            stub = draft_service_pb2_grpc.DraftServiceStub(channel)
            with pytest.raises(grpc.RpcError) as closed:
                stub.GetDraftInfo(wire.GetDraftInfoRequest(), timeout=10)
            assert closed.value.code() is grpc.StatusCode.UNAUTHENTICATED
            call = stub.DraftRounds(iter([wire.DraftRoundsRequest()]), timeout=10)
            with pytest.raises(grpc.RpcError) as closed:
                next(call)
            assert closed.value.code() is grpc.StatusCode.UNAUTHENTICATED
        # and through the command line
        address = f"--address={pair.address}"
        assert cli.main(["info", address, "--json"]) == 1
        assert "TOKEN_INVALID" in capsys.readouterr().err
        assert cli.main(["info", address, "--json", f"--token-file={public}"]) == 0
        assert json.loads(capsys.readouterr().out)["server"]["drafter_state"] == "connected"


def test_a_wrong_token_for_the_drafter_is_told_and_requests_run_plainly(dense, tmp_path):
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("right\n")
    wrong.write_text("wrong\n")
    with (
        secured(
            dense,
            ServerSecurity(token_file=right),
            ClientSecurity(token_file=wrong),
            ServerSecurity(),
            "connecting",
        ) as pair,
        Client(pair.address) as client,
    ):
        refused(client, "TOKEN_INVALID: authorization")
        assert client.generate(prompt_ids=prompt(9), max_tokens=5).usage.proposed == 0


def test_serve_secures_the_public_port_and_ends_on_sigterm(dense, authority, tmp_path):
    own = authority.issue("verifier")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    command = [sys.executable, "-m", "outrider.cli", "serve", "--listen=127.0.0.1:0"]
    command += [f"--target={dense / 'target'}", f"--draft={dense / 'dflash2'}", "--device=cpu"]
    command += [f"--tls-cert={own.certificate}", f"--tls-key={own.key}", f"--token-file={tokens}"]
    command += ["--metrics-listen=0", "--drafter-metrics-listen=0", "--max-context=256"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        try:
            address = it.stdout.readline().split()[-1]
            ours = ClientSecurity(authority.ca, token_file=tokens)
            with Client(address, credentials=ours.credentials(), token=ours.token()) as client:
                deadline = time.monotonic() + 20
                while client.server_info().drafter_state != "connected":
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                assert client.generate(prompt_ids=prompt(9), max_tokens=20).usage.proposed > 0
        finally:
            it.terminate()
            _, log = it.communicate(timeout=60)
    assert it.returncode == 0
    ready = {event["event"]: event for event in map(json.loads, filter(is_json, log.splitlines()))}
    for name in ("verifier_ready", "drafter_ready"):
        assert ready[name]["metrics_address"].startswith("127.0.0.1:")
    assert TOKEN not in log


def is_json(line: str) -> bool:
    return line.startswith("{")


def test_the_command_line_and_the_async_client_speak_tls(dense, authority, capsys):
    import asyncio

    own, caller = authority.issue("verifier"), authority.issue("caller")
    demands = ServerSecurity(own.certificate, own.key, authority.ca)
    files = [f"--tls-ca={authority.ca}", f"--tls-cert={caller.certificate}"]
    files.append(f"--tls-key={caller.key}")
    with secured(dense, ServerSecurity(), ClientSecurity(), demands) as pair:
        address = f"--address={serving.dialable(pair.address)}"
        words = ["generate", address, "--prompt-ids=1,2", "--max-tokens=4", "--json"]
        assert cli.main([*words, *files]) == 0
        assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 4
        assert cli.main([*words, files[0]]) == 1
        capsys.readouterr()
        assert cli.main([*words, f"--tls-ca={caller.key}"]) == 2
        assert "--tls-ca: expected PEM certificates" in capsys.readouterr().err
        assert cli.main(["health", address, *files]) == 0
        assert cli.main(["health", address, "--timeout=2"]) == 1
        load = ["bench", "serve", address, "--concurrency=1", "--duration=0.1"]
        assert cli.main([*load, "--prompt-tokens=2", "--max-tokens=4", *files]) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith("c=1     on")

        async def ask() -> int:
            ours = ClientSecurity(authority.ca, caller.certificate, caller.key)
            async with AsyncClient(pair.address, credentials=ours.credentials()) as client:
                return len((await client.generate(prompt_ids=[1, 2], max_tokens=3)).token_ids)

        assert asyncio.run(ask()) == 3
    assert cli.main(["generate", "--prompt-ids=1,2", files[0]]) == 2
    assert "--address" in capsys.readouterr().err
