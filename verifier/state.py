"""Everything that a target remembers between calls, allocated once at construction.

A resident sequence holds three separate things, which `Residency` names: a lane (its line of page
tables and of the continuation hidden), a state slot (GDN states and convolution history) and KV
pages. None of them is a batch row: rows are formed anew each round from any residencies.

GDN state cannot be cut back, so a prefix can be continued only where its whole state was kept: an
image. Pages may have several holders. A shared page is written to only behind the frontiers of all
its holders but one, so sharing one never changes what another reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kernels.gdn_verify import GdnRecord
from verifier.config import CONV_TAPS, TargetConfig

PAGE_SIZE = 64  # positions of a KV page


@dataclass(eq=False)
class Residency:
    """What one resident sequence holds, until it is released."""

    lane: int
    state_slot: int
    # physical page of each `page_size` consecutive positions; full ones may be shared
    pages: list[int]


@dataclass(frozen=True, eq=False)
class StateImage:
    """A sequence's state as it stood when the target had processed [0, frontier).

    GDN states and history lie in a state slot of its own, the continuation hidden in a line of its
    own; pages are shared with whoever else holds them, and of the last one only the positions
    below the frontier belong to the image.
    """

    state_slot: int
    line: int
    pages: tuple[int, ...]
    frontier: int


class StateRows(NamedTuple):
    """Where the state of each row of a batch lies, as device inputs: int64 [B] each."""

    lanes: Tensor
    slots: Tensor

    @classmethod
    def of(cls, residencies: Sequence[Residency], device: torch.device) -> Self:
        """The rows of these residencies, in order."""
        held = torch.tensor([(r.lane, r.state_slot) for r in residencies], device=device)
        return cls(held[:, 0].contiguous(), held[:, 1].contiguous())


class TargetState:
    """Paged KV, GDN states, convolution history, verify records and continuation hidden.

    Lf counts attention blocks, Lg GDN blocks. All tensors are made here; nothing later allocates.
    """

    def __init__(
        self,
        config: TargetConfig,
        *,
        lanes: int,
        max_context: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        page_size: int = PAGE_SIZE,
        block_rows: int | None = None,
        page_count: int | None = None,
        image_count: int = 0,
    ) -> None:
        """Allocates for `lanes` residents of up to `max_context` positions each.

        Args:
            config: the target's sizes.
            lanes: residents at once.
            max_context: positions a resident may reach.
            width: W, most columns of a verify block.
            dtype: activations; FP32 keeps KV in FP32, BF16 keeps K in BF16 and V in FP16.
            device: where the state lives.
            page_size: positions a KV page holds.
            block_rows: most rows of a verify block, dead ones included; as many as lanes unless
                given.
            page_count: KV pages of all residents and images together; None is enough for every
                lane at once.
            image_count: state images beside those of the residents.
        """
        self.page_size = page_size
        self.width = width
        self.max_context = max_context
        table_length = -(-max_context // page_size)
        page_count = lanes * table_length if page_count is None else page_count
        block = (block_rows or lanes, width)
        shapes = _shapes(config, lanes, image_count, page_count, block, page_size, dtype)
        self.spare_lane = lanes  # a line of the continuation that nobody's lane is
        made = {
            name: torch.zeros(shape, dtype=kind, device=device)
            for name, (_, shape, kind) in shapes.items()
        }
        self._plan = [
            (what, math.prod(shape) * kind.itemsize) for what, shape, kind in shapes.values()
        ]
        self.key_pages: Tensor = made["key_pages"]  # [Lf, pages, page, Hkv, D]
        self.value_pages: Tensor = made["value_pages"]  # [Lf, pages, page, Hkv, D]
        self.gdn: Tensor = made["gdn"]  # [Lg, slots, Hv, Dk, Dv] FP32
        self.conv_history: Tensor = made["conv_history"]  # [Lg, slots, 3, C], oldest first
        self.continuation: Tensor = made["continuation"]  # [lanes + 1 + images, H]
        # records of the last verify block, room for every plane [Lg, rows, W, ...]
        self.records = GdnRecord(
            conv=made["record_conv"],
            key=made["record_key"],
            value=made["record_value"],
            gate=made["record_gate"],
        )
        self.page_tables = torch.zeros((lanes, table_length), dtype=torch.int64, device=device)
        self._free_lanes = list(reversed(range(lanes)))
        self._free_slots = list(reversed(range(lanes)))
        self._image_count = image_count
        self._free_images = list(reversed(range(image_count)))
        self._free_pages = list(reversed(range(page_count)))
        self._holders = [0] * page_count
        self._residents: dict[int, Residency] = {}

    def plan(self) -> list[tuple[str, int]]:
        """What was allocated, as (what, bytes)."""
        return list(self._plan)

    def occupancy(self) -> dict[str, tuple[int, int]]:
        """Used and free lanes, state slots, images and pages; callable from any thread."""
        lanes = self.page_tables.shape[0]
        free = {
            "lanes": (lanes, len(self._free_lanes)),
            "state_slots": (lanes, len(self._free_slots)),
            "images": (self._image_count, len(self._free_images)),
            "pages": (len(self._holders), len(self._free_pages)),
        }
        return {name: (total - left, left) for name, (total, left) in free.items()}

    @property
    def page_count(self) -> int:
        """Pages in all."""
        return len(self._holders)

    @property
    def has_lane(self) -> bool:
        """Whether another resident could be taken, pages aside."""
        return bool(self._free_lanes and self._free_slots)

    @property
    def free_page_count(self) -> int:
        """Pages that nobody holds."""
        return len(self._free_pages)

    @property
    def free_image_count(self) -> int:
        """Images that could still be captured."""
        return len(self._free_images)

    def pages_of(self, position_count: int) -> int:
        """Pages that hold so many positions."""
        return -(-position_count // self.page_size)

    def acquire(self, position_count: int) -> Residency | None:
        """Takes a lane, a zeroed state slot and pages for `position_count` positions, maybe none.

        Returns:
            None while there are not enough of them.

        Raises:
            ValueError: more positions than any resident may have.
        """
        if not 0 <= position_count <= self.max_context:
            raise ValueError(
                f"position_count: expected 0..{self.max_context}, got {position_count}"
            )
        enough_pages = self.pages_of(position_count) <= self.free_page_count
        if not self._free_lanes or not self._free_slots or not enough_pages:
            return None
        residency = Residency(self._free_lanes.pop(), self._free_slots.pop(), [])
        self._residents[residency.lane] = residency
        self.gdn[:, residency.state_slot].zero_()
        self.conv_history[:, residency.state_slot].zero_()
        self.grow(residency, position_count)
        return residency

    def grow(self, residency: Residency, position_count: int) -> bool:
        """Adds the pages that `position_count` positions need; False, and none, while they lack."""
        missing = self.pages_of(position_count) - len(residency.pages)
        if missing > self.free_page_count:
            return False
        self._attach(residency, [self._take_page() for _ in range(missing)])
        return True

    def release(self, residency: Residency) -> None:
        """Gives everything back; a second release of the same residency does nothing."""
        if not self.holds(residency):
            return
        del self._residents[residency.lane]
        self._free_lanes.append(residency.lane)
        self._free_slots.append(residency.state_slot)
        self.drop_pages(residency.pages)

    def view(self, residency: Residency, frontier: int) -> StateImage:
        """A resident's state as an image that owns nothing; it is right until the state moves."""
        pages = residency.pages[: self.pages_of(frontier)]
        return StateImage(residency.state_slot, residency.lane, tuple(pages), frontier)

    def capture(self, residency: Residency, frontier: int) -> StateImage | None:
        """Copies a resident's state, which stands at `frontier`, and shares its pages.

        Sharing the last page too is sound: the resident goes on to write behind the frontier alone.

        Returns:
            None while no image is free.
        """
        image = self.take_image(self.view(residency, frontier).pages, frontier)
        if image is not None:
            self._copy_state(image.state_slot, image.line, self.view(residency, frontier))
        return image

    def take_image(self, pages: Sequence[int], frontier: int) -> StateImage | None:
        """An image of arbitrary content that holds ``pages`` too; None while no image is free."""
        if not self._free_images:
            return None
        index = self._free_images.pop()
        for page in pages:
            self._holders[page] += 1
        lanes = self.spare_lane
        return StateImage(lanes + index, lanes + 1 + index, tuple(pages), frontier)

    def forget(self, image: StateImage) -> None:
        """Gives back what a captured image holds; pages stay with their other holders."""
        self._free_images.append(image.state_slot - self.spare_lane)
        self.drop_pages(image.pages)

    def resume(self, residency: Residency, source: StateImage, position_count: int) -> bool:
        """Lets a resident without pages continue `source`, with room for so many positions.

        Full pages are shared; a page that the frontier cuts is copied, because both will write to
        it.

        Returns:
            False, and nothing is changed, while pages are lacking.
        """
        assert not residency.pages
        full = source.frontier // self.page_size
        if self.pages_of(max(position_count, source.frontier)) - full > self.free_page_count:
            return False
        shared = list(source.pages[:full])
        for page in shared:
            self._holders[page] += 1
        self._attach(residency, shared)
        if source.frontier % self.page_size:
            tail = self._take_page()
            self.copy_page(tail, source.pages[full])
            self._attach(residency, [tail])
        self._copy_state(residency.state_slot, residency.lane, source)
        return self.grow(residency, position_count)

    def copy_page(self, page: int, source: int) -> None:
        """Copies the KV of one page over another, all layers."""
        self.key_pages[:, page].copy_(self.key_pages[:, source])
        self.value_pages[:, page].copy_(self.value_pages[:, source])

    def take_pages(self, count: int) -> list[int] | None:
        """Pages for an image that is about to be written, held once; None while they lack."""
        if count > self.free_page_count:
            return None
        return [self._take_page() for _ in range(count)]

    def _copy_state(self, slot: int, line: int, source: StateImage) -> None:
        self.gdn[:, slot].copy_(self.gdn[:, source.state_slot])
        self.conv_history[:, slot].copy_(self.conv_history[:, source.state_slot])
        self.continuation[line].copy_(self.continuation[source.line])

    def _attach(self, residency: Residency, pages: list[int]) -> None:
        if not pages:
            return
        first = len(residency.pages)
        residency.pages += pages
        entries = self.page_tables[residency.lane, first : first + len(pages)]
        # from memory that is not pinned, the copy has read its source when it returns
        entries.copy_(torch.tensor(pages, dtype=torch.int64), non_blocking=True)

    def _take_page(self) -> int:
        page = self._free_pages.pop()
        self._holders[page] = 1
        return page

    def drop_pages(self, pages: Sequence[int]) -> None:
        """Ends one holding of each page."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free_pages.append(page)

    def holds(self, residency: Residency) -> bool:
        """Whether the residency is still acquired."""
        return self._residents.get(residency.lane) is residency

    def record_view(self, rows: int, columns: int) -> GdnRecord:
        """The records of a block of [rows, columns]: every plane [Lg, rows, columns, ...].

        Blocks of all sizes share the memory: the records of one are lost to the next.
        """

        def part(plane: Tensor) -> Tensor:
            shape = (plane.shape[0], rows, columns, *plane.shape[3:])
            return plane.flatten()[: math.prod(shape)].view(shape)

        return GdnRecord(*map(part, self.records))


def state_plan(
    config: TargetConfig,
    *,
    lanes: int,
    max_context: int,
    width: int,
    dtype: torch.dtype,
    page_size: int = PAGE_SIZE,
    block_rows: int | None = None,
    page_count: int | None = None,
    image_count: int = 0,
) -> list[tuple[str, int]]:
    """What a `TargetState` of these sizes would allocate, as (what, bytes)."""
    pages = lanes * -(-max_context // page_size) if page_count is None else page_count
    block = (block_rows or lanes, width)
    shapes = _shapes(config, lanes, image_count, pages, block, page_size, dtype)
    return [(what, math.prod(shape) * kind.itemsize) for what, shape, kind in shapes.values()]


def _shapes(
    config: TargetConfig,
    lanes: int,
    images: int,
    pages: int,
    block: tuple[int, int],  # most rows and columns of a verify block
    page_size: int,
    dtype: torch.dtype,
) -> dict[str, tuple[str, tuple[int, ...], torch.dtype]]:
    """Every tensor of the state: what it is, extents, element type."""
    # BF16 keys are normalised and lose little; values keep more bits as FP16 in the same room
    value_dtype = torch.float16 if dtype == torch.bfloat16 else dtype
    full, gdn = config.full_layer_count, config.gdn_layer_count
    page = (full, pages, page_size, config.key_value_head_count, config.head_dim)
    key_heads, value_heads = config.gdn_key_head_count, config.gdn_value_head_count
    key_dim, value_dim, channels = config.gdn_key_dim, config.gdn_value_dim, config.conv_channels
    recorded = (gdn, *block)
    return {
        "key_pages": ("KV: keys", page, dtype),
        "value_pages": ("KV: values", page, value_dtype),
        "gdn": (
            "GDN states",
            (gdn, lanes + images, value_heads, key_dim, value_dim),
            torch.float32,
        ),
        "conv_history": (
            "convolution history",
            (gdn, lanes + images, CONV_TAPS - 1, channels),
            dtype,
        ),
        "continuation": ("continuation hidden", (lanes + 1 + images, config.hidden_size), dtype),
        "record_conv": ("records: columns", (*recorded, channels), dtype),
        "record_key": ("records: keys", (*recorded, key_heads, key_dim), dtype),
        "record_value": ("records: values", (*recorded, value_heads, value_dim), dtype),
        "record_gate": ("records: gates", (*recorded, value_heads, 2), torch.float32),
    }
