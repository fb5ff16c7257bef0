"""Triton form; see the contract.

A logit and its id are one integer key (`rank_key`), no two equal, so that the best of chunks,
merged in any grouping, are the best of all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear_topk.kernel import LOWEST_KEY, key_id, key_value, rank_key
from kernels.overlap import OVERLAPPED, enter

_CHUNK = 4096
_RANKED = 1024
# beyond it a whole sort is the better ranking
_MOST_RANKED = 128


@triton.jit
def _chunk_keys_kernel(
    scores,
    keys,
    rows,
    scores_row,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The K best keys of chunk program_id(0) of line program_id(1), descending."""
    enter()
    chunk, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < rows
    values = tl.load(scores + line * scores_row + at, mask=inside, other=0.0).to(tl.float32)
    best = tl.topk(tl.where(inside, rank_key(values, at), LOWEST_KEY), K)
    tl.store(keys + (line * tl.num_programs(0) + chunk) * K + tl.arange(0, K), best)


@triton.jit
def _merge_keys_kernel(source, keys, count, K: tl.constexpr, CHUNK: tl.constexpr):
    """The K best of chunk program_id(0) of the `count` keys of line program_id(1)."""
    enter()
    chunk, line = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    best = tl.topk(tl.load(source + line * count + at, mask=at < count, other=LOWEST_KEY), K)
    tl.store(keys + (line * tl.num_programs(0) + chunk) * K + tl.arange(0, K), best)


def _top_keys(scores: Tensor, rows: int, k: int) -> Tensor:
    """The best keys of each line of scores [M, >= rows]: [M, K] int64, K >= k a power of two."""
    lines, padded = scores.shape[0], max(triton.next_power_of_2(k), 2)
    chunk = max(_RANKED, 2 * padded)
    chunks = triton.cdiv(rows, chunk)
    keys = torch.empty(lines, chunks * padded, dtype=torch.int64, device=scores.device)
    _chunk_keys_kernel[(chunks, lines)](
        scores,
        keys,
        rows,
        scores.stride(0),
        K=padded,
        CHUNK=chunk,
        num_warps=4,
        **OVERLAPPED,
    )
    while chunks > 1:
        count, chunks = chunks * padded, triton.cdiv(chunks * padded, chunk)
        merged = torch.empty(lines, chunks * padded, dtype=torch.int64, device=scores.device)
        _merge_keys_kernel[(chunks, lines)](
            keys,
            merged,
            count,
            K=padded,
            CHUNK=chunk,
            num_warps=4,
            **OVERLAPPED,
        )
        keys = merged
    return keys


@triton.jit
def _chunk_mass_kernel(logits, peaks, masses, V, logits_row, CHUNK: tl.constexpr):
    enter()
    line = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    z = tl.load(logits + line * logits_row + at, mask=at < V, other=float("-inf")).to(tl.float32)
    peak = tl.max(z, axis=0)
    level = tl.where(peak == float("-inf"), 0.0, peak)
    out = line * tl.num_programs(0) + tl.program_id(0)
    tl.store(peaks + out, peak)
    tl.store(masses + out, tl.sum(tl.exp(z - level), axis=0))


@triton.jit
def _logprob_kernel(
    logits,
    tokens,
    peaks,
    masses,
    keys,
    logprob,
    top_ids,
    top_logprobs,
    logits_row,
    chunks,
    top,
    CHUNKS: tl.constexpr,
    K: tl.constexpr,
):
    enter()
    line = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNKS)
    inside = at < chunks
    peak = tl.load(peaks + line * chunks + at, mask=inside, other=float("-inf"))
    mass = tl.load(masses + line * chunks + at, mask=inside, other=0.0)
    best = tl.max(peak, axis=0)
    level = best + tl.log(tl.sum(mass * tl.exp(peak - best), axis=0))
    token = tl.load(tokens + line)
    z = tl.load(logits + line * logits_row + token).to(tl.float32)
    tl.store(logprob + line, z - level)
    if K > 0:
        rank = tl.arange(0, K)
        key = tl.load(keys + line * K + rank)
        tl.store(top_ids + line * top + rank, key_id(key), mask=rank < top)
        tl.store(top_logprobs + line * top + rank, key_value(key) - level, mask=rank < top)


def token_logprobs(
    logits: Tensor, tokens: Tensor, top: int, *, public_vocab: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See the contract."""
    M, device = logits.shape[0], logits.device
    logprob = torch.empty(M, dtype=torch.float32, device=device)
    top_ids = torch.empty(M, top, dtype=torch.int64, device=device)
    top_logprobs = torch.empty(M, top, dtype=torch.float32, device=device)
    if M == 0:
        return logprob, top_ids, top_logprobs
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    chunks = triton.cdiv(public_vocab, _CHUNK)
    peaks = torch.empty(M, chunks, dtype=torch.float32, device=device)
    masses = torch.empty(M, chunks, dtype=torch.float32, device=device)
    _chunk_mass_kernel[(chunks, M)](
        logits,
        peaks,
        masses,
        public_vocab,
        logits.stride(0),
        CHUNK=_CHUNK,
        num_warps=8,
        **OVERLAPPED,
    )
    ranked = 0 < top <= _MOST_RANKED
    keys = _top_keys(logits, public_vocab, top) if ranked else peaks
    _logprob_kernel[(M,)](
        logits,
        tokens.contiguous(),
        peaks,
        masses,
        keys,
        logprob,
        top_ids,
        top_logprobs,
        logits.stride(0),
        chunks,
        top,
        CHUNKS=triton.next_power_of_2(chunks),
        K=keys.shape[1] if ranked else 0,
        num_warps=1,
        **OVERLAPPED,
    )
    if top > _MOST_RANKED:
        z = logits[:, :public_vocab].float()
        # a stable sort leaves equal entries in the order of their ids
        values, ids = z.sort(dim=1, descending=True, stable=True)
        top_ids.copy_(ids[:, :top])
        torch.sub(values[:, :top], z.logsumexp(dim=1, keepdim=True), out=top_logprobs)
    return logprob, top_ids, top_logprobs
