"""What every Outrider process needs: limits, addresses, health, reflection, logs, signals, flags.

Importing this takes grpc alone; what the extra `serve` brings is imported where it is used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO, cast

import grpc

if TYPE_CHECKING:
    import grpc.aio

# bytes; both ends of both services, either way
MESSAGE_LIMIT = 16 * 1024 * 1024

_LIMITS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
)
# core ignores a misspelt argument without a word, so a test looks each of these names up in it
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_LIMITS,
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # a quiet generation must survive a client that pings often: no strikes, no GOAWAY
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    # two servers on one port would each take half of the calls
    ("grpc.so_reuseport", 0),
    # of one connection; further ones wait at the client
    ("grpc.max_concurrent_streams", 1_024),
)
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_LIMITS,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # core would wait up to two minutes before it dials a restarted peer again
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    # a proxy from the environment is for the web, not for a peer given by address
    ("grpc.enable_http_proxy", 0),
)

LAST_PORT = 65535
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
DRAFTER_LISTEN = "127.0.0.1:50052"
VERIFIER_LISTEN = "127.0.0.1:50051"
DRAFT_SERVICE = "outrider.v1.DraftService"
GENERATION_SERVICE = "outrider.v1.GenerationService"
# of the gateway's protocol, from the extra `gateway`
GATEWAY_SERVICE = "vllm.grpc.engine.VllmEngine"
GATEWAY_CHOICES = ("auto", "on", "off")

# set by a supervising `outrider` for its children: they report on stdout, by line, for it to show
SUPERVISOR_PID = "OUTRIDER_SUPERVISOR_PID"


# --- addresses


class AddressError(ValueError):
    """An address that cannot be listened on."""


def bind(
    server: grpc.Server | grpc.aio.Server,
    address: str,
    credentials: grpc.ServerCredentials | None = None,
) -> str:
    """Listens on an address and returns the real one: port 0 becomes the port that was taken.

    Takes "host:port", "[v6]:port" and "unix:path"; without credentials the port is plain text. For
    sync and asyncio servers, before start.

    Raises:
        AddressError: When the address is taken or is none.
    """
    follow_supervisor()
    port_text = address.rpartition(":")[2]
    is_port = ":" in address and port_text.isdecimal() and int(port_text) <= LAST_PORT
    if not address.startswith("unix:") and not is_port:  # core would wrap a larger port around
        raise AddressError(f"listen: expected HOST:PORT or unix:PATH, got {address!r}")
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        port = 0
        cause = str(error).splitlines()[0]
    else:
        cause = "not bound"
    if port == 0:
        raise AddressError(f"listen: expected a free address, got {address!r} ({cause})")
    if not address.startswith("unix:"):
        address = f"{address.rpartition(':')[0]}:{port}"
    _tell_supervisor(f"listening {address}")
    return address


def dialable(address: str) -> str:
    """The address that a process on this host dials to reach a server listening on `address`."""
    host, _, port = address.rpartition(":")
    if host in ("0.0.0.0", "*", "[::]", ""):
        return f"{'[::1]' if host == '[::]' else '127.0.0.1'}:{port}"
    return address


def announce_ready(address: str) -> None:
    """Prints the one line that says a process serves: `ready ADDRESS`, on stdout."""
    print(f"ready {address}", flush=True)


def memory_bytes(device: str) -> int:
    """Free memory of a GPU, or what this host has in all."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def keep_freed_memory() -> None:
    """Has the C library keep up to 64 MiB of what is freed, where it is one that can (glibc).

    The buffers of a round's messages come and go every round. Given back to the system each time,
    their pages are faulted in and cleared anew, which costs more than all copies of the messages.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        # from malloc.h: larger blocks would go back on their own
        mallopt(_M_MMAP_THRESHOLD, 2 * MESSAGE_LIMIT)
        mallopt(_M_TRIM_THRESHOLD, 4 * MESSAGE_LIMIT)


def spare_what_is_loaded() -> None:
    """Keeps the garbage collector from what exists now: modules, weights' objects, graphs.

    None of it will go before the process does, and a full collection that looks through it stops
    every thread for tens of milliseconds, in the middle of some round.
    """
    gc.collect()
    gc.freeze()


# --- health and reflection


class Health:
    """grpc.health.v1 on a synchronous server.

    The empty name is liveness: SERVING while the process answers. Each service's full name is
    readiness: NOT_SERVING until `set_ready(True)`, and again from `close` on.
    """

    def __init__(self, server: grpc.Server, *services: str) -> None:
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc

        class ClosingServicer(health.HealthServicer):  # type: ignore[misc]
            """Ends its watches at a drain; the base leaves them open, and stop waits for them."""

            def __init__(self) -> None:
                super().__init__()
                self.sends: set[Callable[[Any], None]] = set()
                self.lock = threading.Lock()
                self.closed = False

            def Watch(
                self,
                request: Any,
                context: grpc.ServicerContext,
                send_response_callback: Callable[[Any], None],
            ) -> None:
                super().Watch(request, context, send_response_callback)
                with self.lock:
                    self.sends.add(send_response_callback)
                    closed = self.closed
                if closed:
                    send_response_callback(None)
                if not context.add_callback(lambda: self.sends.discard(send_response_callback)):
                    self.sends.discard(send_response_callback)

            def end_watches(self) -> None:
                with self.lock:
                    self.closed = True
                    sends = list(self.sends)
                for send in sends:
                    send(None)

        self._services = services
        self._statuses = health_pb2.HealthCheckResponse
        self._servicer = ClosingServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        self.set_ready(False)

    def set_ready(self, ready: bool) -> None:
        """Says whether calls to the services are answered; watches hear of it."""
        status = self._statuses.SERVING if ready else self._statuses.NOT_SERVING
        for service in self._services:
            self._servicer.set(service, status)

    def close(self) -> None:
        """Turns readiness off and ends every watch, so that the server can drain."""
        self.set_ready(False)
        self._servicer.end_watches()


class AsyncHealth:
    """`Health` for an asyncio server; create it and call it on the server's loop.

    `peers` are services that this one depends on. Each has a status of its own, and none of them
    touches the readiness of `services`.
    """

    def __init__(self, server: grpc.aio.Server, *services: str, peers: Sequence[str] = ()) -> None:
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        response = health_pb2.HealthCheckResponse
        named = (*services, *peers)
        statuses = {"": response.SERVING} | dict.fromkeys(named, response.NOT_SERVING)
        changed = asyncio.Event()

        class Servicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
            closed = False

            async def Check(self, request: Any, context: Any) -> Any:
                if request.service not in statuses:
                    await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
                return response(status=statuses[request.service])

            async def Watch(self, request: Any, context: Any) -> None:
                told = None
                while True:
                    event = outer._changed
                    status = statuses.get(request.service, response.SERVICE_UNKNOWN)
                    if status != told:
                        await context.write(response(status=status))
                        told = status
                    if self.closed:
                        return
                    await event.wait()

        outer = self
        self._changed = changed
        self._services = services
        self._statuses = statuses
        self._response = response
        self._servicer = Servicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def set_ready(self, ready: bool) -> None:
        """Says whether calls to the services are answered; watches hear of it."""
        status = self._response.SERVING if ready else self._response.NOT_SERVING
        for service in self._services:
            self._statuses[service] = status
        self._wake()

    @property
    def ready(self) -> bool:
        """Whether calls to the services are answered."""
        serving = self._response.SERVING
        return all(self._statuses[service] == serving for service in self._services)

    def set_peer(self, peer: str, connected: bool) -> None:
        """Says whether a peer is there; watches of its name hear of it."""
        response = self._response
        self._statuses[peer] = response.SERVING if connected else response.NOT_SERVING
        self._wake()

    def close(self) -> None:
        """Turns readiness off and ends every watch, so that the server can drain."""
        self._servicer.closed = True
        self.set_ready(False)

    def _wake(self) -> None:
        # a fresh event each time: a watch takes the one in force before it looks at the status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def add_reflection(server: grpc.Server | grpc.aio.Server, *services: str) -> None:
    """Server reflection for the services, health and itself; sync and asyncio servers."""
    from grpc_health.v1 import health
    from grpc_reflection.v1alpha import reflection

    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


# --- logs and progress


class _StandardError:
    """Standard error as it is when a line is written, for loggers that outlive a redirection.

    A reader that went away costs lines; it must not end the thread that wrote them.
    """

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()


def configure_logs(level: str = "info") -> None:
    """structlog to stderr: coloured lines on a terminal, one JSON object a line otherwise."""
    import logging

    import structlog

    on_terminal = sys.stderr.isatty()
    # structlog's own choice shows every local variable: prompts and tensors do not belong in a log,
    # and printing them holds the engine's thread up for seconds
    console = structlog.dev.ConsoleRenderer(
        colors="NO_COLOR" not in os.environ, exception_formatter=structlog.dev.plain_traceback
    )
    last: list[Any] = (
        [console]
        if on_terminal
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _StandardError())),
        cache_logger_on_first_use=True,
    )


class LoadingProgress:
    """Progress while weights load, as a context manager; `update` may be called often.

    Shown on stderr as `progress_display` does; a supervised child reports to its supervisor
    instead, which shows all of its children together.
    """

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._display: ProgressBars | ProgressLines | None = None
        self._told = float("-inf")

    def __enter__(self) -> Self:
        if not supervised():
            self._display = progress_display(self._stream)
        return self

    def update(self, done: int, total: int) -> None:
        """Says that `done` of `total` is loaded, in whole units of any kind."""
        if self._display is not None:
            self._display.update(self._label, done, total)
        elif done >= total or time.monotonic() - self._told > 0.1:
            self._told = time.monotonic()
            _tell_supervisor(f"progress {done} {total} {self._label}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._display is not None:
            self._display.close()


class ProgressBars:
    """rich bars on a terminal, one a label, removed when closed."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._tasks: dict[str, Any] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._progress.start()

    def update(self, label: str, done: int, total: int) -> None:
        """Moves one bar; the first call of a label adds it."""
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(f"loading {label}", total=total)
        self._progress.update(self._tasks[label], completed=done, total=total)

    def close(self) -> None:
        """Removes the bars."""
        self._progress.stop()


