"""Bad folders and bad requests: told what, expected and actual; and nobody else is harmed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

import drafter.__main__ as drafter_process
import verifier.__main__ as verifier_process
from drafter.config import DrafterOptions
from outrider import cli
from outrider.client import Client
from outrider.faults import from_rpc_error
from outrider.serving import CHANNEL_OPTIONS
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import generation_service_pb2_grpc as pb_grpc
from tests.system.conftest import greedy, prompt
from tests.tiny_pair import Pair
from verifier.options import VerifierOptions

WEIGHTS = "model.safetensors"
Edit = Callable[[Path], None]  # of a pair's folder


def cut(part: str, byte_count: int) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / part / WEIGHTS
        path.write_bytes(path.read_bytes()[:byte_count])

    return edit


def written(part: str, name: str, content: bytes) -> Edit:
    return lambda folder: (folder / part / name).write_bytes(content)


def retensored(part: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / part / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / part / WEIGHTS, {"format": "pt"})

    return edit


def removed(part: str, name: str) -> Edit:
    return lambda folder: (folder / part / name).unlink()


UP = "model.layers.1.mlp.up_proj.weight"
DRAFT_UP = "layers.0.mlp.up_proj.weight"
NOT_OPEN = f"{WEIGHTS}: expected a complete safetensors file, got one that does not open"

# which service sees it first, what was done to the folder, and how it is refused
FOLDERS: dict[str, tuple[str, Edit, str]] = {
    "target cut short": ("drafter", cut("target", 300_000), NOT_OPEN),
    "target empty": ("drafter", cut("target", 0), NOT_OPEN),
    "target of other bytes": ("drafter", written("target", WEIGHTS, b"GGUF" * 99), NOT_OPEN),
    "target without weights": (
        "drafter",
        removed("target", WEIGHTS),
        "target: expected model.safetensors or model.safetensors.index.json, got neither",
    ),
    "no target folder": (
        "drafter",
        lambda folder: shutil.rmtree(folder / "target"),
        "target: expected a model folder, got nothing there",
    ),
    "target without config": (
        "drafter",
        removed("target", "config.json"),
        "config.json: no such file",
    ),
    "config cut short": (
        "drafter",
        written("target", "config.json", b'{"a": '),
        "config.json: expected JSON, got Expecting value",
    ),
    "tensor missing": (
        "verifier",
        retensored("target", lambda t: t.pop(UP)),
        rf"{UP}: expected \[96, 64\], got no such tensor",
    ),
    "tensor extra": (
        "verifier",
        retensored("target", lambda t: t.update({"model.layers.9.x": torch.zeros(2)})),
        r"model.layers.9.x: expected no such tensor, got \[2\]",
    ),
    "tensor misshaped": (
        "verifier",
        retensored("target", lambda t: t.update({UP: torch.zeros(96, 63)})),
        rf"{UP}: expected \[96, 64\], got \[96, 63\]",
    ),
    "draft cut short": ("drafter", cut("dflash2", 300_000), NOT_OPEN),
    "draft tensor missing": (
        "drafter",
        retensored("dflash2", lambda t: t.pop(DRAFT_UP)),
        rf"{DRAFT_UP}: expected \[96, 64\], got no such tensor",
    ),
    "draft tensor extra": (
        "drafter",
        retensored("dflash2", lambda t: t.update({"layers.7.x": torch.zeros(2)})),
        r"layers.7.x: expected no such tensor, got \[2\]",
    ),
    "draft tensor misshaped": (
        "drafter",
        retensored("dflash2", lambda t: t.update({"fc.weight": torch.zeros(64, 100)})),
        r"fc.weight: expected \[64, 192\], got \[64, 100\]",
    ),
}


@pytest.fixture
def spoilt(dense: Path, tmp_path: Path) -> Callable[[Edit], Path]:
    def spoil(edit: Edit) -> Path:
        shutil.copytree(dense, tmp_path / "pair")
        edit(tmp_path / "pair")
        return tmp_path / "pair"

    return spoil


@pytest.mark.parametrize("name", FOLDERS)
def test_a_bad_folder_is_refused_and_leaves_nothing_running(spoilt, name):
    which, edit, message = FOLDERS[name]
    folder = spoilt(edit)
    before = set(threading.enumerate())
    options = {"target": folder / "target", "draft": folder / "dflash2", "max_context": 128}
    with pytest.raises(ValueError, match=message):
        if which == "drafter":
            drafter_process.start(DrafterOptions(**options))
        else:
            verifier_process.start(VerifierOptions(drafter="127.0.0.1:1", **options))
    left = {t.name for t in set(threading.enumerate()) - before if t.is_alive()}
    assert not {n for n in left if n in ("server", "engine", "drafter-link", "draft-engine")}


def processes_of(folder: Path) -> list[int]:
    """Processes whose command line names ``folder``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["target cut short", "tensor misshaped"])
