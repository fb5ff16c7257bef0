"""Triton form; see the contract.

Three launches: steps 1 to 5 over chunks of the vocabulary, one program a column that finds what
stays, and the division. A logit and its id are one integer key (`rank_key`) whose order is the
contract's, and a filter keeps the keys from some cut on. The 32 best logits lie in the 32 tiles
whose own best are the largest; where they settle the filters, they alone are ranked. Else the cut
is bisected over counts (top_k) or over masses (top_p), which only grow as the cut falls, sums being
taken in one fixed order. Greedy columns need the largest key alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.linear_topk.kernel import LOWEST_KEY, key_id, key_value, rank_key
from kernels.overlap import OVERLAPPED, enter
from kernels.tree_paths import depth_of

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.target_distribution import SamplingRows

_CHUNK = 1024
_PASS = 8192
_TILE = 64
_RANKED = 32
# differences of logits: beyond the first, exp is zero in FP32; the second is only a good guess
_NO_WEIGHT = tl.constexpr(104.0)
_NEAR = tl.constexpr(32.0)
_LINEAR_STEPS = tl.constexpr(24)


@triton.jit
def middle(low, high):
    """The key halfway between two, without overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _process_kernel(
    logits,
    proposals,
    counts,
    ancestors,
    temperatures,
    presences,
    frequencies,
    repetitions,
    min_tokens,
    output_index,
    lanes,
    generated_counts,
    prompt_seen,
    logit_bias,
    stop_mask,
    p,
    tile_keys,
    faults,
    V,
    public_vocab,
    logits_row,
    logits_column,
    proposals_row,
    real_row,
    whole_row,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes zeros, or what a sampled column's steps 1 to 5 leave, into p; each tile's best key."""
    enter()
    chunk, column = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    width, chunks = tl.num_programs(1), tl.num_programs(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    out = p + (row * width + column) * V + at
    if column >= tl.load(counts + row):
        tl.store(out, tl.zeros([CHUNK], tl.float32), mask=at < V)
    else:
        depth = column
        if ancestors is not None:
            mask = tl.load(ancestors + row * width + column)
            depth = depth_of(mask)
        public = at < public_vocab
        logits_at = logits + row * logits_row + column.to(tl.int64) * logits_column + at
        z = tl.load(logits_at, mask=public, other=0.0).to(tl.float32)
        fault = tl.max((tl.abs(z) < float("inf")).to(tl.int32) ^ 1, axis=0)
        lane = tl.load(lanes + row) * V
        bias = tl.load(logit_bias + lane + at, mask=public, other=0.0)
        wish = row * real_row
        presence, frequency = tl.load(presences + wish), tl.load(frequencies + wish)
        repetition = tl.load(repetitions + wish)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            count = tl.load(generated_counts + lane + at, mask=public, other=0)
            for earlier in range(column):
                draft = tl.load(proposals + row * proposals_row + earlier)
                overlaid = (at == draft).to(tl.int32)
                count += overlaid if ancestors is None else overlaid * ((mask >> earlier + 1) & 1)
            generated = count > 0
            seen = tl.load(prompt_seen + lane + at, mask=public, other=0) != 0
            scaled = tl.where(z > 0.0, tl.div_rn(z, repetition), z * repetition)
            z = tl.where(seen | generated, scaled, z)
            bias -= presence * generated.to(tl.float32) + frequency * count.to(tl.float32)
        z += bias
        if depth < tl.load(min_tokens + row * whole_row) - tl.load(output_index + row):
            stops = tl.load(stop_mask + lane + at, mask=public, other=0) != 0
            z = tl.where(stops, float("-inf"), z)
        keys = tl.where(public, rank_key(z, at), LOWEST_KEY)
        line = (row * width + column) * chunks + chunk
        tile_at = tile_keys + line * (CHUNK // TILE) + tl.arange(0, CHUNK // TILE)
        tl.store(tile_at, tl.max(tl.reshape(keys, [CHUNK // TILE, TILE]), axis=1))
        tl.store(faults + line, fault)
        greedy = tl.load(temperatures + wish) <= 0.0
        tl.store(out, tl.where(public & (not greedy), z, 0.0), mask=at < V)


@triton.jit
def _measure(z_at, public_vocab, cut, min_p, best, temperature, PASS: tl.constexpr):
    """How many keys from `cut` on weigh at least min_p, and their weight together."""
    count = tl.zeros([PASS], tl.int32)
    mass = tl.zeros([PASS], tl.float32)
    for first in range(0, public_vocab, PASS):
        at = first + tl.arange(0, PASS)
        z = tl.load(z_at + at, mask=at < public_vocab, other=float("-inf"))
        weight = tl.exp((z - best) / temperature)
        stays = (at < public_vocab) & (rank_key(z, at) >= cut) & (weight >= min_p)
        count += stays.to(tl.int32)
        mass += tl.where(stays, weight, 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _first_key(value):
    """The lowest key that a logit of this value may have."""
    return rank_key(value, tl.full([], 0xFFFFFFFF, tl.int64))


@triton.jit
def _probe(low, high, step):
    """A key between two: by value first, since weights are exponential in it, then by bits."""
    by_value = _first_key(0.5 * key_value(low) + 0.5 * key_value(high))
    fits = (step < _LINEAR_STEPS) & (by_value > low) & (by_value < high)
    return tl.where(fits, by_value, middle(low, high))


@triton.jit
def _top_k_cut(z_at, public_vocab, top_k, highest, temperature, PASS: tl.constexpr):
    """The cut that leaves top_k keys: they are distinct, so that there is one."""
    best = key_value(highest)
    low, high = tl.full([], LOWEST_KEY, tl.int64), highest + 1
    kept = tl.full([], 0, tl.int32) + public_vocab
    probe = _first_key(best - _NEAR)
    step = tl.full([], 0, tl.int32)
    while kept > top_k:
        found, _ = _measure(z_at, public_vocab, probe, 0.0, best, temperature, PASS)
        enough = found >= top_k
        low = tl.where(enough, probe, low)
        kept = tl.where(enough, found, kept)
        high = tl.where(enough, high, probe)
        probe = _probe(low, high, step)
        step += 1
    return low


@triton.jit
def _top_p_cut(z_at, public_vocab, cut, top_p, highest, temperature, PASS: tl.constexpr):
    """The highest cut whose mass reaches top_p of the mass from `cut` on."""
    best = key_value(highest)
    _, whole = _measure(z_at, public_vocab, cut, 0.0, best, temperature, PASS)
    goal = top_p * whole
    # what has no weight changes no mass
    low, high = tl.maximum(cut, _first_key(best - _NO_WEIGHT * temperature)), highest + 1
    # keys from low on, at most, and from high on
    upper = tl.full([], 0, tl.int32) + public_vocab
    lower = tl.full([], 0, tl.int32)
    step = tl.full([], 0, tl.int32)
    while (upper - lower > 1) & (low + 1 < high):
        probe = _probe(low, high, step)
        found, reached = _measure(z_at, public_vocab, probe, 0.0, best, temperature, PASS)
        enough = reached >= goal
        low = tl.where(enough, probe, low)
        upper = tl.where(enough, found, upper)
        high = tl.where(enough, high, probe)
        lower = tl.where(enough, lower, found)
        step += 1
    return low


@triton.jit
def best_of_tiles(values, bests, size, RANKED: tl.constexpr, TILE: tl.constexpr):
    """The RANKED largest keys of FP32 values [size], descending: in the tiles of largest bests."""
    chosen = tl.topk(bests, RANKED)
    first = tl.where(chosen == LOWEST_KEY, size, key_id(chosen) // TILE * TILE)
    at = tl.reshape(first[:, None] + tl.arange(0, TILE)[None, :], [RANKED * TILE])
    value = tl.load(values + at, mask=at < size, other=0.0)
    return tl.topk(tl.where(at < size, rank_key(value, at), LOWEST_KEY), RANKED)


@triton.jit
def _ranked_cut(
    z_at,
    bests,
    public_vocab,
    top_k,
    top_p,
    min_p,
    temperature,
    RANKED: tl.constexpr,
    TILE: tl.constexpr,
    PASS: tl.constexpr,
):
    """Whether a short ranking settles the filters, and the cut and the mass if so.

    top_k is at most RANKED, or public_vocab.
    """
    keys = best_of_tiles(z_at, bests, public_vocab, RANKED, TILE)
    best = key_value(tl.max(keys, axis=0))
    rank = tl.arange(0, RANKED)
    limited = top_k < public_vocab
    taken = (keys != LOWEST_KEY) & (rank < top_k)
    weights = tl.where(taken, tl.exp((key_value(keys) - best) / temperature), 0.0)
    whole = tl.sum(weights, axis=0)
    if not limited:
        lowest = tl.full([], LOWEST_KEY, tl.int64)
        _, whole = _measure(z_at, public_vocab, lowest, 0.0, best, temperature, PASS)
    short = taken & (tl.cumsum(weights, axis=0) < top_p * whole)
    kept = tl.sum(short.to(tl.int32), axis=0) + 1
    kept = tl.where(top_p < 1.0, kept, RANKED)
    kept = tl.where(limited, tl.minimum(kept, top_k.to(tl.int32)), kept)
    cut = tl.max(tl.where(rank == kept - 1, keys, LOWEST_KEY), axis=0)
    mass = tl.sum(tl.where((rank < kept) & (weights >= min_p), weights, 0.0), axis=0)
    settled = limited | (kept <= RANKED)
    return settled.to(tl.int32), tl.where(settled, cut, LOWEST_KEY), mass


@triton.jit
def _cut_kernel(
    p,
    counts,
    temperatures,
    top_ps,
    min_ps,
    top_ks,
    tile_keys,
    faults,
    cuts,
    levels,
    V,
    public_vocab,
    chunks,
    tiles,
    real_row,
    whole_row,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    RANKED: tl.constexpr,
    PASS: tl.constexpr,
):
    """Leaves what `_divide_kernel` needs: the cut, the largest logit and the mass that stays."""
    enter()
    column, width = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    count = tl.load(counts + row)
    if column < count:
        line = row * width + column
        at = tl.arange(0, CHUNKS)
        fault = tl.full([], 0, tl.int32)
        for other in range(count):
            at_fault = faults + (row * width + other) * chunks + at
            fault += tl.max(tl.load(at_fault, mask=at < chunks, other=0), axis=0)
        at_t = tl.arange(0, TILES)
        bests = tl.load(tile_keys + line * tiles + at_t, mask=at_t < tiles, other=LOWEST_KEY)
        highest = tl.max(bests, axis=0)
        best = key_value(highest)
        temperature = tl.load(temperatures + row * real_row)
        z_at = p + line * V
        mass = tl.full([], float("nan"), tl.float32)
        cut = tl.full([], LOWEST_KEY, tl.int64)
        if (fault == 0) & (temperature <= 0.0):
            tl.store(z_at + key_id(highest), 1.0)
            mass = tl.full([], 1.0, tl.float32)
        if (fault == 0) & (temperature > 0.0):
            top_k, top_p = tl.load(top_ks + row * whole_row), tl.load(top_ps + row * real_row)
            min_p = tl.load(min_ps + row * real_row)
            limited = (top_k > 0) & (top_k < public_vocab)
            settled = tl.full([], 0, tl.int32)
            if limited & (top_k > RANKED):
                cut = _top_k_cut(z_at, public_vocab, top_k, highest, temperature, PASS)
            elif limited | (top_p < 1.0):
                # few stay as a rule, unless the mass lies beyond them
                settled, cut, mass = _ranked_cut(
                    z_at,
                    bests,
                    public_vocab,
                    tl.where(limited, top_k, public_vocab),
                    top_p,
                    min_p,
                    temperature,
                    RANKED,
                    TILE,
                    PASS,
                )
            if (settled == 0) & (top_p < 1.0):
                cut = _top_p_cut(z_at, public_vocab, cut, top_p, highest, temperature, PASS)
            if settled == 0:
                _, mass = _measure(z_at, public_vocab, cut, min_p, best, temperature, PASS)
        tl.store(cuts + line, cut)
        tl.store(levels + line * 2, best)
        tl.store(levels + line * 2 + 1, mass)


@triton.jit
def _divide_kernel(
    p,
    counts,
    temperatures,
    min_ps,
    cuts,
    levels,
    V,
    public_vocab,
    real_row,
    CHUNK: tl.constexpr,
):
    enter()
    column, width = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(2).to(tl.int64)
    if column < tl.load(counts + row):
        line = row * width + column
        at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        out = p + line * V + at
        best, mass = tl.load(levels + line * 2), tl.load(levels + line * 2 + 1)
        temperature = tl.load(temperatures + row * real_row)
        # the mass of a row with a fault is not a number
        if not (mass >= 0.0):
            tl.store(out, tl.zeros([CHUNK], tl.float32) + mass, mask=at < V)
        elif temperature > 0.0:
            z = tl.load(out, mask=at < public_vocab, other=float("-inf"))
            weight = tl.exp((z - best) / temperature)
            min_p = tl.load(min_ps + row * real_row)
            stays = (rank_key(z, at) >= tl.load(cuts + line)) & (weight >= min_p)
            tl.store(out, tl.where(stays, tl.div_rn(weight, mass), 0.0), mask=at < public_vocab)


def _columns(*wishes: Tensor) -> tuple[tuple[Tensor, ...], int]:
    """Wishes [B] and the one stride of all: often columns of a table, which need no copies."""
    stride = wishes[0].stride(0)
    if any(wish.stride(0) != stride for wish in wishes):
        return tuple(wish.contiguous() for wish in wishes), 1
    return wishes, stride


def target_distribution(
    logits: Tensor,
    proposals: Tensor,
    counts: Tensor,
    rows: SamplingRows,
    *,
    public_vocab: int,
    ancestors: Tensor | None = None,
) -> Tensor:
    """See the contract."""
    B, W, V = logits.shape
    device = logits.device
    p = torch.empty(B, W, V, dtype=torch.float32, device=device)
    if B == 0 or W == 0:
        return p
    if logits.stride(2) != 1:
        logits = logits.contiguous()
    chunks = triton.cdiv(V, _CHUNK)
    tiles = chunks * (_CHUNK // _TILE)
    tile_keys = torch.empty(B, W, tiles, dtype=torch.int64, device=device)
    faults = torch.empty(B, W, chunks, dtype=torch.int32, device=device)
    cuts = torch.empty(B, W, dtype=torch.int64, device=device)
    levels = torch.empty(B, W, 2, dtype=torch.float32, device=device)
    (temperature, top_p, min_p, presence, frequency, repetition), real_row = _columns(
        rows.temperature,
        rows.top_p,
        rows.min_p,
        rows.presence_penalty,
        rows.frequency_penalty,
        rows.repetition_penalty,
    )
    (top_k, min_tokens), whole_row = _columns(rows.top_k, rows.min_tokens)
    _process_kernel[(chunks, W, B)](
        logits,
        proposals.contiguous(),
        counts,
        None if ancestors is None else ancestors.contiguous(),
        temperature,
        presence,
        frequency,
        repetition,
        min_tokens,
        rows.output_index.contiguous(),
        rows.lanes.contiguous(),
        rows.generated_counts,
        rows.prompt_seen,
        rows.logit_bias,
        rows.stop_mask,
        p,
        tile_keys,
        faults,
        V,
        public_vocab,
        logits.stride(0),
        logits.stride(1),
        proposals.shape[1],
        real_row,
        whole_row,
        CHUNK=_CHUNK,
        TILE=_TILE,
        num_warps=8,
        **OVERLAPPED,
    )
    _cut_kernel[(W, B)](
        p,
        counts,
        temperature,
        top_p,
        min_p,
        top_k,
        tile_keys,
        faults,
        cuts,
        levels,
        V,
        public_vocab,
        chunks,
        tiles,
        real_row,
        whole_row,
        CHUNKS=triton.next_power_of_2(chunks),
        TILES=max(triton.next_power_of_2(tiles), _RANKED),
        TILE=_TILE,
        RANKED=_RANKED,
        PASS=_PASS,
        num_warps=16,
        **OVERLAPPED,
    )
    _divide_kernel[(chunks, W, B)](
        p,
        counts,
        temperature,
        min_p,
        cuts,
        levels,
        V,
        public_vocab,
        real_row,
        CHUNK=_CHUNK,
        num_warps=8,
        **OVERLAPPED,
    )
    return p
