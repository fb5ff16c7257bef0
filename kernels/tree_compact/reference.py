"""Plain torch form: all that moves is read before any of it is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def compact_columns(planes: Sequence[Tensor], columns: Tensor) -> None:
    """See the contract."""
    rows, places, sources = _moves(columns)
    if rows.numel():
        for plane in planes:
            plane[:, rows, places] = plane[:, rows, sources]


def compact_pages(
    key_pages: Tensor, value_pages: Tensor, page_tables: Tensor, frontiers: Tensor, columns: Tensor
) -> None:
    """See the contract."""
    rows, places, sources = _moves(columns)
    if not rows.numel():
        return
    page = key_pages.shape[2]
    to, source = frontiers[rows] + places, frontiers[rows] + sources
    cell = page_tables[rows, to // page], to % page
    source_cell = page_tables[rows, source // page], source % page
    for pages in (key_pages, value_pages):
        pages[:, *cell] = pages[:, *source_cell]


def _moves(columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row, place and source column of everything that moves."""
    here = torch.arange(columns.shape[1], device=columns.device)
    rows, places = (columns != here).nonzero(as_tuple=True)
    return rows, places, columns[rows, places]