def test_serve_ends_with_2_and_one_line_and_takes_the_other_service_down(spoilt, name):
    """The misshaped tensor is the verifier's alone to find, when the drafter is up already."""
    which, edit, message = FOLDERS[name]
    folder = spoilt(edit)
    command = [sys.executable, "-m", "outrider.cli", "serve", "--listen=127.0.0.1:0"]
    command += [f"--target={folder / 'target'}", f"--draft={folder / 'dflash2'}", "--device=cpu"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    said = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert said[0].startswith(f"{which}: ")
    assert re.search(message, said[0])
    assert said[1:] == [f"outrider serve: the {which} ended before it was ready (exit code 2)"]
    assert processes_of(folder) == []


# ---- requests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worded_pair(worded: Path) -> Iterator[Pair]:
    from tests.tiny_pair import served

    with served(worded / "target", worded / "dflash2", draft_tokens=7, max_context=512) as pair:
        yield pair


IDS = "--prompt-ids=1,2"
COMMANDS: dict[str, tuple[list[str], str]] = {
    "id beyond the vocabulary": (
        ["--prompt-ids=1,160"],
        "TOKEN_OUT_OF_RANGE: token_ids: expected ids in [0, 160), got 160",
    ),
    "id below 0": (
        ["--prompt-ids=-1"],
        "TOKEN_OUT_OF_RANGE: token_ids: expected ids in [0, 160), got -1",
    ),
    "id beyond 32 bits": (["--prompt-ids=9999999999"], "prompt_ids: expected 32-bit token ids"),
    "empty text": ([""], "PROMPT_EMPTY: text: expected at least one character, got 0"),
    "no ids": (["--prompt-ids="], "PROMPT_EMPTY: prompt: expected at least one token, got 0"),
    "too long": (
        ["--prompt-ids=" + ",".join(["1"] * 512)],
        "PROMPT_TOO_LONG: prompt: expected at most 511 tokens, got 512",
    ),
    "max tokens 0": (
        [IDS, "--max-tokens=0"],
        "REQUEST_INVALID: max_tokens: expected at least 1, got 0",
    ),
    "max tokens below 0": (
        [IDS, "--max-tokens=-3"],
        "REQUEST_INVALID: max_tokens: expected at least 1, got -3",
    ),
    "temperature NaN": ([IDS, "--temperature=nan"], "SAMPLING_INVALID: temperature: expected"),
    "temperature infinite": ([IDS, "--temperature=inf"], "SAMPLING_INVALID: temperature: expected"),
    "top-p 0": ([IDS, "--top-p=0"], "SAMPLING_INVALID: top_p: expected in (0, 1], got 0.0"),
    "top-p 1.5": ([IDS, "--top-p=1.5"], "SAMPLING_INVALID: top_p: expected in (0, 1], got 1.5"),
    "top-k below 0": ([IDS, "--top-k=-1"], "SAMPLING_INVALID: top_k: expected at least 0, got -1"),
    "min-p NaN": ([IDS, "--min-p=nan"], "SAMPLING_INVALID: min_p: expected in [0, 1], got nan"),
    "presence 9": ([IDS, "--presence-penalty=9"], "SAMPLING_INVALID: presence_penalty: expected"),
    "repetition 0": (
        [IDS, "--repetition-penalty=0"],
        "SAMPLING_INVALID: repetition_penalty: expected in [0.001, 1000], got 0.0",
    ),
    "stop of no length": (
        [IDS, "--stop="],
        "STOP_INVALID: stop: expected strings of 1..1024 bytes, got 0",
    ),
    "stop id": ([IDS, "--stop-token-ids=160"], "TOKEN_OUT_OF_RANGE: stop_token_ids: expected"),
    "more drafts than K": ([IDS, "--draft-tokens=8"], "REQUEST_INVALID: draft_tokens: expected"),
}


def test_bad_requests_end_with_2_and_say_what_and_harm_nobody(worded_pair, dense, oracle, capsys):
    """All through the command line, while a request is running beside them."""
    address = worded_pair.address
    with Client(address) as client:
        long = {"prompt_ids": prompt(8), "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        stream = client.stream(**long)
        next(stream)
        for name, (words, message) in COMMANDS.items():
            code = cli.main(["generate", f"--address={address}", *words])
            out, err = capsys.readouterr()
            assert (code, out) == (2, ""), name
            assert err.startswith(f"outrider generate: {message}"), name
        (whole,) = stream.completions()
        assert list(whole.token_ids) == greedy(oracle, prompt(8), 400)
    worded_pair.expect_idle()


MESSAGES: dict[str, tuple[dict[str, object], str, grpc.StatusCode]] = {
    "text of 10 MB": (
        {"text": "x" * 10_000_000},
        "PROMPT_TOO_LARGE",
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
    "image": (
        {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content="?", media=["a.png"])])},
        "MEDIA_UNSUPPORTED",
        grpc.StatusCode.UNIMPLEMENTED,
    ),
    "nothing": ({}, "REQUEST_INVALID", grpc.StatusCode.INVALID_ARGUMENT),
    "NaN": (
        {
            "token_ids": pb.TokenIds(ids=[1]),
            "sampling": pb.Sampling(temperature=float("nan")),
        },
        "SAMPLING_INVALID",
        grpc.StatusCode.INVALID_ARGUMENT,
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_bad_messages_get_their_code_and_reason(worded_pair, name):
    fields, reason, code = MESSAGES[name]
    with grpc.insecure_channel(worded_pair.address, options=CHANNEL_OPTIONS) as channel:
        call = pb_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(**fields))
        with pytest.raises(grpc.RpcError) as refused:
            list(call)
    assert refused.value.code() == code
    assert from_rpc_error(refused.value).reason == reason
    assert "expected" in refused.value.details()
    worded_pair.expect_idle()
