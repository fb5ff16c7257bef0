"""Triton form; see the contract.

The products stream the head once into FP32 scores. A score and its id then become one integer key
whose order is the contract's (larger score, then lower id), so that no two are equal. Each tile of
the head leaves its largest key: the k best scores lie in the k tiles whose keys are the largest,
and only those are ranked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import require_that
from kernels.overlap import OVERLAPPED, enter

LOWEST_KEY = tl.constexpr(-(1 << 63))


@triton.jit
def rank_key(values, ids):
    """One int64 a pair: greater for a larger FP32 value, of equal ones for the lower id.

    Signed zeros are equal, and NaN is above infinity. ids are below 2**32.
    """
    values = tl.where(values == 0.0, 0.0, values)
    bits = values.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
    # of negative numbers the larger magnitude is the smaller
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def key_value(key):
    """The FP32 value of a `rank_key`."""
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def key_id(key):
    """The id of a `rank_key`, int64."""
    return 0xFFFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def head_tile(
    hidden, head, rows, at_m, at_v, M, H, hidden_row, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr
):
    """FP32 products [BLOCK_M, BLOCK_V] of hidden rows at_m with head rows at_v, over H in order."""
    acc = tl.zeros([at_m.shape[0], at_v.shape[0]], tl.float32)
    across = tl.arange(0, BLOCK_K)
    hidden_at = hidden + at_m.to(tl.int64)[:, None] * hidden_row + across[None, :]
    head_at = head + at_v.to(tl.int64)[None, :] * H + across[:, None]
    for first in range(0, H, BLOCK_K):
        inside = across < H - first
        x = tl.load(hidden_at + first, mask=(at_m < M)[:, None] & inside[None, :], other=0.0)
        w = tl.load(head_at + first, mask=(at_v < rows)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _products_kernel(
    hidden,
    head,
    token_ids,
    scores,
    tile_keys,
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
    # neighbouring programs share a tile of the head
    at_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    z = head_tile(hidden, head, rows, at_m, at_v, M, H, hidden_row, PRECISION, BLOCK_K)
    inside = (at_m < M)[:, None] & (at_v < rows)[None, :]
    tl.store(scores + at_m.to(tl.int64)[:, None] * rows + at_v[None, :], z, mask=inside)
    allowed = at_v < rows
    ids = tl.load(token_ids + at_v, mask=allowed, other=0) if INDEXED else at_v.to(tl.int64)
    allowed = allowed & (ids < public_vocab)
    key = rank_key(z, tl.broadcast_to(ids[None, :], [BLOCK_M, BLOCK_V]))
    best = tl.max(tl.where(allowed[None, :], key, LOWEST_KEY), axis=1)
    tile, tile_count = tl.program_id(1), tl.num_programs(1)
    tl.store(tile_keys + at_m.to(tl.int64) * tile_count + tile, best, mask=at_m < M)


@triton.jit
def _rank_kernel(
    products,
    token_ids,
    tile_keys,
    scores,
    ids,
    rows,
    tile_count,
    public_vocab,
    k,
    multiplier,
    softcap,
    INDEXED: tl.constexpr,
    CAPPED: tl.constexpr,
    K: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The k best of one line: they lie in the K tiles whose own best are the largest."""
    enter()
    line = tl.program_id(0).to(tl.int64)
    at_t = tl.arange(0, TILES)
    bests = tl.load(tile_keys + line * tile_count + at_t, mask=at_t < tile_count, other=LOWEST_KEY)
    # the tile of the rank-th largest key: its number, where keys carry the rows themselves
    chosen = tl.topk(bests, K)
    if INDEXED:
        rank = tl.arange(0, K)
        tiles = tl.zeros([K], tl.int64)
        for index in tl.static_range(K):
            key = tl.max(tl.where(rank == index, chosen, LOWEST_KEY), axis=0)
            tile = tl.max(tl.where(bests == key, at_t, 0), axis=0)
            tiles = tl.where(rank == index, tile.to(tl.int64), tiles)
    else:
        tiles = key_id(chosen) // BLOCK_V
    # fewer tiles than ranks: what is left over repeats nothing
    at = tl.where(chosen == LOWEST_KEY, rows, tiles * BLOCK_V)[:, None]
    at = tl.reshape(at + tl.arange(0, BLOCK_V)[None, :], [K * BLOCK_V])
    inside = at < rows
    names = tl.load(token_ids + at, mask=inside, other=0) if INDEXED else at
    values = tl.load(products + line * rows + at, mask=inside, other=0.0)
    inside = inside & (names < public_vocab)
    key = tl.topk(tl.where(inside, rank_key(values, names), LOWEST_KEY), K)
    rank = tl.arange(0, K)
    score = key_value(key) * multiplier
    if CAPPED:
        # tanh through exp of what is never positive, so that nothing overflows
        decayed = tl.exp(-2.0 * tl.abs(score) / softcap)
        bounded = softcap * (1.0 - decayed) / (1.0 + decayed)
        score = tl.where(score < 0.0, -bounded, bounded)
    tl.store(scores + line * k + rank, score, mask=rank < k)
    tl.store(ids + line * k + rank, key_id(key), mask=rank < k)


def tiles(hidden: Tensor) -> dict[str, int | str]:
    """Block extents and launch options of the products.

    An output's sum runs over H in the same blocks whatever the number of rows; on one H200 the
    bits were the same at 16, 32 and 64 rows a block.
    """
    wide = hidden.dtype is torch.float32
    return {
        "PRECISION": "ieee" if wide else "tf32",
        "BLOCK_M": min(max(triton.next_power_of_2(hidden.shape[0]), 16), 64),
        "BLOCK_V": 64,
        "BLOCK_K": 32 if wide else 128,
        "num_warps": 4,
        "num_stages": 4,
    }


def linear_topk(
    hidden: Tensor,
    head: Tensor,
    k: int,
    *,
    public_vocab: int,
    token_ids: Tensor | None,
    multiplier: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    M, H = hidden.shape
    # an indexed head's public rows are not counted: that would wait for the device
    rows = head.shape[0] if token_ids is not None else min(head.shape[0], public_vocab)
    require_that(rows >= k, "head", f"at least {k} public rows", rows)
    best = torch.empty(M, k, dtype=torch.float32, device=hidden.device)
    ids = torch.empty(M, k, dtype=torch.int64, device=hidden.device)
    if M == 0:
        return best, ids
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    products = torch.empty(M, rows, dtype=torch.float32, device=hidden.device)
    options = tiles(hidden)
    grid = (triton.cdiv(M, options["BLOCK_M"]), triton.cdiv(rows, options["BLOCK_V"]))
    tile_keys = torch.empty(M, grid[1], dtype=torch.int64, device=hidden.device)
    indexed = token_ids is not None
    _products_kernel[grid](
        hidden,
        head.contiguous(),
        token_ids,
        products,
        tile_keys,
        M,
        rows,
        H,
        hidden.stride(0),
        public_vocab,
        INDEXED=indexed,
        **options,
        **OVERLAPPED,
    )
    padded = max(triton.next_power_of_2(k), 2)
    _rank_kernel[(M,)](
        products,
        token_ids,
        tile_keys,
        best,
        ids,
        rows,
        grid[1],
        public_vocab,
        k,
        multiplier,
        softcap,
        INDEXED=indexed,
        CAPPED=softcap > 0.0,
        K=padded,
        TILES=max(triton.next_power_of_2(grid[1]), padded),
        BLOCK_V=options["BLOCK_V"],
        num_warps=8,
        **OVERLAPPED,
    )
    return best, ids
