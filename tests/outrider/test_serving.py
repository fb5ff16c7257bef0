"""Limits, addresses, health, reflection, logs, signals and flags."""

import argparse
import asyncio
import io
import json
import os
import platform
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from fake_generation import FakeGeneration
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider import serving
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import generation_service_pb2_grpc as pb_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
NAME = "outrider.v1.DraftService"


@contextmanager
def started(options=serving.SERVER_OPTIONS, add=lambda server: None, listen="127.0.0.1:0"):
    server = grpc.server(futures.ThreadPoolExecutor(4), options=options)
    added = add(server)
    address = serving.bind(server, listen)
    server.start()
    try:
        yield server, address, added
    finally:
        server.stop(None).wait()


class Echo(grpc.GenericRpcHandler):
    """Unary bytes back, after a wait of the given seconds; or a given number of bytes."""

    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(self.answer)

    def answer(self, request, context):
        word, _, rest = bytes(request[:20]).partition(b" ")
        if word == b"wait":
            context_gone = threading.Event()
            context.add_callback(context_gone.set)
            context_gone.wait(float(rest))
        return bytes(int(rest)) if word == b"give" else b"ok"


def add_echo(server):
    server.add_generic_rpc_handlers((Echo(),))


def echo(channel, request, timeout=30):
    return channel.unary_unary("/test.Service/Echo")(request, timeout=timeout)


# --- channel arguments


@pytest.mark.parametrize(
    "name", sorted({name for name, _ in serving.SERVER_OPTIONS + serving.CHANNEL_OPTIONS})
)
def test_core_knows_every_channel_argument(name):
    # up to the string's end: a prefix of a real name would be ignored like any misspelling
    assert name.encode() + b"\0" in Path(cygrpc.__file__).read_bytes()


def test_the_name_that_core_ignores_is_not_found_by_that_check():
    ignored = b"grpc.http2.min_recv_ping_interval_without_data_ms\0"
    assert ignored not in Path(cygrpc.__file__).read_bytes()


def test_keepalive_and_limits_are_set_by_these_names():
    server, channel = dict(serving.SERVER_OPTIONS), dict(serving.CHANNEL_OPTIONS)
    limits = {
        "grpc.max_send_message_length": 16 * 1024 * 1024,
        "grpc.max_receive_message_length": 16 * 1024 * 1024,
    }
    assert limits.items() <= server.items()
    assert limits.items() <= channel.items()
    assert server.keys() - limits == {
        "grpc.keepalive_time_ms",
        "grpc.keepalive_timeout_ms",
        "grpc.keepalive_permit_without_calls",
        "grpc.http2.max_pings_without_data",
        "grpc.http2.min_ping_interval_without_data_ms",
        "grpc.http2.max_ping_strikes",
        "grpc.so_reuseport",
        "grpc.max_concurrent_streams",
    }
    assert channel.keys() - limits == {
        "grpc.keepalive_time_ms",
        "grpc.keepalive_timeout_ms",
        "grpc.keepalive_permit_without_calls",
        "grpc.http2.max_pings_without_data",
        "grpc.initial_reconnect_backoff_ms",
        "grpc.min_reconnect_backoff_ms",
        "grpc.max_reconnect_backoff_ms",
        "grpc.enable_http_proxy",
    }
    # pings without calls are this far apart, so the server must allow them
    assert (
        channel["grpc.keepalive_time_ms"] >= server["grpc.http2.min_ping_interval_without_data_ms"]
    )


