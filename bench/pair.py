"""Starts a pair as its users do: two processes behind `outrider serve`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from outrider.client import Client

START_TIMEOUT_S = 240.0
LINK_TIMEOUT_S = 30.0


@contextlib.contextmanager
def served(*flags: str) -> Iterator[str]:
    """Runs `outrider serve` with ``flags`` on a free port and yields its address.

    Raises:
        RuntimeError: when it ends before it is ready; its own output says why.
    """
    command = [sys.executable, "-m", "outrider.cli", "serve", "--listen", "127.0.0.1:0", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith("ready "):
                yield line.split()[1]
                return
        raise RuntimeError(f"outrider serve ended with {server.wait()} before it was ready")
    finally:
        server.terminate()
        server.wait(timeout=60)


class Process:
    """A child that says `ready ADDRESS`; the rest of what it prints goes to stderr."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=os.environ | dict(environment)
        )
        self.address: str | None = None
        self._ready = threading.Event()
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            if line.startswith("ready "):
                self.address = line.split()[1]
                self._ready.set()
            else:
                print(line, end="", file=sys.stderr)
        self._ready.set()

    def wait_ready(self) -> str:
        """Its address.

        Raises:
            RuntimeError: it ended first, or took too long.
        """
        self._ready.wait(START_TIMEOUT_S)
        if self.address is None:
            raise RuntimeError(f"{self._process.args} was not ready: {self._process.poll()}")
        return self.address

    @property
    def cpu_seconds(self) -> float:
        """Its processor time so far, where Linux tells."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL a while later."""
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Services:
    """A verifier and its drafters, running."""

    address: str
    drafters: tuple[Process, ...]
    verifier: Process

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all of them so far, where Linux tells."""
        return sum(process.cpu_seconds for process in (*self.drafters, self.verifier))


@contextlib.contextmanager
def services(
    common: Sequence[str],
    verifier: Sequence[str] = (),
    *,
    drafters: int = 1,
    command: Sequence[str] = ("verifier",),
) -> Iterator[Services]:
    """Starts a verifier and its drafters as processes of their own, and stops them at the end.

    Args:
        common: Flags of every process.
        verifier: Flags of the verifier alone.
        drafters: How many; the verifier dials the first, and the others when it is gone.
        command: The module that is run for the verifier, with what comes before its flags.

    Raises:
        RuntimeError: one of them was not ready in time, or found no drafter.
    """
    environment = {"OMP_NUM_THREADS": "1"}
    # ports that are free now: all load at the same time, and the verifier dials until one answers
    with contextlib.ExitStack() as taken:
        sockets = [
            taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(drafters)
        ]
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    module, *before = command
    commands = [["drafter", f"--listen={address}"] for address in addresses]
    commands.append(
        [module, *before, "--listen=127.0.0.1:0", f"--drafter={','.join(addresses)}", *verifier]
    )
    processes: list[Process] = []
    # services are stopped on the way out, also when this is ended from outside
    outside = threading.current_thread() is threading.main_thread()
    before = (
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        if outside
        else None
    )
    try:
        for flags in commands:
            line = [sys.executable, "-m", *flags, *common]
            processes.append(Process(line, environment))
        address = [process.wait_ready() for process in processes][-1]
        wait_for_link(address)
        yield Services(address, tuple(processes[:-1]), processes[-1])
    finally:
        for process in reversed(processes):
            process.stop()
        if outside:
            signal.signal(signal.SIGTERM, before)


def wait_for_link(address: str) -> None:
    """Waits until a verifier has its drafter.

    Raises:
        RuntimeError: there is none in time; the verifier says why.
    """
    with Client(address) as client:
        end = time.monotonic() + LINK_TIMEOUT_S
        while client.server_info(timeout=10).drafter_state != "connected":
            if time.monotonic() > end:
                raise RuntimeError(f"no drafter: {client.server_info(timeout=10).drafter_detail}")
            time.sleep(0.05)


def describe() -> str:
    """Commit, torch and device of a figure."""
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return f"commit {commit or 'unknown'}, torch {torch.__version__}, {os.cpu_count()} CPUs"


def flag_line(names: Sequence[str]) -> str:
    """A command line for a report."""
    return " ".join(["python", "-m", *names])
