"""`outrider serve`: runs drafter and verifier as child processes and keeps them running.

The verifier is the service: when it ends, all ends, with its exit code. A drafter that dies is
started again, with back-off, while the verifier serves on without it.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO

from outrider import metrics, security, serving, tracing
from outrider.cli import VerbError, require_serve_extra
from outrider.client import Client, ClientError

# seconds
FIRST_BACK_OFF = 0.5
LONGEST_BACK_OFF = 30.0
# a drafter that served this long starts over at the first back-off
STEADY_AFTER = 60.0
# how long a service may take beyond its drain before it is killed
STOP_GRACE = 10.0
# the same for one that still loads, and so has nothing to drain
UNREADY_GRACE = 1.0
# how often signals and restarts are looked at
POLL = 0.2
# how long a fresh pair may take to find each other
LINK_TIMEOUT = 10.0

END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def add_arguments(parser: argparse.ArgumentParser, listen: str = serving.VERIFIER_LISTEN) -> None:
    """The flags of `outrider serve`; verbs that start their own services take them too."""
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        default=listen,
        help="public address, HOST:PORT or unix:PATH (default: %(default)s)",
    )
    parser.add_argument(
        "--drafter-listen",
        metavar="ADDRESS",
        default="127.0.0.1:0",
        help="the drafter's address (default: a free port on loopback)",
    )
    serving.add_pair_arguments(parser)
    serving.add_drafter_arguments(parser)
    serving.add_verifier_arguments(parser)
    metrics.add_metrics_argument(parser)
    metrics.add_metrics_argument(parser, "--drafter-metrics-listen", " of the drafter")
    tracing.add_tracing_argument(parser)
    security.add_server_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Serves until a signal or the verifier's end; returns 0 or the verifier's exit code."""
    require_serve_extra()
    services = Services(options)
    with _on_signals(END_SIGNALS, services.end_asked):
        try:
            serving.announce_ready(services.start())
            return services.supervise()
        except EndAsked:
            return 0
        finally:
            services.stop()


@contextmanager
def running(options: argparse.Namespace) -> Iterator[str]:
    """Both services for the length of a `with` block, whose value is the address.

    Raises:
        VerbError: When they cannot be had, with the exit code of the one that failed.
    """
    require_serve_extra()
    services = Services(options)
    # the default action would leave without the `finally` below
    with _on_signals((signal.SIGTERM, signal.SIGHUP), _leave):
        try:
            yield services.start()
        finally:
            services.stop()


