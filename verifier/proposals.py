"""What a round asks of the drafter, and what comes of it: proposals and the laws they come from."""

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
from verifier.trees import TreeAsk, expect_siblings, expect_tree


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
class Law:
    """What each proposal of a row was drawn from; both None where each is a point mass.

    ``candidate_ids`` int32 and ``probabilities`` float32 are [N, k], read-only.
    """

    candidate_ids: torch.Tensor | None = None
    probabilities: torch.Tensor | None = None


POINT_MASSES = Law()


@dataclass(frozen=True)
class Drafted:
    """A proposal, a chain of P tokens or a tree of N, whose law is not looked at yet.

    The target's view of a token does not depend on what it was drawn from, so that laws are
    decoded, by `laws_of`, while the target works.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...] = ()  # of a tree, what columns 1..N continue; empty for a chain
    nodes: int = 0  # columns that the tree might have had
    conditional: wire.Conditional | None = None  # the law; None where each is a point mass

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


def decode_proposal(proposal: wire.Proposal, ask: Ask, public_vocab: int) -> Drafted:
    """Checks a proposal's tokens against what was asked.

    Raises:
        FaultError: PROPOSAL_INVALID when the count is not P, or not N of a tree, an id lies outside
            the public vocabulary, there is no law, or the parents are not those of a tree that was
            asked for.
    """
    token_ids, parents = tuple(proposal.token_ids), tuple(proposal.parents)
    count = len(parents) or ask.live
    if len(token_ids) != count:
        raise _invalid(f"expected {count} tokens, got {len(token_ids)}", count, len(token_ids))
    if not (min(token_ids) >= 0 and max(token_ids) < public_vocab):
        # no ids: this is logged
        raise _invalid(f"expected ids in [0, {public_vocab}), got others")
    law = proposal.WhichOneof("distribution")
    if law is None:
        raise _invalid("expected a distribution, got none")
    conditional = proposal.conditional if law == "conditional" else None
    if not parents:
        return Drafted(token_ids, conditional=conditional)
    if ask.tree is None or conditional is None:
        raise _invalid("expected a chain, got a tree")
    expect_tree(parents, ask.live, ask.tree)
    return Drafted(token_ids, parents, ask.tree.nodes, conditional)


def laws_of(drafted: Sequence[Drafted | None], public_vocab: int) -> list[Law | FaultError | None]:
    """Decodes and checks what proposals were drawn from.

    Returns:
        For each its law, or a fault: PROPOSAL_INVALID when q does not contain the drafted token,
        does not sum to 1 within 1e-5, or is not what siblings of a tree were drawn from;
        TENSOR_SHAPE when an array is not of its shape. None where nothing was proposed.
    """
    reads = [None if each is None else _read(each) for each in drafted]
    # all at once; one by one only to find which does not hold
    sound = _hold([read for read in reads if isinstance(read, _Read)], public_vocab)
    return [
        _checked(read, None if sound else public_vocab) if isinstance(read, _Read) else read
        for read in reads
    ]


@dataclass(frozen=True)
class _Read:
    """A law whose arrays have the right forms; its values are not checked."""

    drafted: Drafted
    law: Law
    # the same, and the tokens [N] int32
    tokens: NDArray[np.int32]
    support: NDArray[np.int32]
    mass: NDArray[np.float32]


def _read(drafted: Drafted) -> _Read | Law | FaultError:
    conditional, count = drafted.conditional, len(drafted.token_ids)
    if conditional is None:
        return POINT_MASSES
    try:
        ids = tensors.decode(
            conditional.candidate_ids, (count, None), torch.int32, name="candidate_ids"
        )
        q = tensors.decode(
            conditional.probabilities, tuple(ids.shape), torch.float32, name="probabilities"
        )
    except FaultError as fault:
        return fault
    tokens = np.array(drafted.token_ids, dtype=np.int32)
    return _Read(drafted, Law(ids, q), tokens, ids.numpy(), q.numpy())


def _checked(read: _Read, public_vocab: int | None) -> Law | FaultError:
    """The law; it is checked where there is a vocabulary to check it against."""
    if public_vocab is not None and not _hold([read], public_vocab):
        return _invalid(
            "expected q over public ids that sums to 1, with the drafted token in its support"
        )
    try:
        if read.drafted.parents:
            expect_siblings(read.drafted.parents, read.tokens, read.support, read.mass)
    except FaultError as fault:
        return fault
    return read.law


def _hold(reads: Sequence[_Read], public_vocab: int) -> bool:
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
