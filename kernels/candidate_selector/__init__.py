"""Walks a lattice of candidates from left to right, each choice conditioned on the one before.

Maths:
    predecessor of position 0: the anchor; of position i: the token chosen at i - 1
    edge_i[c] = scores[i, c] + sum over r of
                predecessor[previous, r] * projected[i, r] * successor[ids[i, c], r]
    temperature <= 0:  choice = the lowest rank with the largest edge, q = one-hot
    temperature > 0:   q[c] = exp((edge[c] - max) / temperature) / sum
                       choice = the first rank with u < q[0] + ... + q[c], else the last rank with
                       q > 0; u = uniform(seed, F + i, PROPOSAL, 0)

Shapes:
    scores [B, P, k] FP32, best first; ids [B, P, k] int64, distinct within a position
    projected [B, P, R]; predecessor, successor [V, R]
    anchors, seeds, frontiers [B] int64; temperatures [B] FP32
    Returns tokens [B, P] int64 and probabilities [B, P, k] FP32.

Domain:
    P may be 0. Candidate ids and anchors are below V. Sampling controls other than the
    temperature do not reach q.

Numerics:
    FP32. The probabilities returned are the ones drawn from, bit for bit; a greedy row's are
    exactly one-hot. Rows do not influence each other. Where scores are not finite the
    probabilities are not either: the caller checks.

Effects:
    None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import require
from kernels.dispatch import select


def candidate_selector(
    scores: Tensor,
    ids: Tensor,
    projected: Tensor,
    predecessor: Tensor,
    successor: Tensor,
    anchors: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    frontiers: Tensor,
) -> tuple[Tensor, Tensor]:
    """Chooses a path through the candidates; see the module's contract.

    Args:
        scores: [B, P, k] FP32 scores of the candidates themselves.
        ids: [B, P, k] int64 global ids.
        projected: [B, P, R] projected hidden vectors.
        predecessor: [V, R] codebook.
        successor: [V, R] codebook.
        anchors: [B] int64 token before position 0.
        temperatures: [B] FP32; <= 0 is greedy.
        seeds: [B] int64 bit patterns of uint64 seeds.
        frontiers: [B] int64, F: the anchor's position.

    Returns:
        tokens [B, P] int64, and probabilities [B, P, k] FP32: the q each was drawn from.

    Raises:
        ValueError: an argument of another shape or dtype.
    """
    rows, positions, k = scores.shape
    require("scores", scores, (rows, positions, k), torch.float32)
    require("ids", ids, scores.shape, torch.int64)
    require("projected", projected, (rows, positions, None))
    require("predecessor", predecessor, (None, projected.shape[2]))
    require("successor", successor, predecessor.shape)
    require("anchors", anchors, (rows,), torch.int64)
    require("temperatures", temperatures, (rows,), torch.float32)
    require("seeds", seeds, (rows,), torch.int64)
    require("frontiers", frontiers, (rows,), torch.int64)
    result: tuple[Tensor, Tensor] = select("candidate_selector", scores).candidate_selector(
        scores,
        ids,
        projected,
        predecessor,
        successor,
        anchors,
        temperatures,
        seeds,
        frontiers,
    )
    return result