def quiet_call(server_options):
    """A call that stays quiet while its client pings as often as core lets it: each second."""
    eager = (
        ("grpc.keepalive_time_ms", 100),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    with (
        started(server_options, add_echo) as (_, address, _),
        grpc.insecure_channel(address, options=eager) as channel,
    ):
        return echo(channel, b"wait 6")


def test_a_quiet_call_survives_a_client_that_pings_where_default_options_send_it_away():
    with futures.ThreadPoolExecutor(2) as both:
        ours = both.submit(quiet_call, serving.SERVER_OPTIONS)
        defaults = both.submit(quiet_call, ())
    assert ours.result() == b"ok"
    assert "too many pings" in defaults.exception().details().lower()


@pytest.mark.parametrize("direction", ["to the server", "from the server"])
def test_messages_pass_up_to_sixteen_mebibytes_and_no_further(direction):
    sending = direction == "to the server"
    with (
        started(add=add_echo) as (_, address, _),
        grpc.insecure_channel(address, options=serving.CHANNEL_OPTIONS) as channel,
    ):
        limit = serving.MESSAGE_LIMIT
        fits = bytes(limit) if sending else f"give {limit}".encode()
        over = bytes(limit + 1) if sending else f"give {limit + 1}".encode()
        assert len(echo(channel, fits)) == (2 if sending else limit)
        with pytest.raises(grpc.RpcError) as caught:
            echo(channel, over)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(limit) in caught.value.details()
        assert echo(channel, b"still alive") == b"ok"


# --- addresses


def test_port_zero_becomes_the_port_taken():
    with started(add=add_echo) as (_, address, _):
        host, port = address.rsplit(":", 1)
        assert host == "127.0.0.1"
        assert int(port) > 0
        assert echo(grpc.insecure_channel(address), b"") == b"ok"


def test_a_unix_socket_is_bound_again_after_a_crash_left_it(tmp_path):
    path = tmp_path / "drafter.sock"
    child = (
        "import os, grpc; from concurrent import futures; from outrider import serving\n"
        "server = grpc.server(futures.ThreadPoolExecutor(1))\n"
        f"serving.bind(server, 'unix:{path}'); server.start(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", child], check=True, timeout=60)
    assert path.exists()
    with started(add=add_echo, listen=f"unix:{path}") as (_, address, _):
        assert address == f"unix:{path}"
        assert echo(grpc.insecure_channel(address), b"") == b"ok"


def test_a_taken_address_is_refused_not_shared():
    with started() as (_, address, _):
        other = grpc.server(futures.ThreadPoolExecutor(1), options=serving.SERVER_OPTIONS)
        with pytest.raises(serving.AddressError, match="expected a free address"):
            serving.bind(other, address)


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:99999", "unix:/no/such/folder/x"])
def test_what_is_no_address_is_refused(address):
    server = grpc.server(futures.ThreadPoolExecutor(1), options=serving.SERVER_OPTIONS)
    with pytest.raises(serving.AddressError, match="listen: expected"):
        serving.bind(server, address)


@pytest.mark.parametrize(
    ("listen", "dial"),
    [
        ("0.0.0.0:7", "127.0.0.1:7"),
        ("[::]:7", "[::1]:7"),
        ("*:7", "127.0.0.1:7"),
        (":7", "127.0.0.1:7"),
        ("10.0.0.1:7", "10.0.0.1:7"),
        ("unix:/a/b:c", "unix:/a/b:c"),
    ],
)
def test_a_wildcard_is_dialled_on_loopback(listen, dial):
    assert serving.dialable(listen) == dial


# --- health and reflection


def check(address, service):
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status


class Watches:
    """Watch calls, collected on threads."""

    def __init__(self, address, service, count=1):
        self._channel = grpc.insecure_channel(address)
        stub = health_pb2_grpc.HealthStub(self._channel)
        self.seen = [[] for _ in range(count)]
        self.first = threading.Barrier(count + 1)
        self.threads = [
            threading.Thread(target=self._follow, args=(stub, service, seen), daemon=True)
            for seen in self.seen
        ]
        for thread in self.threads:
            thread.start()
        self.first.wait(10)

    def _follow(self, stub, service, seen):
        for number, each in enumerate(stub.Watch(health_pb2.HealthCheckRequest(service=service))):
            seen.append(each.status)
            if number == 0:
                self.first.wait(10)

    def ended(self, timeout=5):
        for thread in self.threads:
            thread.join(timeout)
        return not any(thread.is_alive() for thread in self.threads)


