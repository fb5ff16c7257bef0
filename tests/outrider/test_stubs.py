"""The committed stubs are what the protos generate."""

import importlib.util
from pathlib import Path

import pytest

PROTOS = Path(__file__).parents[2] / "protos"
STUBS = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("outrider/v1/*_pb2*.py*"))


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory):
    destination = tmp_path_factory.mktemp("stubs")
    spec = importlib.util.spec_from_file_location("generate", PROTOS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.generate(destination)
    return destination


def test_every_proto_has_its_stubs_committed(regenerated):
    made = sorted(str(path.relative_to(regenerated)) for path in regenerated.rglob("*_pb2*"))
    assert made == STUBS
    assert len(STUBS) == 10


@pytest.mark.parametrize("name", STUBS)
def test_committed_stub_equals_the_regenerated_one_byte_for_byte(regenerated, name):
    assert (PROTOS / name).read_bytes() == (regenerated / name).read_bytes()
