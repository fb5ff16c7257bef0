"""The scripted service, and commands run as a user runs them."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for fake_generation, here and in children

import fake_generation


@pytest.fixture
def fake():
    """(service, address) of a running fake."""
    service = fake_generation.FakeGeneration()
    server, address = fake_generation.serve(service)
    yield service, address
    server.stop(None).wait()


BASE_DISTRIBUTIONS = {"outrider", "grpcio", "protobuf", "typing-extensions", "typing_extensions"}


@pytest.fixture(scope="session")
def base_install():
    """Runs code in a fresh interpreter that can import the base dependencies and no other."""
    owners = importlib.metadata.packages_distributions()
    hidden = sorted(name for name, held in owners.items() if not BASE_DISTRIBUTIONS & set(held))
    assert "torch" in hidden
    assert "rich" in hidden
    preamble = (
        "import sys\n"
        "class Hide:\n"
        f"    names = frozenset({hidden!r})\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in self.names:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )

    def run(code, *arguments, **kwargs):
        return subprocess.run(
            [sys.executable, "-c", preamble + code, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            **kwargs,
        )

    return run
