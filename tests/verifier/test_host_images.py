"""Images in host memory: every byte comes back, wherever its pages lie, in few copies."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from outrider.checkpoint import Checkpoint
from outrider.pair import TargetFacts
from tests.tiny_target import Variant, save_target
from verifier import host_images
from verifier.config import TargetConfig
from verifier.host_images import STAGED_PAGES, HostImages
from verifier.state import PAGE_SIZE, TargetState


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TargetConfig:
    folder: Path = tmp_path_factory.mktemp("target")
    save_target(folder, Variant("dense"), seed=1)
    with Checkpoint(folder) as checkpoint:
        return TargetConfig.read(TargetFacts.read(checkpoint))


def made(config: TargetConfig, pages: int, seed: int) -> tuple[TargetState, HostImages]:
    """State of random content whose free pages, and the host's, lie in any order."""
    state = TargetState(
        config,
        lanes=2,
        max_context=pages * PAGE_SIZE,
        width=4,
        dtype=torch.bfloat16,
        page_count=2 * pages + 7,
        image_count=1,
    )
    host = HostImages(state, 64 << 20)
    generator = torch.Generator().manual_seed(seed)
    for plane in (state.key_pages, state.value_pages, state.gdn, state.conv_history):
        plane.copy_(torch.randn(plane.shape, generator=generator))
    state.continuation.normal_(generator=generator)
    for free in (state._free_pages, host._free_pages):
        random.Random(seed).shuffle(free)
    return state, host


@pytest.mark.parametrize("pages", [1, STAGED_PAGES, 2 * STAGED_PAGES + 3])
@pytest.mark.parametrize("cut", [0, 11])
def test_an_image_comes_back_with_every_byte(config, pages, cut):
    state, host = made(config, pages, seed=pages)
    frontier = pages * PAGE_SIZE - cut
    source, heir = state.acquire(frontier), state.acquire(0)
    assert sorted(source.pages) != source.pages or pages == 1
    wanted = [p[:, source.pages].clone() for p in (state.key_pages, state.value_pages)]
    states = [p[:, source.state_slot].clone() for p in (state.gdn, state.conv_history)]
    hidden = state.continuation[source.lane].clone()
    stored = host.store(state.view(source, frontier))
    # nothing of it is left where it was
    for plane in (state.key_pages, state.value_pages):
        plane[:, source.pages] = 0
    others = [p.clone() for p in (state.key_pages, state.value_pages)]
    assert host.load(stored, heir, frontier)
    for plane, pages_wanted, before in zip(
        (state.key_pages, state.value_pages), wanted, others, strict=True
    ):
        assert torch.equal(plane[:, heir.pages], pages_wanted)
        rest = [page for page in range(plane.shape[1]) if page not in heir.pages]
        assert torch.equal(plane[:, rest], before[:, rest]), "no other page is touched"
    for plane, wanted_state in zip((state.gdn, state.conv_history), states, strict=True):
        assert torch.equal(plane[:, heir.state_slot], wanted_state)
    assert torch.equal(state.continuation[heir.lane], hidden)


def test_a_page_is_copied_at_once_for_all_layers(config, monkeypatch):
    """A copy for each layer of each page held the engine for longer than the bytes take."""
    copies: list[int] = []
    copy = host_images._copy

    def counted(destination, source):
        copies.append(destination.nbytes)
        copy(destination, source)

    pages = STAGED_PAGES + 5
    state, host = made(config, pages, seed=3)
    source = state.acquire(pages * PAGE_SIZE)
    monkeypatch.setattr(host_images, "_copy", counted)
    stored = host.store(state.view(source, pages * PAGE_SIZE))
    of_state = 2 * config.gdn_layer_count + 1
    assert len(copies) <= 2 * pages + of_state
    copies.clear()
    heir = state.acquire(0)
    assert host.load(stored, heir, pages * PAGE_SIZE)
    assert len(copies) <= 2 * pages + of_state
    # pages that follow each other go together
    host.forget(stored)
    host._free_pages.sort(reverse=True)
    copies.clear()
    host.store(state.view(source, pages * PAGE_SIZE))
    assert len(copies) == 2 * 2 + of_state, "two batches of keys and of values"