def test_readiness_follows_loading_serving_and_draining_while_liveness_stays():
    with started(add=lambda server: serving.Health(server, NAME)) as (server, address, health):
        assert (check(address, ""), check(address, NAME)) == (SERVING, NOT_SERVING)
        watches = Watches(address, NAME, count=6)  # more than the server has threads
        health.set_ready(True)
        assert (check(address, ""), check(address, NAME)) == (SERVING, SERVING)
        health.close()
        assert (check(address, ""), check(address, NAME)) == (SERVING, NOT_SERVING)
        assert watches.ended()
        assert watches.seen == [[NOT_SERVING, SERVING, NOT_SERVING]] * 6
        late = Watches(address, NAME)
        assert late.ended()
        before = time.monotonic()
        server.stop(30).wait()
        assert time.monotonic() - before < 5


def test_an_unknown_service_is_not_found():
    with started(add=lambda server: serving.Health(server, NAME)) as (_, address, health):
        with pytest.raises(grpc.RpcError) as caught:
            check(address, "no.Such")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watches = Watches(address, "no.Such")
        health.close()
        assert watches.ended()
        assert watches.seen == [[SERVICE_UNKNOWN]]


def test_the_asyncio_server_keeps_the_same_rules():
    async def run():
        server = grpc.aio.server(options=serving.SERVER_OPTIONS)
        health = serving.AsyncHealth(server, NAME)
        address = serving.bind(server, "127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            def request(service):
                return health_pb2.HealthCheckRequest(service=service)

            async def follow(service, seen):
                async for each in stub.Watch(request(service)):
                    seen.append(each.status)

            async def status(service):
                return (await stub.Check(request(service), timeout=10)).status

            async def until(seen, count):
                while len(seen) < count:
                    await asyncio.sleep(0.005)

            assert (await status(""), await status(NAME)) == (SERVING, NOT_SERVING)
            seen, unknown = [], []
            follower = asyncio.create_task(follow(NAME, seen))
            stranger = asyncio.create_task(follow("no.Such", unknown))
            await asyncio.wait_for(asyncio.gather(until(seen, 1), until(unknown, 1)), 10)
            health.set_ready(True)
            await asyncio.wait_for(until(seen, 2), 10)
            assert await status(NAME) == SERVING
            with pytest.raises(grpc.RpcError) as caught:
                await status("no.Such")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            health.close()
            await asyncio.wait_for(asyncio.gather(follower, stranger), 10)
            assert (await status(""), await status(NAME)) == (SERVING, NOT_SERVING)
            assert seen == [NOT_SERVING, SERVING, NOT_SERVING]
            assert unknown == [SERVICE_UNKNOWN]
            await asyncio.wait_for(server.stop(30), 5)

    asyncio.run(run())


def add_generation(server):
    pb_grpc.add_GenerationServiceServicer_to_server(FakeGeneration(), server)
    serving.Health(server, serving.GENERATION_SERVICE)
    serving.add_reflection(server, serving.GENERATION_SERVICE)


def reflected(channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asks = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=serving.GENERATION_SERVICE),
    ]
    listed, file = stub.ServerReflectionInfo(iter(asks), timeout=10)
    names = {each.name for each in listed.list_services_response.service}
    return names, file.file_descriptor_response.file_descriptor_proto


