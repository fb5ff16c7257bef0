"""What a round asks of the drafter, and what comes of it: proposals that are fit to be verified."""

from __future__ import annotations

from collections.abc import Sequence
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

    ``candidate_ids`` int32 and ``probabilities`` float32 are [N, k], read-only; both None for a
    point mass.
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


@dataclass(frozen=True)
class _Read:
    """A proposal whose parts have the right forms; its values are not checked."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    candidate_ids: torch.Tensor  # [N, k] int32
    probabilities: torch.Tensor  # [N, k] float32
    # the same, and the tokens [N] int32
    tokens: NDArray[np.int32]
    support: NDArray[np.int32]
    mass: NDArray[np.float32]


def decode_proposals(
    offered: Sequence[tuple[wire.Proposal, Ask]], public_vocab: int
) -> list[Drafted | FaultError]:
    """Checks the proposals of a reply against what was asked and turns their laws into tensors.

    Returns:
        For each the proposal, or a fault: PROPOSAL_INVALID when the count is not P, or not N of a
        tree, an id lies outside the public vocabulary, q does not contain the drafted token or does
        not sum to 1 within 1e-5, or the parents are not those of a tree that was asked for;
        TENSOR_SHAPE when an array is not of its shape.
    """
    outcomes: list[_Read | Drafted | FaultError] = []
    for proposal, ask in offered:
        try:
            outcomes.append(_read(proposal, ask, public_vocab))
        except FaultError as fault:
            outcomes.append(fault)
    # a round waits for it, so all laws at once; one by one only to find which does not hold
    reads = [read for read in outcomes if isinstance(read, _Read)]
    sound = _laws_hold(reads, public_vocab)
    decoded: list[Drafted | FaultError] = []
    for read, (_, ask) in zip(outcomes, offered, strict=True):
        if isinstance(read, _Read):
            try:
                decoded.append(_drafted(read, ask, None if sound else public_vocab))
            except FaultError as fault:
                decoded.append(fault)
        else:
            decoded.append(read)
    return decoded


def _read(proposal: wire.Proposal, ask: Ask, public_vocab: int) -> _Read | Drafted:
    token_ids, parents = tuple(proposal.token_ids), tuple(proposal.parents)
    count = len(parents) or ask.live
    if len(token_ids) != count:
        raise _invalid(f"expected {count} tokens, got {len(token_ids)}", count, len(token_ids))
    law = proposal.WhichOneof("distribution")
    if parents and (ask.tree is None or law != "conditional"):
        raise _invalid("expected a chain, got a tree")
    if law == "point_mass":
        outside = sum(not 0 <= token < public_vocab for token in token_ids)
        if outside:
            # no ids: this is logged
            raise _invalid(f"expected ids in [0, {public_vocab}), got {outside} outside")
        return Drafted(token_ids, None, None)
    if law != "conditional":
        raise _invalid("expected a distribution, got none")
    conditional = proposal.conditional
    ids = tensors.decode(
        conditional.candidate_ids, (count, None), torch.int32, name="candidate_ids"
    )
    q = tensors.decode(
        conditional.probabilities, tuple(ids.shape), torch.float32, name="probabilities"
    )
    tokens = np.array(token_ids, dtype=np.int32)
    return _Read(token_ids, parents, ids, q, tokens, ids.numpy(), q.numpy())


def _drafted(read: _Read, ask: Ask, public_vocab: int | None) -> Drafted:
    """The proposal; its law is checked where there is a vocabulary to check it against."""
    if public_vocab is not None and not _laws_hold([read], public_vocab):
        raise _invalid(
            "expected q over public ids that sums to 1, with the drafted token in its support"
        )
    law = read.candidate_ids, read.probabilities
    if not read.parents or ask.tree is None:
        return Drafted(read.token_ids, *law)
    expect_tree(read.parents, ask.live, ask.tree, read.tokens, read.support, read.mass)
    return Drafted(read.token_ids, *law, read.parents, ask.tree.nodes)


def _laws_hold(reads: Sequence[_Read], public_vocab: int) -> bool:
    """Whether each of these laws is one, over public ids, and has the token that was drawn."""
    if not reads:
        return True
    if len({read.support.shape[1] for read in reads}) > 1 or not reads[0].support.shape[1]:
        return False
    tokens = np.concatenate([read.tokens for read in reads])
    support = np.concatenate([read.support for read in reads])
    mass = np.concatenate([read.mass for read in reads])
    drawn = mass * (support == tokens[:, None])
    sums = mass.sum(axis=1, dtype=np.float64)
    # NaN fails every comparison
    return bool(
        drawn.max(axis=1).min() > 0
        and mass.min() >= 0
        and support.min() >= 0
        and support.max() < public_vocab
        and sums.min() >= 1 - 1e-5
        and sums.max() <= 1 + 1e-5
    )


def _invalid(difference: str, expected: object = None, actual: object = None) -> FaultError:
    details = {} if expected is None else {"expected": expected, "actual": actual}
    return FaultError("PROPOSAL_INVALID", f"proposal: {difference}", **details)
