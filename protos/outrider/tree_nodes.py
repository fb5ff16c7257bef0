"""What `--draft-tree-nodes` says: how many columns a round's trees have, by how many rows share it.

Both services are given the same flag: the verifier chooses among the widths, and the drafter grows
trees up to the widest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

# bits of a column's mask, and leaves of a tree
MOST_COLUMNS = 32
MOST_PATHS = 8
LEAST_PATHS = 2
# columns beyond a chain's among which `auto` chooses; few, as each costs graphs and time to measure
AUTO_FURTHER = (4, 8, 16)


@dataclass(frozen=True)
class TreeNodes:
    """The flag's value.

    Attributes:
        auto: Whether widths are chosen by what rounds have cost and brought.
        by_rows: Columns for rounds of 1, 2, ... rows, the anchor's among them; the last entry also
            for more rows. 0 is the chain. Empty: no trees, or `auto`.
    """

    auto: bool = False
    by_rows: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `off`, `auto`, or column counts separated by commas.

        Raises:
            ValueError: anything else.
        """
        if text in ("off", "auto"):
            return cls(auto=text == "auto")
        try:
            by_rows = tuple(int(word) for word in text.split(","))
        except ValueError:
            raise ValueError(
                f"--draft-tree-nodes: expected off, auto or column counts such as 16,12,0, "
                f"got {text!r}"
            ) from None
        return cls(by_rows=by_rows)

    @property
    def off(self) -> bool:
        """Whether there are no trees."""
        return not self.auto and not any(self.by_rows)

    def expect_served(self, draft_tokens: int, selector_top_k: int) -> None:
        """Checks the flag against a draft of K proposals and so many candidates a position.

        Raises:
            ValueError: trees without a candidate selector, no room for one beside the chain, or a
                count outside 0 and K+2..32.
        """
        if self.off:
            return
        if not selector_top_k:
            raise ValueError(
                "--draft-tree-nodes: expected off, as the draft has no candidate selector "
                f"(DFlash), got {self}"
            )
        wrong = [n for n in self.by_rows if n and not draft_tokens + 2 <= n <= MOST_COLUMNS]
        if wrong:
            raise ValueError(
                f"--draft-tree-nodes: expected 0 or {draft_tokens + 2}..{MOST_COLUMNS} columns for "
                f"{draft_tokens} draft tokens, got {wrong[0]}"
            )

    def widths(self, draft_tokens: int, row_count: int | None = None) -> tuple[int, ...]:
        """Columns that trees may have, ascending; None is for any number of rows."""
        if self.auto:
            chain = draft_tokens + 1
            return tuple(sorted({min(chain + more, MOST_COLUMNS) for more in AUTO_FURTHER}))
        counts = self.by_rows if row_count is None else (self.for_rows(row_count),)
        return tuple(sorted({count for count in counts if count}))

    def for_rows(self, row_count: int) -> int:
        """The list's columns for a round of so many rows, at least one; 0 is the chain."""
        return self.by_rows[min(row_count, len(self.by_rows)) - 1] if self.by_rows else 0

    def most(self, draft_tokens: int) -> int:
        """Columns of the widest tree; 0 without trees."""
        return max(self.widths(draft_tokens), default=0)

    def __str__(self) -> str:
        """As the flag has it."""
        if self.off:
            return "off"
        return "auto" if self.auto else ",".join(map(str, self.by_rows))
