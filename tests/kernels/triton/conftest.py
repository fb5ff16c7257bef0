"""Runs the kernels' tests under Triton's interpreter, in a process of their own.

Whether a kernel is compiled or interpreted is settled when Triton and the kernel's module are
imported, so one process cannot do both, and an environment set here would leak into the rest of
the suite. Hence every test module of this folder is collected as one item; the first of them to
run starts a single `pytest` over all the modules selected, with TRITON_INTERPRET=1 and
OUTRIDER_KERNELS=triton, and each reports its own module's failures. With TRITON_INTERPRET=1 in the
environment the modules are collected as ordinary tests, one by one:

    TRITON_INTERPRET=1 OUTRIDER_KERNELS=triton pytest tests/kernels/triton/test_linear.py

Modules named in COMPILED need the compiler, not the interpreter, and are always ordinary tests.
"""

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

COMPILED = {"test_compile.py", "test_compile_draft.py", "test_compile_prefill.py"}
FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OUTCOMES = pytest.StashKey[dict]()
MINUTES_ALLOWED = 15


def pytest_pycollect_makemodule(module_path, parent):
    if module_path.name in COMPILED:
        return None
    if INTERPRETED:
        return None
    return InterpretedModule.from_parent(parent, path=module_path)


class InterpretedModule(pytest.File):
    def collect(self):
        yield InterpretedRun.from_parent(self, name="interpreted")


class InterpretedRun(pytest.Item):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        # the first one waits for the modules of all
        self.add_marker(pytest.mark.timeout(60 * MINUTES_ALLOWED))

    def runtest(self):
        if importlib.util.find_spec("triton") is None:
            pytest.skip("triton is not installed")
        if OUTCOMES not in self.session.stash:
            modules = [i.path for i in self.session.items if isinstance(i, InterpretedRun)]
            self.session.stash[OUTCOMES] = _interpret(modules, self.config)
        cases, output = self.session.stash[OUTCOMES]
        mine = [c for c in cases if c.get("classname", "").split(".")[-1] == self.path.stem]
        if not mine:
            raise InterpretedFailure(f"no test of {self.path.name} ran:\n{output}")
        broken = [(c, c.find("failure"), c.find("error")) for c in mine]
        texts = [
            f"{case.get('name')}\n{found.text}"
            for case, *both in broken
            for found in both
            if found is not None
        ]
        if texts:
            raise InterpretedFailure("\n\n".join(texts))

    def repr_failure(self, excinfo):
        if isinstance(excinfo.value, InterpretedFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self):
        return self.path, None, f"{self.path.name} under the interpreter"


class InterpretedFailure(Exception):
    pass


def _interpret(modules, config):
    """The `testcase` elements of one run over the modules, and what that run printed."""
    report = Path(config.rootpath) / ".pytest_cache" / f"interpreted-{os.getpid()}.xml"
    report.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OUTRIDER_KERNELS": "triton"}
    done = subprocess.run(
        [*command, *map(str, modules)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60 * MINUTES_ALLOWED,
        check=False,
    )
    output = done.stdout + done.stderr
    if not report.exists():
        return [], output
    try:
        return list(ElementTree.parse(report).iter("testcase")), output
    finally:
        report.unlink()


@pytest.fixture
def distance():
    """Relative L2 distance of a result from what it should be; not a number never passes."""

    def measure(actual, expected):
        actual, expected = actual.double(), expected.double()
        assert actual.shape == expected.shape
        assert torch.isfinite(actual).all()
        return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))

    return measure


@pytest.fixture
def random():
    """`random(*shape, dtype=..., scale=...)`: normal numbers that a test's name does not change."""
    generator = torch.Generator().manual_seed(20)

    def draw(*shape, dtype=torch.float32, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    return draw
