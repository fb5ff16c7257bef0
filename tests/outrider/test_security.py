"""Files, tokens and limits: what is refused, and how it is told."""

from __future__ import annotations

import argparse
import asyncio
import threading
from concurrent import futures

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider import guard, security, serving
from outrider.faults import FaultError, from_rpc_error
from outrider.guard import Guard, Tokens, bearer, host_of, read_tokens
from outrider.security import ClientSecurity, SecurityError, ServerSecurity, exposed
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import generation_service_pb2_grpc as pb_grpc
from tests.certificates import Authority

TOKEN = "s3cret-token"


# --- files


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


def written(tmp_path, text):
    path = tmp_path / "file"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda own, other, ca, no: ServerSecurity(own.certificate), "--tls-cert: .* --tls-key"),
        (lambda own, other, ca, no: ServerSecurity(None, own.key), "--tls-key: .* --tls-cert"),
        (lambda own, other, ca, no: ServerSecurity(client_ca=ca), "--tls-ca: expected --tls-cert"),
        (lambda own, other, ca, no: ServerSecurity(own.certificate, no), "--tls-key: .* readable"),
        (lambda own, other, ca, no: ServerSecurity(no, own.key), "--tls-cert: .* readable"),
        (lambda own, other, ca, no: ServerSecurity(own.certificate, other.key), "key .*mismatch"),
        (lambda own, other, ca, no: ServerSecurity(own.key, own.key), "--tls-cert: expected a PEM"),
        (
            lambda own, other, ca, no: ServerSecurity(own.certificate, own.key, own.key),
            "--tls-ca: expected PEM certificates",
        ),
        (
            lambda own, other, ca, no: ServerSecurity(own.certificate, own.key, no),
            "--tls-ca: expected a readable file",
        ),
        (lambda own, other, ca, no: ClientSecurity(None, own.certificate, own.key), "--tls-ca be"),
        (lambda own, other, ca, no: ClientSecurity(ca, own.certificate), "--tls-key beside"),
        (lambda own, other, ca, no: ClientSecurity(no), "--tls-ca: expected a readable file"),
    ],
)
def test_files_that_cannot_be_used_are_refused_by_flag(authority, tmp_path, make, message):
    own, other = authority.issue("own"), authority.issue("other")
    with pytest.raises(SecurityError, match=message):
        make(own, other, authority.ca, tmp_path / "missing").credentials()


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(authority, tmp_path):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    own = authority.issue("own")
    locked = tmp_path / "locked.key"
    locked.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )
    with pytest.raises(SecurityError, match="expected a PEM certificate and its key"):
        ServerSecurity(own.certificate, locked).credentials()


def test_without_files_both_ends_are_plain_text():
    assert ServerSecurity().credentials() is None
    assert ClientSecurity().credentials() is None
    assert ClientSecurity().token() is None


def test_tokens_are_lines_without_blank_ones_and_comments(tmp_path):
    path = written(tmp_path, f"# of the gateway\n\n  {TOKEN}  \nother\n")
    assert read_tokens(path) == [TOKEN, "other"]
    assert ClientSecurity(token_file=path).token() == TOKEN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one token"),
        ("# none\n", "at least one token"),
        ("two words\n", "without blanks"),
        ("naïve\n", "printable ASCII"),
    ],
)
def test_a_token_file_that_cannot_be_used_is_refused_without_showing_it(tmp_path, text, message):
    with pytest.raises(SecurityError, match=message) as refused:
        ServerSecurity(token_file=written(tmp_path, text)).guard()
    for word in ("words", "naïve"):
        assert word not in str(refused.value)


def test_a_missing_token_file_is_refused(tmp_path):
    with pytest.raises(SecurityError, match=r"--token-file: .*readable"):
        ServerSecurity(token_file=tmp_path / "missing").guard()


@pytest.mark.parametrize("limit", [0, -1, (1 << 20) + 1])
def test_a_limit_out_of_range_is_refused(limit):
    with pytest.raises(SecurityError, match="--max-streams-per-peer: expected 1 to"):
        ServerSecurity(streams_per_peer=limit).guard()


@pytest.mark.parametrize(
    ("address", "reachable"),
    [
        ("127.0.0.1:1", False),
        ("127.8.0.1:1", False),
        ("[::1]:1", False),
        ("localhost:1", False),
        ("unix:/a", False),
        ("0.0.0.0:1", True),
        ("[::]:1", True),
        ("*:1", True),
        (":1", True),
        ("10.0.0.1:1", True),
        ("verifier.internal:1", True),
    ],
)
def test_what_others_can_reach_is_known(address, reachable):
    assert exposed(address) is reachable


def test_nothing_listens_beyond_loopback_by_default():
    import drafter.__main__
    import verifier.options
    from outrider.cli import serve

    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    flags = parser.parse_args([])
    addresses = [flags.listen, flags.drafter_listen]
    addresses += [verifier.options.parse([]).listen, verifier.options.parse([]).drafter]
    addresses += [drafter.__main__.parse([])[0].listen]
    assert not any(map(exposed, addresses)), addresses


