"""Triton form; see the contract. Three launches, and nothing waits for the host.

The first convolves all columns. The second takes each chunk of 64 columns and value head by a
program of its own: what a chunk does to itself does not depend on the state it begins with, so all
chunks are taken at once. It leaves S = (I + A)^-1 diag(beta), the masked products P of queries and
keys, and the decays. The third goes through the chunks in order, a program a head and block of the
state's columns; with E the diagonal of exp G_i, e = exp G_last:
    U = S (V - E K^ M_0),    output = E Q^ M_0 + P U,    M_next = e M_0 + (e E^-1 K^)^T U.
There everything is held transposed: the left side of each product is then what the one before it
left in registers.

Queries and keys enter products as they were rounded after the convolution; their norms and all
decays are FP32 factors of rows. Further roundings to the dtype of projected are those of S, P, V -
E K^ M_0, U and M where they enter a product; M itself is summed in FP32. Tiles and warps are fixed,
not tuned at run time: equal calls give equal bits.
"""

import torch
import triton
import triton.language as tl

CHUNK = 64
COLUMNS, CHANNELS = 16, 512  # convolved by one program
VALUES = 64  # of a head's state columns, in one program of the third launch


@triton.jit
def raw_column(projected, past, channel, j, end, C, p_column):
    """Column j of history and projected put together, channels below end."""
    older = tl.load(past + j * C, mask=channel < tl.where(j < 3, end, 0), other=0.0)
    newer = projected + tl.maximum(j - 3, 0).to(tl.int64) * p_column + channel
    newer = tl.load(newer, mask=channel < tl.where(j < 3, 0, end), other=0.0)
    return tl.where(j < 3, older.to(newer.dtype), newer)


