"""Moves the columns of an accepted branch to the front, as if the block had been that chain.

Maths: with columns[b] as `kernels.tree_accept` gives them, place i of row b takes what column
    columns[b, i] holds. Where the two are equal nothing moves.
Shapes: columns int64 [B, W].
    `compact_columns`: planes [L, B, W, ...].
    `compact_pages`: key_pages and value_pages [L, pages, page, Hkv, D], page_tables int64 [B, N],
    frontiers int64 [B]: column c lies at position F + c, in physical page
    page_tables[b, (F + c) // page] at offset (F + c) % page.
Domain: 0 <= columns < W <= 32. No place that takes another's column is itself taken from: so it is
    in a tree whose first path has columns 0..K, for an accepted column is either its own place or
    beyond K. Everything but the dimensions L, B and W of a plane is contiguous; table entries are
    looked at where something moves. No two live cells coincide.
Numerics: copies of bits, of any dtype.
Effects: writes the places that take another column's, in every layer, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.checks import require, require_that
from kernels.dispatch import select

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def compact_columns(planes: Sequence[Tensor], columns: Tensor) -> None:
    """Moves columns of planes that have one entry a column; see the module's contract.

    Args:
        planes: [L, B, W, ...] each, written in place.
        columns: [B, W] int64.

    Raises:
        ValueError: a shape or dtype does not fit, or an entry is not contiguous.
    """
    batch, width = columns.shape
    require("columns", columns, (batch, width), torch.int64)
    for index, plane in enumerate(planes):
        name = f"planes[{index}]"
        require(name, plane, (plane.shape[0], batch, width, *plane.shape[3:]))
        require_that(
            plane.numel() == 0 or plane[0, 0, 0].is_contiguous(),
            name,
            "contiguous entries",
            f"strides {plane.stride()[3:]}",
        )
    select("tree_compact", columns).compact_columns(planes, columns)


def compact_pages(
    key_pages: Tensor, value_pages: Tensor, page_tables: Tensor, frontiers: Tensor, columns: Tensor
) -> None:
    """Moves columns' keys and values between their cells; see the module's contract.

    Args:
        key_pages: [L, pages, page, Hkv, D], written in place.
        value_pages: [L, pages, page, Hkv, D], written in place.
        page_tables: [B, N] int64, physical page of each logical page.
        frontiers: [B] int64, F: the anchor's position.
        columns: [B, W] int64.

    Raises:
        ValueError: a shape or dtype does not fit, or pages are not contiguous.
    """
    batch, width = columns.shape
    require("columns", columns, (batch, width), torch.int64)
    require("key_pages", key_pages, (None, None, None, None, None))
    require("value_pages", value_pages, key_pages.shape)
    require("page_tables", page_tables, (batch, None), torch.int64)
    require("frontiers", frontiers, (batch,), torch.int64)
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        require_that(pages.is_contiguous(), name, "contiguous pages", pages.stride())
    select("tree_compact", columns).compact_pages(
        key_pages, value_pages, page_tables, frontiers, columns
    )
