"""Runs the kernels' tests under Triton's interpreter, in a process of their own.

Whether a kernel is compiled or interpreted is settled when Triton and the kernel's module are
imported, so one process cannot do both, and an environment set here would leak into the rest of
the suite. Hence every test module of this folder is collected as one item; a single `pytest` over
all the modules selected, with TRITON_INTERPRET=1 and OUTRIDER_KERNELS=triton, runs beside the tests
before them, behind them where there are not enough CPUs, and each item reports its own module's
failures. With TRITON_INTERPRET=1 in the
environment the modules are collected as ordinary tests, one by one:

    TRITON_INTERPRET=1 OUTRIDER_KERNELS=triton pytest tests/kernels/triton/test_linear.py

Modules named in COMPILED need the compiler, not the interpreter, and are always ordinary tests.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from outrider import serving

COMPILED = {"test_compile.py", "test_compile_draft.py", "test_compile_prefill.py"}
FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUN = pytest.StashKey["Interpretation"]()

if INTERPRETED:
    serving.follow_supervisor()  # the suite's own process, which may be killed
MINUTES_ALLOWED = 15


def pytest_pycollect_makemodule(module_path, parent):
    if module_path.name in COMPILED:
        return None
    if INTERPRETED:
        return None
    return InterpretedModule.from_parent(parent, path=module_path)


def pytest_collection_finish(session):
    modules = [item.path for item in session.items if isinstance(item, InterpretedRun)]
    if modules and not session.config.option.collectonly and importlib.util.find_spec("triton"):
        session.stash[RUN] = Interpretation(modules, session.config)


def pytest_sessionfinish(session):
    if RUN in session.stash:
        session.stash[RUN].end()


class InterpretedModule(pytest.File):
    def collect(self):
        yield InterpretedRun.from_parent(self, name="interpreted")


class InterpretedRun(pytest.Item):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        # the first one may wait for the modules of all
        self.add_marker(pytest.mark.timeout(60 * MINUTES_ALLOWED))

    def runtest(self):
        if RUN not in self.session.stash:
            pytest.skip("triton is not installed")
        cases, output = self.session.stash[RUN].outcomes()
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


class Interpretation:
    """One run over the modules, in the background and less urgent than the suite's own process."""

    def __init__(self, modules, config):
        self._outcomes = None
        self._report = Path(config.rootpath) / ".pytest_cache" / f"interpreted-{os.getpid()}.xml"
        self._report.parent.mkdir(exist_ok=True)
        # not a pipe: nobody reads it before the end
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in end
        options = ["-q", "--tb=short", f"--junitxml={self._report}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *map(str, modules)],
            cwd=ROOT,
            env=os.environ
            | {"TRITON_INTERPRET": "1", "OUTRIDER_KERNELS": "triton"}
            | {serving.SUPERVISOR_PID: str(os.getpid())},
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        os.setpriority(os.PRIO_PROCESS, self._process.pid, 10)

    def outcomes(self):
        """Its `testcase` elements, and what it printed; waits for its end."""
        if self._outcomes is None:
            try:
                self._process.wait(60 * MINUTES_ALLOWED)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._output.seek(0)
            cases = []
            if self._report.exists():
                cases = list(ElementTree.parse(self._report).iter("testcase"))
            self._outcomes = cases, self._output.read()
        return self._outcomes

    def end(self):
        """Leaves no process and no file behind."""
        self._process.kill()
        self._process.wait()
        self._output.close()
        self._report.unlink(missing_ok=True)


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