class EndAsked(Exception):
    """A signal came before the services were ready."""


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _on_signals(
    numbers: Sequence[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@dataclass(frozen=True)
class _Line:
    child: _Child
    text: str


@dataclass(frozen=True)
class _Ended:
    child: _Child
    code: int


@dataclass(frozen=True)
class _EndAskedEvent:
    pass


_Event = _Line | _Ended | _EndAskedEvent


class _Child:
    """One service's process; what it prints and its end become events."""

    def __init__(
        self, name: str, arguments: Sequence[str], events: queue.SimpleQueue[_Event]
    ) -> None:
        self.name = name
        self.ready = False
        self.started = time.monotonic()
        self._events = events
        # a group of its own, so that Ctrl-C reaches the supervisor alone, which drains in order
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", name, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {serving.SUPERVISOR_PID: str(os.getpid())},
            process_group=0,
        )
        assert self.process.stdout is not None
        for work in (self._read, self._wait):
            threading.Thread(target=work, args=(self.process.stdout,), daemon=True).start()

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._events.put(_Line(self, line.rstrip("\n")))

    def _wait(self, stdout: IO[str]) -> None:
        self._events.put(_Ended(self, self.process.wait()))

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def stop(self, grace: float) -> None:
        """SIGTERM, and SIGKILL if it takes longer than `grace` seconds."""
        if self.alive:
            self.process.terminate()
        try:
            self.process.wait(grace)
        except subprocess.TimeoutExpired:
            _say(f"the {self.name} did not end within {grace:.0f} s and is killed")

    def kill(self) -> None:
        """SIGKILL, if it still runs; returns when it is gone."""
        if self.alive:
            self.process.kill()
        self.process.wait()


class Services:
    """Drafter and verifier on one host; everything but reading pipes happens on one thread."""

    def __init__(self, options: argparse.Namespace) -> None:
        pair = serving.add_pair_arguments
        self._drafter_arguments = serving.arguments_given(
            (pair, serving.add_drafter_arguments, tracing.add_tracing_argument), options
        )
        if options.drafter_metrics_listen is not None:
            self._drafter_arguments.append(f"--metrics-listen={options.drafter_metrics_listen}")
        self._verifier_arguments = serving.arguments_given(
            (
                pair,
                serving.add_verifier_arguments,
                metrics.add_metrics_argument,
                tracing.add_tracing_argument,
                security.add_server_arguments,
            ),
            options,
        )
        # the supervisor has no certificate or token of a client's, and cannot ask its own verifier
        self._callable = not (options.tls_cert or options.token_file)
        self._listen: str = options.listen
        self._drafter_listen: str = options.drafter_listen
        self._drain: float = options.drain_timeout
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._drafter: _Child | None = None
        self._verifier: _Child | None = None
        self._address: str | None = None
        self._progress: serving.ProgressBars | serving.ProgressLines | None = None
        self._back_off = FIRST_BACK_OFF
        self._restart_at: float | None = None
        self._end_asked = False

    def end_asked(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: the first asks for a drain, a second one kills."""
        if self._end_asked:
            for child in self._children():
                child.process.kill()  # no wait: the interrupted code may be inside one
        self._end_asked = True
        self._events.put(_EndAskedEvent())

    def start(self) -> str:
        """Starts both and returns the public address once both are ready and linked.

        Raises:
            VerbError: When one of them ends first, with its exit code.
            EndAsked: When a signal came first.
        """
        self._progress = serving.progress_display(sys.stderr)
        try:
            self._start_drafter()
            while not (self._address and self._drafter and self._drafter.ready):
                event = self._next_event()
                if event is None:
                    continue
                if isinstance(event, _EndAskedEvent):
                    raise EndAsked
                if isinstance(event, _Ended):
                    raise VerbError(
                        f"the {event.child.name} ended before it was ready "
                        f"({_how_ended(event.code)})",
                        _exit_code(event.code) or 1,
                    )
                self._heard(event)
            address = self._address
        finally:
            self._progress.close()
            self._progress = None
        if self._callable:
            self._await_link(serving.dialable(address))
        return address

    def supervise(self) -> int:
        """Restarts a dead drafter until a signal (0) or the verifier's end (its exit code)."""
        while True:
            event = self._next_event()
            if self._restart_at is not None and time.monotonic() >= self._restart_at:
                self._restart_at = None
                self._start_drafter()
            if event is None:
                continue
            if isinstance(event, _EndAskedEvent):
                return 0
            if isinstance(event, _Line):
                self._heard(event)
            elif event.child is self._verifier:
                _say(f"the verifier ended ({_how_ended(event.code)})")
                return _exit_code(event.code)
            elif event.child is self._drafter:
                self._drafter_ended(event.child, event.code)

    def stop(self) -> None:
        """Drains the verifier, then stops the drafter; whatever happens, neither is left."""
        try:
            for child, drain in ((self._verifier, self._drain), (self._drafter, 0.0)):
                if child is not None:
                    child.stop(drain + STOP_GRACE if child.ready else UNREADY_GRACE)
        finally:
            for child in self._children():
                child.kill()

    def _children(self) -> list[_Child]:
        return [child for child in (self._verifier, self._drafter) if child is not None]

    def _start_drafter(self) -> None:
        arguments = [f"--listen={self._drafter_listen}", *self._drafter_arguments]
        self._drafter = _Child("drafter", arguments, self._events)

    def _drafter_ended(self, child: _Child, code: int) -> None:
        if child.ready and time.monotonic() - child.started >= STEADY_AFTER:
            self._back_off = FIRST_BACK_OFF
        _say(
            f"the drafter ended ({_how_ended(code)}); the verifier serves on without drafts; "
            f"starting it again in {self._back_off:g} s"
        )
        self._restart_at = time.monotonic() + self._back_off
        self._back_off = min(2 * self._back_off, LONGEST_BACK_OFF)

    def _next_event(self) -> _Event | None:
        """The next event, or None when there was none for a while."""
        try:
            # never for long: a signal that lands just before this blocks does not wake it
            return self._events.get(timeout=POLL)
        except queue.Empty:
            return None

    def _heard(self, line: _Line) -> None:
        """Acts on one line of a child's standard output."""
        word, _, rest = line.text.partition(" ")
        child = line.child
        if word == "progress":
            self._show_progress(child, rest)
        elif word in ("listening", "ready") and child is self._drafter:
            # it keeps the port it was given, so that the verifier finds it after a restart
            self._drafter_listen = rest
            child.ready = child.ready or word == "ready"
            if self._verifier is None:
                self._start_verifier()
        elif word == "ready" and child is self._verifier:
            child.ready = True
            self._address = rest
        elif word != "listening":
            print(line.text, file=sys.stderr, flush=True)

    def _start_verifier(self) -> None:
        arguments = [
            f"--listen={self._listen}",
            f"--drafter={serving.dialable(self._drafter_listen)}",
            *self._verifier_arguments,
        ]
        self._verifier = _Child("verifier", arguments, self._events)

    def _show_progress(self, child: _Child, rest: str) -> None:
        done, total, label = rest.split(" ", 2)
        if self._progress is not None:
            name = label if label == child.name else f"{child.name} {label}"
            self._progress.update(name, int(done), int(total))

    def _await_link(self, address: str) -> None:
        """Waits until the pair drafts; a pair that does not is served all the same, and said."""
        end = time.monotonic() + LINK_TIMEOUT
        with Client(address) as client:
            while True:
                try:
                    server = client.server_info(timeout=LINK_TIMEOUT)
                except ClientError as error:
                    state, detail = "not answering", str(error)
                else:
                    state, detail = server.drafter_state, server.drafter_detail
                if state == "connected":
                    return
                if not (self._verifier and self._verifier.alive) or self._end_asked:
                    return
                if state == "refused" or time.monotonic() >= end:
                    _say(f"the drafter is {state}, so nothing is drafted: {detail}")
                    return
                time.sleep(0.05)


def _say(message: str) -> None:
    print(f"outrider: {message}", file=sys.stderr, flush=True)


def _how_ended(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _exit_code(code: int) -> int:
    """A process's return code as a shell reports it."""
    return 128 - code if code < 0 else code
