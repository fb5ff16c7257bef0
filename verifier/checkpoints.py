"""Prefix checkpoints: where a prompt that begins like an earlier one need not be processed again.

A checkpoint is complete: the tokens of [0, F), the target's whole state there, the hidden state
from which the next token follows, and the last feature rows before F. Its other half, the draft
context, lies in the drafter under the same id, and counts only once the drafter has confirmed it;
without it the target half is valid alone. GDN state cannot be cut back, so a prompt continues a
checkpoint only if it begins with exactly its tokens.

Images lie on the device or in host memory. When room is needed, the checkpoint goes whose loss
costs least: the tokens that would have to be processed again from the next shorter prefix that is
still kept, weighed by how often it was used, and aged by what was evicted since (GreedyDual). A
leased checkpoint never goes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from verifier.draft_context import Context
from verifier.drafter_link import DrafterLink
from verifier.features import FeatureRows
from verifier.host_images import HostImage, HostImages
from verifier.state import Residency, StateImage, TargetState

log = structlog.get_logger("outrider.checkpoints")

_TOKEN_BYTES = 8


@dataclass(eq=False)
class Checkpoint:
    """One kept prefix; exactly one of `image` and `replica` is there."""

    checkpoint_id: int  # also the draft half's, in the drafter
    token_ids: tuple[int, ...]  # of [0, F)
    digest: bytes
    image: StateImage | None  # on the device
    replica: HostImage | None = None  # in host memory
    rows: FeatureRows = field(default_factory=FeatureRows)  # the last ones before F, if any
    coverage_first: int = 0  # where the captured draft context began
    parent: Checkpoint | None = None  # the next shorter prefix that is kept
    use_count: int = 0
    age: float = 0.0  # of the store when it was last used
    leases: int = 0

    @property
    def frontier(self) -> int:
        """F."""
        return len(self.token_ids)

    @property
    def priority(self) -> float:
        """What its loss would cost; the lowest goes first."""
        below = self.parent.frontier if self.parent is not None else 0
        return self.age + (1 + self.use_count) * (self.frontier - below)


class Checkpoints:
    """All checkpoints of a verifier. Used by the engine thread alone.

    Args:
        state: the target's memory, with room for images.
        host: room for images that the device has none for.
        link: the drafter, for the other halves.
    """

    def __init__(self, state: TargetState, host: HostImages, link: DrafterLink) -> None:
        self.counters: Counter[str] = Counter()
        self._state = state
        self._host = host
        self._link = link
        self._kept: dict[tuple[int, bytes], Checkpoint] = {}  # by length and digest
        self._lengths: Counter[int] = Counter()
        self._next_id = 1
        self._age = 0.0
        self._enabled = state.free_image_count > 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def enabled(self) -> bool:
        """Whether anything can be kept."""
        return self._enabled

    @property
    def feature_bytes(self) -> int:
        """Host memory of the feature rows; rows that checkpoints share count for each."""
        return sum(checkpoint.rows.byte_count for checkpoint in list(self._kept.values()))

    # ---- use ----------------------------------------------------------------------------------

    def find(
        self, token_ids: Sequence[int], usable: Callable[[Checkpoint], bool] = lambda _: True
    ) -> Checkpoint | None:
        """The longest usable checkpoint that ``token_ids`` begins with, itself included."""
        for length, digest in reversed(list(self._digests(token_ids))):
            checkpoint = self._kept.get((length, digest))
            if checkpoint is None or checkpoint.token_ids != tuple(token_ids[:length]):
                continue
            if usable(checkpoint):
                return checkpoint
        return None

    @contextmanager
    def leased(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Keeps a checkpoint from being evicted or moved."""
        checkpoint.leases += 1
        try:
            yield
        finally:
            checkpoint.leases -= 1

    def resume(self, checkpoint: Checkpoint, residency: Residency, position_count: int) -> bool:
        """Lets a resident without pages go on from a checkpoint, with room for more positions.

        Other checkpoints give way where pages are lacking.

        Returns:
            False, and nothing is changed for the resident, while pages are lacking all the same.
        """
        state = self._state
        with self.leased(checkpoint):
            needed = state.pages_of(max(position_count, checkpoint.frontier))
            if checkpoint.image is not None:
                needed -= checkpoint.frontier // state.page_size
            if not self.reclaim(needed):
                return False
            if checkpoint.image is not None:
                resumed = state.resume(residency, checkpoint.image, position_count)
            else:
                assert checkpoint.replica is not None
                resumed = self._host.load(checkpoint.replica, residency, position_count)
        assert resumed
        checkpoint.use_count += 1
        checkpoint.age = self._age
        self.counters["hits"] += 1
        self.counters["host_hits"] += checkpoint.image is None
        self.counters["cached_tokens"] += checkpoint.frontier
        return True

    def capture(
        self, residency: Residency, token_ids: Sequence[int], context: Context | None
    ) -> None:
        """Keeps a resident's state, which has processed exactly ``token_ids``.

        A prefix that is kept already only gets what it lacked. Without room nothing happens.

        Args:
            residency: whose state; every round before has been committed.
            token_ids: of [0, F).
            context: its draft half, with all rows before F; None without one.
        """
        if not self._enabled or not token_ids:
            return
        digest = _digest(token_ids)
        known = self._kept.get((len(token_ids), digest))
        if known is None:
            known = self._capture_target(residency, tuple(token_ids), digest)
        elif known.token_ids != tuple(token_ids):
            return  # another prefix of the same digest: one of them is enough
        if known is not None and context is not None:
            self._capture_draft(known, context)

    def _capture_target(
        self, residency: Residency, token_ids: tuple[int, ...], digest: bytes
    ) -> Checkpoint | None:
        if not self._state.free_image_count and not self._make_image_room():
            self.counters["captures_without_room"] += 1
            return None
        image = self._state.capture(residency, len(token_ids))
        assert image is not None
        checkpoint = Checkpoint(self._next_id, token_ids, digest, image, age=self._age)
        self._next_id += 1
        self._adopt(checkpoint)
        self.counters["captures"] += 1
        return checkpoint

    def _capture_draft(self, checkpoint: Checkpoint, context: Context) -> None:
        if self._link.keeps(checkpoint.checkpoint_id):
            return
        if context.rows.end == checkpoint.frontier:
            checkpoint.rows = self._link.tail(context)
        # an id names one draft half for ever; one that came to nothing is not used again
        self._link.drop(checkpoint.checkpoint_id)
        checkpoint.checkpoint_id, self._next_id = self._next_id, self._next_id + 1
        checkpoint.coverage_first = context.coverage_first
        self._link.capture(context, checkpoint.checkpoint_id, checkpoint.frontier)

    # ---- room ---------------------------------------------------------------------------------

    def reclaim(self, page_count: int) -> bool:
        """Frees pages until ``page_count`` are free; False when leases or residents hold the rest.

        Checkpoints move to host memory if they can, and otherwise go.
        """
        while self._state.free_page_count < page_count:
            cheapest = self._cheapest(on_device=True)
            if cheapest is None:
                return False
            self._demote_or_evict(cheapest)
        return True

    def store_snapshot(self, image: StateImage) -> HostImage | None:
        """Keeps a state that is in use in host memory, before any checkpoint there.

        Returns:
            None where it would not fit even alone, or beside others like it.
        """
        if not self._host.could_hold(image) or not self._make_host_room(image, float("inf")):
            return None
        return self._host.store(image)

    def clear(self) -> None:
        """Forgets everything, draft halves included."""
        for checkpoint in list(self._kept.values()):
            self._remove(checkpoint)

    def _make_image_room(self) -> bool:
        cheapest = self._cheapest(on_device=True)
        if cheapest is not None:
            self._demote_or_evict(cheapest)
        return cheapest is not None

    def _cheapest(self, *, on_device: bool) -> Checkpoint | None:
        candidates = [
            checkpoint
            for checkpoint in self._kept.values()
            if (checkpoint.image is not None) == on_device and not checkpoint.leases
        ]
        return min(candidates, key=lambda c: (c.priority, c.checkpoint_id), default=None)

    def _demote_or_evict(self, checkpoint: Checkpoint) -> None:
        image = checkpoint.image
        assert image is not None
        if not self._host.could_hold(image) or not self._make_host_room(image, checkpoint.priority):
            self._evict(checkpoint)
            return
        checkpoint.replica = self._host.store(image)
        checkpoint.image = None
        self._state.forget(image)
        self.counters["demotions"] += 1

    def _make_host_room(self, image: StateImage, priority: float) -> bool:
        """Evicts cheaper replicas until the image fits; False when the rest is worth more."""
        while not self._host.has_room(image):
            other = self._cheapest(on_device=False)
            if other is None or other.priority > priority:
                return False
            self._evict(other)
        return True

    def _evict(self, checkpoint: Checkpoint) -> None:
        self._age = max(self._age, checkpoint.priority)
        self._remove(checkpoint)
        self.counters["evictions"] += 1

    # ---- the table ----------------------------------------------------------------------------

    def _adopt(self, checkpoint: Checkpoint) -> None:
        """Adds a checkpoint between the prefixes of it and those that it is a prefix of."""
        token_ids, frontier = checkpoint.token_ids, checkpoint.frontier
        checkpoint.parent = self.find(token_ids)
        for other in self._kept.values():
            longer = other.parent is checkpoint.parent and other.frontier > frontier
            if longer and other.token_ids[:frontier] == token_ids:
                other.parent = checkpoint
        self._kept[frontier, checkpoint.digest] = checkpoint
        self._lengths[frontier] += 1

    def _remove(self, checkpoint: Checkpoint) -> None:
        frontier = checkpoint.frontier
        del self._kept[frontier, checkpoint.digest]
        self._lengths[frontier] -= 1
        if not self._lengths[frontier]:
            del self._lengths[frontier]
        for other in self._kept.values():
            if other.parent is checkpoint:
                other.parent = checkpoint.parent
        if checkpoint.image is not None:
            self._state.forget(checkpoint.image)
        if checkpoint.replica is not None:
            self._host.forget(checkpoint.replica)
        self._link.drop(checkpoint.checkpoint_id)

    def _digests(self, token_ids: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Digests of those prefixes that have the length of a checkpoint, the shortest first."""
        lengths = sorted(length for length in self._lengths if length <= len(token_ids))
        if not lengths:
            return
        data = array("q", token_ids[: lengths[-1]]).tobytes()
        running, hashed = hashlib.blake2b(digest_size=16), 0
        for length in lengths:
            running.update(data[hashed * _TOKEN_BYTES : length * _TOKEN_BYTES])
            hashed = length
            yield length, running.digest()


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()