class ProgressLines:
    """Plain lines, one a label every two seconds; what loads faster than that prints none."""

    INTERVAL = 2.0  # seconds

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._due: dict[str, float] = {}
        self._told: set[str] = set()

    def update(self, label: str, done: int, total: int) -> None:
        """Prints where a label stands, if it is time to."""
        now = time.monotonic()
        due = self._due.setdefault(label, now + self.INTERVAL)
        if now >= due or (done >= total and label in self._told):
            self._due[label] = now + self.INTERVAL
            self._told.add(label)
            print(progress_line(label, done, total), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is left to take away."""


def progress_display(stream: TextIO) -> ProgressBars | ProgressLines:
    """Bars on a terminal, lines elsewhere."""
    return ProgressBars(stream) if stream.isatty() else ProgressLines(stream)


def progress_line(label: str, done: int, total: int) -> str:
    """One plain line of progress."""
    return f"loading {label}: {done / total if total else 1:.0%}"


def supervised() -> bool:
    """Whether this process is a child of a supervising `outrider`."""
    return os.environ.get(SUPERVISOR_PID) == str(os.getppid())


def _tell_supervisor(line: str) -> None:
    if supervised():
        print(line, flush=True)


# --- the end of a process


class Termination:
    """SIGTERM, SIGINT and SIGHUP as an event: the first asks for a drain, a second one kills.

    Create it in the main thread, before the server starts. A supervised child also gets SIGTERM
    when its supervisor dies, however that happens (Linux).
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    # a signal that lands just before the main thread blocks would wake it only when it next runs,
    # so it never blocks for long
    POLL = 0.2  # seconds

    def __init__(self) -> None:
        self.signal: int | None = None
        for number in self.SIGNALS:
            signal.signal(number, self._received)
        follow_supervisor()

    def _received(self, number: int, frame: FrameType | None = None) -> None:
        self.signal = number
        for each in self.SIGNALS:
            signal.signal(each, signal.SIG_DFL)

    @property
    def requested(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until a signal, or `timeout` seconds; says whether one came."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while not self.requested and time.monotonic() < end:
            time.sleep(min(self.POLL, max(0.0, end - time.monotonic())))
        return self.requested

    async def wait_async(self) -> None:
        """Returns when a signal came; for an asyncio server's loop in the main thread."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def received(number: int) -> None:
            for each in self.SIGNALS:
                loop.remove_signal_handler(each)
            self._received(number)
            woken.set()

        for number in self.SIGNALS:
            loop.add_signal_handler(number, received, number)
        if not self.requested:  # it may have come before the loop took over
            await woken.wait()


def follow_supervisor() -> None:
    """Ends a supervised child when its supervisor is gone: the kernel sees to it (Linux).

    `Termination` and `bind` call it, so a service need not.
    """
    supervisor = os.environ.get(SUPERVISOR_PID)
    if supervisor is None:
        return
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGTERM, 0, 0, 0)
    if supervisor != str(os.getppid()):  # it died before this call
        os.kill(os.getpid(), signal.SIGTERM)


# --- flags


def add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that both services take, and must be given alike."""
    group = parser.add_argument_group("the pair")
    group.add_argument(
        "--target", metavar="DIR", help="folder of the target (default: the bundled one)"
    )
    group.add_argument(
        "--draft", metavar="DIR", help="folder of the draft (default: the bundled DFlash2 one)"
    )
    group.add_argument(
        "--load-format",
        choices=("auto", "random"),
        default="auto",
        help="auto reads weights; random draws them, for benchmarks: only config.json is needed, "
        "and the output is noise (default: %(default)s)",
    )
    group.add_argument("--device", default=None, help="cpu, cuda or cuda:N (default: cuda if any)")
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default=None,
        help="numeric profile (default: float32 on cpu, bfloat16 on cuda)",
    )
    group.add_argument(
        "--draft-tokens",
        type=int,
        metavar="K",
        default=None,
        help="proposals a round, 1 to 15 (default: the draft's block_size - 1)",
    )
    group.add_argument(
        "--draft-tree-nodes",
        metavar="off|LIST|auto",
        default="off",
        help="columns of trees in rounds of 1, 2, ... samples, K+2 to 32 or 0 for chains, such as "
        "16,12,0; auto learns them; DFlash2 alone (default: %(default)s)",
    )
    group.add_argument(
        "--max-concurrency",
        type=int,
        metavar="B",
        default=4,
        help="sequences at once, 1 to 8 (default: %(default)s)",
    )
    group.add_argument(
        "--max-context",
        type=int,
        metavar="N",
        default=None,
        help="most positions of a sequence (default: what the checkpoint and memory allow)",
    )
    group.add_argument(
        "--proposal-head",
        metavar="full|FILE",
        default="full",
        help="rows of the head that propose: all, or those of a shortlist file (default: full)",
    )
    group.add_argument(
        "--checkpoint-slots",
        type=int,
        metavar="N",
        default=0,
        help="prefix checkpoints kept on the device (default: %(default)s)",
    )
    group.add_argument(
        "--checkpoint-host-mib",
        type=int,
        metavar="MIB",
        default=0,
        help="host memory for checkpoints that the device has no room for (default: %(default)s)",
    )
    group.add_argument(
        "--causal-local-layers",
        action="store_true",
        help="mask the draft's local layers causally within the block",
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least severe log event shown (default: %(default)s)",
    )


def add_drafter_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the drafter alone, beside --listen."""
    group = parser.add_argument_group("the drafter")
    group.add_argument(
        "--checkpoint-grace",
        type=float,
        metavar="SECONDS",
        default=60.0,
        help="how long checkpoints outlive their verifier's stream (default: %(default)s)",
    )
    group.add_argument(
        "--spin-ms",
        type=int,
        metavar="MS",
        default=None,
        help="how long after a round the engine looks for the next one in shared memory, on a core "
        "of its own (default: 50 on cuda, 0 on cpu)",
    )


def add_verifier_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verifier alone, beside --listen and --drafter."""
    group = parser.add_argument_group("the verifier")
    group.add_argument(
        "--draft-timeout-ms",
        type=int,
        metavar="MS",
        default=None,
        help="longest wait for a round's proposals (default: 250 on cuda, 5000 on cpu)",
    )
    group.add_argument(
        "--shared-memory",
        choices=("auto", "off"),
        default="auto",
        help="auto hands features and rounds to a drafter on this host in memory that both map "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--feature-backlog-mib",
        type=int,
        metavar="MIB",
        default=None,
        help="host memory for unsent features (default: B times the larger of window and chunk)",
    )
    group.add_argument(
        "--draft-policy",
        choices=("fixed", "auto"),
        default="fixed",
        help="auto drafts only in rounds where it pays; seeds then do not fix the output",
    )
    group.add_argument(
        "--draft-tree-paths",
        type=int,
        metavar="N",
        default=8,
        help="leaves of a tree, 2 to 8 (default: %(default)s)",
    )
    group.add_argument(
        "--kv-pages",
        type=int,
        metavar="N",
        default=None,
        help="KV pages of 64 positions, of all requests (default: max context for each of B)",
    )
    group.add_argument(
        "--max-queue",
        type=int,
        metavar="N",
        default=64,
        help="samples that may wait beside those that run (default: %(default)s)",
    )
    group.add_argument(
        "--max-prompt-bytes",
        type=int,
        metavar="BYTES",
        default=None,
        help="largest prompt as text (default: chosen by the context)",
    )
    group.add_argument(
        "--queue-timeout-ms",
        type=int,
        metavar="MS",
        default=30_000,
        help="longest wait for admission (default: %(default)s)",
    )
    group.add_argument(
        "--reader-timeout-ms",
        type=int,
        metavar="MS",
        default=30_000,
        help="longest pause for a client that does not read (default: %(default)s)",
    )
    group.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="N",
        default=None,
        help="prompt tokens a prefill step (default: chosen by device)",
    )
    group.add_argument("--model-name", default=None, help="name reported to clients")
    group.add_argument(
        "--gateway",
        choices=GATEWAY_CHOICES,
        default="auto",
        help="serve the protocol of an OpenAI gateway too; auto: if the extra `gateway` is "
        "installed (default: %(default)s)",
    )
    group.add_argument(
        "--model-defaults",
        action="store_true",
        help="absent sampling fields take the checkpoint's generation_config",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        metavar="SECONDS",
        default=30.0,
        help="how long running requests may finish after SIGTERM (default: %(default)s)",
    )


def arguments_given(
    add_arguments: Sequence[Callable[[argparse.ArgumentParser], None]],
    namespace: argparse.Namespace,
) -> list[str]:
    """The flags of those groups that differ from their defaults, as a command line."""
    parser = argparse.ArgumentParser(add_help=False)
    for add in add_arguments:
        add(parser)
    line: list[str] = []
    for action in parser._actions:
        value = getattr(namespace, action.dest, action.default)
        if value == action.default:
            continue
        line.append(
            action.option_strings[0] if value is True else f"{action.option_strings[0]}={value}"
        )
    return line
