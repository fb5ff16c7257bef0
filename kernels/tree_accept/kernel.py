"""Triton form; see the contract.

Three launches: how much of p lies outside the candidates, at every column that has several
children; the walk, in ascending order of the columns, which passes parents before children and
elder siblings before younger ones; and the terminal token, drawn as `kernels.speculative_accept`
draws it. Each program of the second walks for itself and leaves the weights of one chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.overlap import OVERLAPPED, enter
from kernels.rng import Purpose
from kernels.rng.kernel import draw
from kernels.speculative_accept.kernel import draw_terminal, leave_chunk
from kernels.trees import MOST_COLUMNS

_CHUNK = 4096
_PASS = 8192
_TILE = 64
_RANKED = 32
_BITS = tl.constexpr(MOST_COLUMNS)
_ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
_CORRECTION = tl.constexpr(int(Purpose.CORRECTION))
_BONUS = tl.constexpr(int(Purpose.BONUS))


@triton.jit
def _masks(ancestors, live, row, width):
    """The masks of a row's live columns, and each without its own bit; 0 elsewhere."""
    column = tl.arange(0, _BITS)
    inside = column <= tl.load(live + row)
    masks = tl.load(ancestors + row * width + column, mask=inside, other=0)
    # a column's own bit is the last; the anchor is nobody's child
    return masks, tl.where(inside & (column > 0), masks ^ (1 << column), 0)


@triton.jit
def _outside_kernel(
    p,
    live,
    ancestors,
    candidate_ids,
    outside,
    V,
    k,
    CHUNK: tl.constexpr,
):
    """Sum of one chunk of p at a column over all that are not candidates of its children."""
    enter()
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    node, width = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(2).to(tl.int64)
    column = tl.arange(0, _BITS)
    masks, before = _masks(ancestors, live, row, width)
    mask = tl.sum(tl.where(column == node, masks, 0), axis=0)
    is_child = (before == mask) & (before != 0)
    if tl.sum(is_child.to(tl.int32), axis=0) > 1:
        first = tl.min(tl.where(is_child, column, _BITS), axis=0)
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        mine = tl.load(p + (row * width + node) * V + at, mask=at < V, other=0.0)
        ids = candidate_ids + (row * (width - 1) + first - 1) * k
        for candidate in range(k):
            mine = tl.where(at == tl.load(ids + candidate), 0.0, mine)
        tl.store(outside + (row * width + node) * chunks + chunk, tl.sum(mine, axis=0))


