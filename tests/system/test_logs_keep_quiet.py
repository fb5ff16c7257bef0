"""No prompt, output, token id or bearer token reaches a log, at any level, whatever goes wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from outrider.checkpoint import bundled
from outrider.client import Client, ClientError
from outrider.guard import bearer

PROMPT = "xylophone marmalade def zebra_quartz():"
BEARER = "bearer-7f3a9c"
# JSON of ids, as any careless log call would write it
ID_LIST = re.compile(r"\[\s*\d+\s*(,\s*\d+\s*){2,}\]")


class Service:
    """One service as a process, at debug level, with its log in a file."""

    def __init__(self, log: Path, module: str, *flags: str) -> None:
        self.log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, "--listen=127.0.0.1:0", "--log-level=debug", *flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=os.environ | {"GRPC_VERBOSITY": "INFO"},
            )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(30)


def spoil(client: Client, address: str, ids: Sequence[int]) -> None:
    """Everything that a client can do wrong with a prompt in its hands."""
    for wrong in (
        {"temperature": float("nan")},
        {"stop": [""]},
        {"prompt_ids": [*ids, 10**6]},
        {"messages": [{"role": "robot", "content": PROMPT}]},
        {"messages": [{"role": "user", "content": PROMPT}], "tools_json": [PROMPT]},
        {"logit_bias": {10**6: 1.0}},
        {"timeout": 0.001},
    ):
        prompt = None if {"prompt_ids", "messages"} & wrong.keys() else PROMPT
        with pytest.raises((ClientError, TypeError, ValueError)):
            client.generate(prompt, **wrong)
    with (
        Client(address, token=f"{BEARER}-wrong") as stranger,
        pytest.raises(ClientError, match="TOKEN_INVALID"),
    ):
        stranger.generate(PROMPT)
    with grpc.insecure_channel(address) as channel:
        method = channel.unary_stream("/outrider.v1.GenerationService/Generate")
        for raw in (PROMPT.encode() + b"\xff", b"\x0a\xff" + PROMPT.encode()):
            with pytest.raises(grpc.RpcError):
                list(method(raw, metadata=bearer(BEARER), timeout=10))


def test_logs_at_debug_level_hold_no_prompt_no_output_and_no_token(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{BEARER}\n")
    drafter = Service(tmp_path / "drafter.log", "drafter", f"--token-file={tokens}")
    verifier = Service(
        tmp_path / "verifier.log",
        "verifier",
        f"--drafter={drafter.address}",
        f"--drafter-token-file={tokens}",
        f"--token-file={tokens}",
    )
    try:
        with Client(verifier.address, token=BEARER) as client:
            whole = client.generate(PROMPT, max_tokens=24, temperature=0, request_id="r-1")
            chat = client.chat([{"role": "user", "content": PROMPT}], max_tokens=8, logprobs=3)
            ids = client.tokenize(PROMPT).token_ids
            spoil(client, verifier.address, ids)
            drafter.stop(signal.SIGKILL)  # and so a lost link, with rounds before and after
            plain = client.generate(PROMPT, max_tokens=8, temperature=0, request_id="r-2")
            assert plain.token_ids == whole.token_ids[:8]
    finally:
        verifier.stop()
        if drafter.process.poll() is None:
            drafter.stop()
    assert bundled("target").is_dir()
    texts = {name: (tmp_path / f"{name}.log").read_text() for name in ("verifier", "drafter")}
    events = [json.loads(line) for line in texts["verifier"].splitlines() if line[:1] == "{"]
    names = {event["event"] for event in events}
    assert {"request_ended", "round_committed", "drafter_lost"} <= names, "the logs are real"
    assert any(event.get("request_id") == "r-1" for event in events)
    assert "round_drafted" in texts["drafter"]
    words = [word for word in (*PROMPT.split(), BEARER, whole.text, chat.text) if len(word) > 6]
    for name, text in texts.items():
        for word in words:
            assert word not in text, name
            assert json.dumps(word)[1:-1] not in text, name
        assert not ID_LIST.findall(text), name
