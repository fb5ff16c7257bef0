"""What a round asks of the drafter, and what comes of it: proposals that are fit to be verified."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outrider import tensors
from outrider.faults import FaultError
from outrider.v1 import draft_service_pb2 as wire
from verifier.draft_context import Context
from verifier.trees import TreeAsk, expect_tree


@dataclass(frozen=True)
class Ask:
    """One row of a round: its context and, where a proposal is wanted, what for."""

    context: Context
    live: int  # P wanted; 0 sends pending features alone
    frontier: int
    anchor: int
    temperature: float
    seed: int
    tree: TreeAsk | None = None  # None: the chain alone


@dataclass(frozen=True)
class Drafted:
    """A proposal with the law it was drawn from, a chain of P tokens or a tree of N.

    ``candidate_ids`` int64 and ``probabilities`` float32 are [N, k]; both None for a point mass.
    """

    token_ids: tuple[int, ...]
    candidate_ids: torch.Tensor | None
    probabilities: torch.Tensor | None
    parents: tuple[int, ...] = ()  # of a tree, what columns 1..N continue; empty for a chain
    nodes: int = 0  # columns that the tree might have had

    def ends_at(self, accepted: int, columns: tuple[int, ...]) -> bool:
        """Whether nothing continues the last of the accepted proposals."""
        if not self.parents:
            return accepted == len(self.token_ids)
        return (columns[-1] if columns else 0) not in self.parents


@dataclass(frozen=True)
class Exchange:
    """What one Round brought: proposals by sequence id, and where the time went."""

    proposals: dict[int, Drafted]
    draft_ns: int = 0
    wire_ns: int = 0


NOTHING = Exchange({})


def decode_proposal(
    proposal: wire.Proposal, live: int, public_vocab: int, tree: TreeAsk | None = None
) -> Drafted:
    """Checks a proposal against what was asked and turns its law into tensors.

    Raises:
        FaultError: PROPOSAL_INVALID when the count is not P, or not N of a tree, an id lies outside
            the public vocabulary, q does not contain the drafted token or does not sum to 1 within
            1e-5, or the parents are not those of a tree that was asked for.
    """
    token_ids, parents = tuple(proposal.token_ids), tuple(proposal.parents)
    count = len(parents) or live
    outside = sum(not 0 <= token < public_vocab for token in token_ids)
    if len(token_ids) != count or outside:
        raise FaultError(
            "PROPOSAL_INVALID",
            # no ids: this is logged
            f"proposal: expected {count} ids in [0, {public_vocab}), got {len(token_ids)}, of them "
            f"{outside} outside",
            expected=count,
            actual=len(token_ids),
        )
    law = proposal.WhichOneof("distribution")
    if parents and (tree is None or law != "conditional"):
        raise FaultError("PROPOSAL_INVALID", "proposal: expected a chain, got a tree")
    if law == "point_mass":
        return Drafted(token_ids, None, None)
    if law != "conditional":
        raise FaultError("PROPOSAL_INVALID", "proposal: expected a distribution, got none")
    conditional = proposal.conditional
    ids = tensors.decode(
        conditional.candidate_ids, (count, None), torch.int32, name="candidate_ids"
    )
    q = tensors.decode(
        conditional.probabilities, tuple(ids.shape), torch.float32, name="probabilities"
    )
    tokens, support, mass = np.array(token_ids, dtype=np.int32), ids.numpy(), q.numpy()
    _expect_law(support, mass, tokens, public_vocab)
    if not parents or tree is None:
        return Drafted(token_ids, ids.long(), q)
    expect_tree(parents, live, tree, tokens, support, mass)
    return Drafted(token_ids, ids.long(), q, parents, tree.nodes)


def _expect_law(
    support: NDArray[np.int32],
    mass: NDArray[np.float32],
    tokens: NDArray[np.int32],
    public_vocab: int,
) -> None:
    """Checks q [N, k]; in numpy, and in few calls: a round waits for it, row by row."""
    drawn = mass * (support == tokens[:, None])
    # NaN fails every comparison
    if (
        not drawn.max(axis=1).min() > 0
        or not mass.min() >= 0
        or support.min() < 0
        or support.max() >= public_vocab
    ):
        raise FaultError(
            "PROPOSAL_INVALID",
            "proposal: expected q over public ids with the drafted token in its support",
        )
    sums = mass.sum(axis=1, dtype=np.float64)
    if not (sums.min() >= 1 - 1e-5 and sums.max() <= 1 + 1e-5):
        raise FaultError(
            "PROPOSAL_INVALID", f"proposal: expected q to sum to 1, got {sums.tolist()}"
        )
