"""Paths through trees of columns, as Triton code finds them from the masks (`kernels.trees`).

A path leads from the anchor to a column that no other continues; they are numbered by those last
columns. A column's place on a path that passes it is its depth.
"""

import triton
import triton.language as tl

from kernels.trees import MOST_COLUMNS

BITS = tl.constexpr(MOST_COLUMNS)


@triton.jit
def depth_of(mask):
    """How many columns lie before one with this mask on its way from the anchor."""
    return tl.sum((mask >> tl.arange(0, BITS)) & 1, axis=0) - 1


@triton.jit
def places_of(mask):
    """For each of 32 columns its place among the members of a mask, or -1."""
    bit = (mask >> tl.arange(0, BITS)) & 1
    return tl.where(bit != 0, tl.cumsum(bit, axis=0) - 1, -1)


@triton.jit
def column_at(places, place):
    """The column at a place; 0 where there is none."""
    return tl.sum(tl.where(places == place, tl.arange(0, BITS), 0), axis=0)


@triton.jit
def path_of(ancestors, count, path):
    """Places of the columns of a row's path of this number, and which no earlier path has."""
    column = tl.arange(0, BITS)
    masks = tl.load(ancestors + column, mask=column < count, other=0)
    sees = (masks[:, None] >> column[None, :]) & 1
    # a path ends at a column that none sees but itself
    last = (column < count) & (tl.sum(sees, axis=0) == 1)
    number = tl.cumsum(last.to(tl.int32), axis=0) - 1
    places = places_of(tl.sum(tl.where(last & (number == path), masks, 0), axis=0))
    earlier = (last & (number < path)).to(tl.int32)
    return places, (places >= 0) & (tl.max(sees * earlier[:, None], axis=0) == 0)


@triton.jit
def path_masks(ancestors, count, path, COLUMNS: tl.constexpr):
    """The mask of a row's path of this number, counted from the back, and of all before together.

    One of the row's COLUMNS after the other, for the compiler to see that all threads have the
    same: where it does not, matrix products in a branch that depends on it take more registers.
    """
    mask = path * 0
    earlier = mask
    seen = mask
    number = mask
    for column in tl.static_range(COLUMNS - 1, -1, -1):
        sees = tl.load(ancestors + column, mask=column < count, other=0)
        last = (sees != 0) & (((seen >> column) & 1) == 0)
        mask = tl.where(last & (number == path), sees, mask)
        earlier |= tl.where(last & (number < path), sees, 0)
        number += last.to(tl.int32)
        seen |= sees
    return mask, earlier


@triton.jit
def member_count(mask, column):
    """How many members a mask has among the columns up to this one, 0..31."""
    word = (mask & ((2 << column) - 1)).to(tl.uint32, bitcast=True)
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word += word >> 8
    return ((word + (word >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def columns_at(mask, place):
    """The columns at a vector of places among the members of a mask; 0 where there is none."""
    column = tl.arange(0, BITS)
    places = tl.where((mask >> column) & 1 != 0, member_count(mask, column), 0)
    hit = place[:, None] + 1 == places[None, :]
    return tl.sum(tl.where(hit, column[None, :], 0), axis=1)
