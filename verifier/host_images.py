"""State images in host memory: checkpoints that the device has no room for, and paused requests.

The memory is made at start, pinned where the state is on CUDA, and cut into images and pages like
the device's, but that all layers of a page lie together: pages lie anywhere, on both sides, and a
copy for each layer of each would hold the engine for longer than the bytes take. They are gathered
a few at a time, in memory that is made for it. Copies are queued on the stream that everything else
runs on: what was launched before them is in them, and what is launched later finds them done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifier.state import Residency, StateImage, TargetState

# host images that an image on the device may have behind it, however large the budget is
_MOST_PER_DEVICE_IMAGE = 64
STAGED_PAGES = 16  # gathered at a time


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

        def room(*shape: int, like: Tensor) -> Tensor:
            return torch.zeros(shape, dtype=like.dtype, pin_memory=pinned)

        def image_room(plane: Tensor) -> Tensor:
            return room(plane.shape[0], self.image_count, *plane.shape[2:], like=plane)

        self._gdn = image_room(state.gdn)
        self._conv_history = image_room(state.conv_history)
        hidden = state.continuation
        self._continuation = room(self.image_count, hidden.shape[1], like=hidden)
        self._paged = tuple(
            _PagedPlane(plane, room(self.page_count, plane.shape[0], *plane.shape[2:], like=plane))
            for plane in (state.key_pages, state.value_pages)
        )
        self._free_images = list(reversed(range(self.image_count)))
        self._free_pages = list(reversed(range(self.page_count)))

    @property
    def byte_count(self) -> int:
        """Host memory taken."""
        return (
            self._gdn.nbytes
            + self._conv_history.nbytes
            + self._continuation.nbytes
            + sum(plane.host.nbytes for plane in self._paged)
        )

    @property
    def staged_bytes(self) -> int:
        """Device memory taken, for pages on their way."""
        return sum(plane.staged.nbytes for plane in self._paged)

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
        for plane in self._paged:
            plane.store(pages, image.pages)
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
        for plane in self._paged:
            plane.load(stored.pages, residency.pages)
        return True

    def forget(self, stored: HostImage) -> None:
        """Gives an image's room back."""
        self._free_images.append(stored.index)
        self._free_pages.extend(reversed(stored.pages))

    def _planes(self) -> tuple[tuple[Tensor, Tensor], ...]:
        state = self._state
        return (self._gdn, state.gdn), (self._conv_history, state.conv_history)


class _PagedPlane:
    """Keys or values of all pages, here and on the device.

    Args:
        device_pages: [Lf, pages, page, Hkv, D], the state's.
        host: [pages, Lf, page, Hkv, D].
    """

    def __init__(self, device_pages: Tensor, host: Tensor) -> None:
        self.host = host
        self._by_page = device_pages.transpose(0, 1)
        count = min(STAGED_PAGES, len(host))
        self.staged = torch.empty(
            (count, *host.shape[1:]), dtype=host.dtype, device=device_pages.device
        )

    def store(self, ours: Sequence[int], theirs: Sequence[int]) -> None:
        """Copies pages of the device here."""
        for first, places in self._batches(theirs):
            staged = self.staged[: len(places)]
            torch.index_select(self._by_page, 0, places, out=staged)
            for start, page, count in _runs(ours[first : first + len(places)]):
                _copy(self.host[page : page + count], staged[start : start + count])

    def load(self, ours: Sequence[int], theirs: Sequence[int]) -> None:
        """Copies pages from here to the device."""
        for first, places in self._batches(theirs[: len(ours)]):
            staged = self.staged[: len(places)]
            for start, page, count in _runs(ours[first : first + len(places)]):
                _copy(staged[start : start + count], self.host[page : page + count])
            self._by_page.index_copy_(0, places, staged)

    def _batches(self, pages: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """As many pages at a time as are staged: the first one's number, and where they lie."""
        # pinned, so that the engine does not wait for what the device has yet to do
        places = torch.tensor(pages, dtype=torch.int64, pin_memory=self.staged.is_cuda)
        places = places.to(self.staged.device, non_blocking=True)
        for first in range(0, len(pages), STAGED_PAGES):
            yield first, places[first : first + STAGED_PAGES]


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


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Where pages follow each other: (number of the first, that page, how many)."""
    start = 0
    for number in range(1, len(pages) + 1):
        if number == len(pages) or pages[number] != pages[number - 1] + 1:
            yield start, pages[start], number - start
            start = number
