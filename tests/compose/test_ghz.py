"""The loads for ghz: keys that ghz documents, and calls that the service takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, json_format

from outrider import serving
from outrider.checkpoint import bundled
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import generation_service_pb2_grpc as pb_grpc
from tests.tiny_pair import served

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "compose" / "ghz"
LOADS = sorted(FOLDER.glob("*.json"))

TEXT, COUNT, STEP, TRUTH, TABLE = str, int, "integer", bool, dict
DURATION = re.compile(r"(\d+(\.\d+)?(ns|us|ms|s|m|h))+")
# the keys of a configuration file that ghz documents (ghz.sh/docs/options), and what they hold
KEYS: dict[str, Any] = {
    **dict.fromkeys(
        ("proto", "protoset", "call", "cacert", "cert", "key", "cname", "authority", "host"), TEXT
    ),
    **dict.fromkeys(("data-file", "binary-file", "metadata-file", "output", "name", "debug"), TEXT),
    **dict.fromkeys(("skipTLS", "insecure", "async", "enable-compression"), TRUTH),
    **dict.fromkeys(("total", "concurrency", "connections", "rps", "cpus", "skipFirst"), COUNT),
    **dict.fromkeys(("concurrency-start", "concurrency-end", "load-start", "load-end"), COUNT),
    **dict.fromkeys(("concurrency-step", "load-step"), STEP),
    **dict.fromkeys(
        (
            *("timeout", "connect-timeout", "duration", "max-duration", "keepalive"),
            *("stream-interval", "concurrency-step-duration", "concurrency-max-duration"),
            *("load-step-duration", "load-max-duration"),
        ),
        DURATION,
    ),
    **dict.fromkeys(("metadata", "tags", "reflect-metadata"), TABLE),
    "concurrency-schedule": ("const", "step", "line"),
    "load-schedule": ("const", "step", "line"),
    "duration-stop": ("close", "wait", "ignore"),
    "format": ("summary", "csv", "json", "pretty", "html", "influx-summary", "influx-details"),
    "import-paths": list,
    "data": TABLE,
}
# what ghz puts in the place of a template
TEMPLATES = {"RequestNumber": "7", "UUID": "0b5e7e5c-3a83-4e0a-9d5e-2f9a1c0f5c11"}


def problem(key: str, value: object) -> str | None:
    """Why a key or its value is none of ghz's."""
    if key not in KEYS:
        return "no such key"
    kind = KEYS[key]
    if isinstance(kind, re.Pattern):
        fits = isinstance(value, str) and kind.fullmatch(value) is not None
    elif isinstance(kind, tuple):
        fits = value in kind
    elif kind in (COUNT, STEP):
        fits = isinstance(value, int) and not isinstance(value, bool)
        fits = fits and (kind == STEP or value >= 0)
    elif kind is TABLE and key != "data":
        fits = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
    else:
        fits = isinstance(value, kind)
    return None if fits else f"expected {kind}, got {value!r}"


def read(load: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), "a key stands twice"
        return dict(pairs)

    return json.loads(load.read_text(), object_pairs_hook=unique)


def request(load: Path) -> pb.GenerateRequest:
    """The message of the first call, templates filled in."""
    written = json.dumps(read(load)["data"])
    filled = re.sub(r"\{\{\.(\w+)\}\}", lambda found: TEMPLATES[found[1]], written)
    return json_format.Parse(filled, pb.GenerateRequest())


def seconds(duration: str) -> float:
    scale = {"ms": 1e-3, "s": 1, "m": 60, "h": 3600}
    return sum(float(n) * scale[u] for n, _, u in re.findall(r"(\d+(\.\d+)?)(ms|s|m|h)", duration))


def test_there_are_three():
    assert [load.stem for load in LOADS] == ["ramp", "smoke", "steady"]


@pytest.mark.parametrize("load", LOADS, ids=lambda p: p.stem)
def test_every_key_is_one_that_ghz_documents(load):
    found = {key: problem(key, value) for key, value in read(load).items()}
    assert {key: why for key, why in found.items() if why} == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [("threads", 3), ("total", "20"), ("timeout", 60), ("timeout", "1 minute"), ("insecure", 1)],
)
def test_the_table_refuses_what_ghz_would_not_read(key, value):
    assert problem(key, value) is not None


@pytest.mark.parametrize("load", LOADS, ids=lambda p: p.stem)
def test_the_call_and_its_protoset_exist(load):
    config = read(load)
    service, _, method = config["call"].rpartition(".")
    assert service == serving.GENERATION_SERVICE
    assert method in pb.DESCRIPTOR.services_by_name["GenerationService"].methods_by_name
    assert config["host"] == serving.VERIFIER_LISTEN
    if "protoset" in config:
        files = descriptor_pb2.FileDescriptorSet.FromString(
            (ROOT / config["protoset"]).read_bytes()
        ).file
        names = [f"{file.package}.{each.name}" for file in files for each in file.service]
        assert service in names


@pytest.mark.parametrize("load", LOADS, ids=lambda p: p.stem)
def test_the_loads_suit_long_streams(load):
    config = read(load)
    # ghz ends a call after 20 s unless told otherwise
    assert seconds(config["timeout"]) >= 60
    if "duration" in config:
        assert config["duration-stop"] == "wait"
    if config.get("concurrency-schedule", "const") == "step":
        steps = (config["concurrency-end"] - config["concurrency-start"]) // config[
            "concurrency-step"
        ]
        whole = steps * seconds(config["concurrency-step-duration"])
        assert whole <= seconds(config["concurrency-max-duration"])
        assert seconds(config["concurrency-max-duration"]) <= seconds(config["max-duration"])
    assert config.get("total", 1) >= config.get("concurrency", 1) >= config["connections"] or (
        "duration" in config or "concurrency-schedule" in config
    )


def test_every_call_is_one_that_the_service_takes():
    with (
        served(bundled("target"), bundled("dflash2"), max_context=512) as pair,
        grpc.insecure_channel(pair.address, options=serving.CHANNEL_OPTIONS) as channel,
    ):
        stub = pb_grpc.GenerationServiceStub(channel)
        for load in LOADS:
            message = request(load)
            *_, last = stub.Generate(message, timeout=120)
            assert last.finish.usage.output_tokens == message.max_tokens, load
            assert last.finish.reason == pb.FINISH_REASON_LENGTH


def test_the_page_names_every_load():
    page = (FOLDER / "README.md").read_text()
    assert {f"`{load.name}`" for load in LOADS} <= set(re.findall(r"`[^`\n]+`", page))
