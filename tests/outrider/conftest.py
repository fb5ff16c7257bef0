"""The scripted service, and commands run as a user runs them."""

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
