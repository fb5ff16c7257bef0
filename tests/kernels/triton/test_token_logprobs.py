"""The log-probabilities' kernels against their reference."""

import pytest
import torch

from kernels.token_logprobs import kernel, token_logprobs
from kernels.token_logprobs.reference import token_logprobs as reference


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(kernel, "_CHUNK", 64)
    monkeypatch.setattr(kernel, "_RANKED", 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_equals_reference(random, top, dtype):
    logits = random(2, 150, scale=4.0, dtype=dtype)
    logits[:, 140:] = float("nan")  # not looked at
    tokens = torch.tensor([3, 139])
    actual = token_logprobs(logits, tokens, top, public_vocab=140)
    expected = reference(logits, tokens, top, public_vocab=140)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=2e-6)
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual[2], expected[2], rtol=1e-5, atol=2e-6)


def test_ties_go_to_the_lower_id_however_many_are_wanted(random, monkeypatch):
    logits = torch.zeros(1, 200)
    logits[0, [150, 20]] = 1.0
    expected = [20, 150, *(v for v in range(200) if v not in (20, 150))]
    for top in (6, 190):
        _, ids, _ = token_logprobs(logits, torch.tensor([0]), top, public_vocab=200)
        assert ids[0].tolist() == expected[:top]


def test_row_does_not_depend_on_its_neighbours(random):
    logits, tokens = random(3, 100), torch.tensor([5, 6, 7])
    together = token_logprobs(logits, tokens, 4, public_vocab=100)
    alone = token_logprobs(logits[2:], tokens[2:], 4, public_vocab=100)
    for one, all_of_them in zip(alone, together, strict=True):
        assert torch.equal(one[0], all_of_them[2])
