"""Generates the committed stubs and protoset: ``python protos/generate.py [DESTINATION]``.

protoc's import path is this folder, which is also Python's, so that the stubs import one another
as ``outrider.v1.x_pb2`` without any rewriting. The protoset is a descriptor set of all protos and
their imports, for clients such as grpcurl and ghz where a server offers no reflection.
tests/outrider/test_stubs.py runs this again and compares bytes.
"""

import sys
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PROTOSET = "outrider.protoset"


def generate(destination: Path) -> None:
    """Writes ``outrider/v1/*_pb2*.py``, ``*.pyi`` and the protoset below ``destination``."""
    from grpc_tools import protoc  # dev-only dependency

    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("outrider/v1/*.proto"))
    services = [name for name in protos if name.endswith("_service.proto")]
    well_known = str(resources.files("grpc_tools") / "_proto")
    base = ["protoc", f"-I{ROOT}", f"-I{well_known}"]
    steps = (
        [*base, f"--python_out={destination}", f"--pyi_out={destination}", *protos],
        [*base, f"--grpc_python_out={destination}", *services],
        [*base, f"--descriptor_set_out={destination / PROTOSET}", "--include_imports", *protos],
    )
    for step in steps:
        if protoc.main(step) != 0:
            raise SystemExit(f"protoc failed: {' '.join(step)}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
