"""Triton form; see the contract. Five launches: scores, routes, two grouped products, the sum.

A pair is a row and one of its experts. A program of a grouped product takes one expert, collects
the pairs that chose it, COLUMNS at a time, and streams a tile of that expert's weights past them;
the shared expert is one more, chosen by every row. The tile and its order over K are the same
whoever chose the expert, so that a row's result does not depend on its neighbours. The expert of a
program is found on the device: by its number where there are at least as many pairs as experts,
else as the expert of a pair, of which the first to choose it goes ahead.
"""

import torch
import triton
import triton.language as tl

from kernels.linear.kernel import product
from kernels.overlap import OVERLAPPED, enter

COLUMNS = 16
PAIRS = 128  # looked through at a time


@triton.jit
def route_kernel(
    x,
    scores,
    shared_gate,
    experts,
    weights,
    openness,
    x_row,
    H: tl.constexpr,
    E: tl.constexpr,
    TOP: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Chooses the experts of row program_id(0), and how far the shared one is open."""
    enter()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    score = tl.load(scores + row * E + expert, mask=expert < E, other=float("-inf"))
    power = tl.exp(score - tl.max(score))
    power = power / tl.sum(power)
    # what is not a number counts as zero, and experts that do not exist come last
    power = tl.where(power >= 0.0, power, 0.0)
    power = tl.where(expert < E, power, -1.0)
    rank = tl.arange(0, RANKS)
    chosen = tl.zeros((RANKS,), dtype=tl.int32)
    best = tl.zeros((RANKS,), dtype=tl.float32)
    for nth in tl.static_range(TOP):
        greatest = tl.max(power)
        lowest = tl.min(tl.where(power == greatest, expert, EXPERTS))
        chosen = tl.where(rank == nth, lowest, chosen)
        best = tl.where(rank == nth, greatest, best)
        power = tl.where(expert == lowest, -1.0, power)
    best = best / tl.sum(best)
    tl.store(experts + row * TOP + rank, chosen, mask=rank < TOP)
    best = best.to(x.dtype.element_ty).to(tl.float32)
    tl.store(weights + row * TOP + rank, best, mask=rank < TOP)

    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, H, BLOCK):
        inside = first + at < H
        part = tl.load(x + row * x_row + first + at, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(shared_gate + first + at, mask=inside, other=0.0).to(tl.float32)
    opening = tl.sum(total).to(x.dtype.element_ty).to(tl.float32)
    tl.store(openness + row, 1.0 / (1.0 + tl.exp(-opening)))


@triton.jit
def _group(experts, pairs, groups, rows, BY_NUMBER: tl.constexpr, PAIRS: tl.constexpr):
    """The expert of group program_id(0), and how many pairs it has: 0 if another group has them.

    Group `groups` is the shared expert's, whose number is -1.
    """
    group = tl.program_id(0)
    expert = group
    if not BY_NUMBER:
        expert = tl.load(experts + tl.minimum(group, groups - 1))
    members = 0
    earlier = 0
    for first in range(0, pairs, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        match = tl.load(experts + pair, mask=pair < pairs, other=-1) == expert
        members += tl.sum(match.to(tl.int32))
        earlier += tl.sum((match & (pair < group)).to(tl.int32))
    if not BY_NUMBER:
        members = tl.where(earlier == 0, members, 0)
    if group == groups:
        expert = -1
        members = rows
    return expert, members


@triton.jit
def _members(experts, pairs, expert, nth, PAIRS: tl.constexpr, COLUMNS: tl.constexpr):
    """The nth [COLUMNS] pairs of an expert; the shared expert's follow all others, a row each."""
    if expert < 0:
        found = pairs + nth
    else:
        found = nth * 0
        seen = 0
        for first in range(0, pairs, PAIRS):
            pair = first + tl.arange(0, PAIRS)
            match = tl.load(experts + pair, mask=pair < pairs, other=-1) == expert
            place = tl.where(match, seen + tl.cumsum(match.to(tl.int32), axis=0) - 1, -1)
            hit = place[:, None] == nth[None, :]
            found += tl.sum(tl.where(hit, pair[:, None], 0), axis=0)
            seen += tl.sum(match.to(tl.int32))
    return found


@triton.jit
def expand_kernel(
    x,
    experts,
    gate_up,
    shared_gate_up,
    hidden,
    pairs,
    groups,
    rows,
    x_row,
    hidden_row,
    H: tl.constexpr,
    TOP: tl.constexpr,
    ROUTED: tl.constexpr,
    SHARED: tl.constexpr,
    BY_NUMBER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """hidden [pairs + rows, ..] = swiglu(G x), columns of tile program_id(1), of one expert."""
    enter()
    expert, members = _group(experts, pairs, groups, rows, BY_NUMBER, PAIRS)
    inner = tl.where(expert < 0, SHARED, ROUTED)
    first_n = tl.program_id(1) * BLOCK_N
    if (members > 0) & (first_n < inner):
        weight = gate_up + tl.maximum(expert, 0).to(tl.int64) * (2 * ROUTED * H)
        if expert < 0:
            weight = shared_gate_up
        n = first_n + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        gate_rows = weight + tl.minimum(n, inner - 1)[:, None] * H + k[None, :]
        for tile in range(tl.cdiv(members, COLUMNS)):
            nth = tile * COLUMNS + tl.arange(0, COLUMNS)
            pair = _members(experts, pairs, expert, nth, PAIRS, COLUMNS)
            live = nth < members
            row = tl.where(live, tl.where(pair < pairs, pair // TOP, pair - pairs), 0)
            columns = x + row.to(tl.int64)[None, :] * x_row + k[:, None]
            gate = tl.zeros((BLOCK_N, COLUMNS), dtype=tl.float32)
            up = tl.zeros((BLOCK_N, COLUMNS), dtype=tl.float32)
            for at in range(0, H, BLOCK_K):
                inside = k < H - at
                right = tl.load(columns + at, mask=inside[:, None], other=0.0)
                left = tl.load(gate_rows + at, mask=inside[None, :], other=0.0)
                gate = tl.dot(left, right, gate, input_precision="ieee")
                left = tl.load(gate_rows + inner * H + at, mask=inside[None, :], other=0.0)
                up = tl.dot(left, right, up, input_precision="ieee")
            dtype: tl.constexpr = hidden.dtype.element_ty
            gate = gate.to(dtype).to(tl.float32)
            opened = gate / (1.0 + tl.exp(-gate)) * up.to(dtype).to(tl.float32)
            cells = pair.to(tl.int64)[None, :] * hidden_row + n[:, None]
            tl.store(hidden + cells, opened.to(dtype), mask=live[None, :] & (n < inner)[:, None])


@triton.jit
def contract_kernel(
    hidden,
    experts,
    down,
    shared_down,
    out,
    pairs,
    groups,
    rows,
    hidden_row,
    H: tl.constexpr,
    ROUTED: tl.constexpr,
    SHARED: tl.constexpr,
    BY_NUMBER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out [pairs + rows, H] = D hidden, columns of tile program_id(1), of one expert."""
    enter()
    expert, members = _group(experts, pairs, groups, rows, BY_NUMBER, PAIRS)
    inner = tl.where(expert < 0, SHARED, ROUTED)
    if members > 0:
        weight = down + tl.maximum(expert, 0).to(tl.int64) * (H * ROUTED)
        if expert < 0:
            weight = shared_down
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        weight_rows = weight + tl.minimum(n, H - 1)[:, None] * inner + k[None, :]
        for tile in range(tl.cdiv(members, COLUMNS)):
            nth = tile * COLUMNS + tl.arange(0, COLUMNS)
            pair = _members(experts, pairs, expert, nth, PAIRS, COLUMNS)
            live = nth < members
            pair = tl.where(live, pair, 0).to(tl.int64)
            columns = hidden + pair[None, :] * hidden_row + k[:, None]
            total = tl.zeros((BLOCK_N, COLUMNS), dtype=tl.float32)
            for at in range(0, inner, BLOCK_K):
                inside = k < inner - at
                right = tl.load(columns + at, mask=inside[:, None] & live[None, :], other=0.0)
                left = tl.load(weight_rows + at, mask=inside[None, :], other=0.0)
                total = tl.dot(left, right, total, input_precision="ieee")
            cells = pair[None, :] * H + n[:, None]
            mask = live[None, :] & (n < H)[:, None]
            tl.store(out + cells, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def mix_kernel(parts, weights, openness, out, pairs, H, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """Adds row program_id(0)'s experts in the order of their rank, then the shared one."""
    enter()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < H
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in tl.static_range(TOP):
        pair = row * TOP + rank
        part = tl.load(parts + pair * H + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * part
    shared = tl.load(parts + (pairs + row) * H + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(openness + row) * shared
    tl.store(out + row * H + at, total.to(out.dtype.element_ty), mask=inside)


def moe(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared_gate_up: torch.Tensor,
    shared_down: torch.Tensor,
    shared_gate: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """Sends each row of x [M, H] through its top_k experts and the shared expert."""
    M, H = x.shape
    if not M:
        return torch.empty_like(x)
    E, routed, shared = router.shape[0], down.shape[-1], shared_down.shape[-1]
    x = x if x.stride(-1) == 1 else x.contiguous()
    pairs = M * top_k
    experts = torch.empty((M, top_k), dtype=torch.int32, device=x.device)
    weights = torch.empty((M, top_k), dtype=torch.float32, device=x.device)
    openness = torch.empty(M, dtype=torch.float32, device=x.device)
    route_kernel[(M,)](
        x,
        product(x, router, torch.float32),
        shared_gate,
        experts,
        weights,
        openness,
        x.stride(0),
        H=H,
        E=E,
        TOP=top_k,
        EXPERTS=triton.next_power_of_2(E),
        RANKS=triton.next_power_of_2(top_k),
        BLOCK=min(triton.next_power_of_2(H), 2048),
        num_warps=4,
        **OVERLAPPED,
    )
    inner = max(routed, shared)
    hidden = x.new_empty(pairs + M, inner)
    parts = x.new_empty(pairs + M, H)
    by_number = pairs >= E
    groups = E if by_number else pairs
    widest = 256 // x.element_size()
    settings = {
        "H": H,
        "ROUTED": routed,
        "SHARED": shared,
        "BY_NUMBER": by_number,
        "BLOCK_N": 64,
        "PAIRS": PAIRS,
        "COLUMNS": COLUMNS,
        "num_warps": 4,
        "num_stages": 3,
    }
    expand_kernel[(groups + 1, triton.cdiv(inner, 64))](
        x,
        experts,
        gate_up,
        shared_gate_up,
        hidden,
        pairs,
        groups,
        M,
        x.stride(0),
        inner,
        TOP=top_k,
        BLOCK_K=min(max(triton.next_power_of_2(H), 16), widest),
        **settings,
        **OVERLAPPED,
    )
    contract_kernel[(groups + 1, triton.cdiv(H, 64))](
        hidden,
        experts,
        down,
        shared_down,
        parts,
        pairs,
        groups,
        M,
        inner,
        BLOCK_K=min(max(triton.next_power_of_2(inner), 16), widest),
        **settings,
        **OVERLAPPED,
    )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = min(triton.next_power_of_2(H), 1024)
    mix_kernel[(M, triton.cdiv(H, block))](
        parts,
        weights,
        openness,
        out,
        pairs,
        H,
        TOP=top_k,
        BLOCK=block,
        num_warps=4,
        **OVERLAPPED,
    )
    return out
