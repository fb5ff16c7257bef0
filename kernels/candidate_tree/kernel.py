"""Triton form; see the contract. One program grows a row's tree, a line of its tiles a node."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.candidate_selector.kernel import edges_after, law_of, rank_drawn
from kernels.candidate_tree import Tree
from kernels.overlap import OVERLAPPED, enter
from kernels.rng import Purpose
from kernels.rng.kernel import draw
from kernels.trees import MOST_COLUMNS

_PROPOSAL = tl.constexpr(int(Purpose.PROPOSAL))


@triton.jit
def _line_of(tile, own):
    """The one line of a tile [NODES, C] that `own` marks."""
    return tl.sum(tl.where(own[:, None], tile, 0.0), axis=0)


@triton.jit
def _grow_kernel(  # noqa: PLR0915
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
    tokens,
    parents,
    depths,
    counts,
    candidate_ids,
    probabilities,
    positions,
    lines,
    k,
    R,
    projected_row,
    projected_column,
    NODES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    enter()
    row = tl.program_id(0).to(tl.int64)
    rank, node = tl.arange(0, BLOCK_C), tl.arange(0, NODES)
    temperature = tl.load(temperatures + row)
    greedy = temperature <= 0.0
    divisor = tl.where(greedy, 1.0, temperature)
    seed = tl.load(seeds + row).to(tl.uint64)
    frontier = tl.load(frontiers + row)
    limit = tl.minimum(tl.load(nodes + row), lines + 1).to(tl.int32)
    leaf_limit = tl.load(paths + row)
    purpose = tl.full([], _PROPOSAL, tl.uint64)

    # of every node: its law and edges, ranks of its children as bits, their number
    law = tl.zeros([NODES, BLOCK_C], tl.float32)
    edges = tl.zeros([NODES, BLOCK_C], tl.float32)
    taken = tl.zeros([NODES], tl.int32)
    children = tl.zeros([NODES], tl.int32)
    depth = tl.zeros([NODES], tl.int32)
    score = tl.where(node == 0, 1.0, 0.0)

    token = tl.load(anchors + row)
    # the node at hand, the one that its child is drawn for
    parent = tl.full([], 0, tl.int32)
    column = tl.full([], 1, tl.int32)
    position = tl.full([], 0, tl.int32)
    growing = tl.full([], 1, tl.int32)
    candidate, edge = edges_after(
        scores,
        ids,
        projected,
        predecessor,
        successor,
        row,
        position,
        token,
        positions,
        k,
        R,
        projected_row,
        projected_column,
        BLOCK_C,
        BLOCK_R,
    )
    _, q = law_of(edge, divisor)
    law = tl.where(node[:, None] == 0, q[None, :], law)
    edges = tl.where(node[:, None] == 0, edge[None, :], edges)
    while growing > 0:
        own = node == parent
        on_path = column <= positions
        position = tl.sum(tl.where(own, depth, 0), axis=0)
        used = tl.sum(tl.where(own, taken, 0), axis=0)
        born = tl.sum(tl.where(own, children, 0), axis=0)
        is_open = ((used >> rank) & 1) == 0
        q = _line_of(law, own)
        rest = tl.where(is_open, q, 0.0)
        sub = tl.where(on_path, 0, ((parent + 1) << 5) | born).to(tl.uint64)
        u = draw(seed, (frontier + position).to(tl.uint64), purpose, sub)
        # on the path as the selector draws: not scaled by a sum that is 1 but for rounding
        goal = tl.where(on_path, u, u * tl.sum(rest, axis=0))
        edge = tl.where(is_open & (rank < k), _line_of(edges, own), float("-inf"))
        best = tl.max(edge, axis=0)
        lowest_best = tl.min(tl.where(edge == best, rank, k - 1), axis=0)
        choice = tl.where(greedy, lowest_best, rank_drawn(rest, goal, k, BLOCK_C))

        line = row * lines + column - 1
        at = (row * positions + position) * k + rank
        candidate = tl.load(ids + at, mask=rank < k, other=0)
        token = tl.sum(tl.where(rank == choice, candidate, 0), axis=0)
        chosen = rank == choice
        tl.store(tokens + line, token)
        tl.store(parents + line, parent.to(tl.int64))
        tl.store(depths + line, (position + 1).to(tl.int64))
        tl.store(candidate_ids + line * k + rank, candidate, mask=rank < k)
        kept = tl.where(greedy, tl.where(chosen, 1.0, 0.0), q)
        tl.store(probabilities + line * k + rank, kept, mask=rank < k)

        worth = tl.sum(tl.where(own, score, 0.0), axis=0)
        worth *= tl.sum(tl.where(chosen, q, 0.0), axis=0)
        taken = tl.where(own, taken | (1 << choice), taken)
        children = tl.where(own, children + 1, children)
        is_new = node == column
        score = tl.where(is_new, worth, score)
        depth = tl.where(is_new, position + 1, depth)
        # a node at the last depth has no law: nothing of it is open
        inner = position + 1 < positions
        _, edge = edges_after(
            scores,
            ids,
            projected,
            predecessor,
            successor,
            row,
            tl.where(inner, position + 1, position),
            token,
            positions,
            k,
            R,
            projected_row,
            projected_column,
            BLOCK_C,
            BLOCK_R,
        )
        _, q = law_of(edge, divisor)
        law = tl.where(is_new[:, None], tl.where(inner, q, 0.0)[None, :], law)
        edges = tl.where(is_new[:, None], edge[None, :], edges)

        parent = column
        column += 1
        growing = (column <= positions).to(tl.int32)
        if column > positions:
            left = tl.where(((taken[:, None] >> rank[None, :]) & 1) == 0, law, 0.0)
            mean = tl.sum(left * left, axis=1) / tl.sum(left, axis=1)
            priority = score * tl.where(greedy, tl.max(left, axis=1), mean)
            leaf = children == 0
            leaves = tl.sum((leaf & (node < column)).to(tl.int32), axis=0)
            allowed = (node < column) & (priority > 0.0) & (leaf | (leaves < leaf_limit))
            priority = tl.where(allowed, priority, 0.0)
            highest = tl.max(priority, axis=0)
            parent = tl.min(tl.where(priority == highest, node, NODES), axis=0)
            growing = ((column < limit) & (highest > 0.0)).to(tl.int32)

    tl.store(counts + row, (column - 1).to(tl.int64))
    nothing = tl.zeros([BLOCK_C], tl.float32)
    for dead in range(column - 1, lines):
        line = row * lines + dead
        zero = tl.full([], 0, tl.int64)
        tl.store(tokens + line, zero)
        tl.store(parents + line, zero)
        tl.store(depths + line, zero)
        tl.store(candidate_ids + line * k + rank, nothing.to(tl.int64), mask=rank < k)
        tl.store(probabilities + line * k + rank, nothing, mask=rank < k)


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
    """See the contract."""
    B, P, k = ids.shape
    R, N = projected.shape[2], width - 1
    tokens, parents, depths = (ids.new_empty(B, N) for _ in range(3))
    tree = Tree(
        tokens,
        parents,
        depths,
        ids.new_empty(B),
        ids.new_empty(B, N, k),
        torch.empty(B, N, k, dtype=torch.float32, device=ids.device),
    )
    if B == 0:
        return tree
    if projected.stride(2) != 1:
        projected = projected.contiguous()
    _grow_kernel[(B,)](
        scores.contiguous(),
        ids.contiguous(),
        projected,
        predecessor.contiguous(),
        successor.contiguous(),
        anchors.contiguous(),
        temperatures.contiguous(),
        seeds.contiguous(),
        frontiers.contiguous(),
        nodes.contiguous(),
        paths.contiguous(),
        *tree,
        P,
        N,
        k,
        R,
        projected.stride(0),
        projected.stride(1),
        NODES=MOST_COLUMNS,
        BLOCK_C=max(triton.next_power_of_2(k), 2),
        BLOCK_R=triton.next_power_of_2(R),
        num_warps=4,
        **OVERLAPPED,
    )
    return tree
