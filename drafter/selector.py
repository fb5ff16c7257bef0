"""From hidden states to proposals: the proposal head, then argmax, a conditional walk or tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter.config import DraftConfig
from drafter.model import DraftBlock
from drafter.weights import DraftWeights, HeadWeights, SelectorWeights
from kernels.candidate_selector import candidate_selector
from kernels.candidate_tree import candidate_tree
from kernels.linear import linear
from kernels.linear_argmax import linear_argmax
from kernels.linear_topk import linear_topk
from kernels.rows_finite import rows_finite
from outrider.faults import FaultError
from outrider.pair import DraftFacts


@dataclass(frozen=True)
class Proposals:
    """Tokens offered for one block, and the law each was drawn from; one entry a row.

    N is K, or the columns of a tree but the anchor's. Only the first P of a row count, of a tree as
    many as it has lines, and only where the row is finite.
    """

    tokens: Tensor  # [B, N] int64, or int32 once in host memory
    finite: Tensor  # [B] bool: nothing behind the row's live lines overflowed or is NaN
    candidate_ids: Tensor | None = None  # [B, N, k], like the tokens; None: every q is a point mass
    probabilities: Tensor | None = None  # [B, N, k] FP32: q, exactly as drawn from
    parents: Tensor | None = None  # [B, N], like the tokens: what each continues; None: no trees
    lines: Tensor | None = None  # [B], like the tokens: live lines; None: P

    def offers(self) -> Offers:
        """What was proposed, row by row; in host memory."""

        def integers(values: Tensor | None) -> NDArray[np.int32] | None:
            return None if values is None else values.int().numpy()

        q = self.probabilities
        return Offers(
            self.tokens.int().numpy(),
            self.finite.tolist(),
            integers(self.candidate_ids),
            None if q is None else q.numpy(),
            integers(self.parents),
            None if self.lines is None else self.lines.tolist(),
        )


@dataclass(frozen=True)
class Offers:
    """`Proposals` as arrays in host memory, to be taken row by row."""

    tokens: NDArray[np.int32]
    finite: list[bool]
    candidate_ids: NDArray[np.int32] | None
    probabilities: NDArray[np.float32] | None
    parents: NDArray[np.int32] | None
    lines: list[int] | None

    def count(self, row: int, live: int) -> int:
        """N: P unless the row has a tree."""
        return live if self.lines is None else self.lines[row]

    def branches(self, row: int, live: int) -> list[int]:
        """What each line of a row's tree continues; nothing where it is the path alone."""
        count = self.count(row, live)
        if self.parents is None or count <= live:
            return []
        parents: list[int] = self.parents[row, :count].tolist()
        return parents


class Selector(Protocol):
    """Turns a block's hidden states into proposals."""

    def select(self, hidden: Tensor, block: DraftBlock) -> Proposals:
        """Proposes.

        Args:
            hidden: [B, W, H] final-normed hidden states.
            block: What they were computed for.
        """


class ArgmaxSelector:
    """DFlash: the best row of the head at each position, a point mass at any temperature."""

    def __init__(self, head: HeadWeights, public_vocab: int) -> None:
        self._head = head
        self._public_vocab = public_vocab

    def select(self, hidden: Tensor, block: DraftBlock) -> Proposals:
        """See `Selector`. Scaling and capping of logits would not change their order."""
        masks = hidden[:, 1 : 1 + block.most_live]
        tokens = linear_argmax(
            masks.flatten(0, 1),
            self._head.rows,
            public_vocab=self._public_vocab,
            token_ids=self._head.token_ids,
        )
        return Proposals(tokens.view(masks.shape[:2]), rows_finite((block.lives, masks)))


class ConditionalSelector:
    """DFlash2: the best candidates at each position, and a walk conditioned on each choice."""

    def __init__(
        self, head: HeadWeights, selector: SelectorWeights, draft: DraftFacts, public_vocab: int
    ) -> None:
        self._head = head
        self._selector = selector
        self._draft = draft
        self._public_vocab = public_vocab

    def select(self, hidden: Tensor, block: DraftBlock) -> Proposals:
        """See `Selector`."""
        masks = hidden[:, 1 : 1 + block.most_live].contiguous()
        scores, ids = self._candidates(masks)
        projected = linear(masks, self._selector.hidden_projection)
        behind = masks, scores, projected
        lattice = (
            scores,
            ids,
            projected,
            self._selector.predecessor,
            self._selector.successor,
            block.anchors,
            block.temperatures,
            block.seeds,
            block.rows.frontiers,
        )
        if not block.tree_width:
            tokens, probabilities = candidate_selector(*lattice)
            finite = rows_finite(*((block.lives, v) for v in (*behind, probabilities)))
            return Proposals(tokens, finite, ids, probabilities)
        tree = candidate_tree(*lattice, block.tree_nodes, block.tree_paths, width=block.tree_width)
        # rows without a tree get the path, bit for bit
        lines = torch.minimum(tree.counts, block.most_lines)
        finite = rows_finite(*((block.lives, v) for v in behind), (lines, tree.probabilities))
        return Proposals(
            tree.tokens, finite, tree.candidate_ids, tree.probabilities, tree.parents, lines
        )

    def _candidates(self, masks: Tensor) -> tuple[Tensor, Tensor]:
        scores, ids = linear_topk(
            masks.flatten(0, 1),
            self._head.rows,
            self._draft.selector_top_k,
            public_vocab=self._public_vocab,
            token_ids=self._head.token_ids,
            multiplier=self._draft.output_multiplier,
            softcap=self._draft.final_logit_softcapping,
        )
        return scores.view(*masks.shape[:2], -1), ids.view(*masks.shape[:2], -1)


def selector_for(config: DraftConfig, weights: DraftWeights) -> Selector:
    """The selector of the draft's format."""
    if weights.selector is None:
        return ArgmaxSelector(weights.head, config.target.public_vocab)
    return ConditionalSelector(
        weights.head, weights.selector, config.draft, config.target.public_vocab
    )


def not_finite(frontier: int) -> FaultError:
    """The fault of a row whose proposal may not be used."""
    return FaultError(
        "PROPOSAL_NOT_FINITE",
        f"proposal at {frontier}: expected finite scores, got NaN or infinity",
        frontier=frontier,
    )
