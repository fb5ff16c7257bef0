"""Accepts the leading proposals that the target allows and draws the token after them.

Maths:
    d_(i+1) is checked against p_i with q_i(d_(i+1)), the probability it was drawn with:
        accept while p_i(d) > 0 and (p_i(d) >= q_i(d) or u * q_i(d) < p_i(d)),
        u = uniform(seed, F + i + 1, ACCEPT, 0)
        A = number accepted before the first failure, at most P
    terminal token:
        A < P (correction)  from r = max(p_A - q_A, 0), or from p_A where r has no mass
        A = P (bonus)       from p_P
        the first entry with r > 0 and u * sum(r) < its inclusive cumulative sum, in the order
        (p descending, id ascending), else the last with r > 0
        u = uniform(seed, F + A + 1, CORRECTION or BONUS, 0)
    tokens = [d_1..d_A, terminal, 0...]
    If d was drawn from q, each token's law is p given the tokens before it, whatever q is. (Chen
    et al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling", theorem 1.)

Shapes:
    p [B, W, V] FP32; proposals [B, K] int64, W = K + 1
    candidate_ids [B, K, k] int64 and candidate_probabilities [B, K, k] FP32: q, zero elsewhere
    live, seeds, frontiers [B] int64
    Returns `Acceptance`.

Domain:
    0 <= live <= K; K may be 0. Columns 0..live of p are distributions, the rest are not looked at.
    A point mass is one candidate with probability 1; ids of candidates with probability 0 may
    repeat. Proposals and candidate ids are below V.

Numerics:
    FP32 sums and comparisons. Rows do not influence each other. A row whose p is NaN gets some
    ids below V: the caller looks for NaN first.

Effects:
    None.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.checks import require
from kernels.dispatch import select


class Acceptance(NamedTuple):
    """The licensed tokens of each row."""

    tokens: Tensor  # [B, W] int64: A drafts, the terminal token, zeros
    accepted: Tensor  # [B] int64: A


def speculative_accept(
    p: Tensor,
    proposals: Tensor,
    live: Tensor,
    candidate_ids: Tensor,
    candidate_probabilities: Tensor,
    seeds: Tensor,
    frontiers: Tensor,
) -> Acceptance:
    """Accepts proposals and draws the terminal token; see the module's contract.

    Args:
        p: [B, W, V] FP32 processed target distributions.
        proposals: [B, K] int64, d_1..d_K.
        live: [B] int64, P: how many proposals count.
        candidate_ids: [B, K, k] int64 support of each q.
        candidate_probabilities: [B, K, k] FP32 q on it.
        seeds: [B] int64 bit patterns of uint64 seeds.
        frontiers: [B] int64, F: the anchor's position.

    Returns:
        tokens [B, W] int64 and accepted [B] int64.

    Raises:
        ValueError: an argument of another shape or dtype.
    """
    batch, width, _ = p.shape
    require("p", p, (batch, width, None), torch.float32)
    require("proposals", proposals, (batch, width - 1), torch.int64)
    require("live", live, (batch,), torch.int64)
    require("candidate_ids", candidate_ids, (batch, width - 1, None), torch.int64)
    require("candidate_probabilities", candidate_probabilities, candidate_ids.shape, torch.float32)
    require("seeds", seeds, (batch,), torch.int64)
    require("frontiers", frontiers, (batch,), torch.int64)
    tokens, accepted = select("speculative_accept", p).speculative_accept(
        p, proposals, live, candidate_ids, candidate_probabilities, seeds, frontiers
    )
    return Acceptance(tokens, accepted)
