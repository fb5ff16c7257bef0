"""`outrider serve` over the bundled pair: real services, as processes, killed and drained."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from outrider.cli import demo
from outrider.client import Client, UnavailableError

GREEDY = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}


@contextmanager
def served(log):
    """(process, client) of a pair that drafts; what it says goes to the file `log`."""
    with log.open("w") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", "outrider.cli", "serve", "--listen=127.0.0.1:0", "--device=cpu"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        word, _, address = child.stdout.readline().strip().partition(" ")
        assert word == "ready", log.read_text()
        with Client(address) as client:
            yield child, client
    finally:
        child.terminate()
        child.communicate(timeout=60)


def children(parent):
    """(drafter, verifier) process ids."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent and "-m" in words:
            found[words[words.index("-m") + 1]] = int(folder.name)
    return found["drafter"], found["verifier"]


def gone(pid, timeout=20.0):
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def until(condition, timeout=60.0):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "condition was not met in time"
        time.sleep(0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_served_pair_drafts_survives_its_drafters_death_and_drains(tmp_path):
    with served(tmp_path / "log") as (child, client):
        drafted = client.generate(demo.PROMPT, **GREEDY)
        plain = client.generate(demo.PROMPT, draft_tokens=0, **GREEDY)
        assert drafted.token_ids == plain.token_ids
        assert drafted.usage.accepted > 0
        assert drafted.usage.rounds < plain.usage.rounds
        assert plain.usage.proposed == 0

        drafter, verifier = children(child.pid)
        with client.stream(demo.PROMPT, **GREEDY) as stream:
            next(stream)
            os.kill(drafter, signal.SIGKILL)
            (survivor,) = stream.completions()
        assert survivor.token_ids == plain.token_ids

        until(lambda: client.server_info().drafter_state == "connected")
        again, same_verifier = children(child.pid)
        assert (again != drafter, same_verifier) == (True, verifier)
        resumed = client.generate(demo.PROMPT, **GREEDY)
        assert resumed.token_ids == plain.token_ids
        assert resumed.usage.accepted > 0

        with client.stream(demo.PROMPT, **(GREEDY | {"max_tokens": 160})) as stream:
            next(stream)
            child.send_signal(signal.SIGTERM)
            (last,) = stream.completions()
        assert len(last.token_ids) == 160
        with pytest.raises(UnavailableError):
            client.generate(demo.PROMPT, **GREEDY)
        assert child.wait(60) == 0
        assert gone(again)
        assert gone(verifier)
