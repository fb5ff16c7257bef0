"""Copies several tensors at once, each into a place of its own type.

Maths:
    destination = source, for every pair

Shapes:
    of each pair: source and destination of any one shape

Domain:
    1 to 8 pairs; destinations are contiguous and overlap nothing.

Numerics:
    A number that the destination's dtype does not hold is converted as torch does: nothing here
    rounds where both are integers in range, or of one dtype.

Effects:
    Writes the destinations.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.checks import require, require_that
from kernels.dispatch import select

MOST_PAIRS = 8


def cast_together(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """Copies each source into its destination; see the module's contract.

    Args:
        sources: tensors of any shape and dtype.
        destinations: one for each, of the same shape.

    Raises:
        ValueError: another number or shape of destinations, or one that is not contiguous.
    """
    require_that(0 < len(sources) <= MOST_PAIRS, "sources", f"1..{MOST_PAIRS}", len(sources))
    require_that(
        len(destinations) == len(sources), "destinations", str(len(sources)), len(destinations)
    )
    for source, destination in zip(sources, destinations, strict=True):
        require("destination", destination, source.shape)
        is_whole = destination.is_contiguous()
        require_that(is_whole, "destination", "contiguous memory", destination.stride())
    select("cast_together", sources[0]).cast_together(sources, destinations)
