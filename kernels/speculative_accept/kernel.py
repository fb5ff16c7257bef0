"""Triton form; see the contract.

The first launch accepts, and writes the weights that the terminal token is drawn from; the second
draws it, one program a row. A probability and its id are one integer key (`rank_key`) whose order
is the contract's. Where the first token of the order has the weight, as in every greedy row, there
is nothing to search; else a short ranking is tried. Beyond it the weight from a key on only grows
as the key falls, sums being taken in one fixed order, so that bisection finds the token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear_topk.kernel import LOWEST_KEY, key_id, rank_key
from kernels.overlap import OVERLAPPED, enter
from kernels.rng import Purpose
from kernels.rng.kernel import draw
from kernels.target_distribution.kernel import best_of_tiles, middle

_CHUNK = 4096
_PASS = 8192
_TILE = 64
_RANKED = 32
_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
_CORRECTION = tl.constexpr(int(Purpose.CORRECTION))
_BONUS = tl.constexpr(int(Purpose.BONUS))


@triton.jit
def leave_chunk(
    mine,
    weight,
    chunk,
    chunks,
    row,
    weights,
    tile_keys,
    masses,
    amounts,
    V,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Stores one chunk of the weights that the terminal token is drawn from, and their sums."""
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < V
    tl.store(weights + row * V + at, weight, mask=inside)
    line = row * chunks + chunk
    keys = tl.reshape(tl.where(inside, rank_key(mine, at), LOWEST_KEY), [CHUNK // TILE, TILE])
    tile_at = tile_keys + line * (CHUNK // TILE) + tl.arange(0, CHUNK // TILE)
    tl.store(tile_at, tl.max(keys, axis=1))
    tl.store(masses + line * 2, tl.sum(weight, axis=0))
    tl.store(masses + line * 2 + 1, tl.sum(mine, axis=0))
    tl.store(amounts + line * 2, tl.sum((weight > 0.0).to(tl.int32), axis=0))
    tl.store(amounts + line * 2 + 1, tl.sum((mine > 0.0).to(tl.int32), axis=0))


@triton.jit
def _accept_kernel(
    p,
    proposals,
    live,
    candidate_ids,
    candidate_probabilities,
    seeds,
    frontiers,
    accepted,
    weights,
    tile_keys,
    masses,
    amounts,
    V,
    drafts,
    k,
    DRAFTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Weights of one chunk of the terminal token's column; every chunk counts A for itself."""
    enter()
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    count = tl.load(live + row).to(tl.int32)
    at_c = tl.arange(0, CANDIDATES)
    passed = tl.full([], 0, tl.int32)
    if DRAFTS > 0:
        at_d = tl.arange(0, DRAFTS)
        checked = at_d < count
        draft = tl.load(proposals + row * drafts + at_d, mask=checked, other=0)
        target_at = p + (row * (drafts + 1) + at_d) * V + draft
        target = tl.load(target_at, mask=checked, other=0.0)
        q_at = (row * drafts + at_d)[:, None] * k + at_c[None, :]
        q_mask = checked[:, None] & (at_c < k)[None, :]
        ids = tl.load(candidate_ids + q_at, mask=q_mask, other=-1)
        q = tl.load(candidate_probabilities + q_at, mask=q_mask, other=0.0)
        # candidates beside the proposal count nothing towards q(d)
        proposed = tl.sum(tl.where(ids == draft[:, None], q, 0.0), axis=1)
        seed = tl.load(seeds + row).to(tl.uint64)
        key = (tl.load(frontiers + row) + at_d + 1).to(tl.uint64)
        u = draw(seed, key, tl.full([], _ACCEPT, tl.uint64), tl.full([], 0, tl.uint64))
        passes = (target > 0.0) & ((target >= proposed) | (u * proposed < target))
        passed = tl.min(tl.where(checked, tl.where(passes, count, at_d), count), axis=0)
    if chunk == 0:
        tl.store(accepted + row, passed.to(tl.int64))
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < V
    mine = tl.load(p + (row * (drafts + 1) + passed) * V + at, mask=inside, other=0.0)
    weight = mine
    if passed < count:
        rejecting = (row * drafts + passed) * k
        # one candidate after the other: their ids differ wherever q is not zero
        for candidate in range(k):
            token = tl.load(candidate_ids + rejecting + candidate)
            q_token = tl.load(candidate_probabilities + rejecting + candidate)
            weight = tl.where(at == token, weight - q_token, weight)
        weight = tl.maximum(weight, 0.0)
    leave_chunk(
        mine, weight, chunk, chunks, row, weights, tile_keys, masses, amounts, V, CHUNK, TILE
    )


@triton.jit
def _search(order, source, V, goal, amount, highest, PASS: tl.constexpr):
    """The key that `goal` falls on, of the `amount` keys with weight; the lowest of all if none."""
    # the last key with weight stays in [low, high) even if rounding leaves the sum below goal
    low, high = tl.full([], 1 << 32, tl.int64), highest + 1
    upper, lower = amount, tl.full([], 0, tl.int32)
    while (upper - lower > 1) & (low + 1 < high):
        probe = middle(low, high)
        reached = tl.zeros([PASS], tl.float32)
        found = tl.zeros([PASS], tl.int32)
        for first in range(0, V, PASS):
            at_v = first + tl.arange(0, PASS)
            mine = tl.load(order + at_v, mask=at_v < V, other=0.0)
            weight = tl.load(source + at_v, mask=at_v < V, other=0.0)
            counts = (rank_key(mine, at_v) >= probe) & (weight > 0.0)
            reached += tl.where(counts, weight, 0.0)
            found += counts.to(tl.int32)
        number = tl.sum(found, axis=0)
        beyond = tl.sum(reached, axis=0) > goal
        low, upper = tl.where(beyond, probe, low), tl.where(beyond, number, upper)
        high, lower = tl.where(beyond, high, probe), tl.where(beyond, lower, number)
    chosen = tl.full([PASS], LOWEST_KEY, tl.int64)
    for first in range(0, V, PASS):
        at_v = first + tl.arange(0, PASS)
        mine = tl.load(order + at_v, mask=at_v < V, other=0.0)
        weight = tl.load(source + at_v, mask=at_v < V, other=0.0)
        at_key = rank_key(mine, at_v)
        candidate = (at_key >= low) & (at_key < high) & (weight > 0.0)
        chosen = tl.maximum(chosen, tl.where(candidate, at_key, LOWEST_KEY))
    return tl.max(chosen, axis=0)


@triton.jit
def draw_terminal(
    order,
    weights,
    tile_keys,
    masses,
    amounts,
    row,
    u,
    V,
    chunks,
    tiles,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    RANKED: tl.constexpr,
    PASS: tl.constexpr,
):
    """The token that u falls on, of a row's weights as `leave_chunk` left them, by p at `order`."""
    at = tl.arange(0, CHUNKS)
    inside = at < chunks
    line = row * chunks + at
    at_t = tl.arange(0, TILES)
    bests = tl.load(tile_keys + row * tiles + at_t, mask=at_t < tiles, other=LOWEST_KEY)
    highest = tl.max(bests, axis=0)
    mass = tl.sum(tl.load(masses + line * 2, mask=inside, other=0.0), axis=0)
    amount = tl.sum(tl.load(amounts + line * 2, mask=inside, other=0), axis=0)
    source = weights + row * V
    if mass <= 0.0:
        # where p equals q only rounding can have rejected, and p itself is what is left
        source = order
        mass = tl.sum(tl.load(masses + line * 2 + 1, mask=inside, other=0.0), axis=0)
        amount = tl.sum(tl.load(amounts + line * 2 + 1, mask=inside, other=0), axis=0)
    goal = u * mass
    terminal = key_id(highest)
    if goal >= tl.load(source + terminal):
        # most other draws fall on the next few ranks
        keys = best_of_tiles(order, bests, V, RANKED, TILE)
        rank = tl.arange(0, RANKED)
        weight = tl.load(source + key_id(keys), mask=keys != LOWEST_KEY, other=0.0)
        falls = (tl.cumsum(weight, axis=0) > goal) & (weight > 0.0)
        found = tl.min(tl.where(falls, rank, RANKED), axis=0)
        only = tl.max(tl.where(rank == found, keys, LOWEST_KEY), axis=0)
        if found == RANKED:
            only = _search(order, source, V, goal, amount, highest, PASS)
        # nothing has weight where p is not a number; any id will do then
        terminal = tl.where(only == LOWEST_KEY, terminal, key_id(only))
    return terminal


@triton.jit
def _draw_kernel(
    p,
    proposals,
    live,
    seeds,
    frontiers,
    accepted,
    weights,
    tile_keys,
    masses,
    amounts,
    tokens,
    V,
    drafts,
    chunks,
    tiles,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    RANKED: tl.constexpr,
    PASS: tl.constexpr,
):
    enter()
    row = tl.program_id(0).to(tl.int64)
    passed = tl.load(accepted + row)
    seed = tl.load(seeds + row).to(tl.uint64)
    key = (tl.load(frontiers + row) + passed + 1).to(tl.uint64)
    purpose = tl.where(passed < tl.load(live + row), _CORRECTION, _BONUS).to(tl.uint64)
    u = draw(seed, key, purpose, tl.full([], 0, tl.uint64))
    terminal = draw_terminal(
        p + (row * (drafts + 1) + passed) * V,
        weights,
        tile_keys,
        masses,
        amounts,
        row,
        u,
        V,
        chunks,
        tiles,
        CHUNKS,
        TILES,
        TILE,
        RANKED,
        PASS,
    )
    column = tl.arange(0, WIDTH)
    draft = tl.load(proposals + row * drafts + column, mask=column < passed, other=0)
    token = tl.where(column == passed, terminal, draft)
    tl.store(tokens + row * (drafts + 1) + column, token, mask=column <= drafts)


def speculative_accept(
    p: Tensor,
    proposals: Tensor,
    live: Tensor,
    candidate_ids: Tensor,
    candidate_probabilities: Tensor,
    seeds: Tensor,
    frontiers: Tensor,
) -> tuple[Tensor, Tensor]:
    """See the contract."""
    B, W, V = p.shape
    drafts, k = W - 1, candidate_ids.shape[2]
    device = p.device
    tokens = torch.empty(B, W, dtype=torch.int64, device=device)
    accepted = torch.empty(B, dtype=torch.int64, device=device)
    if B == 0:
        return tokens, accepted
    chunks = triton.cdiv(V, _CHUNK)
    weights = torch.empty(B, V, dtype=torch.float32, device=device)
    tiles = chunks * (_CHUNK // _TILE)
    tile_keys = torch.empty(B, tiles, dtype=torch.int64, device=device)
    masses = torch.empty(B, chunks, 2, dtype=torch.float32, device=device)
    amounts = torch.empty(B, chunks, 2, dtype=torch.int32, device=device)
    p, proposals, live = p.contiguous(), proposals.contiguous(), live.contiguous()
    seeds, frontiers = seeds.contiguous(), frontiers.contiguous()
    _accept_kernel[(chunks, B)](
        p,
        proposals,
        live,
        candidate_ids.contiguous(),
        candidate_probabilities.contiguous(),
        seeds,
        frontiers,
        accepted,
        weights,
        tile_keys,
        masses,
        amounts,
        V,
        drafts,
        k,
        DRAFTS=triton.next_power_of_2(drafts) if drafts else 0,
        CANDIDATES=triton.next_power_of_2(max(k, 1)),
        CHUNK=_CHUNK,
        TILE=_TILE,
        num_warps=8,
        **OVERLAPPED,
    )
    _draw_kernel[(B,)](
        p,
        proposals,
        live,
        seeds,
        frontiers,
        accepted,
        weights,
        tile_keys,
        masses,
        amounts,
        tokens,
        V,
        drafts,
        chunks,
        tiles,
        WIDTH=triton.next_power_of_2(W),
        CHUNKS=triton.next_power_of_2(chunks),
        TILES=max(triton.next_power_of_2(tiles), _RANKED),
        TILE=_TILE,
        RANKED=_RANKED,
        PASS=_PASS,
        num_warps=16,
        **OVERLAPPED,
    )
    return tokens, accepted
