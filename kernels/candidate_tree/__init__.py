"""Grows a tree of proposals in a lattice of candidates, around the path that the selector takes.

Maths:
    Node v stands for column v, at depth t: 0 is the anchor, depth t > 0 holds a candidate of
    position t - 1. With edge and temperature as `kernels.candidate_selector` has them:
        law_v[c] = softmax of the edges from v's token to the candidates of position t, at the
                   row's temperature T, or 1 where T <= 0;  none at depth P
        score_v  = product of law_u[the child's rank] over the nodes u before v; 1 at the anchor
        open_v   = law_v at the ranks that no child of v has, 0 elsewhere
        priority_v = score_v * (sum(open_v^2) / sum(open_v) where T > 0, else max(open_v))
    Columns 1..P are the selector's path, drawn with its keys. Then, column by column while the
    row has fewer than `nodes`, the node with the largest priority > 0, ties to the lowest column,
    gets its next child. A node that already has one is passed over while the tree has `paths`
    leaves; where no node is left the row stops short.
        T <= 0:  child = the lowest open rank with the largest edge
        T > 0:   child = the first rank with u * sum(open_v) < open_v[0] + ... + open_v[c], else the
                 last open one; u = uniform(seed, F + t, PROPOSAL, ((v + 1) << 5) | children so far)
    A node's priority is fixed before its child is drawn, so given all columns before it, a child
    is drawn from law_v without its elder siblings, renormalised: what `kernels.tree_accept` needs.

Shapes:
    scores, ids, projected, predecessor, successor, anchors, temperatures, seeds, frontiers as
    `kernels.candidate_selector` takes them, positions [B, P]; nodes, paths [B] int64
    Returns `Tree`, N = width - 1 lines a row.

Domain:
    P >= 1, k <= 16; P < width <= 32, nodes <= width, paths >= 1: at most `nodes` columns, the
    anchor counted, and `paths` leaves. Rows with nodes <= P + 1 get the path alone.

Numerics:
    FP32. Tokens and probabilities of the path are the selector's, bit for bit. The probabilities
    of a column are its parent's whole law, the one it was drawn from; in greedy rows they are
    exactly one-hot at the column's own token. Rows do not influence each other. Where scores are
    not finite the path's probabilities are not either: the caller checks.

Effects:
    None. Lines from counts[b] on are zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.checks import require, require_that
from kernels.dispatch import select
from kernels.trees import MOST_COLUMNS


class Tree(NamedTuple):
    """The proposals of each row, columns 1..N, and what each continues."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64: column that each continues, 0 the anchor
    depths: Tensor  # [B, N] int64: 1 for children of the anchor
    counts: Tensor  # [B] int64: live lines
    candidate_ids: Tensor  # [B, N, k] int64
    probabilities: Tensor  # [B, N, k] FP32: the law that each was drawn from


def candidate_tree(
    scores: Tensor,
    ids: Tensor,
    projected: Tensor,
    predecessor: Tensor,
    successor: Tensor,
    anchors: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    frontiers: Tensor,
    nodes: Tensor,
    paths: Tensor,
    *,
    width: int,
) -> Tree:
    """Grows each row's tree; see the module's contract.

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
        nodes: [B] int64, most columns of each row, the anchor's among them.
        paths: [B] int64, most leaves of each row.
        width: columns of the block, N + 1.

    Returns:
        `Tree` with N = width - 1.

    Raises:
        ValueError: an argument of another shape or dtype, or a width that does not fit.
    """
    rows, positions, k = scores.shape
    require("scores", scores, (rows, positions, k), torch.float32)
    require("ids", ids, scores.shape, torch.int64)
    require("projected", projected, (rows, positions, None))
    require("predecessor", predecessor, (None, projected.shape[2]))
    require("successor", successor, predecessor.shape)
    require("temperatures", temperatures, (rows,), torch.float32)
    for name, numbers in (
        ("anchors", anchors),
        ("seeds", seeds),
        ("frontiers", frontiers),
        ("nodes", nodes),
        ("paths", paths),
    ):
        require(name, numbers, (rows,), torch.int64)
    require_that(positions >= 1, "scores", "a position", positions)
    require_that(1 <= k <= 16, "scores", "1..16 candidates", k)
    require_that(
        positions < width <= MOST_COLUMNS, "width", f"{positions + 1}..{MOST_COLUMNS}", width
    )
    tree: Tree = select("candidate_tree", scores).candidate_tree(
        scores,
        ids,
        projected,
        predecessor,
        successor,
        anchors,
        temperatures,
        seeds,
        frontiers,
        nodes,
        paths,
        width=width,
    )
    return tree
