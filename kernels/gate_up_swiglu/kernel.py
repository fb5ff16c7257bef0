"""Triton form; see the contract. Up to WIDEST rows; more take a product and then the activation.

A tile is some rows of the gate and the same of the up half, times a tile of columns (the rows of
x). Runs of K are those that `linear` has for the weight, halved; where several make up a tile, the
last to arrive adds what all have left in memory, as there. So a column's result does not depend on
what shares the call. Weight and columns come through the tensor memory engine where they are
aligned for it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.linear.kernel import COLUMNS, WIDEST, counters, cut, product, sum_of_runs
from kernels.overlap import OVERLAPPED, release, wait
from kernels.swiglu.kernel import opened, swiglu

ROWS = 64  # of either half, in a tile


@triton.jit
def _activated(gate, up, dtype: tl.constexpr):
    """SiLU(gate) * up of whole sums, each rounded as a product is."""
    return opened(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["M"])
def gate_up_swiglu_kernel(  # noqa: PLR0915
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
    cut_programs,
    run,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    ENGINE: tl.constexpr,
    CUT_FIRST: tl.constexpr,
):
    """Columns program_id(0) and, by program_id(1), a tile of N rows of either half and a run of K.

    The first `whole` rows have one run each, the others SPLIT of `run` elements, in cut_programs
    programs, before the rest or after. partial is FP32 [gate and up, SPLIT, M, rows that are cut];
    arrivals are zero before and after. With ENGINE x and weight are descriptors of themselves.
    """
    wait()
    uncut = whole // BLOCK_N
    if CUT_FIRST:
        beyond = tl.where(tl.program_id(1) < cut_programs, tl.program_id(1), 0)
        tile = tl.program_id(1) - cut_programs
        tile = tl.where(tile < 0, uncut + beyond // SPLIT, tile)
    else:
        beyond = tl.maximum(tl.program_id(1) - uncut, 0)
        tile = tl.minimum(tl.program_id(1), uncut) + beyond // SPLIT
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK_K)
    is_column = (m < M)[None, :]
    first = tl.where(tile < uncut, 0, beyond % SPLIT * run)
    end = tl.where(tile < uncut, K, tl.minimum(first + run, K))
    if not ENGINE:
        # rows beyond the edge repeat the last one and are not stored
        w = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * w_row + k[None, :] * w_k
        columns = x + m.to(tl.int64)[None, :] * x_row + k[:, None]
        to_up = N.to(tl.int64) * w_row
    gate = tl.zeros((BLOCK_N, COLUMNS), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, COLUMNS), dtype=tl.float32)
    for at in range(first, end, BLOCK_K):
        if ENGINE:
            right = x.load([tl.program_id(0) * COLUMNS, at]).T
            left = weight.load([tile * BLOCK_N, at])
            left_up = weight.load([N + tile * BLOCK_N, at])
        elif EVEN_K:
            right = tl.load(columns + at, mask=is_column, other=0.0)
            left = tl.load(w + at * w_k, eviction_policy="evict_first")
            left_up = tl.load(w + to_up + at * w_k, eviction_policy="evict_first")
        else:
            inside_k = k < K - at
            right = tl.load(columns + at, mask=inside_k[:, None] & is_column, other=0.0)
            left = tl.load(w + at * w_k, mask=inside_k[None, :], other=0.0)
            left_up = tl.load(w + to_up + at * w_k, mask=inside_k[None, :], other=0.0)
        gate = tl.dot(left, right, gate, input_precision="ieee")
        up = tl.dot(left_up, right, up, input_precision="ieee")

    # not earlier: the next kernel's programs would stand in the way of those that stream
    release()
    inside = (n[:, None] < N) & is_column
    cell = m.to(tl.int64)[None, :] * N + n[:, None]
    if tile < uncut:
        tl.store(out + cell, _activated(gate, up, out.dtype.element_ty), mask=inside)
    else:
        size = M.to(tl.int64) * (N - whole)
        part = partial + m.to(tl.int64)[None, :] * (N - whole) + n[:, None] - whole
        tl.store(part + beyond % SPLIT * size, gate, mask=inside)
        tl.store(part + (SPLIT + beyond % SPLIT) * size, up, mask=inside)
        tl.debug_barrier()
        mine = arrivals + beyond // SPLIT * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(mine, 1, sem="acq_rel") == SPLIT - 1:
            total = sum_of_runs(part, size, inside, SPLIT)
            total_up = sum_of_runs(part + SPLIT * size, size, inside, SPLIT)
            total = _activated(total, total_up, out.dtype.element_ty)
            tl.store(out + cell, total, mask=inside)
            tl.atomic_xchg(mine, 0)


def gate_up_swiglu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns SiLU of the first half of x [..., K] weight^T times the second half."""
    N, K = weight.shape[0] // 2, weight.shape[1]
    rows = x.reshape(-1, K)
    M = rows.shape[0]
    if M > WIDEST or not M * N:
        return swiglu(product(x, weight, x.dtype))
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    plan = cut(2 * N, K, weight.element_size())
    whole = plan.whole // 2 if plan.split > 1 else triton.cdiv(N, ROWS) * ROWS
    columns = min(max(triton.next_power_of_2(M), 16), COLUMNS)
    options = extents(columns, plan.block_k)
    cut_programs = triton.cdiv(max(N - whole, 0), ROWS) * plan.split
    out = torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    partial = out
    if plan.split > 1:
        shape = (2, plan.split, M, N - whole)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    engine = all(map(is_aligned, (rows, weight)))
    places = (rows, weight)
    if engine:
        blocks = [columns, options["BLOCK_K"]], [ROWS, options["BLOCK_K"]]
        places = tuple(map(TensorDescriptor.from_tensor, places, blocks))
    gate_up_swiglu_kernel[(triton.cdiv(M, columns), whole // ROWS + cut_programs)](
        *places,
        out,
        partial,
        counters(x.device),
        M,
        N,
        K,
        rows.stride(0),
        *weight.stride(),
        whole,
        cut_programs,
        triton.cdiv(triton.cdiv(K, plan.block_k), plan.split) * plan.block_k,
        BLOCK_N=ROWS,
        COLUMNS=columns,
        SPLIT=plan.split,
        EVEN_K=K % options["BLOCK_K"] == 0,
        ENGINE=engine,
        **options,
        **OVERLAPPED,
    )
    return out


def extents(columns: int, block_k: int) -> dict[str, Any]:
    """How a program goes through its run: measured, and without effect on any sum.

    At 64 columns three programs share a processor: all there are run at once.
    """
    return {
        "BLOCK_K": max(block_k // 2, 16) if columns == 64 else block_k,
        "CUT_FIRST": columns > 16,
        "num_stages": 5 if columns == 32 else 3,
        "num_warps": 8 if columns > 64 else 4,
    }


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the tensor memory engine takes it: rows of whole, aligned 16 bytes."""
    row = tensor.stride(0) * tensor.element_size()
    return tensor.stride(1) == 1 and row % 16 == 0 and tensor.data_ptr() % 16 == 0
