"""Triton form; see the contract. One program walks a row's positions in order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.overlap import OVERLAPPED, enter
from kernels.rng import Purpose
from kernels.rng.kernel import draw

_PROPOSAL = tl.constexpr(int(Purpose.PROPOSAL))


@triton.jit
def edges_after(
    scores,
    ids,
    projected,
    predecessor,
    successor,
    row,
    position,
    previous,
    positions,
    k,
    R,
    projected_row,
    projected_column,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The candidates of a position, and their edges from a token; -inf beyond the last."""
    rank, at_r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    wide = (rank < k)[:, None] & (at_r < R)[None, :]
    at = (row * positions + position) * k + rank
    candidate = tl.load(ids + at, mask=rank < k, other=0)
    score = tl.load(scores + at, mask=rank < k, other=float("-inf"))
    after = tl.load(successor + candidate[:, None] * R + at_r[None, :], mask=wide, other=0.0)
    before = tl.load(predecessor + previous * R + at_r, mask=at_r < R, other=0.0)
    hidden_at = projected + row * projected_row + position * projected_column + at_r
    hidden = tl.load(hidden_at, mask=at_r < R, other=0.0)
    left = before.to(tl.float32) * hidden.to(tl.float32)
    edge = score + tl.sum(after.to(tl.float32) * left[None, :], axis=1)
    return candidate, tl.where(rank < k, edge, float("-inf"))


@triton.jit
def law_of(edge, divisor):
    """The largest edge, and the softmax of all."""
    best = tl.max(edge, axis=0)
    weight = tl.exp((edge - best) / divisor)
    return best, weight / tl.sum(weight, axis=0)


@triton.jit
def rank_drawn(q, goal, k, BLOCK_C: tl.constexpr):
    """The first rank whose inclusive sum of weights q lies beyond goal."""
    rank = tl.arange(0, BLOCK_C)
    passed = tl.sum(((tl.cumsum(q, axis=0) <= goal) & (rank < k)).to(tl.int32), axis=0)
    # rounding can leave the whole sum below it: then the last rank with q > 0
    return tl.minimum(passed, tl.max(tl.where((q > 0.0) & (rank < k), rank, 0), axis=0))


@triton.jit
def _walk_kernel(
    scores,
    ids,
    projected,
    predecessor,
    successor,
    anchors,
    temperatures,
    seeds,
    frontiers,
    tokens,
    probabilities,
    positions,
    k,
    R,
    projected_row,
    projected_column,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    enter()
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, BLOCK_C)
    temperature = tl.load(temperatures + row)
    greedy = temperature <= 0.0
    divisor = tl.where(greedy, 1.0, temperature)
    seed = tl.load(seeds + row).to(tl.uint64)
    frontier = tl.load(frontiers + row)
    previous = tl.load(anchors + row)
    for position in range(positions):
        candidate, edge = edges_after(
            scores,
            ids,
            projected,
            predecessor,
            successor,
            row,
            position,
            previous,
            positions,
            k,
            R,
            projected_row,
            projected_column,
            BLOCK_C,
            BLOCK_R,
        )
        best, q = law_of(edge, divisor)
        lowest_best = tl.min(tl.where(edge == best, rank, k - 1), axis=0)
        key = (frontier + position).to(tl.uint64)
        u = draw(seed, key, tl.full([], _PROPOSAL, tl.uint64), tl.full([], 0, tl.uint64))
        choice = tl.where(greedy, lowest_best, rank_drawn(q, u, k, BLOCK_C))
        q = tl.where(greedy, tl.where(rank == choice, 1.0, 0.0), q)
        previous = tl.sum(tl.where(rank == choice, candidate, 0), axis=0)
        tl.store(tokens + row * positions + position, previous)
        at = (row * positions + position) * k + rank
        tl.store(probabilities + at, q, mask=rank < k)


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
    """See the contract."""
    B, P, k = ids.shape
    R = projected.shape[2]
    tokens = torch.empty(B, P, dtype=torch.int64, device=ids.device)
    probabilities = torch.empty(B, P, k, dtype=torch.float32, device=ids.device)
    if B == 0 or P == 0:
        return tokens, probabilities
    if projected.stride(2) != 1:
        projected = projected.contiguous()
    _walk_kernel[(B,)](
        scores.contiguous(),
        ids.contiguous(),
        projected,
        predecessor.contiguous(),
        successor.contiguous(),
        anchors.contiguous(),
        temperatures.contiguous(),
        seeds.contiguous(),
        frontiers.contiguous(),
        tokens,
        probabilities,
        P,
        k,
        R,
        projected.stride(0),
        projected.stride(1),
        BLOCK_C=max(triton.next_power_of_2(k), 2),
        BLOCK_R=triton.next_power_of_2(R),
        num_warps=4,
        **OVERLAPPED,
    )
    return tokens, probabilities
