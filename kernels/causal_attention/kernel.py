"""Triton form; see the contract.

The query heads that share a key head are further columns of one product. Positions are cut into
runs, of NEAR below FAR_FROM and of FAR from there on: short ones go side by side, long ones leave
less to add. A program stores the new keys and values of one run and scores it; a second kernel adds
a column's runs in ascending order, as many as its own position asks for. So the arithmetic of a
column follows from its position alone: not from the width of its block, its neighbours, or the
length of the page table, which only decides how many programs are launched.

A tree is scored path by path. A column's position is the frontier and its depth, and at each
position from the frontier on stand the key and value of the path's column of that depth, wherever
they lie in the pages: what a path's columns get is what a chain of them alone would. The runs below
the frontier are the same on every path. Those that reach beyond it, two at most, have a program
more for each further path; of the paths that pass a column the first gives its result.
"""

import torch
import triton
import triton.language as tl

from kernels.overlap import OVERLAPPED, enter
from kernels.tree_paths import columns_at, depth_of, member_count, path_masks
from kernels.trees import MOST_PATHS

WIDEST = 32  # columns of a launch
NEAR, FAR, FAR_FROM = 128, 512, 2048  # positions of a run below FAR_FROM, and beyond
RUNS = 16  # added at a time
ROWS, KEYS = 64, 64  # scored at a time
WARPS, STAGES = 8, 3
# rows, warps and stages of a tile that reads the keys once for up to 128 lines. It pays where keys
# are most of what is read: on an H200 16 columns took 403 us with low tiles and 349 with tall ones
# at 4 rows of 32,768 positions, and 34 and 36 us at 1,024
TALL = (128, 8, 2)
TALL_FROM = 32768  # positions that the page tables reach
ENDS = 2  # runs that the columns of a tree may lie in: it is not as deep as a run is long


@triton.jit
def _extend(scores, values, greatest, total, attended):
    """Takes a running softmax, in powers of two, over further positions."""
    higher = tl.maximum(greatest, tl.max(scores, axis=1))
    # a row that has seen nothing yet stays at -inf and weighs nothing
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    kept = tl.exp2(greatest - base)
    total = total * kept + tl.sum(weights, axis=1)
    attended = attended * kept[:, None]
    attended = tl.dot(weights.to(values.dtype), values, attended, input_precision="ieee")
    return higher, total, attended


@triton.jit
def _first_of(run, NEAR: tl.constexpr, FAR: tl.constexpr, FAR_FROM: tl.constexpr):
    """The first position of a run."""
    beyond = run - FAR_FROM // NEAR
    return tl.where(beyond < 0, run * NEAR, FAR_FROM + beyond * FAR)