def test_an_exposed_port_says_what_others_can_do(authority, tmp_path):
    own = authority.issue("own")
    plain, tls = ServerSecurity(), ServerSecurity(own.certificate, own.key)
    mutual = ServerSecurity(own.certificate, own.key, authority.ca)
    both = ServerSecurity(own.certificate, own.key, token_file=written(tmp_path, TOKEN))
    assert plain.weakness("127.0.0.1:1") is None
    assert plain.weakness("0.0.0.0:1") == "plain text beyond this host"
    assert tls.weakness("0.0.0.0:1") == "anybody may call"
    assert mutual.weakness("0.0.0.0:1") is both.weakness("0.0.0.0:1") is None


# --- tokens


@pytest.mark.parametrize(
    ("metadata", "accepted"),
    [
        (bearer(TOKEN), True),
        (bearer("other"), True),
        ((("authorization", f"bearer {TOKEN}"),), True),
        ((("authorization", f"BEARER   {TOKEN}"),), True),
        ((), False),
        (bearer(""), False),
        (bearer(TOKEN[:-1]), False),
        (bearer(f"{TOKEN}x"), False),
        ((("authorization", TOKEN),), False),
        ((("authorization", f"Basic {TOKEN}"),), False),
        ((("x-authorization", f"Bearer {TOKEN}"),), False),
        ((*bearer(TOKEN), *bearer(TOKEN)), False),
        ((("authorization", f"Bearer {TOKEN}".encode()),), False),
    ],
)
def test_only_a_known_bearer_token_is_accepted(metadata, accepted):
    assert Tokens([TOKEN, "other"]).accept(metadata) is accepted


def test_every_known_token_is_compared_in_constant_time_whichever_fits(monkeypatch):
    compared = []

    def comparing(left, right):
        compared.append((len(left), len(right)))
        return left == right

    monkeypatch.setattr(guard.hmac, "compare_digest", comparing)
    tokens = Tokens(["a", "bb", "c" * 400])
    for offered in ("a", "bb", "c" * 400, "d", ""):
        compared.clear()
        tokens.accept(bearer(offered))
        assert compared == [(32, 32)] * 3, offered


# --- both kinds of server behind the guard


class Plain(pb_grpc.GenerationServiceServicer):
    """Answers two methods; `held` calls of Generate wait until `go_on`."""

    def __init__(self):
        self.held = threading.Semaphore(0)
        self.go_on = threading.Event()

    def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(model_name="m")

    def Generate(self, request, context):
        yield pb.GenerateResponse(text="first")
        self.held.release()
        self.go_on.wait(10)


class Async(Plain):
    async def GetModelInfo(self, request, context):
        return Plain.GetModelInfo(self, request, context)

    async def Generate(self, request, context):
        await context.write(pb.GenerateResponse(text="first"))
        self.held.release()
        await asyncio.to_thread(self.go_on.wait, 10)


class SyncServer:
    def __init__(self, rules):
        self.service = Plain()
        self.server = grpc.server(
            futures.ThreadPoolExecutor(16),
            options=serving.SERVER_OPTIONS,
            interceptors=(rules.sync(),),
        )
        pb_grpc.add_GenerationServiceServicer_to_server(self.service, self.server)
        serving.Health(self.server, serving.GENERATION_SERVICE)
        serving.add_reflection(self.server, serving.GENERATION_SERVICE)
        self.address = serving.bind(self.server, "127.0.0.1:0")
        self.server.start()

    def stop(self):
        self.service.go_on.set()
        self.server.stop(None).wait()


class AsyncServer:
    def __init__(self, rules):
        self.service = Async()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def start():
            self.server = grpc.aio.server(
                options=serving.SERVER_OPTIONS, interceptors=(rules.asynchronous(),)
            )
            pb_grpc.add_GenerationServiceServicer_to_server(self.service, self.server)
            serving.AsyncHealth(self.server, serving.GENERATION_SERVICE)
            serving.add_reflection(self.server, serving.GENERATION_SERVICE)
            address = serving.bind(self.server, "127.0.0.1:0")
            await self.server.start()
            return address

        self.address = asyncio.run_coroutine_threadsafe(start(), self._loop).result(10)

    def stop(self):
        self.service.go_on.set()
        asyncio.run_coroutine_threadsafe(self.server.stop(None), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture(params=[SyncServer, AsyncServer])
def guarded(request):
    started = []

    def start(rules):
        server = request.param(rules)
        channel = grpc.insecure_channel(server.address, options=serving.CHANNEL_OPTIONS)
        started.append((server, channel))
        return server, channel

    yield start
    for server, channel in started:
        channel.close()
        server.stop()


def fault_of(call) -> FaultError:
    with pytest.raises(grpc.RpcError) as ended:
        call()
    return from_rpc_error(ended.value)


def info(channel, token=None):
    stub = pb_grpc.GenerationServiceStub(channel)
    return stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=bearer(token), timeout=10)