@triton.jit
def _walk_kernel(  # noqa: PLR0915
    p,
    proposals,
    live,
    ancestors,
    candidate_ids,
    candidate_probabilities,
    seeds,
    frontiers,
    outside,
    accepted,
    columns,
    rejected,
    weights,
    tile_keys,
    masses,
    amounts,
    V,
    width,
    k,
    CANDIDATES: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Walks a row, and leaves one chunk of the terminal token's weights."""
    enter()
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    count = tl.load(live + row).to(tl.int32)
    column, slot = tl.arange(0, _BITS), tl.arange(0, CANDIDATES)
    at_chunk = tl.arange(0, CHUNKS)
    masks, before = _masks(ancestors, live, row, width)
    seed = tl.load(seeds + row).to(tl.uint64)
    frontier = tl.load(frontiers + row)
    accepting = tl.full([], _ACCEPT, tl.uint64)

    node = tl.full([], 0, tl.int32)
    mask = tl.sum(tl.where(column == 0, masks, 0), axis=0)
    depth = tl.full([], 0, tl.int32)
    sibling = tl.full([], 0, tl.int32)
    branch = column
    # of the node's candidates: id, what is left of p, who was tried, whom a law has offered
    ids = tl.full([CANDIDATES], -1, tl.int64)
    left = tl.zeros([CANDIDATES], tl.float32)
    taken = tl.zeros([CANDIDATES], tl.int32)
    touched = tl.zeros([CANDIDATES], tl.int32)
    for child in range(1, count + 1):
        continues = tl.sum(tl.where(column == child, before, 0), axis=0)
        if continues == mask:
            line = row * (width - 1) + child - 1
            token = tl.load(proposals + line)
            ids = tl.load(candidate_ids + line * k + slot, mask=slot < k, other=-1)
            q = tl.load(candidate_probabilities + line * k + slot, mask=slot < k, other=0.0)
            here = p + (row * width + node) * V
            whole = tl.load(here + ids, mask=slot < k, other=0.0)
            mass = tl.full([], 1.0, tl.float32)
            share = tl.full([], 1.0, tl.float32)
            if sibling == 0:
                left = whole
                taken = tl.zeros([CANDIDATES], tl.int32)
                touched = tl.zeros([CANDIDATES], tl.int32)
            else:
                q = tl.where(taken != 0, 0.0, q)
                share = tl.sum(q, axis=0)
                rest = outside + (row * width + node) * chunks + at_chunk
                rest = tl.load(rest, mask=at_chunk < chunks, other=0.0)
                mass = tl.sum(rest, axis=0) + tl.sum(left, axis=0)
                if mass <= 0.0:
                    # where p equals q only rounding can have rejected, and p is what is left
                    left = whole
                    mass = tl.full([], 1.0, tl.float32)
            chosen = ids == token
            owed = tl.max(tl.where(chosen, left, 0.0), axis=0) / mass
            offered = tl.sum(tl.where(chosen, q, 0.0), axis=0) / share
            key = (frontier + depth + 1).to(tl.uint64)
            u = draw(seed, key, accepting, sibling.to(tl.uint64))
            if (owed > 0.0) & ((owed >= offered) | (u * offered < owed)):
                node = child
                mask = tl.sum(tl.where(column == child, masks, 0), axis=0)
                depth += 1
                sibling = tl.full([], 0, tl.int32)
                branch = tl.where(column == depth, child, branch)
            else:
                left = tl.maximum(left - (mass / share) * q, 0.0)
                touched = touched | (q > 0.0).to(tl.int32)
                taken = taken | chosen.to(tl.int32)
                sibling += 1
    if chunk == 0:
        tl.store(accepted + row, depth.to(tl.int64))
        tl.store(rejected + row, sibling)
        tl.store(columns + row * width + column, branch.to(tl.int64), mask=column < width)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    mine = tl.load(p + (row * width + node) * V + at, mask=at < V, other=0.0)
    weight = mine
    if sibling > 0:
        # one candidate after the other: their ids differ wherever a law is not zero
        for candidate in range(k):
            token = tl.sum(tl.where((slot == candidate) & (touched != 0), ids + 1, 0), axis=0) - 1
            amount = tl.sum(tl.where(slot == candidate, left, 0.0), axis=0)
            weight = tl.where(at == token, amount, weight)
    leave_chunk(
        mine, weight, chunk, chunks, row, weights, tile_keys, masses, amounts, V, CHUNK, TILE
    )


@triton.jit
def _terminal_kernel(
    p,
    proposals,
    seeds,
    frontiers,
    accepted,
    columns,
    rejected,
    weights,
    tile_keys,
    masses,
    amounts,
    tokens,
    V,
    width,
    chunks,
    tiles,
    CHUNKS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    RANKED: tl.constexpr,
    PASS: tl.constexpr,
):
    enter()
    row = tl.program_id(0).to(tl.int64)
    passed = tl.load(accepted + row)
    node = tl.load(columns + row * width + passed)
    seed = tl.load(seeds + row).to(tl.uint64)
    key = (tl.load(frontiers + row) + passed + 1).to(tl.uint64)
    purpose = tl.where(tl.load(rejected + row) > 0, _CORRECTION, _BONUS).to(tl.uint64)
    u = draw(seed, key, purpose, tl.full([], 0, tl.uint64))
    terminal = draw_terminal(
        p + (row * width + node) * V,
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
    place = tl.arange(0, _BITS)
    source = tl.load(columns + row * width + place + 1, mask=place < passed, other=1)
    draft = tl.load(proposals + row * (width - 1) + source - 1, mask=place < passed, other=0)
    token = tl.where(place == passed, terminal, draft)
    tl.store(tokens + row * width + place, token, mask=place < width)


def tree_accept(
    p: Tensor,
    proposals: Tensor,
    live: Tensor,
    ancestors: Tensor,
    candidate_ids: Tensor,
    candidate_probabilities: Tensor,
    seeds: Tensor,
    frontiers: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See the contract."""
    B, W, V = p.shape
    k, device = candidate_ids.shape[2], p.device
    tokens, columns = (torch.empty(B, W, dtype=torch.int64, device=device) for _ in range(2))
    accepted = torch.empty(B, dtype=torch.int64, device=device)
    if B == 0:
        return tokens, accepted, columns
    chunks = triton.cdiv(V, _CHUNK)
    tiles = chunks * (_CHUNK // _TILE)
    outside = torch.empty(B, W, chunks, dtype=torch.float32, device=device)
    rejected = torch.empty(B, dtype=torch.int32, device=device)
    weights = torch.empty(B, V, dtype=torch.float32, device=device)
    tile_keys = torch.empty(B, tiles, dtype=torch.int64, device=device)
    masses = torch.empty(B, chunks, 2, dtype=torch.float32, device=device)
    amounts = torch.empty(B, chunks, 2, dtype=torch.int32, device=device)
    p, proposals, live, ancestors, candidate_ids, candidate_probabilities, seeds, frontiers = (
        x.contiguous()
        for x in (
            p,
            proposals,
            live,
            ancestors,
            candidate_ids,
            candidate_probabilities,
            seeds,
            frontiers,
        )
    )
    _outside_kernel[(chunks, W, B)](
        p, live, ancestors, candidate_ids, outside, V, k, CHUNK=_CHUNK, num_warps=8, **OVERLAPPED
    )
    left = (weights, tile_keys, masses, amounts)
    _walk_kernel[(chunks, B)](
        p,
        proposals,
        live,
        ancestors,
        candidate_ids,
        candidate_probabilities,
        seeds,
        frontiers,
        outside,
        accepted,
        columns,
        rejected,
        *left,
        V,
        W,
        k,
        CANDIDATES=triton.next_power_of_2(max(k, 1)),
        CHUNKS=triton.next_power_of_2(chunks),
        CHUNK=_CHUNK,
        TILE=_TILE,
        num_warps=8,
        **OVERLAPPED,
    )
    _terminal_kernel[(B,)](
        p,
        proposals,
        seeds,
        frontiers,
        accepted,
        columns,
        rejected,
        *left,
        tokens,
        V,
        W,
        chunks,
        tiles,
        CHUNKS=triton.next_power_of_2(chunks),
        TILES=max(triton.next_power_of_2(tiles), _RANKED),
        TILE=_TILE,
        RANKED=_RANKED,
        PASS=_PASS,
        num_warps=16,
        **OVERLAPPED,
    )
    return tokens, accepted, columns
