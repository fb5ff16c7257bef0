"""Kernels know torch and one another, and each op's folder says what it does."""

import ast
import importlib
import inspect
import sys
from pathlib import Path

import pytest

import kernels

ROOT = Path(kernels.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
OPS = sorted(path.parent.name for path in ROOT.glob("*/reference.py"))
HEADINGS = ("Maths:", "Shapes:", "Domain:", "Numerics:", "Effects:")


def imported(source: str) -> set[str]:
    """Top-level names of everything imported anywhere in a file, type-checking blocks included."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else (node.module or "").partition(".")[0])
    return names


def allowed(path: Path) -> set[str]:
    """What a file of kernels may import."""
    names = {*sys.stdlib_module_names, "torch", "kernels"}
    if path.name in ("kernel.py", "overlap.py", "tree_paths.py"):
        names.add("triton")
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_only_stdlib_torch_and_kernels(path):
    assert not imported(path.read_text()) - allowed(path)


def test_a_foreign_import_would_be_seen():
    source = "import os\ndef f():\n    from transformers.models import x\n    from . import y\n"
    assert imported(source) - allowed(Path("reference.py")) == {"transformers", "."}
    assert "triton" not in allowed(Path("reference.py"))
    assert "triton" in allowed(Path("kernel.py"))


@pytest.mark.parametrize("op", OPS)
def test_contract_has_its_five_headings_in_order(op):
    contract = importlib.import_module(f"kernels.{op}").__doc__
    places = [contract.find(f"\n{heading}") for heading in HEADINGS]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("op", OPS)
def test_reference_takes_what_the_contract_says(op):
    stated = importlib.import_module(f"kernels.{op}")
    reference = importlib.import_module(f"kernels.{op}.reference")
    own = {
        name: function
        for name, function in inspect.getmembers(stated, inspect.isfunction)
        if function.__module__ == stated.__name__ and not name.startswith("_")
    }
    assert own
    for name, function in own.items():
        theirs = inspect.signature(getattr(reference, name)).parameters
        assert list(theirs) == list(inspect.signature(function).parameters)


def test_every_op_folder_is_covered():
    assert {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()} == set(OPS)
    assert len(OPS) >= 10
