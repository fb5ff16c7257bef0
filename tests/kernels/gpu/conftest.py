"""The kernels as they run: compiled, on a CUDA device, at the official shapes and at odd ones.

    make gpu-test

The interpreter's suite next door asks each kernel for its formula; this one asks what only a device
shows: BF16 through the matrix units, real numbers of programs and runs, and that a row has the same
bits whatever shares its call. Its arguments come from the interpreter suite's builders.
"""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _device():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def random():
    """`random(*shape, dtype=..., scale=...)` on the device."""
    generator = torch.Generator("cuda").manual_seed(20)

    def draw(*shape, dtype=torch.bfloat16, scale=1.0):
        return torch.randn(*shape, generator=generator, dtype=dtype, device="cuda").mul_(scale)

    return draw


@pytest.fixture
def host_random():
    """As `random`, on the host: what the interpreter suite's builders draw with."""
    generator = torch.Generator().manual_seed(20)

    def draw(*shape, dtype=torch.float32, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    return draw


@pytest.fixture
def distance():
    """Relative L2 distance of a result from what it should be; not a number never passes."""

    def measure(actual, expected):
        actual, expected = actual.double(), expected.double()
        assert actual.shape == expected.shape
        assert torch.isfinite(actual).all()
        return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))

    return measure
