"""Programs as processes: services, gateways and proxies, started and always stopped."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# seconds; far beyond what anything here takes, for a machine that is busy
PATIENCE = 120.0


@dataclass
class Program:
    """A running program and where it logs."""

    child: subprocess.Popen[str]
    log: Path
    address: str = ""

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.child.kill()
        self.child.wait()


def installed(name: str) -> str | None:
    """Path of a program beside this interpreter or on the path; None if it is at neither."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], object], what: str, program: Program | None = None) -> None:
    """Waits for a condition; fails with the program's log when it ends or takes too long."""
    end = time.monotonic() + PATIENCE
    while not condition():
        dead = program is not None and program.child.poll() is not None
        if dead or time.monotonic() > end:
            log = program.log.read_text()[-4000:] if program else ""
            raise AssertionError(f"{what}: not in time, or the program ended\n{log}")
        time.sleep(0.05)


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, *, environment: dict[str, str] | None = None
) -> Iterator[Program]:
    """A program for the length of a `with` block, then SIGTERM and, in the end, SIGKILL."""
    with log.open("w") as output:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        )
    try:
        yield Program(child, log)
    finally:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def service(module: str, log: Path, *flags: str) -> Iterator[Program]:
    """`python -m MODULE` with flags, ready; its address is what it announced."""
    with running([sys.executable, "-P", "-m", module, *flags], log) as program:
        announced: list[str] = []

        def ready() -> bool:
            lines = log.read_text().splitlines()
            announced[:] = [line for line in lines if line.startswith("ready ")]
            return bool(announced)

        until(ready, f"{module} ready", program)
        program.address = announced[0].removeprefix("ready ")
        yield program
