"""Prefix checkpoints: what matches, what is kept, where it lies, and that nothing leaks."""

from __future__ import annotations

import pytest
import torch

from tests.verifier.test_state import config as config
from tests.verifier.test_state import free, overwrite, same, snapshot, with_images, written
from verifier.checkpoints import Checkpoints
from verifier.draft_context import Context
from verifier.features import FeatureRows
from verifier.host_images import HostImages


class Link:
    """A drafter that keeps everything at once, and counts."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.dropped: list[int] = []

    def keeps(self, checkpoint_id: int) -> bool:
        return checkpoint_id in self.held

    def tail(self, context: Context) -> FeatureRows:
        return context.rows.tail(4)

    def capture(self, context: Context, checkpoint_id: int, position: int) -> bool:
        self.held.add(checkpoint_id)
        return True

    def drop(self, checkpoint_id: int) -> None:
        self.held.discard(checkpoint_id)
        self.dropped.append(checkpoint_id)


def store(config, host_images: int = 0, **options):
    state = with_images(config, **options)
    image = sum(p[:, 0].nbytes for p in (state.gdn, state.conv_history))
    image += state.continuation[0].nbytes
    page = state.key_pages[:, 0].nbytes + state.value_pages[:, 0].nbytes
    budget = host_images * max(2 * image, image + 5 * page)
    host = HostImages(state, budget)
    link = Link()
    return Checkpoints(state, host, link), state, host, link


def keep(checkpoints, state, tokens, context=None) -> None:
    """Captures a state that is a function of the tokens, and ends its resident."""
    resident = written(state, len(tokens), seed=hash(tuple(tokens)) % 2**31)
    checkpoints.capture(resident, tokens, context)
    state.release(resident)


def test_the_longest_exact_prefix_is_found(config):
    checkpoints, state, _, _ = store(config, image_count=4)
    for tokens in ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 9, 9]):
        keep(checkpoints, state, tokens)

    def found(*tokens):
        checkpoint = checkpoints.find(tokens)
        return checkpoint and checkpoint.token_ids

    assert found(1, 2, 3, 4, 5, 6) == (1, 2, 3, 4, 5)
    assert found(1, 2, 3, 4, 5) == (1, 2, 3, 4, 5), "the whole prompt"
    assert found(1, 2, 3, 4) == (1, 2, 3), "a prefix of a checkpoint is none"
    assert found(1, 2, 9, 9, 9) == (1, 2, 9, 9)
    assert found(2, 2, 3) is None
    assert found(1, 2) is None
    longest = checkpoints.find((1, 2, 3, 4, 5, 6), lambda c: c.frontier < 5)
    assert longest.token_ids == (1, 2, 3), "the longest that is wanted"


def test_a_digest_that_collides_does_not_match(config, monkeypatch):
    import verifier.checkpoints as module

    class Constant:
        def __init__(self, data=b"", digest_size=0) -> None:
            pass

        def update(self, data) -> None:
            pass

        def digest(self) -> bytes:
            return b"same"

    monkeypatch.setattr(module.hashlib, "blake2b", Constant)
    checkpoints, state, _, _ = store(config)
    keep(checkpoints, state, [1, 2, 3])
    assert checkpoints.find([1, 2, 4]) is None
    keep(checkpoints, state, [1, 2, 4])
    assert checkpoints.find([1, 2, 3]).token_ids == (1, 2, 3)
    assert len(checkpoints) == 1


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_a_hit_has_the_state_that_was_captured(config, on_host):
    checkpoints, state, host, _ = store(config, host_images=2, image_count=1)
    tokens = list(range(1, 36))
    source = written(state, 35)
    whole = snapshot(state, state.view(source, 35), 35)
    checkpoints.capture(source, tokens, None)
    state.release(source)
    if on_host:
        keep(checkpoints, state, list(range(50, 90)))
        assert checkpoints.counters["demotions"] == 1
        assert host.free_image_count == host.image_count - 1
    # others have written wherever they could
    other = state.acquire(80)
    overwrite(state, other, seed=9)
    state.release(other)
    heir = state.acquire(0)
    hit = checkpoints.find([*tokens, 7])
    assert (hit.image is None) == on_host
    assert checkpoints.resume(hit, heir, 40)
    assert same(snapshot(state, state.view(heir, 35), 35), whole)
    assert len(heir.pages) == 3
    overwrite(state, heir, seed=3) if on_host else None
    again = state.acquire(0)
    assert checkpoints.resume(hit, again, 40)
    assert same(snapshot(state, state.view(again, 35), 35), whole)


def test_what_costs_least_to_lose_goes_first_and_leased_ones_stay(config):
    checkpoints, state, _, _ = store(config, image_count=3, max_context=80)
    long = list(range(60))
    keep(checkpoints, state, long[:50])
    keep(checkpoints, state, long[:52])  # two tokens more than what would be left
    keep(checkpoints, state, [7, 7, 7, 7])  # four tokens on its own
    keep(checkpoints, state, long[:60])
    assert checkpoints.find(long[:52]).frontier == 50, "two tokens are lost, not 52"
    leased = checkpoints.find([7, 7, 7, 7])
    with checkpoints.leased(leased):
        keep(checkpoints, state, [8, 8, 8])
    assert checkpoints.find([7, 7, 7, 7]) is leased
    assert checkpoints.find(long[:60]).frontier == 50, "ten tokens are the next"


def test_when_a_prefix_goes_the_longer_one_costs_all_of_it(config):
    checkpoints, state, _, _ = store(config, image_count=3)
    keep(checkpoints, state, list(range(30)))
    keep(checkpoints, state, list(range(40)))
    short, long = (checkpoints.find(range(n)) for n in (30, 40))
    assert (short.priority, long.priority) == (30, 10)
    checkpoints._remove(short)
    assert long.priority == 40
    keep(checkpoints, state, list(range(20)))
    assert long.priority == 20, "a prefix that comes later counts too"


def test_use_protects_and_ages_away(config):
    checkpoints, state, _, _ = store(config, image_count=2)
    keep(checkpoints, state, [1] * 10)
    heir = state.acquire(0)
    assert checkpoints.resume(checkpoints.find([1] * 10), heir, 12)
    state.release(heir)
    for first in range(2, 4):
        keep(checkpoints, state, [first] * 10)
    assert checkpoints.find([1] * 10), "used once"
    for first in range(4, 14):
        keep(checkpoints, state, [first] * 10)
    assert not checkpoints.find([1] * 10), "and never again"


def test_residents_come_first_pages_are_reclaimed(config):
    checkpoints, state, _, _ = store(config, image_count=2, page_count=6)
    keep(checkpoints, state, [1] * 40)
    keep(checkpoints, state, [2] * 16)
    assert state.free_page_count == 2
    assert checkpoints.reclaim(3)
    assert checkpoints.find([1] * 40), "16 tokens were enough"
    resident = state.acquire(33)
    assert checkpoints.reclaim(3)
    assert len(checkpoints) == 0
    assert not checkpoints.reclaim(4), "the rest is a resident's"
    state.release(resident)


def test_a_hit_reclaims_pages_but_not_its_own(config):
    checkpoints, state, _, _ = store(config, image_count=2, page_count=6)
    keep(checkpoints, state, [1] * 40)
    keep(checkpoints, state, [2] * 40)
    heir = state.acquire(0)
    hit = checkpoints.find([1] * 40)
    assert checkpoints.resume(hit, heir, 48)
    assert checkpoints.find([2] * 40) is None
    assert checkpoints.find([1] * 40) is hit
    other = state.acquire(0)
    assert not checkpoints.resume(hit, other, 80)
    assert other.pages == []
    assert hit.leases == 0


def test_the_same_prefix_is_kept_once_and_gets_the_draft_half_it_lacked(config):
    checkpoints, state, _, link = store(config)
    context = Context(1)
    context.rows.append(0, torch.zeros(6, 3))
    keep(checkpoints, state, [1] * 6)
    assert link.held == set()
    keep(checkpoints, state, [1] * 6, context)
    (held,) = link.held
    checkpoint = checkpoints.find([1] * 6)
    assert checkpoint.checkpoint_id == held
    assert (checkpoint.rows.end, len(checkpoint.rows)) == (6, 4), "the window is 4"
    keep(checkpoints, state, [1] * 6, context)
    assert link.held == {held}
    assert checkpoints.counters["captures"] == 1
    # the drafter has lost it: another half under another id
    link.held.clear()
    keep(checkpoints, state, [1] * 6, context)
    assert link.held == {checkpoint.checkpoint_id} != {held}


def test_host_memory_takes_what_fits_and_the_rest_goes(config):
    checkpoints, state, host, link = store(config, host_images=1, image_count=1)
    before = free(state)
    for first in range(4):
        keep(checkpoints, state, [first] * 20, Context(first))
    assert len(checkpoints) == 1 + host.image_count
    assert checkpoints.counters["evictions"] == 3 - host.image_count
    assert link.held == {c.checkpoint_id for c in checkpoints._kept.values()}
    checkpoints.clear()
    assert free(state) == before
    assert (host.free_image_count, host.free_page_count) == (host.image_count, host.page_count)
    assert link.held == set()


def test_without_images_nothing_is_kept(config):
    checkpoints, state, _, link = store(config, image_count=0)
    keep(checkpoints, state, [1, 2, 3], Context(1))
    assert (len(checkpoints), link.held) == (0, set())
