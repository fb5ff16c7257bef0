"""Starts a pair as its users do: two processes behind `outrider serve`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence


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
