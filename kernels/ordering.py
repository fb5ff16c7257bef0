"""The order in which tokens are ranked: larger first, equal ones by the lower id."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def top_ranks(values: Tensor, count: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Ranks the `count` largest entries of each row, exact ties by the lower id.

    `topk` leaves the order of equal entries open and a stable sort of a vocabulary costs ten
    times as much, so only a tie is sorted.

    Args:
        values: [M, N].
        count: how many, at most N.
        ids: [N] int64 distinct ids of the columns; the column number itself where absent.

    Returns:
        values [M, count] and columns [M, count] int64.
    """
    # one rank more than wanted shows a tie across the end
    ranked, columns = values.topk(min(count + 1, values.shape[1]), dim=1)
    if (ranked[:, 1:] == ranked[:, :-1]).any():
        if ids is None:
            ranked, columns = values.sort(dim=1, descending=True, stable=True)
        else:
            by_id = ids.argsort()
            ranked, order = values[:, by_id].sort(dim=1, descending=True, stable=True)
            columns = by_id[order]
    return ranked[:, :count], columns[:, :count]