def test_reflection_lists_the_service_health_and_itself():
    with started(add=add_generation) as (_, address, _), grpc.insecure_channel(address) as channel:
        names, files = reflected(channel)
        assert names == {
            "outrider.v1.GenerationService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        assert files[0] == pb.DESCRIPTOR.serialized_pb


def test_reflection_works_on_an_asyncio_server():
    async def run():
        server = grpc.aio.server(options=serving.SERVER_OPTIONS)
        serving.add_reflection(server, serving.GENERATION_SERVICE)
        address = serving.bind(server, "127.0.0.1:0")
        await server.start()

        def ask():
            with grpc.insecure_channel(address) as channel:
                return reflected(channel)

        names, files = await asyncio.to_thread(ask)
        await server.stop(None)
        return names, files

    names, files = asyncio.run(run())
    assert serving.GENERATION_SERVICE in names
    assert files[0] == pb.DESCRIPTOR.serialized_pb


def test_the_service_names_are_those_of_the_protos():
    from outrider.v1 import draft_service_pb2

    assert serving.GENERATION_SERVICE in {
        each.full_name for each in pb.DESCRIPTOR.services_by_name.values()
    }
    assert serving.DRAFT_SERVICE in {
        each.full_name for each in draft_service_pb2.DESCRIPTOR.services_by_name.values()
    }


# --- logs and progress


def run_python(code, **kwargs):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, **kwargs
    )


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc alone is told")
@pytest.mark.parametrize("kept", [True, False])
def test_messages_that_come_and_go_fault_no_pages_in_once_freed_memory_is_kept(kept):
    code = f"""
        import resource
        from outrider import serving
        if {kept}:
            serving.keep_freed_memory()
        def rounds(count):
            for _ in range(count):
                [b"x" * size for size in [655_360] * 32]
        rounds(5)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        rounds(10)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    faults = int(run_python(textwrap.dedent(code)).stdout)
    # 10 rounds of 32 x 160 pages, were each to be faulted in again
    assert (faults < 500) if kept else (faults > 20_000)


def test_logs_are_json_lines_on_standard_error_when_that_is_no_terminal():
    done = run_python(
        "from outrider import serving; serving.configure_logs('info'); import structlog\n"
        "log = structlog.get_logger().bind(sequence_id=7)\n"
        "log.info('round_committed', committed=3); log.debug('hidden')"
    )
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    event = json.loads(line)
    assert event.pop("timestamp").endswith("Z")
    assert event == {
        "event": "round_committed",
        "level": "info",
        "sequence_id": 7,
        "committed": 3,
    }


def test_a_log_whose_reader_left_does_not_stop_the_writer():
    code = (
        "import os, sys; from outrider import serving; serving.configure_logs('info')\n"
        "import structlog; log = structlog.get_logger(); log.info('heard')\n"
        "sys.stdin.read(); log.info('unheard'); sys.stderr.close(); log.info('unheard')\n"
        "print('still here')"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "heard" in child.stderr.readline()
    child.stderr.close()
    child.stdin.close()
    assert child.stdout.read() == "still here\n"
    assert child.wait(30) == 0
    child.stdout.close()


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_logged_exception_shows_no_values_of_variables(on_terminal):
    done = run_python(
        f"import sys; sys.stderr.isatty = lambda: {on_terminal}\n"
        "from outrider import serving; serving.configure_logs('info'); import structlog\n"
        "prompt = 'a' + 'secret'\n"
        "try:\n    1 / 0\n"
        "except ZeroDivisionError:\n    structlog.get_logger().exception('round_failed')"
    )
    assert "ZeroDivisionError" in done.stderr
    assert "asecret" not in done.stderr


def test_progress_that_is_quick_prints_nothing_and_slow_progress_prints_lines(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(serving.time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    with serving.LoadingProgress("target", stream) as progress:
        progress.update(0, 10)
        progress.update(10, 10)
    assert stream.getvalue() == ""
    with serving.LoadingProgress("target", stream) as progress:
        progress.update(5, 10)
        clock[0] += 2.5
        progress.update(8, 10)
        progress.update(9, 10)
        progress.update(10, 10)
    assert stream.getvalue().splitlines() == ["loading target: 80%", "loading target: 100%"]


def test_a_supervised_child_reports_progress_and_addresses_on_standard_output():
    done = run_python(
        "import grpc; from concurrent import futures; from outrider import serving\n"
        "server = grpc.server(futures.ThreadPoolExecutor(1))\n"
        "address = serving.bind(server, '127.0.0.1:0')\n"
        "with serving.LoadingProgress('target') as progress: progress.update(10, 10)\n"
        "serving.announce_ready(address)",
        env=os.environ | {serving.SUPERVISOR_PID: str(os.getpid())},
    )
    listening, progress, ready = done.stdout.splitlines()
    assert done.stderr == ""
    assert progress == "progress 10 10 target"
    assert listening.split()[0] == "listening"
    assert ready == f"ready {listening.split()[1]}"


def test_alone_a_process_prints_only_that_it_is_ready():
    done = run_python(
        "import grpc; from concurrent import futures; from outrider import serving\n"
        "server = grpc.server(futures.ThreadPoolExecutor(1))\n"
        "serving.announce_ready(serving.bind(server, '127.0.0.1:0'))"
    )
    (line,) = done.stdout.splitlines()
    assert line.startswith("ready 127.0.0.1:")


# --- the end of a process

WAITING = {
    "sync": (
        "from outrider import serving; ending = serving.Termination(); print('up', flush=True)\n"
        "ending.wait(60); print('drained', ending.signal, flush=True)"
    ),
    "async": (
        "import asyncio; from outrider import serving\n"
        "ending = serving.Termination()\n"
        "async def main():\n"
        "    print('up', flush=True); await ending.wait_async(); print('drained', ending.signal)\n"
        "asyncio.run(main())"
    ),
    "stubborn": (
        "import time; from outrider import serving; ending = serving.Termination()\n"
        "print('up', flush=True); ending.wait(60); print('draining', flush=True); time.sleep(60)"
    ),
}


def start(kind, **kwargs):
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING[kind]], stdout=subprocess.PIPE, text=True, **kwargs
    )
    assert child.stdout.readline() == "up\n"
    return child


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_asks_for_a_drain(kind, number):
    child = start(kind)
    child.send_signal(number)
    assert child.communicate(timeout=30)[0] == f"drained {int(number)}\n"
    assert child.returncode == 0


def test_the_second_signal_kills():
    child = start("stubborn")
    child.send_signal(signal.SIGTERM)
    assert child.stdout.readline() == "draining\n"
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=30)
    assert child.returncode == -signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_a_supervised_child_drains_when_its_supervisor_is_killed():
    supervisor = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys, time\n"
            f"env = os.environ | {{{serving.SUPERVISOR_PID!r}: str(os.getpid())}}\n"
            f"subprocess.Popen([sys.executable, '-c', {WAITING['sync']!r}], env=env)\n"
            "time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert supervisor.stdout.readline() == "up\n"
    supervisor.kill()
    # the pipe's other end is the orphan's alone now; its end is the pipe's end
    assert supervisor.stdout.read() == f"drained {int(signal.SIGTERM)}\n"
    supervisor.wait()


# --- flags


def test_both_services_can_be_given_exactly_what_serve_was_given():
    parser = argparse.ArgumentParser()
    groups = (
        serving.add_pair_arguments,
        serving.add_drafter_arguments,
        serving.add_verifier_arguments,
    )
    for add in groups:
        add(parser)
    words = [
        "--target=/a b",
        "--draft-tokens=3",
        "--causal-local-layers",
        "--proposal-head=x.safetensors",
        "--checkpoint-grace=1.5",
        "--model-name=a=b",
        "--draft-timeout-ms=0",
    ]
    namespace = parser.parse_args(words)
    passed = serving.arguments_given(groups, namespace)
    assert sorted(passed) == sorted(words)
    assert parser.parse_args(passed) == namespace
    assert serving.arguments_given(groups, parser.parse_args([])) == []
    drafter = argparse.ArgumentParser()
    for add in groups[:2]:
        add(drafter)
    drafter.parse_args(serving.arguments_given(groups[:2], namespace))
