"""What is kept, copied, moved or left by its drafter goes on as if it were not: the whole check."""

from __future__ import annotations

import pytest
import torch

from bench.continued import Check
from bench.invariance import Verdict


@pytest.mark.parametrize(
    "device",
    [
        # the suite asks for each of these things by itself
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_a_sequence_goes_on_as_a_cold_one_alone(device: str, capfd):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    verdict = Verdict()
    Check(device, verdict).run()
    told = capfd.readouterr().out
    assert verdict.failed == 0, told
    assert "differs" not in told and "not so" not in told


@pytest.mark.parametrize(
    ("actual", "failed", "told"),
    [
        ([(1, 2, 3), (4, 5)], 0, "equal"),
        ([(1, 2, 9), (4, 5)], 1, "the first in output 0 at token 2"),
        ([(1, 2, 3), (4,)], 1, "the first in output 1 at token -1"),
    ],
)
def test_a_verdict_counts_what_differs_and_says_where(actual, failed, told, capsys):
    verdict = Verdict()
    verdict.compare("name", actual, [(1, 2, 3), (4, 5)])
    assert verdict.failed == failed
    assert told in capsys.readouterr().out
