"""State images in host memory: checkpoints that the device has no room for, and paused requests.

The memory is made at start, pinned where the state is on CUDA, and cut into images and pages like
the device's. Copies are queued on the stream that everything else runs on: what was launched before
them is in them, and what is launched later finds them done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifier.state import Residency, StateImage, TargetState

# host images that an image on the device may have behind it, however large the budget is
_MOST_PER_DEVICE_IMAGE = 64


@dataclass(frozen=True, eq=False)
class HostImage:
    """A state image in host memory; its pages are its own."""

    index: int
    pages: tuple[int, ...]
    frontier: int


class HostImages:
    """Room for images and pages within a budget.

    Args:
        state: what is copied from and to.
        byte_budget: host memory to take; half of it at most goes to states, the rest to pages.
    """

    def __init__(self, state: TargetState, byte_budget: int) -> None:
        self._state = state
        planes = (state.gdn, state.conv_history)
        image_bytes = sum(p[:, 0].nbytes for p in planes) + state.continuation[0].nbytes
        page_bytes = state.key_pages[:, 0].nbytes + state.value_pages[:, 0].nbytes
        self.image_count, self.page_count = host_room(
            byte_budget,
            image_bytes=image_bytes,
            page_bytes=page_bytes,
            device_images=state.free_image_count,
            longest_pages=state.pages_of(state.max_context),
        )
        pinned = state.gdn.device.type == "cuda" and self.image_count > 0

        def room(like: Tensor, count: int, dim: int) -> Tensor:
            shape = list(like.shape)
            shape[dim] = count
            return torch.zeros(shape, dtype=like.dtype, pin_memory=pinned)

        self._gdn = room(state.gdn, self.image_count, 1)
        self._conv_history = room(state.conv_history, self.image_count, 1)
        self._continuation = room(state.continuation, self.image_count, 0)
        self._key_pages = room(state.key_pages, self.page_count, 1)
        self._value_pages = room(state.value_pages, self.page_count, 1)
        self._free_images = list(reversed(range(self.image_count)))
        self._free_pages = list(reversed(range(self.page_count)))

    @property
    def byte_count(self) -> int:
        """Host memory taken."""
        return (
            self._gdn.nbytes
            + self._conv_history.nbytes
            + self._continuation.nbytes
            + self._key_pages.nbytes
            + self._value_pages.nbytes
        )

    @property
    def free_image_count(self) -> int:
        """Images that could still be stored."""
        return len(self._free_images)

    @property
    def free_page_count(self) -> int:
        """Pages that could still be stored."""
        return len(self._free_pages)

    def has_room(self, image: StateImage) -> bool:
        """Whether `store` would succeed."""
        return bool(self._free_images) and len(image.pages) <= self.free_page_count

    def could_hold(self, image: StateImage) -> bool:
        """Whether there would be room if nothing else were stored."""
        return self.image_count > 0 and len(image.pages) <= self.page_count

    def store(self, image: StateImage) -> HostImage | None:
        """Copies an image here; None, and nothing is done, without room."""
        if not self.has_room(image):
            return None
        pages = tuple(self._free_pages.pop() for _ in image.pages)
        stored = HostImage(self._free_images.pop(), pages, image.frontier)
        state = self._state
        for ours, theirs in self._planes():
            for layer in range(len(ours)):
                _copy(ours[layer, stored.index], theirs[layer, image.state_slot])
        _copy(self._continuation[stored.index], state.continuation[image.line])
        for ours, theirs in self._paged():
            for run, count in _runs(pages, image.pages):
                for layer in range(len(ours)):
                    ours_run = ours[layer, run[0] : run[0] + count]
                    _copy(ours_run, theirs[layer, run[1] : run[1] + count])
        return stored

    def load(self, stored: HostImage, residency: Residency, position_count: int) -> bool:
        """Lets a resident without pages continue a stored image; the image stays.

        Returns:
            False, and nothing is changed, while the device lacks pages.
        """
        state = self._state
        assert not residency.pages
        if not state.grow(residency, max(position_count, stored.frontier)):
            return False
        for ours, theirs in self._planes():
            for layer in range(len(ours)):
                _copy(theirs[layer, residency.state_slot], ours[layer, stored.index])
        _copy(state.continuation[residency.lane], self._continuation[stored.index])
        for ours, theirs in self._paged():
            for run, count in _runs(stored.pages, residency.pages):
                for layer in range(len(ours)):
                    theirs_run = theirs[layer, run[1] : run[1] + count]
                    _copy(theirs_run, ours[layer, run[0] : run[0] + count])
        return True

    def forget(self, stored: HostImage) -> None:
        """Gives an image's room back."""
        self._free_images.append(stored.index)
        self._free_pages.extend(reversed(stored.pages))

    def _planes(self) -> tuple[tuple[Tensor, Tensor], ...]:
        state = self._state
        return (self._gdn, state.gdn), (self._conv_history, state.conv_history)

    def _paged(self) -> tuple[tuple[Tensor, Tensor], ...]:
        state = self._state
        return (self._key_pages, state.key_pages), (self._value_pages, state.value_pages)


def host_room(
    byte_budget: int, *, image_bytes: int, page_bytes: int, device_images: int, longest_pages: int
) -> tuple[int, int]:
    """Images and pages that a budget makes: half of it at most goes to states, the rest to pages.

    Args:
        byte_budget: Host memory that may be taken.
        image_bytes: Of a state.
        page_bytes: Of a page, all layers.
        device_images: Images beside it on the device, which bound those that are of use.
        longest_pages: Pages of the longest sequence.
    """
    most = _MOST_PER_DEVICE_IMAGE * max(1, device_images)
    images = min(byte_budget // 2 // image_bytes, most)
    pages = (byte_budget - images * image_bytes) // page_bytes
    # no more than all images could fill
    return images, min(pages, images * longest_pages)


def _copy(destination: Tensor, source: Tensor) -> None:
    # both sides contiguous, so that no copy goes through a temporary of its own
    destination.copy_(source, non_blocking=True)


def _runs(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[tuple[int, int], int]]:
    """Pairs of pages, joined where both sides go on consecutively: ((first, second), count)."""
    start, count = (0, 0), 0
    for pair in zip(first, second, strict=False):
        if count and pair == (start[0] + count, start[1] + count):
            count += 1
            continue
        if count:
            yield start, count
        start, count = pair, 1
    if count:
        yield start, count