@triton.jit(do_not_specialize=["T"])
def convolve_kernel(
    projected,
    conv_weight,
    conv_history,
    slot,
    mixed,
    T,
    C,
    p_column,
    w_channel,
    w_tap,
    COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """COLUMNS columns from program_id(0) * COLUMNS on, channels of part program_id(1)."""
    first = tl.program_id(0) * COLUMNS
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < C
    past = conv_history + tl.load(slot) * 3 * C + channel
    weight = conv_weight + channel * w_channel
    weight_0 = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    weight_1 = tl.load(weight + w_tap, mask=inside, other=0.0).to(tl.float32)
    weight_2 = tl.load(weight + 2 * w_tap, mask=inside, other=0.0).to(tl.float32)
    weight_3 = tl.load(weight + 3 * w_tap, mask=inside, other=0.0).to(tl.float32)
    raw_0 = raw_column(projected, past, channel, first, C, C, p_column).to(tl.float32)
    raw_1 = raw_column(projected, past, channel, first + 1, C, C, p_column).to(tl.float32)
    raw_2 = raw_column(projected, past, channel, first + 2, C, C, p_column).to(tl.float32)
    source = projected + first.to(tl.int64) * p_column + channel
    target = mixed + first.to(tl.int64) * C + channel
    # a column is asked for while those before it are mixed
    next_1 = tl.load(source, mask=inside, other=0.0)
    next_2 = tl.load(source + p_column, mask=channel < tl.where(first + 1 < T, C, 0), other=0.0)
    for i in tl.static_range(COLUMNS):
        raw_3 = next_1.to(tl.float32)
        next_1 = next_2
        if i + 2 < COLUMNS:
            live = channel < tl.where(first + i + 2 < T, C, 0)
            next_2 = tl.load(source + (i + 2) * p_column, mask=live, other=0.0)
        total = raw_0 * weight_0 + raw_1 * weight_1 + raw_2 * weight_2 + raw_3 * weight_3
        total = total / (1.0 + tl.exp(-total))
        live = channel < tl.where(first + i < T, C, 0)
        tl.store(target + i * C, total.to(mixed.dtype.element_ty), mask=live)
        raw_0, raw_1, raw_2 = raw_1, raw_2, raw_3


@triton.jit
def invert(A, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A [CHUNK, CHUNK], FP32.

    Blocks of the diagonal are inverted, then pairs of them: with D the inverse of both and N the
    block below them, D - D N D. Substitution in another order, and as stable; powers of A are not.
    """
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    pair = row // 2 == column // 2
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(pair, A, 0.0)
    size = 2
    while size < CHUNK:
        below = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
        N = tl.where(below, A, 0.0)
        N = tl.dot(N, inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, N, input_precision=PRECISION)
        size *= 2
    return inverse


@triton.jit(do_not_specialize=["T"])
def chunk_kernel(  # noqa: PLR0915
    projected,
    a,
    b,
    a_log,
    dt_bias,
    conv_history,
    slot,
    mixed,
    solved,
    mixing,
    factors,
    decays,
    T,
    p_column,
    a_column,
    b_column,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARE: tl.constexpr,
    SHARE_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Chunk program_id(0), value head program_id(1).

    solved and mixing are [T, HV, CHUNK]; factors FP32 [3, HV, T] of reads by keys, of reads by
    queries and of writes; decays FP32 [HV, chunks], of the whole chunk. The programs of the last
    chunk also slide SHARE channels of the history each.
    """
    C: tl.constexpr = 2 * HK * DK + HV * DV
    head = tl.program_id(1)
    shared = head // (HV // HK)
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    live = i < T
    wide = i.to(tl.int64)

    x = tl.load(a + wide * a_column + head, mask=live, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head).to(tl.float32)
    # softplus(x) = max(x, 0) + log(1 + y), y = exp(-|x|); the quotient undoes the rounding of 1 + y
    y = tl.exp(-tl.abs(x))
    sum_y = 1.0 + y
    log_y = tl.where(sum_y == 1.0, y, tl.log(sum_y) * (y / tl.maximum(sum_y - 1.0, 1e-30)))
    g = -tl.exp(tl.load(a_log + head).to(tl.float32)) * (tl.maximum(x, 0.0) + log_y)
    opening = tl.load(b + wide * b_column + head, mask=live, other=0.0).to(tl.float32)
    beta = tl.where(live, 1.0 / (1.0 + tl.exp(-opening)), 0.0)
    # FP64: after one strong decay, the differences of later sums would lose their bits
    G = tl.cumsum(tl.where(live, g, 0.0).to(tl.float64), axis=0)
    whole = tl.sum(tl.where(live, g, 0.0).to(tl.float64))
    row, column = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    # beyond the triangle the difference is positive and might overflow
    between = tl.where(row >= column, (G[:, None] - G[None, :]).to(tl.float32), 0.0)
    between = tl.where(row >= column, tl.exp(between), 0.0)

    at = tl.arange(0, KEYS)
    own = live[:, None] & (at < DK)[None, :]
    place = mixed + wide[:, None] * C + shared * DK + at[None, :]
    keys = tl.load(place + HK * DK, mask=own, other=0.0)
    square = keys.to(tl.float32) * keys.to(tl.float32)
    key_norm = 1.0 / tl.sqrt_rn(tl.sum(square, axis=1) + 1e-6)
    A = tl.dot(keys, tl.trans(keys), input_precision="ieee")
    A = A * between * (beta * key_norm)[:, None] * key_norm[None, :]
    solve = invert(tl.where(row > column, A, 0.0), CHUNK, PRECISION) * beta[None, :]
    cell = (wide * HV + head)[:, None] * CHUNK + column
    tl.store(solved + cell, solve.to(solved.dtype.element_ty), mask=live[:, None])

    queries = tl.load(place, mask=own, other=0.0)
    square = queries.to(tl.float32) * queries.to(tl.float32)
    query_norm = DK**-0.5 / tl.sqrt_rn(tl.sum(square, axis=1) + 1e-6)
    mix = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    mix = mix * between * query_norm[:, None] * key_norm[None, :]
    tl.store(mixing + cell, mix.to(mixing.dtype.element_ty), mask=live[:, None])

    since = tl.exp(G.to(tl.float32))
    until = tl.exp((whole - G).to(tl.float32))
    factor = factors + head.to(tl.int64) * T + i
    plane = tl.num_programs(1).to(tl.int64) * T
    tl.store(factor, since * key_norm, mask=live)
    tl.store(factor + plane, since * query_norm, mask=live)
    tl.store(factor + 2 * plane, until * key_norm, mask=live)
    tl.store(decays + head * tl.num_programs(0) + tl.program_id(0), tl.exp(whole.to(tl.float32)))

    if tl.program_id(0) == tl.num_programs(0) - 1:
        # all three are read before any is written: in place, the ranges overlap
        channel = head * SHARE + tl.arange(0, SHARE_BLOCK)
        end = tl.minimum(C, head * SHARE + SHARE)
        past = conv_history + tl.load(slot) * 3 * C + channel
        oldest = raw_column(projected, past, channel, T, end, C, p_column)
        middle = raw_column(projected, past, channel, T + 1, end, C, p_column)
        newest = raw_column(projected, past, channel, T + 2, end, C, p_column)
        tl.store(past, oldest, mask=channel < end)
        tl.store(past + C, middle, mask=channel < end)
        tl.store(past + 2 * C, newest, mask=channel < end)


@triton.jit(do_not_specialize=["T"])
def scan_kernel(
    mixed,
    solved,
    mixing,
    factors,
    decays,
    state,
    slot,
    out,
    T,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Block program_id(0) % blocks of value head program_id(0) // blocks."""
    BLOCKS: tl.constexpr = (DV + VALUES - 1) // VALUES
    C: tl.constexpr = 2 * HK * DK + HV * DV
    dtype: tl.constexpr = mixed.dtype.element_ty
    head = tl.program_id(0) // BLOCKS
    dk = tl.arange(0, KEYS)
    dv = tl.program_id(0) % BLOCKS * VALUES + tl.arange(0, VALUES)
    is_key, is_value = dk < DK, dv < DV
    source = state + (tl.load(slot) * HV + head) * DK * DV
    cells = source + dk[None, :] * DV + dv[:, None]
    is_cell = is_key[None, :] & is_value[:, None]
    current = tl.load(cells, mask=is_cell, other=0.0)  # [VALUES, KEYS], transposed

    within = tl.arange(0, CHUNK)
    shared = mixed + head // (HV // HK) * DK + dk
    values = mixed + 2 * HK * DK + head * DV + dv
    factor = factors + head.to(tl.int64) * T
    chunks = tl.cdiv(T, CHUNK)
    plane = HV * T.to(tl.int64)
    for chunk in range(chunks):
        i = chunk * CHUNK + within
        live = i < T
        wide = i.to(tl.int64)
        own = live[:, None] & is_key[None, :]
        queries = tl.load(shared[None, :] + wide[:, None] * C, mask=own, other=0.0)
        keys = tl.load(shared[None, :] + HK * DK + wide[:, None] * C, mask=own, other=0.0)
        value = values[:, None] + wide[None, :] * C
        value = tl.load(value, mask=is_value[:, None] & live[None, :], other=0.0)
        line = (wide * HV + head)[:, None] * CHUNK + within[None, :]
        solve = tl.load(solved + line, mask=live[:, None], other=0.0)
        mix = tl.load(mixing + line, mask=live[:, None], other=0.0)
        key_factor = tl.load(factor + i, mask=live, other=0.0)
        query_factor = tl.load(factor + plane + i, mask=live, other=0.0)
        write_factor = tl.load(factor + 2 * plane + i, mask=live, other=0.0)
        decay = tl.load(decays + head * chunks + chunk)

        rounded = current.to(dtype)
        recalled = tl.dot(rounded, tl.trans(keys), input_precision="ieee") * key_factor[None, :]
        update = (value.to(tl.float32) - recalled).to(dtype)
        update = tl.dot(update, tl.trans(solve), input_precision="ieee")  # U, [VALUES, CHUNK]
        read = tl.dot(rounded, tl.trans(queries), input_precision="ieee") * query_factor[None, :]
        read = tl.dot(update.to(dtype), tl.trans(mix), read, input_precision="ieee")
        written = (update * write_factor[None, :]).to(dtype)
        current = tl.dot(written, keys, current * decay, input_precision="ieee")
        place = out + (wide * HV + head)[None, :] * DV + dv[:, None]
        tl.store(place, read.to(dtype), mask=is_value[:, None] & live[None, :])
    tl.store(cells, current, mask=is_cell)


def gdn_prefill(
    projected: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    conv_weight: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    conv_history: torch.Tensor,
    slot: torch.Tensor,
) -> torch.Tensor:
    """Runs T columns from a slot's state and leaves the slot as they leave it."""
    T, C = projected.shape
    _, HV, DK, DV = state.shape
    HK = (C - HV * DV) // (2 * DK)
    chunks = triton.cdiv(T, CHUNK)
    mixed = projected.new_empty(T, C)
    channels = min(CHANNELS, triton.next_power_of_2(C))
    convolve_kernel[(triton.cdiv(T, COLUMNS), triton.cdiv(C, channels))](
        projected,
        conv_weight,
        conv_history,
        slot,
        mixed,
        T,
        C,
        projected.stride(0),
        *conv_weight.stride(),
        COLUMNS=COLUMNS,
        CHANNELS=channels,
        num_warps=2,
    )
    solved, mixing = projected.new_empty(2, T, HV, CHUNK).unbind()
    factors = projected.new_empty(3, HV, T, dtype=torch.float32)
    decays = projected.new_empty(HV, chunks, dtype=torch.float32)
    heads = {"HK": HK, "HV": HV, "DK": DK, "DV": DV, "CHUNK": CHUNK}
    heads["KEYS"] = max(triton.next_power_of_2(DK), 16)
    chunk_kernel[(chunks, HV)](
        projected,
        a,
        b,
        a_log,
        dt_bias,
        conv_history,
        slot,
        mixed,
        solved,
        mixing,
        factors,
        decays,
        T,
        projected.stride(0),
        a.stride(0),
        b.stride(0),
        SHARE=triton.cdiv(C, HV),
        SHARE_BLOCK=triton.next_power_of_2(triton.cdiv(C, HV)),
        # the inverse is rounded to the dtype of projected next
        PRECISION="tf32" if projected.element_size() <= 2 else "tf32x3",
        **heads,
        num_warps=4,
    )
    out = projected.new_empty(T, HV, DV)
    values = min(VALUES, max(triton.next_power_of_2(DV), 16))
    scan_kernel[(HV * triton.cdiv(DV, values),)](
        mixed,
        solved,
        mixing,
        factors,
        decays,
        state,
        slot,
        out,
        T,
        VALUES=values,
        **heads,
        num_warps=4,
        num_stages=2,
    )
    return out
