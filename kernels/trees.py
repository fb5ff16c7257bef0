"""Trees of columns: how a block says which of its columns continue which.

Column 0 is the anchor and column c = 1.. of a row continues column parents[c - 1] < c. A column
sees the columns on its way from the anchor, itself included: its ancestors, as bits of one 32-bit
word. A chain is the tree in which every column continues the one before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST_COLUMNS = 32  # bits of a mask, the anchor's among them
MOST_PATHS = 8  # from the anchor to a column that nothing continues


def ancestor_masks(parents: Tensor) -> Tensor:
    """The ancestors of every column.

    Args:
        parents: [B, N] int64, column that columns 1..N continue, below their own.

    Returns:
        [B, N + 1] int32; bit j of entry c says that column c sees column j.
    """
    masks = parents.new_ones(parents.shape[0], parents.shape[1] + 1)
    for column in range(1, masks.shape[1]):
        seen = masks.gather(1, parents[:, column - 1 : column]).squeeze(1)
        masks[:, column] = seen | (1 << column)
    # the top bit is the sign
    return masks.to(torch.int32)


def members(masks: Tensor) -> Tensor:
    """Masks [B, W] int32 as bool [B, W, W]: whether column c (dimension 1) sees column j."""
    bits = torch.arange(masks.shape[1], device=masks.device, dtype=torch.int32)
    return torch.bitwise_right_shift(masks.unsqueeze(2), bits).bitwise_and_(1).bool()


def depths(masks: Tensor) -> Tensor:
    """How many columns lie before each on its way from the anchor, [B, W] int64."""
    return members(masks).sum(dim=2) - 1