@triton.jit
def _run_of(position, NEAR: tl.constexpr, FAR: tl.constexpr, FAR_FROM: tl.constexpr):
    """The run that a position lies in."""
    beyond = FAR_FROM // NEAR + (position - FAR_FROM) // FAR
    return tl.where(position < FAR_FROM, position // NEAR, beyond)


@triton.jit
def attend_kernel(  # noqa: PLR0912, PLR0915
    query,
    key,
    value,
    key_pages,
    value_pages,
    page_tables,
    frontiers,
    counts,
    ancestors,
    partial,
    statistics,
    scale,
    width,
    table_width,
    page,
    runs,
    query_row,
    query_column,
    query_head,
    key_row,
    key_column,
    key_head,
    value_row,
    value_column,
    value_head,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    FAR_FROM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    ENDS: tl.constexpr,
):
    """Run program_id(0), rows (column, head of the group) of tile program_id(1), key head.

    With ancestors the programs from `runs` on take ENDS runs, from the frontier's on, of each path
    but the first. partial is FP32 [B, width, HKV*GROUP, runs, D]; statistics [.., runs, 2] hold
    each run's greatest exponent and its sum of exponentials. EVEN says that a tile of KEYS never
    leaves a page: the pages of a run are then looked up together, beforehand.
    """
    enter()
    row = (tl.program_id(2) // HKV).to(tl.int64)
    shared = tl.program_id(2) % HKV
    frontier = tl.load(frontiers + row).to(tl.int32)
    count = tl.minimum(tl.load(counts + row), width).to(tl.int32)
    line = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = line // GROUP
    head = shared * GROUP + line % GROUP
    live = column < count
    first_column = tl.program_id(1) * ROWS // GROUP
    end_column = tl.minimum(count, tl.cdiv((tl.program_id(1) + 1) * ROWS, GROUP))
    at = tl.arange(0, BLOCK)
    inside = at < D

    run = tl.program_id(0)
    if ancestors is not None:
        further = run - runs
        end_run = _run_of(frontier, NEAR, FAR, FAR_FROM) + further % ENDS
        run = tl.where(further < 0, run, end_run)
    first = _first_of(run, NEAR, FAR, FAR_FROM)
    end = _first_of(run + 1, NEAR, FAR, FAR_FROM)
    if ancestors is None:
        end = tl.minimum(frontier + end_column, end)
    else:
        # how far a line's column lies from the frontier; lines of other paths' are not live here
        depth = column
        passed = count * 0
        if end > frontier:
            deepest = -1
            if (first_column < count) & (first < frontier + count):
                path = tl.where(further < 0, 0, further // ENDS + 1)
                passed, earlier = path_masks(ancestors + row * width, count, path, COLUMNS)
                own_columns = passed & ~earlier
                bit = tl.minimum(column, 31)
                live = live & (((own_columns >> bit) & 1) != 0)
                depth = member_count(passed, bit) - 1
                # a path's own columns are its last ones
                if ((own_columns & ((2 << end_column - 1) - 1)) >> first_column) != 0:
                    deepest = member_count(passed, end_column - 1) - 1
            # a path that gives no line of the tile its result ends before it begins
            end = tl.where(deepest < 0, first, tl.minimum(frontier + deepest + 1, end))
    own = live[:, None] & inside[None, :]
    if (first_column < count) & (first < end):
        table = page_tables + row * table_width
        # tiles of rows that share a run each store what they see of it, the same values
        if (end > frontier) & (first < frontier + count):
            nth = tl.arange(0, COLUMNS)
            place = frontier + nth
            if ancestors is None:
                new = (place >= first) & (place < end)
            else:
                # the path's, which are read again below; other paths' programs store theirs
                seat = frontier + member_count(passed, nth) - 1
                new = ((passed >> nth) & 1 != 0) & (seat >= first) & (seat < end)
            mask = new[:, None] & inside[None, :]
            cell = tl.load(table + place // page, mask=new, other=0) * page + place % page
            cell = ((cell * HKV + shared) * D)[:, None] + at[None, :]
            nth = nth.to(tl.int64)[:, None]
            source = key + row * key_row + shared * key_head + nth * key_column + at[None, :]
            newer = tl.load(source, mask=mask, other=0.0)
            tl.store(key_pages + cell, newer.to(key_pages.dtype.element_ty), mask=mask)
            source = value + row * value_row + shared * value_head + nth * value_column
            newer = tl.load(source + at[None, :], mask=mask, other=0.0)
            tl.store(value_pages + cell, newer.to(value_pages.dtype.element_ty), mask=mask)
            tl.debug_barrier()
        TILES: tl.constexpr = FAR // KEYS
        nth_tile = tl.arange(0, TILES)
        if EVEN:
            reached = first + nth_tile * KEYS
            numbers = tl.load(table + reached // page, mask=reached < end, other=0)
        asked = query + row * query_row + column[:, None].to(tl.int64) * query_column
        asked = tl.load(asked + head[:, None] * query_head + at[None, :], mask=own, other=0.0)
        greatest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        attended = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        # tiles that all columns see throughout
        if ancestors is None:
            solid = tl.minimum(frontier + first_column + 1, end) - first
        else:
            solid = tl.minimum(frontier + 1, end) - first
        solid = first + tl.maximum(solid, 0) // KEYS * KEYS
        for start in range(first, solid, KEYS):
            place = start + tl.arange(0, KEYS)
            if EVEN:
                number = tl.sum(tl.where(nth_tile == (start - first) // KEYS, numbers, 0))
            else:
                number = tl.load(table + place // page)
            cell = number * page + place % page
            cell = (cell * HKV + shared) * D
            keys = tl.load(key_pages + cell[None, :] + at[:, None], mask=inside[:, None], other=0.0)
            values = tl.load(
                value_pages + cell[:, None] + at[None, :], mask=inside[None, :], other=0.0
            )
            scores = tl.dot(asked, keys.to(asked.dtype), input_precision="ieee") * scale
            greatest, total, attended = _extend(scores, values, greatest, total, attended)
        for start in tl.range(solid, end, KEYS, num_stages=1):
            place = start + tl.arange(0, KEYS)
            stored = place
            if ancestors is not None:
                beyond = tl.maximum(place - frontier, 0)
                stored = tl.minimum(place, frontier) + columns_at(passed, beyond)
            if EVEN and ancestors is None:
                number = tl.sum(tl.where(nth_tile == (start - first) // KEYS, numbers, 0))
            else:
                number = tl.load(table + stored // page, mask=place < end, other=0)
            cell = number * page + stored % page
            cell = (cell * HKV + shared) * D
            known = (place < end)[None, :] & inside[:, None]
            keys = tl.load(key_pages + cell[None, :] + at[:, None], mask=known, other=0.0)
            known = (place < end)[:, None] & inside[None, :]
            values = tl.load(value_pages + cell[:, None] + at[None, :], mask=known, other=0.0)
            scores = tl.dot(asked, keys.to(asked.dtype), input_precision="ieee") * scale
            if ancestors is None:
                visible = place[None, :] <= frontier + column[:, None]
            else:
                visible = place[None, :] <= frontier + depth[:, None]
            scores = tl.where(visible, scores, float("-inf"))
            greatest, total, attended = _extend(scores, values, greatest, total, attended)
        line_out = ((row * width + column) * (HKV * GROUP) + head) * runs + run
        tl.store(partial + line_out[:, None] * D + at[None, :], attended, mask=own)
        tl.store(statistics + 2 * line_out, greatest, mask=live)
        tl.store(statistics + 2 * line_out + 1, total, mask=live)


@triton.jit
def combine_kernel(
    partial,
    statistics,
    gate,
    frontiers,
    counts,
    ancestors,
    out,
    width,
    runs,
    gate_row,
    gate_column,
    gate_head,
    D: tl.constexpr,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    FAR_FROM: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the runs of head program_id(1) of column program_id(0), counted over all rows."""
    enter()
    line = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row, column = line // width, line % width
    at = tl.arange(0, BLOCK)
    inside = at < D
    cell = (line * tl.num_programs(1) + head) * D + at
    if column < tl.load(counts + row):
        partial += (line * tl.num_programs(1) + head) * runs * D
        statistics += (line * tl.num_programs(1) + head) * runs * 2
        depth = column
        if ancestors is not None:
            depth = depth_of(tl.load(ancestors + line))
        last = (tl.load(frontiers + row) + depth).to(tl.int32)
        needed = _run_of(last, NEAR, FAR, FAR_FROM) + 1
        greatest = float("-inf")
        total = 0.0
        attended = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, needed, RUNS):
            run = first + tl.arange(0, RUNS)
            present = run < needed
            peaks = tl.load(statistics + 2 * run, mask=present, other=float("-inf"))
            sums = tl.load(statistics + 2 * run + 1, mask=present, other=0.0)
            parts = tl.load(
                partial + run[:, None] * D + at[None, :],
                mask=present[:, None] & inside[None, :],
                other=0.0,
            )
            higher = tl.maximum(greatest, tl.max(peaks))
            weights = tl.exp2(peaks - higher)
            kept = tl.exp2(greatest - higher)
            total = total * kept + tl.sum(weights * sums)
            attended = attended * kept + tl.sum(weights[:, None] * parts, axis=0)
            greatest = higher
        opening = gate + row * gate_row + column * gate_column + head * gate_head + at
        opening = tl.load(opening, mask=inside, other=0.0).to(tl.float32)
        attended = attended / total / (1.0 + tl.exp(-opening))
        tl.store(out + cell, attended.to(out.dtype.element_ty), mask=inside)
    else:
        nothing = tl.zeros((BLOCK,), dtype=tl.float32)
        tl.store(out + cell, nothing.to(out.dtype.element_ty), mask=inside)


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_tables: torch.Tensor,
    frontiers: torch.Tensor,
    counts: torch.Tensor,
    ancestors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stores the live columns' keys and values, then attends causally."""
    B, W, Hq, D = query.shape
    if W > WIDEST:
        # a column is the same in a block of any width
        pieces = []
        for first in range(0, W, WIDEST):
            part = [x[:, first : first + WIDEST] for x in (query, key, value, gate)]
            live = (counts - first).clamp(0, WIDEST)
            place = (page_tables, frontiers + first, live)
            pieces.append(causal_attention(*part, key_pages, value_pages, *place))
        return torch.cat(pieces, dim=1)
    page, Hkv = key_pages.shape[1:3]
    group = Hq // Hkv
    query, key, value, gate = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, gate)
    )
    page_tables = page_tables.contiguous()
    N = page_tables.shape[1]
    runs = run_count(N * page)
    out = query.new_empty(B, W, Hq * D)
    partial = query.new_empty((B, W, Hq, runs, D), dtype=torch.float32)
    statistics = query.new_empty((B, W, Hq, runs, 2), dtype=torch.float32)
    keys = KEYS if key_pages.element_size() <= 2 else 32
    cuts = {"NEAR": NEAR, "FAR": FAR, "FAR_FROM": FAR_FROM}
    block = max(triton.next_power_of_2(D), 16)
    programs = runs
    if ancestors is not None:
        ancestors = ancestors.contiguous()
        programs += ENDS * (min(W, MOST_PATHS) - 1)
    element_size = max(query.element_size(), key_pages.element_size())
    rows, warps, stages = tile(W * group, N * page, element_size)
    attend_kernel[(programs, triton.cdiv(W * group, rows), B * Hkv)](
        query,
        key,
        value,
        key_pages,
        value_pages,
        page_tables,
        frontiers,
        counts,
        ancestors,
        partial,
        statistics,
        D**-0.5 * 1.4426950408889634,  # log2(e): the exponentials are powers of two
        W,
        N,
        page,
        runs,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        HKV=Hkv,
        GROUP=group,
        D=D,
        COLUMNS=triton.next_power_of_2(W),
        EVEN=page % keys == 0,
        ROWS=rows,
        KEYS=keys,
        BLOCK=block,
        ENDS=ENDS,
        **cuts,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=False,
        **OVERLAPPED,
    )
    combine_kernel[(B * W, Hq)](
        partial,
        statistics,
        gate,
        frontiers,
        counts,
        ancestors,
        out,
        W,
        runs,
        *gate.stride()[:3],
        D=D,
        RUNS=RUNS,
        BLOCK=block,
        **cuts,
        num_warps=4,
        **OVERLAPPED,
    )
    return out


def tile(lines: int, positions: int, element_size: int) -> tuple[int, int, int]:
    """Rows that a program scores, its warps and stages: without effect on any sum.

    Args:
        lines: Of a key head: columns times the query heads that share it.
        positions: That a page table reaches.
        element_size: Bytes, the larger of a query's and a key's; a tall tile holds two at most.
    """
    if lines > ROWS and positions >= TALL_FROM and element_size <= 2:
        return TALL
    return ROWS, WARPS, STAGES


def run_count(positions: int) -> int:
    """How many runs the first positions are cut into."""
    near, far = min(positions, FAR_FROM), max(positions - FAR_FROM, 0)
    return triton.cdiv(near, NEAR) + triton.cdiv(far, FAR)
