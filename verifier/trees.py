"""Trees in rounds: how wide they may be, which proposals are one, and their masks.

Column 0 of a tree is the anchor, columns 1..K are what a chain would propose, and those behind them
continue any earlier column. A block with trees is as wide as its widest; beside them chains run as
trees whose every column continues the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.faults import FaultError
from outrider.tree_nodes import TreeNodes


@dataclass(frozen=True)
class TreeAsk:
    """The most that a row's tree may have."""

    nodes: int  # columns, the anchor among them
    paths: int  # leaves


class Trees(Protocol):
    """Chooses how wide the trees of a round are.

    Attributes:
        widths: What it chooses from but for chains, ascending.
    """

    widths: tuple[int, ...]

    def columns(self, row_count: int, frontier: int) -> int:
        """Columns for the next round; 0 for chains.

        Args:
            row_count: Samples in the round.
            frontier: F of the one that is furthest.
        """

    def round_ended(self, row_count: int, frontier: int, columns: int, elapsed_ns: int) -> None:
        """Learns what a round with proposals cost; ``columns`` is 0 where it had no tree."""

    def committed(self, nodes: int, columns: Sequence[int]) -> None:
        """Learns what proposals brought.

        Args:
            nodes: Columns that the tree might have; 0 for a chain.
            columns: Those of the accepted proposals, ascending.
        """

    def choices(self) -> Mapping[str, float]:
        """Columns by the load that they are for; callable from any thread."""


class ListedTrees:
    """Widths as the flag lists them."""

    def __init__(self, nodes: TreeNodes, draft_tokens: int) -> None:
        self._nodes = nodes
        self.widths = nodes.widths(draft_tokens)

    def columns(self, row_count: int, frontier: int) -> int:
        """See `Trees`."""
        return self._nodes.for_rows(row_count)

    def round_ended(self, row_count: int, frontier: int, columns: int, elapsed_ns: int) -> None:
        """A list learns nothing."""

    def committed(self, nodes: int, columns: Sequence[int]) -> None:
        """A list learns nothing."""

    def choices(self) -> Mapping[str, float]:
        """See `Trees`."""
        listed = self._nodes.by_rows
        return {f"{rows} rows": float(columns) for rows, columns in enumerate(listed, 1)}


def tree_widths(
    nodes: TreeNodes, draft_tokens: int, block_rows: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Columns that the trees of a block may have, ascending, by the rows of the block.

    Args:
        nodes: What the flag says.
        draft_tokens: K.
        block_rows: Of rounds of 1, 2, ... samples.
    """
    widths: dict[int, set[int]] = {}
    for samples, rows in enumerate(block_rows, 1):
        widths.setdefault(rows, set()).update(nodes.widths(draft_tokens, samples))
    return {rows: tuple(sorted(found)) for rows, found in widths.items() if found}


def masks_of(parents: Sequence[int], width: int) -> list[int]:
    """The ancestors of each column as bits of an int32; dead columns continue the last one.

    Args:
        parents: Column that each of columns 1..N continues.
        width: Columns in all, at most 32.
    """
    masks = [1]
    for column in range(1, width):
        parent = parents[column - 1] if column <= len(parents) else column - 1
        masks.append(masks[parent] | 1 << column)
    # the top bit is the sign
    return [mask - (mask >> 31 << 32) for mask in masks]


def depths_of(parents: Sequence[int]) -> list[int]:
    """How many columns lie before each of columns 0..N on its way from the anchor."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


def expect_tree(parents: Sequence[int], draft_tokens: int, asked: TreeAsk) -> None:
    """Checks that proposals with these parents are a tree that may be verified.

    Args:
        parents: Column that each of columns 1..N continues.
        draft_tokens: K.
        asked: What it may have.

    Raises:
        FaultError: PROPOSAL_INVALID for parents that are none, another main chain than columns
            1..K, a column below depth K, or too many columns or leaves.
    """
    columns = len(parents) + 1
    _expect(columns <= asked.nodes, f"at most {asked.nodes} columns", columns)
    _expect(all(p < c for c, p in enumerate(parents, 1)), "parents before their columns", "others")
    chain = list(range(draft_tokens))
    _expect(list(parents[:draft_tokens]) == chain, f"a chain of {draft_tokens} first", "another")
    deepest = max(depths_of(parents))
    _expect(deepest <= draft_tokens, f"depths up to {draft_tokens}", deepest)
    leaves = columns - len({0, *parents})
    _expect(leaves <= asked.paths, f"at most {asked.paths} leaves", leaves)


def expect_siblings(
    parents: Sequence[int],
    tokens: NDArray[np.int32],
    support: NDArray[np.int32],
    mass: NDArray[np.float32],
) -> None:
    """Checks that columns of one parent were drawn from one law without replacement.

    Args:
        parents: Column that each of columns 1..N continues.
        tokens: [N], those of the columns.
        support: [N, k] their candidates.
        mass: [N, k] their laws.

    Raises:
        FaultError: PROPOSAL_INVALID.
    """
    siblings: dict[int, list[int]] = {}
    for line, parent in enumerate(parents):
        siblings.setdefault(parent, []).append(line)
    for lines in siblings.values():
        if len(lines) > 1:
            _expect_siblings(tokens[lines], support[lines], mass[lines])


def _expect_siblings(
    tokens: NDArray[np.int32], support: NDArray[np.int32], mass: NDArray[np.float32]
) -> None:
    distinct = len(set(tokens.tolist())) == len(tokens)
    _expect(distinct, "siblings of different tokens", "equal ones")
    alike = bool((support == support[0]).all())
    _expect(alike, "siblings of the same candidates", "different ones")
    _expect(len(set(support[0].tolist())) == support.shape[1], "different candidates", "equal ones")
    drawn = bool((mass == mass[0]).all())
    # greedy rows take the best that is left: each sibling is a point mass of its own
    chosen = bool(((support == tokens[:, None]) == (mass == 1)).all())
    _expect(drawn or chosen, "siblings of one law", "several")


def _expect(holds: bool, expected: str, actual: object) -> None:
    if not holds:
        # no ids: this is logged
        raise FaultError("PROPOSAL_INVALID", f"tree: expected {expected}, got {actual}")


def accepted_within(columns: Sequence[int], width: int) -> int:
    """How many of the accepted columns a tree of the first ``width`` columns would have had too."""
    return next((depth for depth, column in enumerate(columns) if column >= width), len(columns))


def main_chain(columns: Sequence[int]) -> int:
    """How many of the accepted columns, ascending, are the chain's own."""
    return sum(1 for depth, column in enumerate(columns, 1) if depth == column)
