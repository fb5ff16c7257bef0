"""Triton form; see the contract. Alternatives are ranked as `linear_topk` ranks a head's rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear_topk.kernel import key_id, key_value, top_keys

_CHUNK = 4096
# beyond it a whole sort is the better ranking
_MOST_RANKED = 128


@triton.jit
def _chunk_mass_kernel(logits, peaks, masses, V, logits_row, CHUNK: tl.constexpr):
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
        logits, peaks, masses, public_vocab, logits.stride(0), CHUNK=_CHUNK, num_warps=8
    )
    ranked = 0 < top <= _MOST_RANKED
    keys = top_keys(logits, None, public_vocab, top, public_vocab) if ranked else peaks
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
    )
    if top > _MOST_RANKED:
        z = logits[:, :public_vocab].float()
        # a stable sort leaves equal entries in the order of their ids
        values, ids = z.sort(dim=1, descending=True, stable=True)
        top_ids.copy_(ids[:, :top])
        torch.sub(values[:, :top], z.logsumexp(dim=1, keepdim=True), out=top_logprobs)
    return logprob, top_ids, top_logprobs
