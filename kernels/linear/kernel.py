"""Triton form; see the contract. Up to WIDEST rows it streams the weight once; more go to the BLAS.

A tile of weight rows times a tile of columns (the rows of x) is accumulated over K in one order
that the weight's shape alone fixes: tiles of BLOCK_K, in `split` runs whose sums are added in
ascending order, or in one run for rows that fill the device by themselves. That order does not
depend on the number of columns, and neither do the matrix instructions' operands along K; so a
column's result does not depend on what shares the call. The runs of one tile find each other
through a counter in memory: the last to arrive adds what all have left there.
"""

from functools import cache, lru_cache
from itertools import count
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.overlap import OVERLAPPED, release, wait

WIDEST = 256
COLUMNS = 128  # of one program, at most
PROCESSORS = 132  # that a plan has in mind, wherever it runs: sums must not depend on the device
SPLITS = (1, 2, 3, 4, 6, 8)
SHORTEST_RUN = 8  # tiles of K
_LINES = 32
_lines: dict[tuple[torch.device, int], int] = {}
_next_line = count()


class Plan(NamedTuple):
    """How a weight is cut over K; a function of the weight's shape and element size alone."""

    block_k: int
    split: int
    whole: int  # leading rows that are not cut, a multiple of 128


@triton.jit
def sum_of_runs(partial, size, inside, SPLIT: tl.constexpr):
    """What the runs of a tile have left, `size` apart, added in ascending order."""
    total = tl.load(partial, mask=inside, other=0.0, cache_modifier=".cg")
    for index in tl.static_range(1, SPLIT):
        total += tl.load(partial + index * size, mask=inside, other=0.0, cache_modifier=".cg")
    return total


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
    whole,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    LEAVE: tl.constexpr,
):
    """Columns program_id(0) and, by program_id(1), a tile of the weight's rows and a run of K.

    The first `whole` rows have one run each, the others SPLIT. partial is FP32 [SPLIT, M, rows that
    are cut], and stays as it is with LEAVE; arrivals are zero before and after.
    """
    wait()
    uncut = whole // BLOCK_N
    beyond = tl.maximum(tl.program_id(1) - uncut, 0)
    tile = tl.minimum(tl.program_id(1), uncut) + beyond // SPLIT
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK_K)
    # rows beyond the edge repeat the last one and are not stored
    w = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * w_row + k[None, :] * w_k
    columns = x + m.to(tl.int64)[None, :] * x_row + k[:, None]
    is_column = (m < M)[None, :]
    blocks = tl.cdiv(K, BLOCK_K)
    run = tl.where(tile < uncut, blocks, tl.cdiv(blocks, SPLIT))
    first = beyond % SPLIT * run
    end = tl.minimum(first + run, blocks)
    accumulated = tl.zeros((BLOCK_N, COLUMNS), dtype=tl.float32)
    for block in range(first, end):
        at = block * BLOCK_K
        if EVEN_K:
            left = tl.load(w + at * w_k, eviction_policy="evict_first")
            right = tl.load(columns + at, mask=is_column, other=0.0)
        else:
            left = tl.load(w + at * w_k, mask=k[None, :] < K - at, other=0.0)
            right = tl.load(columns + at, mask=(k[:, None] < K - at) & is_column, other=0.0)
        accumulated = tl.dot(left, right, accumulated, input_precision="ieee")

    # not earlier: the next kernel's programs would stand in the way of those that stream
    release()
    inside = (n[:, None] < N) & is_column
    cell = m.to(tl.int64)[None, :] * N + n[:, None]
    if SPLIT == 1:  # noqa: SIM114
        tl.store(out + cell, accumulated.to(out.dtype.element_ty), mask=inside)
    elif tile < uncut:
        tl.store(out + cell, accumulated.to(out.dtype.element_ty), mask=inside)
    else:
        part = partial + m.to(tl.int64)[None, :] * (N - whole) + n[:, None] - whole
        size = M.to(tl.int64) * (N - whole)
        tl.store(part + beyond % SPLIT * size, accumulated, mask=inside)
        if not LEAVE:
            tl.debug_barrier()
            mine = arrivals + beyond // SPLIT * tl.num_programs(0) + tl.program_id(0)
            if tl.atomic_add(mine, 1, sem="acq_rel") == SPLIT - 1:
                total = sum_of_runs(part, size, inside, SPLIT)
                tl.store(out + cell, total.to(out.dtype.element_ty), mask=inside)
                tl.atomic_xchg(mine, 0)


def linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies x [..., K] by weight [N, K] transposed."""
    return product(x, weight, x.dtype, out)


def product(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `linear`, rounded once to dtype."""
    N, K = weight.shape
    rows = x.reshape(-1, K)
    M = rows.shape[0]
    if M > WIDEST or not M * N:
        if dtype != x.dtype:
            x, weight = x.to(dtype), weight.to(dtype)
        result = F.linear(x, weight)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty((*x.shape[:-1], N), dtype=dtype, device=x.device)
    plan = cut(N, K, weight.element_size())
    partial = out
    if plan.split > 1:
        partial = torch.empty((plan.split, M, N - plan.whole), dtype=torch.float32, device=x.device)
    _launch(rows, weight, plan, out, partial)
    return out


def runs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """The sums of a weight's runs, FP32 [runs, rows of x, N], whose own sum is the product.

    None where `product` adds up no such runs of all rows of the weight.
    """
    N, K = weight.shape
    rows = x.reshape(-1, K)
    M = rows.shape[0]
    plan = cut(N, K, weight.element_size())
    if M > WIDEST or not M * N or plan.split == 1 or plan.whole:
        return None
    partial = torch.empty((plan.split, M, N), dtype=torch.float32, device=x.device)
    _launch(rows, weight, plan, None, partial)
    return partial


def _launch(
    rows: torch.Tensor,
    weight: torch.Tensor,
    plan: Plan,
    out: torch.Tensor | None,
    partial: torch.Tensor,
) -> None:
    """Multiplies rows [M, K] by the weight into out; without it the runs' sums are left."""
    (M, K), N = rows.shape, weight.shape[0]
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    columns = min(max(triton.next_power_of_2(M), 16), COLUMNS)
    block_n = tile_rows(N, plan, columns)
    tiles = plan.whole // block_n + triton.cdiv(N - plan.whole, block_n) * plan.split
    linear_kernel[(triton.cdiv(M, columns), tiles)](
        rows,
        weight,
        partial if out is None else out,
        partial,
        counters(rows.device),
        M,
        N,
        K,
        rows.stride(0),
        *weight.stride(),
        plan.whole,
        BLOCK_N=block_n,
        BLOCK_K=plan.block_k,
        COLUMNS=columns,
        SPLIT=plan.split,
        EVEN_K=K % plan.block_k == 0,
        LEAVE=out is None,
        num_warps=8 if columns > 64 else 4,
        num_stages=3 if columns > 64 else 5 if columns <= 32 and block_n == 64 else 4,
        **OVERLAPPED,
    )


@lru_cache(maxsize=256)
def cut(N: int, K: int, element_size: int) -> Plan:
    """As many runs of K as one program of 128 rows for each processor allows, not too short.

    Of a weight with more rows only those are cut that are left over when the others have filled the
    device, by two programs of 64 rows for each processor, some times.
    """
    block_k = min(max(triton.next_power_of_2(K), 16), 256 // element_size)
    tiles, blocks, shortest = triton.cdiv(N, 128), triton.cdiv(K, block_k), SHORTEST_RUN
    whole = 0
    if tiles > PROCESSORS:
        whole = N // (PROCESSORS * 128) * PROCESSORS * 128
        tiles, shortest = triton.cdiv(N - whole, 128), SHORTEST_RUN // 2
    fitting = [s for s in SPLITS if tiles * s <= PROCESSORS and blocks >= s * shortest]
    split = max(fitting, default=1) if tiles else 1
    return Plan(block_k, split, whole if split > 1 else 0)


def tile_rows(N: int, plan: Plan, columns: int) -> int:
    """Rows of the weight in a tile: measured, and without effect on any sum."""
    programs = triton.cdiv(N, 128) * (1 if plan.whole else plan.split)
    few = programs * 2 <= PROCESSORS
    return 128 if not few and (columns > 32 or programs <= PROCESSORS) else 64


def counters(device: torch.device) -> torch.Tensor:
    """Zeros for the tiles of a call; a call leaves them zero for the next one on its stream."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    line = _lines.get((device, stream))
    if line is None:
        line = _lines.setdefault((device, stream), next(_next_line))
    return _counters(device, line // _LINES)[line % _LINES]


@cache
def _counters(device: torch.device, block: int) -> torch.Tensor:
    """Counters of _LINES streams, made at once: a stream is often first seen while captured."""
    with torch.inference_mode(False):
        return torch.zeros((_LINES, 8 * PROCESSORS), dtype=torch.int32, device=device)
