"""Tiny random pairs, written once a session, and greedy oracles over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from outrider.client import Client
from tests.tiny_pair import Pair, save_pair, served
from tests.tiny_target import MIXTURE, Variant, load_oracle

Served = Callable[..., tuple[Pair, Client]]


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert MIXTURE
    return save_pair(tmp_path_factory.mktemp("mixture"), Variant("moe", mixture=True, fused=True))


@pytest.fixture(scope="session")
def oracle(dense: Path) -> torch.nn.Module:
    return load_oracle(dense / "target")


@pytest.fixture
def serve() -> Iterator[Served]:
    """Serves pairs until the test ends: serve(folder, "dflash2", **options) -> pair, client."""
    import contextlib

    with contextlib.ExitStack() as stack:

        def start(folder: Path, kind: str = "dflash2", **options: object) -> tuple[Pair, Client]:
            pair = stack.enter_context(served(folder / "target", folder / kind, **options))
            return pair, stack.enter_context(Client(pair.address))

        yield start


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random ids of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return torch.randint(1, 150, (length,), generator=generator).tolist()


def greedy(oracle: torch.nn.Module, prompt_ids: Sequence[int], count: int) -> list[int]:
    """transformers' own greedy generate on the same weights."""
    ids = torch.tensor([list(prompt_ids)])
    with torch.inference_mode():
        out = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt_ids) :].tolist()
