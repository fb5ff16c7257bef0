"""Triton form; see the contract. Up to WIDEST rows it streams the weight once; more go to the BLAS.

A tile of weight rows times a tile of columns (the rows of x) is accumulated over K in one order
that the weight's shape alone fixes: tiles of BLOCK_K, in `split` runs whose sums are added in
ascending order. Neither that order nor the tile of weight rows depends on the number of columns,
so that a column's result does not depend on what shares the call. The runs of one tile find each
other through a counter in memory: the last to arrive adds what all have left there.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

WIDEST = 256
COLUMNS = 128  # of one program, at most
ENOUGH_PROGRAMS = 220  # two for nearly each processor of a large device
SPLITS = (1, 2, 3, 4, 6, 8)


class Plan(NamedTuple):
    """How a weight is cut; a function of the weight's shape and element size alone."""

    block_n: int
    block_k: int
    split: int


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x,
    weight,
    out,
    partial,
    arrivals,
    M,
    N,
    K,
    x_row,
    w_row,
    w_k,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Tile program_id(1) of the weight's rows, run program_id(2) of K, columns program_id(0).

    partial is FP32 [SPLIT, M, N]; arrivals are zero before and after.
    """
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK_K)
    # rows beyond the edge repeat the last one and are not stored
    w = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * w_row + k[None, :] * w_k
    columns = x + tl.minimum(m, M - 1).to(tl.int64)[None, :] * x_row + k[:, None]
    blocks = tl.cdiv(K, BLOCK_K)
    run = tl.cdiv(blocks, SPLIT)
    first = tl.program_id(2) * run
    accumulated = tl.zeros((BLOCK_N, COLUMNS), dtype=tl.float32)
    for block in range(first, tl.minimum(first + run, blocks)):
        at = block * BLOCK_K
        if EVEN_K:
            tile = tl.load(w + at * w_k, eviction_policy="evict_first")
            right = tl.load(columns + at)
        else:
            tile = tl.load(w + at * w_k, mask=k[None, :] < K - at, other=0.0)
            right = tl.load(columns + at, mask=k[:, None] < K - at, other=0.0)
        accumulated = tl.dot(tile, right, accumulated, input_precision="ieee")

    inside = (n[:, None] < N) & (m[None, :] < M)
    cell = m.to(tl.int64)[None, :] * N + n[:, None]
    if SPLIT == 1:
        tl.store(out + cell, accumulated.to(out.dtype.element_ty), mask=inside)
    else:
        size = M.to(tl.int64) * N
        tl.store(partial + tl.program_id(2) * size + cell, accumulated, mask=inside)
        tl.debug_barrier()
        mine = arrivals + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(mine, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.load(partial + cell, mask=inside, other=0.0, cache_modifier=".cg")
            for index in tl.static_range(1, SPLIT):
                total += tl.load(
                    partial + index * size + cell, mask=inside, other=0.0, cache_modifier=".cg"
                )
            tl.store(out + cell, total.to(out.dtype.element_ty), mask=inside)
            tl.atomic_xchg(mine, 0)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiplies x [..., K] by weight [N, K] transposed."""
    return product(x, weight, x.dtype)


def product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As `linear`, rounded once to dtype."""
    N, K = weight.shape
    rows = x.reshape(-1, K)
    M = rows.shape[0]
    if M > WIDEST or not M * N:
        if dtype != x.dtype:
            return F.linear(x.to(dtype), weight.to(dtype))
        return F.linear(x, weight)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    plan = cut(N, K, weight.element_size())
    columns = min(max(triton.next_power_of_2(M), 16), COLUMNS)
    grid = (triton.cdiv(M, columns), triton.cdiv(N, plan.block_n), plan.split)
    out = torch.empty((M, N), dtype=dtype, device=x.device)
    partial = out
    if plan.split > 1:
        partial = torch.empty((plan.split, M, N), dtype=torch.float32, device=x.device)
    linear_kernel[grid](
        rows,
        weight,
        out,
        partial,
        _arrivals(x.device),
        M,
        N,
        K,
        rows.stride(0),
        *weight.stride(),
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        COLUMNS=columns,
        SPLIT=plan.split,
        EVEN_K=K % plan.block_k == 0,
        num_warps=4,
        num_stages=5 if columns <= 32 else 4 if columns == 64 else 3,
    )
    return out.view(*x.shape[:-1], N)


@lru_cache(maxsize=256)
def cut(N: int, K: int, element_size: int) -> Plan:
    """Tiles of 64 weight rows, and runs of K where those alone would leave the device idle."""
    block_k = min(max(triton.next_power_of_2(K), 16), 256 // element_size)
    tiles, blocks = triton.cdiv(N, 64), triton.cdiv(K, block_k)
    split = next((s for s in SPLITS if tiles * s >= ENOUGH_PROGRAMS), SPLITS[-1])
    # a run of fewer than two tiles is not worth its sum
    return Plan(64, block_k, max(s for s in SPLITS if s <= min(split, max(blocks // 2, 1))))


@lru_cache(maxsize=8)
def _arrivals(device: torch.device) -> torch.Tensor:
    """Counters for the tiles of a call; a call leaves them zero, and calls follow one another."""
    with torch.inference_mode(False):
        return torch.zeros(2 * ENOUGH_PROGRAMS, dtype=torch.int32, device=device)
