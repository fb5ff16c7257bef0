"""The committed stubs and protoset are what the protos generate."""

import importlib.util
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from outrider.v1 import generation_service_pb2 as pb

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


def test_the_committed_protoset_equals_the_regenerated_one(regenerated):
    name = "outrider.protoset"
    assert (PROTOS / name).read_bytes() == (regenerated / name).read_bytes()


def test_the_protoset_alone_is_enough_to_read_an_answer():
    files = descriptor_pb2.FileDescriptorSet.FromString((PROTOS / "outrider.protoset").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:  # protoc lists imports first
        pool.AddSerializedFile(file.SerializeToString())
    service = pool.FindServiceByName("outrider.v1.GenerationService")
    assert {method.name for method in service.methods} == {
        method.name for method in pb.DESCRIPTOR.services_by_name["GenerationService"].methods
    }
    answer = message_factory.GetMessageClass(service.FindMethodByName("Generate").output_type)
    sent = pb.GenerateResponse(token_ids=[5], finish=pb.Finish(usage=pb.Usage(seed=7)))
    assert answer.FromString(sent.SerializeToString()).finish.usage.seed == 7
