"""Triton form; see the contract. `draw` is the same function for kernels that draw as they go."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit
def _finalise(word):
    word = word + 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def draw(seed, position, purpose, sub):
    """The contract's uniform number for uint64 keys; only the low halves of all but seed count."""
    low_half = 0xFFFFFFFF
    key = _finalise(seed ^ ((position & low_half) * 0xD1B54A32D192ED03))
    key = key ^ ((purpose & low_half) << 21) ^ ((sub & low_half) * 0x2545F4914F6CDD1D)
    # the top 24 bits are exact in FP32; signed words convert in fewer steps
    return (_finalise(key) >> 40).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _uniform_kernel(
    seeds,
    positions,
    purpose,
    sub,
    out,
    count,
    POSITIONS_VARY: tl.constexpr,
    PURPOSE_VARIES: tl.constexpr,
    SUB_VARIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    seed = tl.load(seeds + at, mask=inside, other=0).to(tl.uint64)
    # each of the others is a tensor, or one number for all
    place = tl.load(positions + at, mask=inside, other=0) if POSITIONS_VARY else at * 0 + positions
    what = tl.load(purpose + at, mask=inside, other=0) if PURPOSE_VARIES else at * 0 + purpose
    which = tl.load(sub + at, mask=inside, other=0) if SUB_VARIES else at * 0 + sub
    u = draw(seed, place.to(tl.uint64), what.to(tl.uint64), which.to(tl.uint64))
    tl.store(out + at, u, mask=inside)


def uniform(
    seeds: Tensor, positions: Tensor | int, purpose: Tensor | int, sub: Tensor | int
) -> Tensor:
    """See the contract."""
    keys = (seeds, positions, purpose, sub)
    shape = torch.broadcast_shapes(*(key.shape for key in keys if isinstance(key, Tensor)))
    out = torch.empty(shape, dtype=torch.float32, device=seeds.device)
    if out.numel() == 0:
        return out
    flat = [
        key.expand(shape).contiguous() if isinstance(key, Tensor) else int(key) & 0xFFFFFFFF
        for key in keys
    ]
    _uniform_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
        *flat,
        out,
        out.numel(),
        POSITIONS_VARY=isinstance(positions, Tensor),
        PURPOSE_VARIES=isinstance(purpose, Tensor),
        SUB_VARIES=isinstance(sub, Tensor),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out
