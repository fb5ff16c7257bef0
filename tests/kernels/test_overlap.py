"""A kernel that may start early waits before it touches memory."""

import ast
from pathlib import Path

import pytest

import kernels

ROOT = Path(kernels.__file__).parent
FILES = sorted(ROOT.glob("*/kernel.py"))
WAITS = {"enter", "wait"}
MEMORY = {"load", "store", "atomic_add", "atomic_xchg", "atomic_cas", "atomic_max"}
WEIGHTS = {"gain"}  # parameters that no kernel writes: what they point to may be read at any time


def launched(tree: ast.Module) -> dict[str, bool]:
    """Kernels that a file launches, and whether with OVERLAPPED."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            spread = [k.value for k in node.keywords if k.arg is None]
            early = any(isinstance(v, ast.Name) and v.id == "OVERLAPPED" for v in spread)
            found[ast.unparse(node.func.value)] = early
    return found


def reads_weights(call: ast.Call) -> bool:
    """Whether it loads from a weight at an offset."""
    if ast.unparse(call.func) != "tl.load":
        return False
    pointer = call.args[0]
    return isinstance(pointer, ast.BinOp) and ast.unparse(pointer.left) in WEIGHTS


def waits_first(kernel: ast.FunctionDef) -> bool:
    """Whether a statement of its own waits, before anything that loads or stores."""
    for statement in kernel.body:
        made = [n for n in ast.walk(statement) if isinstance(n, ast.Call)]
        calls = [call.func for call in made if not reads_weights(call)]
        if isinstance(statement, ast.Expr) and ast.unparse(statement) in {f"{w}()" for w in WAITS}:
            return True
        if any(isinstance(call, ast.Attribute) and call.attr in MEMORY for call in calls):
            return False
        # what a function of this package does with memory is not looked into
        if any(
            isinstance(call, ast.Name) and call.id not in {"release", "range"} for call in calls
        ):
            return False
    return False


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_kernels_that_start_early_wait_first(path):
    tree = ast.parse(path.read_text())
    own = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, early in launched(tree).items():
        if early:
            assert waits_first(own[name]), name


def test_decode_kernels_start_early():
    early = {
        path.parent.name for path in FILES if any(launched(ast.parse(path.read_text())).values())
    }
    assert early >= {"linear", "gdn_verify", "causal_attention", "rms_norm", "linear_topk", "moe"}


@pytest.mark.parametrize(
    ("body", "waits"),
    [
        ("enter()\ntl.load(x)", True),
        ("release()\nat = tl.arange(0, 4)\nwait()\ntl.load(x)", True),
        ("tl.load(x)\nenter()", False),
        ("scale = tl.load(gain + at, mask=at < 4)\nwait()\ntl.load(x)", True),
        ("tl.load(gain + tl.load(x))\nwait()", False),
        ("tl.store(gain + at, 1)\nwait()", False),
        ("product(x)\nwait()", False),
        ("if late:\n    wait()\ntl.load(x)", False),
        ("at = 1", False),
    ],
)
def test_a_kernel_that_does_not_wait_would_be_seen(body, waits):
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    assert waits_first(ast.parse(f"def kernel(x):\n{lines}").body[0]) is waits
