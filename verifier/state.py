"""Everything that a target remembers between calls, allocated once at construction.

A resident sequence holds three separate things, which `Residency` names: a lane (its line of page
tables and of the continuation hidden), a state slot (GDN states and convolution history) and KV
pages. None of them is a batch row: rows are formed anew each round from any residencies.
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


@dataclass(frozen=True, eq=False)
class Residency:
    """What one resident sequence holds, until it is released."""

    lane: int
    state_slot: int
    pages: tuple[int, ...]  # physical page of each `page_size` consecutive positions
    position_count: int  # positions that the pages have room for


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
        page_size: int = 64,
        block_rows: int | None = None,
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
        """
        self.page_size = page_size
        self.width = width
        self.max_context = max_context
        table_length = -(-max_context // page_size)
        shapes = _shapes(
            config, lanes, lanes * table_length, (block_rows or lanes, width), page_size, dtype
        )
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
        self.continuation: Tensor = made["continuation"]  # [lanes + 1, H]
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
        self._free_pages = list(reversed(range(lanes * table_length)))
        self._page_count = len(self._free_pages)
        self._residents: dict[int, Residency] = {}

    def plan(self) -> list[tuple[str, int]]:
        """What was allocated, as (what, bytes)."""
        return list(self._plan)

    def occupancy(self) -> dict[str, tuple[int, int]]:
        """Used and free lanes, state slots and pages; callable from any thread."""
        lanes = self.page_tables.shape[0]
        free = {
            "lanes": (lanes, len(self._free_lanes)),
            "state_slots": (lanes, len(self._free_slots)),
            "pages": (self._page_count, len(self._free_pages)),
        }
        return {name: (total - left, left) for name, (total, left) in free.items()}

    def acquire(self, position_count: int) -> Residency | None:
        """Takes a lane, a zeroed state slot and pages for `position_count` positions.

        Returns:
            None while there are not enough of them.

        Raises:
            ValueError: more positions than any resident may have.
        """
        if not 1 <= position_count <= self.max_context:
            raise ValueError(
                f"position_count: expected 1..{self.max_context}, got {position_count}"
            )
        page_count = -(-position_count // self.page_size)
        if not self._free_lanes or not self._free_slots or page_count > len(self._free_pages):
            return None
        residency = Residency(
            lane=self._free_lanes.pop(),
            state_slot=self._free_slots.pop(),
            pages=tuple(self._free_pages.pop() for _ in range(page_count)),
            position_count=position_count,
        )
        self._residents[residency.lane] = residency
        self.gdn[:, residency.state_slot].zero_()
        self.conv_history[:, residency.state_slot].zero_()
        table = torch.tensor(residency.pages, dtype=torch.int64)
        self.page_tables[residency.lane, :page_count] = table.to(self.page_tables.device)
        return residency

    def release(self, residency: Residency) -> None:
        """Gives everything back; a second release of the same residency does nothing."""
        if self._residents.get(residency.lane) is not residency:
            return
        del self._residents[residency.lane]
        self._free_lanes.append(residency.lane)
        self._free_slots.append(residency.state_slot)
        self._free_pages.extend(reversed(residency.pages))

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
    page_size: int = 64,
    block_rows: int | None = None,
) -> list[tuple[str, int]]:
    """What a `TargetState` of these sizes would allocate, as (what, bytes)."""
    pages = lanes * -(-max_context // page_size)
    shapes = _shapes(config, lanes, pages, (block_rows or lanes, width), page_size, dtype)
    return [(what, math.prod(shape) * kind.itemsize) for what, shape, kind in shapes.values()]


def _shapes(
    config: TargetConfig,
    lanes: int,
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
        "gdn": ("GDN states", (gdn, lanes, value_heads, key_dim, value_dim), torch.float32),
        "conv_history": ("convolution history", (gdn, lanes, CONV_TAPS - 1, channels), dtype),
        "continuation": ("continuation hidden", (lanes + 1, config.hidden_size), dtype),
        "record_conv": ("records: columns", (*recorded, channels), dtype),
        "record_key": ("records: keys", (*recorded, key_heads, key_dim), dtype),
        "record_value": ("records: values", (*recorded, value_heads, value_dim), dtype),
        "record_gate": ("records: gates", (*recorded, value_heads, 2), torch.float32),
    }
