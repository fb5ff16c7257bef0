"""What residents hold, and what the state costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from outrider.checkpoint import Checkpoint
from outrider.pair import TargetFacts
from tests.tiny_target import TEXT
from verifier.config import TargetConfig
from verifier.state import TargetState, state_plan

PAGE = 16


@pytest.fixture
def config(tmp_path: Path) -> TargetConfig:
    text = {**TEXT, "model_type": "qwen3_5_text", "full_attention_interval": 4}
    (tmp_path / "config.json").write_text(json.dumps(text))
    return TargetConfig.read(TargetFacts.read(Checkpoint(tmp_path)))


def make(config: TargetConfig, dtype: torch.dtype = torch.float32) -> TargetState:
    return TargetState(config, lanes=3, max_context=40, width=8, dtype=dtype, page_size=PAGE)


def test_residents_share_nothing(config: TargetConfig):
    state = make(config)
    residents = [state.acquire(40) for _ in range(3)]
    assert all(residents)
    assert len({r.lane for r in residents if r}) == 3
    assert len({r.state_slot for r in residents if r}) == 3
    pages = [page for r in residents if r for page in r.pages]
    assert len(set(pages)) == len(pages) == 9


@pytest.mark.parametrize(("positions", "pages"), [(1, 1), (16, 1), (17, 2), (40, 3)])
def test_pages_cover_the_positions(config: TargetConfig, positions: int, pages: int):
    state = make(config)
    resident = state.acquire(positions)
    assert resident is not None
    assert len(resident.pages) == pages
    assert state.page_tables[resident.lane, :pages].tolist() == list(resident.pages)


@pytest.mark.parametrize("positions", [-1, 41])
def test_positions_that_no_resident_may_have_are_refused(config: TargetConfig, positions: int):
    with pytest.raises(ValueError, match=rf"position_count: expected 0\.\.40, got {positions}"):
        make(config).acquire(positions)


def test_a_full_state_takes_nobody_until_one_leaves(config: TargetConfig):
    state = make(config)
    residents = [state.acquire(1) for _ in range(3)]
    assert state.acquire(1) is None
    assert residents[1] is not None
    state.release(residents[1])
    again = state.acquire(40)
    assert again is not None
    assert state.acquire(1) is None


def test_a_refused_resident_takes_nothing(config: TargetConfig):
    state = make(config)
    state._free_pages[:] = state._free_pages[:2]
    assert state.acquire(40) is None
    first, second = state.acquire(16), state.acquire(16)
    assert first is not None
    assert second is not None
    assert state.acquire(1) is None, "a lane is free, pages are not"


def test_release_is_idempotent(config: TargetConfig):
    state = make(config)
    gone = state.acquire(40)
    assert gone is not None
    state.release(gone)
    heir = state.acquire(40)
    assert heir is not None
    assert heir.lane == gone.lane
    state.release(gone)
    assert state.holds(heir)
    assert not state.holds(gone)
    others = [state.acquire(40), state.acquire(40)]
    held = [heir, *others]
    assert len({page for r in held if r for page in r.pages}) == 9


def test_a_new_resident_starts_from_nothing(config: TargetConfig):
    state = make(config)
    resident = state.acquire(40)
    assert resident is not None
    state.gdn.fill_(torch.nan)
    state.conv_history.fill_(torch.nan)
    state.release(resident)
    heir = state.acquire(40)
    assert heir is not None
    assert not state.gdn[:, heir.state_slot].any()
    assert not state.conv_history[:, heir.state_slot].any()
    other = 1 if heir.state_slot != 1 else 2
    assert state.gdn[:, other].isnan().all(), "the slots of others are left alone"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_plan_is_what_is_allocated(config: TargetConfig, dtype: torch.dtype):
    state = make(config, dtype)
    tensors = [state.key_pages, state.value_pages, state.gdn, state.conv_history]
    tensors += [state.continuation, *state.records]
    assert sum(size for _, size in state.plan()) == sum(t.nbytes for t in tensors)
    sizes = {"lanes": 3, "max_context": 40, "width": 8, "dtype": dtype, "page_size": PAGE}
    assert state_plan(config, **sizes) == state.plan()
    assert dict(state.plan())["GDN states"] == 3 * 3 * 4 * 16 * 16 * 4


def test_the_profiles_keep_their_element_types(config: TargetConfig):
    wide, narrow = make(config), make(config, torch.bfloat16)
    assert wide.key_pages.dtype == wide.value_pages.dtype == torch.float32
    assert narrow.key_pages.dtype == narrow.records.key.dtype == torch.bfloat16
    assert narrow.value_pages.dtype == torch.float16
    assert narrow.gdn.dtype == narrow.records.gate.dtype == torch.float32


def test_record_views_of_all_sizes_share_one_memory(config: TargetConfig):
    state = make(config)
    whole = state.record_view(3, 8)
    assert whole.key.data_ptr() == state.records.key.data_ptr()
    part = state.record_view(2, 5)
    assert all(plane.is_contiguous() for plane in part)
    part.key.fill_(3.0)
    assert (whole.key.flatten()[: part.key.numel()] == 3.0).all()
    assert not whole.key.flatten()[part.key.numel() :].any()


def test_a_block_may_have_more_rows_than_there_are_lanes(config: TargetConfig):
    sizes = {"lanes": 3, "max_context": 40, "width": 8, "dtype": torch.float32, "page_size": PAGE}
    state = TargetState(config, **sizes, block_rows=4)
    assert state.record_view(4, 8).key.shape[1:3] == (4, 8)
    assert state.plan() == state_plan(config, **sizes, block_rows=4)


def written(state: TargetState, position_count: int, seed: int = 0):
    """A resident whose state and KV of [0, position_count) are random."""
    resident = state.acquire(position_count)
    assert resident is not None
    overwrite(state, resident, seed)
    return resident


def overwrite(state: TargetState, resident, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: torch.Tensor) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))

    draw(state.gdn[:, resident.state_slot])
    draw(state.conv_history[:, resident.state_slot])
    draw(state.continuation[resident.lane])
    for page in resident.pages:
        draw(state.key_pages[:, page])
        draw(state.value_pages[:, page])


def snapshot(state: TargetState, view, frontier: int) -> list[torch.Tensor]:
    """Everything that [0, frontier) left behind."""
    pages = list(view.pages[: state.pages_of(frontier)])
    keys = state.key_pages[:, pages].flatten(1, 2)[:, :frontier]
    values = state.value_pages[:, pages].flatten(1, 2)[:, :frontier]
    planes = (state.gdn[:, view.state_slot], state.conv_history[:, view.state_slot])
    return [t.clone() for t in (keys, values, *planes, state.continuation[view.line])]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def with_images(config: TargetConfig, **options) -> TargetState:
    sizes = {"lanes": 3, "max_context": 80, "width": 8, "page_size": PAGE, "image_count": 2}
    return TargetState(config, dtype=torch.float32, **(sizes | options))


def free(state: TargetState) -> tuple[int, int, int, int]:
    lanes, slots = len(state._free_lanes), len(state._free_slots)
    return lanes, slots, state.free_page_count, state.free_image_count


@pytest.mark.parametrize("frontier", [5, 16, 32, 39])
def test_an_image_keeps_what_stood_there_whatever_its_source_goes_on_to_do(config, frontier):
    state = with_images(config)
    source = written(state, 60)
    image = state.capture(source, frontier)
    assert image is not None
    whole = snapshot(state, state.view(source, frontier), frontier)
    # the source writes on behind the frontier, moves its state and ends
    kept = [
        (p, state.key_pages[:, p].clone(), state.value_pages[:, p].clone()) for p in image.pages
    ]
    overwrite(state, source, seed=1)
    for index, (page, keys, values) in enumerate(kept):
        count = min(PAGE, frontier - index * PAGE)
        state.key_pages[:, page, :count] = keys[:, :count]
        state.value_pages[:, page, :count] = values[:, :count]
    state.release(source)
    written(state, 60, seed=2)
    assert same(snapshot(state, image, frontier), whole)
    heir = state.acquire(0)
    assert state.resume(heir, image, 60)
    assert same(snapshot(state, state.view(heir, frontier), frontier), whole)
    assert list(heir.pages[: frontier // PAGE]) == list(image.pages[: frontier // PAGE])
    assert not set(heir.pages[frontier // PAGE :]) & set(image.pages), (
        "what both write to is copied"
    )
    # and what the heir writes behind the frontier does not reach the image
    for page in heir.pages[frontier // PAGE :]:
        state.key_pages[:, page].fill_(torch.nan)
    assert same(snapshot(state, image, frontier), whole)


def test_a_page_is_free_when_its_last_holder_is_gone(config):
    state = with_images(config)
    everything = free(state)
    source = written(state, 40)
    image = state.capture(source, 40)
    heirs = [state.acquire(0) for _ in range(2)]
    assert all(state.resume(heir, image, 48) for heir in heirs)
    # three pages, and a copy of the third for each heir
    assert state.free_page_count == everything[2] - 5
    state.release(source)
    assert state.free_page_count == everything[2] - 5
    state.forget(image)
    assert state.free_page_count == everything[2] - 4
    for heir in heirs:
        state.release(heir)
    assert free(state) == everything


def test_a_resident_grows_page_by_page_and_takes_none_in_vain(config):
    state = with_images(config, page_count=4)
    first, second = state.acquire(1), state.acquire(0)
    assert state.grow(first, 33)
    assert len(first.pages) == 3
    assert state.grow(second, 16)
    assert not state.grow(first, 49)
    assert len(first.pages) == 3
    assert state.page_tables[first.lane, :3].tolist() == first.pages
    state.release(second)
    assert state.grow(first, 49)


def test_nothing_is_resumed_or_captured_without_room(config):
    state = with_images(config, page_count=3, image_count=1)
    source = written(state, 40)
    image = state.capture(source, 40)
    assert state.capture(source, 40) is None
    heir = state.acquire(0)
    assert not state.resume(heir, image, 41), "the third page needs a copy"
    assert heir.pages == []
    assert not state.resume(heir, state.view(source, 32), 33)
    assert state.resume(heir, state.view(source, 32), 32)
    assert heir.pages == source.pages[:2]
