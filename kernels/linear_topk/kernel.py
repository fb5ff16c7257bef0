"""Triton form; see the contract.

The products stream the head once into FP32 scores. A score and its id then become one integer key
whose order is the contract's (larger score, then lower id), so that no two are equal and the best
of a chunk, merged in any grouping, are the best of all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.checks import require_that

LOWEST_KEY = tl.constexpr(-(1 << 63))
CHUNK = 2048


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
    scores,
    M,
    rows,
    H,
    hidden_row,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # neighbouring programs share a tile of the head
    at_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    z = head_tile(hidden, head, rows, at_m, at_v, M, H, hidden_row, PRECISION, BLOCK_K)
    inside = (at_m < M)[:, None] & (at_v < rows)[None, :]
    tl.store(scores + at_m.to(tl.int64)[:, None] * rows + at_v[None, :], z, mask=inside)


@triton.jit
def chunk_keys_kernel(
    scores,
    token_ids,
    keys,
    rows,
    scores_row,
    public_vocab,
    INDEXED: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The K best keys of chunk program_id(0) of line program_id(1), descending."""
    chunk, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < rows
    ids = tl.load(token_ids + at, mask=inside, other=0) if INDEXED else at.to(tl.int64)
    inside = inside & (ids < public_vocab)
    values = tl.load(scores + line * scores_row + at, mask=inside, other=0.0).to(tl.float32)
    best = tl.topk(tl.where(inside, rank_key(values, ids), LOWEST_KEY), K)
    tl.store(keys + (line * tl.num_programs(0) + chunk) * K + tl.arange(0, K), best)


@triton.jit
def merge_keys_kernel(source, keys, count, K: tl.constexpr, CHUNK: tl.constexpr):
    """The K best of chunk program_id(0) of the `count` keys of line program_id(1)."""
    chunk, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    best = tl.topk(tl.load(source + line * count + at, mask=at < count, other=LOWEST_KEY), K)
    tl.store(keys + (line * tl.num_programs(0) + chunk) * K + tl.arange(0, K), best)


def top_keys(
    scores: Tensor, token_ids: Tensor | None, rows: int, k: int, public_vocab: int
) -> Tensor:
    """The best keys of each line of scores [M, >= rows]: [M, K] int64, K >= k a power of two."""
    lines, padded = scores.shape[0], max(triton.next_power_of_2(k), 2)
    chunk = max(CHUNK, 2 * padded)
    chunks = triton.cdiv(rows, chunk)
    keys = torch.empty(lines, chunks * padded, dtype=torch.int64, device=scores.device)
    chunk_keys_kernel[(chunks, lines)](
        scores,
        token_ids,
        keys,
        rows,
        scores.stride(0),
        public_vocab,
        INDEXED=token_ids is not None,
        K=padded,
        CHUNK=chunk,
        num_warps=4,
    )
    while chunks > 1:
        count, chunks = chunks * padded, triton.cdiv(chunks * padded, chunk)
        merged = torch.empty(lines, chunks * padded, dtype=torch.int64, device=scores.device)
        merge_keys_kernel[(chunks, lines)](keys, merged, count, K=padded, CHUNK=chunk, num_warps=4)
        keys = merged
    return keys


@triton.jit
def _finish_kernel(
    keys,
    scores,
    ids,
    k,
    multiplier,
    softcap,
    CAPPED: tl.constexpr,
    K: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, K)
    key = tl.load(keys + line * K + rank)
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

    An output's sum runs over H in the same blocks and by the same 16-row instruction for every
    number of rows.
    """
    wide = hidden.dtype is torch.float32
    return {
        "PRECISION": "ieee" if wide else "tf32",
        "BLOCK_M": 16 if hidden.shape[0] <= 16 else 32,
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
    _products_kernel[grid](
        hidden, head.contiguous(), products, M, rows, H, hidden.stride(0), **options
    )
    keys = top_keys(products, token_ids, rows, k, public_vocab)
    _finish_kernel[(M,)](
        keys, best, ids, k, multiplier, softcap, CAPPED=softcap > 0.0, K=keys.shape[1], num_warps=1
    )
    return best, ids