def raw(channel, method, message, **options):
    kind = channel.unary_stream if method == "Generate" else channel.unary_unary
    answer = kind(f"/outrider.v1.GenerationService/{method}")(message, timeout=10, **options)
    return list(answer) if method == "Generate" else answer


def test_a_call_needs_a_known_token_and_a_probe_none(guarded):
    _, channel = guarded(Guard(Tokens([TOKEN])))
    assert info(channel, TOKEN).model_name == "m"
    for wrong in (None, "guess"):
        fault = fault_of(lambda wrong=wrong: info(channel, wrong))
        assert (fault.reason, fault.code) == ("TOKEN_INVALID", grpc.StatusCode.UNAUTHENTICATED)
        assert TOKEN not in str(fault) and "guess" not in str(fault)
    # what a stranger sends is not even parsed
    assert fault_of(lambda: raw(channel, "GetModelInfo", b"\xff")).reason == "TOKEN_INVALID"
    assert fault_of(lambda: raw(channel, "Generate", b"\xff" * 1000)).reason == "TOKEN_INVALID"
    stub = health_pb2_grpc.HealthStub(channel)
    assert stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status
    assert next(iter(stub.Watch(health_pb2.HealthCheckRequest(), timeout=10))).status


def test_reflection_is_behind_the_token_too(guarded):
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    _, channel = guarded(Guard(Tokens([TOKEN])))
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
    fault = fault_of(lambda: list(stub.ServerReflectionInfo(iter(asked), timeout=10)))
    assert fault.reason == "TOKEN_INVALID"
    (listed,) = stub.ServerReflectionInfo(iter(asked), metadata=bearer(TOKEN), timeout=10)
    assert len(listed.list_services_response.service) == 3


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x02\xff\xff"])
@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Abort"])
def test_a_malformed_message_is_invalid_argument(guarded, method, message):
    _, channel = guarded(Guard())
    fault = fault_of(lambda: raw(channel, method, message))
    assert (fault.reason, fault.code) == ("REQUEST_INVALID", grpc.StatusCode.INVALID_ARGUMENT)
    assert info(channel).model_name == "m"


def test_a_malformed_message_of_a_stream_is_answered_as_an_empty_one(guarded):
    _, channel = guarded(Guard())
    call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    (answer,) = call(iter([b"\xff"]), timeout=10)
    from grpc_reflection.v1alpha import reflection_pb2

    response = reflection_pb2.ServerReflectionResponse.FromString(answer)
    assert response.error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_a_method_nobody_serves_is_unimplemented(guarded):
    _, channel = guarded(Guard())
    fault = fault_of(lambda: raw(channel, "NoSuch", b""))
    assert fault.code is grpc.StatusCode.UNIMPLEMENTED


def test_a_peer_has_so_many_calls_and_its_next_one_is_refused_with_advice(guarded):
    server, channel = guarded(Guard(streams_per_peer=3))
    stub = pb_grpc.GenerationServiceStub(channel)
    calls = [stub.Generate(pb.GenerateRequest(), timeout=20) for _ in range(3)]
    for call in calls:
        next(call)
        assert server.service.held.acquire(timeout=10)
    # another connection of the same host is the same peer
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(server.address, options=options) as other:
        fault = fault_of(lambda: info(other))
    assert (fault.reason, fault.code) == ("PEER_LIMIT", grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert fault.retry_after == 1.0
    health = health_pb2_grpc.HealthStub(channel)
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=10).status, "probes do not count"
    server.service.go_on.set()
    for call in calls:
        assert list(call) == []
    assert info(channel).model_name == "m", "ended calls are given back"


def test_peers_are_hosts():
    assert host_of("ipv4:10.0.0.1:5000") == host_of("ipv4:10.0.0.1:5001") == "ipv4:10.0.0.1"
    assert host_of("ipv6:%5B::1%5D:5000") == "ipv6:%5B::1%5D"
    assert host_of("unix:") == host_of("unix:/a/b") == "unix"
    rules = Guard(streams_per_peer=1)
    with rules.entered("ipv4:10.0.0.1:1"):
        with rules.entered("ipv4:10.0.0.2:1"):
            pass
        with pytest.raises(FaultError, match="PEER_LIMIT"), rules.entered("ipv4:10.0.0.1:2"):
            pass
    with rules.entered("ipv4:10.0.0.1:3"):
        pass


def test_flags_become_the_demands(authority, tmp_path):
    parser = argparse.ArgumentParser()
    security.add_server_arguments(parser)
    security.add_drafter_channel_arguments(parser)
    given = ["--tls-cert=a", "--tls-key=b", "--tls-ca=c", "--token-file=d"]
    flags = parser.parse_args([*given, "--max-streams-per-peer=7", "--drafter-tls-ca=e"])
    demands = ServerSecurity.of(flags)
    assert [str(path) for path in (demands.certificate, demands.key, demands.client_ca)] == [*"abc"]
    assert (str(demands.token_file), demands.streams_per_peer) == ("d", 7)
    own = security.client_security(flags)
    assert [str(path) for path in (own.certificate, own.key, own.ca)] == [*"abc"]
    assert str(security.drafter_channel_security(flags).ca) == "e"
