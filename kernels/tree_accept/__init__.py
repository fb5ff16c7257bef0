"""Follows the branch of a tree of proposals that the target allows; draws the token after it.

Maths:
    The walk begins at column v = 0. With x_0..x_(m-1) the tokens of v's live children in the order
    of their columns, and q_j the law that x_j was drawn from:
        s_j = q_j without the tokens x_0..x_(j-1);  n_0 = 1, n_j = sum(s_j)
        w_0 = p_v, M_0 = 1
        accept x_j iff w_j(x_j) > 0 and (r >= Q or u * Q < r),
            r = w_j(x_j) / M_j, Q = s_j(x_j) / n_j, u = uniform(seed, F + depth(v) + 1, ACCEPT, j)
        else w_(j+1) = max(w_j - (M_j / n_j) s_j, 0), M_(j+1) = sum(w_(j+1)); where that has no
            mass, w_(j+1) = p_v and M_(j+1) = 1
    The first that is accepted is the next v. Where none is, with A columns accepted:
        no children (bonus)  a token from p_v;  else (correction) one from w_m
    as `kernels.speculative_accept` draws it, with u = uniform(seed, F + A + 1, that purpose, 0).
    tokens = [those of the accepted columns, terminal, 0...]
    Given all columns before it, let each child be drawn from its law without its elder siblings,
    renormalised. Then w_j / M_j is the law that is still owed after j rejections, and each token's
    law is p given the tokens before it. (Jeon et al. 2024, "Recursive Speculative Decoding:
    Accelerating LLM Inference via Sampling Without Replacement".)

Shapes:
    p [B, W, V] FP32; proposals [B, N] int64, tokens of columns 1..N, W = N + 1 <= 32
    ancestors [B, W] int32 (`kernels.trees`)
    candidate_ids [B, N, k] int64 and candidate_probabilities [B, N, k] FP32: q, zero elsewhere
    live, seeds, frontiers [B] int64
    Returns `TreeAcceptance`.

Domain:
    0 <= live <= N. Columns 0..live of p are distributions, and have masks; the rest are not looked
    at. A proposal is among its candidates. Siblings have the same candidate_ids in the same order,
    distinct where there are several, and distinct tokens; their probabilities may differ, as where
    each was a point mass. Of an only child ids of candidates with probability 0 may repeat.

Numerics:
    FP32. Where no column has two children the result is `kernels.speculative_accept`'s, bit for
    bit. Greedy rows, p and q one-hot, follow the child equal to the argmax and use no draw. Rows do
    not influence each other. A row whose p is NaN gets some ids below V.

Effects:
    None.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.checks import require, require_that
from kernels.dispatch import select
from kernels.trees import MOST_COLUMNS


class TreeAcceptance(NamedTuple):
    """The licensed tokens of each row, and the columns that they came from."""

    tokens: Tensor  # [B, W] int64: A drafts, the terminal token, zeros
    accepted: Tensor  # [B] int64: A
    columns: Tensor  # [B, W] int64: entry i <= A is the column at depth i of the branch, else i


def tree_accept(
    p: Tensor,
    proposals: Tensor,
    live: Tensor,
    ancestors: Tensor,
    candidate_ids: Tensor,
    candidate_probabilities: Tensor,
    seeds: Tensor,
    frontiers: Tensor,
) -> TreeAcceptance:
    """Accepts a branch and draws the terminal token; see the module's contract.

    Args:
        p: [B, W, V] FP32 processed target distributions.
        proposals: [B, N] int64, tokens of columns 1..N.
        live: [B] int64, how many proposals count.
        ancestors: [B, W] int32, bit j of entry c: column j is before column c, or is it.
        candidate_ids: [B, N, k] int64 support of each q.
        candidate_probabilities: [B, N, k] FP32 q on it.
        seeds: [B] int64 bit patterns of uint64 seeds.
        frontiers: [B] int64, F: the anchor's position.

    Returns:
        tokens [B, W] int64, accepted [B] int64 and columns [B, W] int64.

    Raises:
        ValueError: an argument of another shape or dtype.
    """
    batch, width, _ = p.shape
    require("p", p, (batch, width, None), torch.float32)
    require_that(width <= MOST_COLUMNS, "p", f"at most {MOST_COLUMNS} columns", width)
    require("proposals", proposals, (batch, width - 1), torch.int64)
    require("live", live, (batch,), torch.int64)
    require("ancestors", ancestors, (batch, width), torch.int32)
    require("candidate_ids", candidate_ids, (batch, width - 1, None), torch.int64)
    require("candidate_probabilities", candidate_probabilities, candidate_ids.shape, torch.float32)
    require("seeds", seeds, (batch,), torch.int64)
    require("frontiers", frontiers, (batch,), torch.int64)
    tokens, accepted, columns = select("tree_accept", p).tree_accept(
        p, proposals, live, ancestors, candidate_ids, candidate_probabilities, seeds, frontiers
    )
    return TreeAcceptance(tokens, accepted, columns)
