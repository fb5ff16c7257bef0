"""Who may import whom, read off the syntax trees."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STUB_READERS = {
    "drafter": {"rounds", "service"},
    "verifier": {
        "rounds",
        "drafter_link",
        "drafter_stream",
        "proposals",
        "service",
        "gateway",
        "__main__",
        "validation",
    },
}


def sources(package: str) -> list[Path]:
    base = ROOT / "protos" if package == "outrider" else ROOT
    return sorted(
        p for p in (base / package).rglob("*.py") if not p.stem.endswith(("_pb2", "_grpc"))
    )


def imports(path: Path, *, at_import: bool = False) -> Iterator[str]:
    """Modules that ``path`` imports; with ``at_import`` only those that importing it imports."""
    tree = ast.parse(path.read_text())
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))


def roots(path: Path, **options: bool) -> set[str]:
    return {name.split(".")[0] for name in imports(path, **options)}


@pytest.mark.parametrize("path", sources("kernels"), ids=lambda p: str(p.relative_to(ROOT)))
def test_kernels_import_torch_and_themselves_alone(path: Path):
    allowed = set(sys.stdlib_module_names) | {"torch", "kernels"}
    if path.name in ("kernel.py", "overlap.py", "tree_paths.py"):
        allowed |= {"triton"}
    assert roots(path) <= allowed


@pytest.mark.parametrize(
    ("package", "stranger"), [("verifier", "drafter"), ("drafter", "verifier")]
)
def test_services_never_import_each_other(package: str, stranger: str):
    for path in sources(package):
        assert stranger not in roots(path), path


@pytest.mark.parametrize("package", ["drafter", "verifier"])
def test_stubs_are_seen_only_at_the_edges(package: str):
    for path in sources(package):
        if path.stem in STUB_READERS[package]:
            continue
        stubs = [name for name in imports(path) if name.startswith("outrider.v1")]
        assert not stubs, f"{path}: {stubs}"


def test_the_gateway_s_protocol_is_known_to_one_file_that_nobody_imports_at_start():
    for package in ("outrider", "kernels", "drafter", "verifier"):
        for path in sources(package):
            if path == ROOT / "verifier" / "gateway.py":
                continue
            assert "smg_grpc_proto" not in roots(path), path
            assert "verifier.gateway" not in set(imports(path, at_import=True)), path


@pytest.mark.parametrize("package", ["outrider", "kernels", "drafter", "verifier"])
def test_oracles_are_for_tests_alone(package: str):
    for path in sources(package):
        assert not roots(path) & {"transformers", "dflash", "scipy", "hypothesis"}, path


@pytest.mark.parametrize("module", ["client", "faults", "__init__"])
def test_the_base_install_needs_grpc_and_protobuf_alone(module: str):
    allowed = set(sys.stdlib_module_names) | {"grpc", "google", "outrider"}
    assert roots(ROOT / "protos" / "outrider" / f"{module}.py") <= allowed


def test_the_cli_imports_services_inside_its_verbs():
    heavy = {"torch", "verifier", "drafter", "rich", "structlog", "numpy", "safetensors"}
    for path in sources("outrider"):
        if path.parent.name == "cli":
            assert not roots(path, at_import=True) & heavy, path
