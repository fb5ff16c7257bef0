"""Triton form; see the contract. Each tile of the head keeps its best row; a second pass merges."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import require_that
from kernels.linear_topk.kernel import LOWEST_KEY, head_tile, key_id, rank_key, tiles
from kernels.overlap import OVERLAPPED, enter


@triton.jit
def _best_rows_kernel(
    hidden,
    head,
    token_ids,
    keys,
    M,
    rows,
    H,
    hidden_row,
    public_vocab,
    INDEXED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    enter()
    at_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    z = head_tile(hidden, head, rows, at_m, at_v, M, H, hidden_row, PRECISION, BLOCK_K)
    rounded = z.to(hidden.dtype.element_ty).to(tl.float32)
    allowed = at_v < rows
    if INDEXED:
        allowed = allowed & (tl.load(token_ids + at_v, mask=allowed, other=0) < public_vocab)
    # ties go to the lowest row: it stands where an id would
    key = rank_key(rounded, tl.broadcast_to(at_v[None, :], [BLOCK_M, BLOCK_V]))
    best = tl.max(tl.where(allowed[None, :], key, LOWEST_KEY), axis=1)
    tile, tile_count = tl.program_id(1), tl.num_programs(1)
    tl.store(keys + at_m.to(tl.int64) * tile_count + tile, best, mask=at_m < M)


@triton.jit
def _best_of_tiles_kernel(keys, token_ids, ids, count, INDEXED: tl.constexpr, BLOCK: tl.constexpr):
    enter()
    line = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], LOWEST_KEY, tl.int64)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        key = tl.load(keys + line * count + at, mask=at < count, other=LOWEST_KEY)
        best = tl.maximum(best, key)
    row = key_id(tl.max(best, axis=0))
    tl.store(ids + line, tl.load(token_ids + row) if INDEXED else row)


def linear_argmax(
    hidden: Tensor, head: Tensor, *, public_vocab: int, token_ids: Tensor | None
) -> Tensor:
    """See the contract."""
    M, H = hidden.shape
    # an indexed head's public rows are not counted: that would wait for the device
    rows = head.shape[0] if token_ids is not None else min(head.shape[0], public_vocab)
    require_that(rows >= 1, "head", "at least one row", rows)
    ids = torch.empty(M, dtype=torch.int64, device=hidden.device)
    if M == 0:
        return ids
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    options = tiles(hidden)
    grid = (triton.cdiv(M, options["BLOCK_M"]), triton.cdiv(rows, options["BLOCK_V"]))
    keys = torch.empty(M, grid[1], dtype=torch.int64, device=hidden.device)
    indexed = token_ids is not None
    _best_rows_kernel[grid](
        hidden,
        head.contiguous(),
        token_ids,
        keys,
        M,
        rows,
        H,
        hidden.stride(0),
        public_vocab,
        INDEXED=indexed,
        **options,
        **OVERLAPPED,
    )
    _best_of_tiles_kernel[(M,)](
        keys,
        token_ids,
        ids,
        grid[1],
        INDEXED=indexed,
        BLOCK=1024,
        num_warps=4,
        **OVERLAPPED,
    )
    return ids
