"""Plain torch form; see the contract."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def cast_together(sources: Sequence[Tensor], destinations: Sequence[Tensor]) -> None:
    """See the contract."""
    for source, destination in zip(sources, destinations, strict=True):
        destination.copy_(source)
