"""Each op's time on a CUDA device against the time its bytes take.

``python -m bench.ops --geometry 27b`` runs the ops of a decode round at that geometry's shapes, a
target's and a draft's, on random weights, and prints one table; ``--json FILE`` keeps the rows. A
case is captured in one CUDA graph over as many input sets as keep the cache cold (its own weights
or states in each set), and the graph is replayed; a row's time is a call's share of the median
replay, launch gaps included. The floor is the bytes that the op must move, each once, over
``--bandwidth``. The case ``layers`` is a chain in which each kernel needs the one before it, and
what a round is made of; ``--apart`` runs everything without overlapping kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from kernels import dynamic_grouped_conv
from kernels.candidate_tree import candidate_tree
from kernels.cast_together import cast_together
from kernels.causal_attention import causal_attention
from kernels.context_kv_materialize import context_kv_materialize
from kernels.gate_up_swiglu import gate_up_swiglu
from kernels.gated_rms_norm import gated_rms_norm
from kernels.gdn_fold import gdn_fold
from kernels.gdn_verify import GdnRecord, gdn_verify
from kernels.head_norm_rope import head_norm_rope
from kernels.linear import linear
from kernels.linear_add_rms_norm import linear_add_rms_norm
from kernels.linear_topk import linear_topk
from kernels.moe import moe
from kernels.rms_norm import rms_norm
from kernels.rows_finite import rows_finite
from kernels.sliding_window_attention import sliding_window_attention
from kernels.swiglu import swiglu
from kernels.tree_accept import tree_accept
from kernels.tree_compact import compact_columns, compact_pages
from kernels.trees import ancestor_masks

COLD_BYTES = 600e6  # several times the cache
MOST_SETS = 64
PAGE = 64
DEVICE = "cuda"
BF16 = torch.bfloat16
Mixer = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Geometry:
    """What the shapes of a target's ops follow from; layers are the GDN layers."""

    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_dim: int
    gdn_key_heads: int
    gdn_value_heads: int
    gdn_dim: int
    gdn_layers: int
    vocabulary: int
    draft_layers: int
    experts: int = 0
    top_k: int = 0
    draft_heads: int = 32
    draft_key_heads: int = 8
    draft_dim: int = 128
    window: int = 2048
    taps: int = 2
    group: int = 16
    candidates: int = 16

    @property
    def channels(self) -> int:
        """Convolution channels C."""
        return (2 * self.gdn_key_heads + self.gdn_value_heads) * self.gdn_dim

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the weights that `linear` streams, by name."""
        attention = self.heads * self.head_dim
        values = self.gdn_value_heads * self.gdn_dim
        shapes = {
            "gdn in": (self.channels + values + 2 * self.gdn_value_heads, self.hidden),
            "gdn out": (self.hidden, values),
            "attention in": (2 * (attention + self.key_heads * self.head_dim), self.hidden),
            "attention out": (self.hidden, attention),
        }
        if not self.experts:
            shapes["gate and up"] = (2 * self.intermediate, self.hidden)
            shapes["down"] = (self.hidden, self.intermediate)
        return shapes | {"head": (self.vocabulary, self.hidden)}


GEOMETRIES = {
    "27b": Geometry(5120, 17408, 24, 4, 256, 16, 48, 128, 48, 248320, 5),
    "35b": Geometry(2048, 512, 16, 2, 256, 16, 32, 128, 30, 248320, 6, experts=256, top_k=8),
}


@dataclass
class Case:
    """One op at one shape: what it must move, and a call over inputs of its own."""

    op: str
    shape: str
    bytes: float
    call: Callable[[], Callable[[], object]]


@dataclass
class Row:
    """One line of the table."""

    op: str
    shape: str
    microseconds: float
    floor_microseconds: float
    ratio: float


def random(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers on the device."""
    return (torch.randn(*shape, device=DEVICE, dtype=torch.float32) * scale).to(dtype)


def bytes_of(*tensors: torch.Tensor) -> int:
    """What tensors hold."""
    return sum(t.numel() * t.element_size() for t in tensors)


def linears(g: Geometry, B: int, W: int) -> Iterator[Case]:
    """Every weight of the target, and the same through the BLAS."""
    for name, (N, K) in g.weights.items():
        size = 2 * (N * K + B * W * (N + K))
        for op, product in (("linear", linear), ("F.linear", F.linear)):

            def made(product: Callable = product, N: int = N, K: int = K) -> Callable[[], object]:
                x, weight = random(B, W, K), torch.empty(N, K, device=DEVICE, dtype=BF16)
                weight.normal_(std=0.02)
                return lambda: product(x, weight)

            yield Case(op, f"{name} {N}x{K}, {B * W} columns", size, made)


def fused(g: Geometry, B: int, W: int) -> Iterator[Case]:
    """Products with what follows them."""
    names = [n for n in ("gdn out", "attention out", "down") if n in g.weights]
    for name in names:
        N, K = g.weights[name]

        def ended(N: int = N, K: int = K) -> Callable[[], object]:
            x, residual, gain = random(B, W, K), random(B, W, N), torch.ones(N, device=DEVICE)
            weight = random(N, K, scale=0.02)
            return lambda: linear_add_rms_norm(x, weight, residual, gain, 1e-6)

        size = 2 * (N * K + B * W * (3 * N + K))
        yield Case("linear_add_rms_norm", f"{name} {N}x{K}, {B * W} columns", size, ended)
    if not g.experts:
        N, K = g.weights["gate and up"]

        def opened() -> Callable[[], object]:
            x, weight = random(B, W, K), random(N, K, scale=0.02)
            return lambda: gate_up_swiglu(x, weight)

        size = 2 * (N * K + B * W * (N // 2 + K))
        yield Case("gate_up_swiglu", f"{N}x{K}, {B * W} columns", size, opened)


def norms(g: Geometry, B: int, W: int) -> Iterator[Case]:
    """Norms, rotation and activation: short launches."""
    H, inner, heads, D = g.hidden, g.intermediate, g.heads, g.head_dim
    Hv, Dv = g.gdn_value_heads, g.gdn_dim

    def plain() -> Callable[[], object]:
        x, gain = random(B, W, H), random(H, dtype=torch.float32)
        return lambda: rms_norm(x, gain, 1e-6)

    def gated() -> Callable[[], object]:
        x, gate, gain = random(B, W, Hv, Dv), random(B, W, Hv, Dv), random(Dv)
        return lambda: gated_rms_norm(x, gate, gain, 1e-6)

    def rope() -> Callable[[], object]:
        x, gain = random(B, W, heads, D), random(D, dtype=torch.float32)
        positions = torch.arange(B * W, device=DEVICE).view(B, W)
        return lambda: head_norm_rope(x, gain, positions, eps=1e-6, theta=1e7, rotary_dim=D // 4)

    def activation() -> Callable[[], object]:
        x = random(B, W, 2 * inner)
        return lambda: swiglu(x)

    yield Case("rms_norm", f"{B * W} x {H}", 4 * B * W * H, plain)
    yield Case("gated_rms_norm", f"{B * W} x {Hv} x {Dv}", 6 * B * W * Hv * Dv, gated)
    yield Case("head_norm_rope", f"{B * W} x {heads} x {D}", 4 * B * W * heads * D, rope)
    if not g.experts:
        yield Case("swiglu", f"{B * W} x {inner}", 6 * B * W * inner, activation)


def attentions(
    g: Geometry, B: int, W: int, contexts: list[int], masks: torch.Tensor | None = None
) -> Iterator[Case]:
    """Paged attention at each context, of chains or of trees with these masks."""
    kind = "" if masks is None else ", tree"
    for context in contexts:
        pages = -(-(context + W) // PAGE)
        cells = g.key_heads * g.head_dim

        def made(context: int = context, pages: int = pages) -> Callable[[], object]:
            query, gate = (random(B, W, g.heads, g.head_dim) for _ in range(2))
            key, value = (random(B, W, g.key_heads, g.head_dim) for _ in range(2))
            key_pages = random(B * pages, PAGE, g.key_heads, g.head_dim)
            value_pages = key_pages.half()
            order = torch.randperm(B * pages, device=DEVICE).view(B, pages)
            frontiers = torch.full((B,), context, device=DEVICE)
            counts = torch.full((B,), W, device=DEVICE)
            planes = (query, key, value, gate, key_pages, value_pages)
            return lambda: causal_attention(*planes, order, frontiers, counts, masks)

        size = 4 * B * (context + 2 * W) * cells + 6 * B * W * g.heads * g.head_dim
        yield Case("causal_attention", f"{B} x {W}, context {context}{kind}", size, made)


def records(g: Geometry, *lead: int) -> GdnRecord:
    """Random record planes with leading dimensions."""
    gate = torch.rand(*lead, g.gdn_value_heads, 2, device=DEVICE)
    gate[..., 0].neg_()
    return GdnRecord(
        random(*lead, g.channels),
        random(*lead, g.gdn_key_heads, g.gdn_dim),
        random(*lead, g.gdn_value_heads, g.gdn_dim),
        gate,
    )


def recurrences(g: Geometry, B: int, W: int, masks: torch.Tensor | None = None) -> Iterator[Case]:
    """One layer's verify and the fold of all layers, or the verify of trees with these masks."""
    Hv, D, C, L = g.gdn_value_heads, g.gdn_dim, g.channels, g.gdn_layers
    slots = torch.arange(B, device=DEVICE)
    counts = torch.full((B,), W, device=DEVICE)

    def verify() -> Callable[[], object]:
        gates = [random(B, W, Hv) for _ in range(2)]
        constants = random(C, 4), random(Hv, dtype=torch.float32), random(Hv, dtype=torch.float32)
        state = random(B, Hv, D, D, dtype=torch.float32, scale=0.1)
        history, record = random(B, 3, C), records(g, B, W)
        x = random(B, W, C)
        place = (state, history, slots, counts, record)
        return lambda: gdn_verify(x, *gates, *constants, *place, masks)

    def fold() -> Callable[[], object]:
        state = random(L, B, Hv, D, D, dtype=torch.float32, scale=0.1)
        history, record = random(L, B, 3, C), records(g, L, B, W)
        return lambda: gdn_fold(record, state, history, slots, slots, counts)

    state_bytes = 4 * B * Hv * D * D
    column_bytes = 2 * B * W * (C + 2 * Hv)
    kind = "" if masks is None else ", tree"
    yield Case("gdn_verify", f"{B} x {W}{kind}", state_bytes + 3 * column_bytes, verify)
    if masks is not None:
        return
    size = L * (2 * state_bytes + column_bytes)
    yield Case("gdn_fold", f"{L} layers, {B} x {W}", size, fold)


def drafts(g: Geometry, B: int, W: int) -> Iterator[Case]:
    """What a draft has beside products and norms, its ring full."""
    H, heads, key_heads, D, S = g.hidden, g.draft_heads, g.draft_key_heads, g.draft_dim, g.window
    rows, counts = torch.arange(B, device=DEVICE), torch.full((B,), W, device=DEVICE)
    outputs = 2 * g.taps * H // g.group

    def ranking() -> Callable[[], object]:
        hidden, head = random(B * (W - 1), H), random(g.vocabulary, H, scale=0.02)
        return lambda: linear_topk(hidden, head, g.candidates, public_vocab=g.vocabulary)

    def enter() -> Callable[[], object]:
        x, gain, base = random(B, W, H), random(H), random(2, g.taps, H)
        projection = random(outputs, H, scale=0.02)
        return lambda: dynamic_grouped_conv.prepare(x, gain, base, projection, 1e-6)

    def leave() -> Callable[[], object]:
        x, z, base = random(B, W, H), random(B, W, H), random(2, g.taps, H)
        deltas = random(B, W, g.taps, H // g.group)
        return lambda: dynamic_grouped_conv.finish_add(x, z, base, deltas)

    def attention() -> Callable[[], object]:
        query = random(B, W, heads, D)
        key, value = (random(B, W, key_heads, D) for _ in range(2))
        keys = random(B, S, key_heads, D)
        planes = (query, key, value, keys, keys.half(), rows, 0 * rows, 0 * rows + 2 * S, counts)
        return lambda: sliding_window_attention(*planes, window=S, causal=False)

    def materialize() -> Callable[[], object]:
        L, context = g.draft_layers, random(B, W, H)
        weight, gain = random(L, 2 * key_heads * D, H, scale=0.02), random(L, D)
        keys = random(L, B * S, key_heads, D)
        values, positions = keys.half(), torch.arange(B * W, device=DEVICE).view(B, W)
        planes = (context, positions, positions, weight, gain, keys, values)
        return lambda: context_kv_materialize(*planes, eps=1e-6, theta=1e7)

    def finite() -> Callable[[], object]:
        ranked = B, W - 1, g.candidates
        parts = random(B, W, H)[:, 1:], *(random(*ranked, dtype=torch.float32) for _ in range(2))
        lives = counts - 1
        return lambda: rows_finite(*((lives, values) for values in parts))

    def results() -> Callable[[], object]:
        ranked = B, W - 1, g.candidates
        ids, law = torch.zeros(ranked, device=DEVICE, dtype=torch.int64), random(*ranked).float()
        found = ids[..., 0].contiguous(), counts > 0, ids, law
        places = [torch.empty_like(t, dtype=t.dtype if t is law else torch.int32) for t in found]
        return lambda: cast_together(found, places)

    cells = key_heads * D
    sizes = {
        "linear_topk": 2 * g.vocabulary * H,
        "conv prepare": 2 * (outputs * H + 3 * B * W * H),
        "conv finish": 6 * B * W * H,
        "sliding_window_attention": 4 * B * (S + W) * cells + 4 * B * W * heads * D,
        "context_kv_materialize": 4 * g.draft_layers * cells * (H + B * W),
        "rows_finite": 2 * B * W * (H + 4 * g.candidates),
        "cast_together": 20 * B * W * g.candidates,
    }
    made = (ranking, enter, leave, attention, materialize, finite, results)
    for (op, size), call in zip(sizes.items(), made, strict=True):
        yield Case(op, f"{B} x {W}", size, call)


def trees(g: Geometry, B: int, W: int, contexts: list[int]) -> Iterator[Case]:
    """What a tree changes, and what only trees need: half a path, the rest two branches of it."""
    if W < 4:
        return
    path, V, k = W // 2, g.vocabulary, g.candidates
    parents = [
        c - 1 if c <= path else max(c - path - 1, 0) if c <= path + 2 else c - 2
        for c in range(1, W)
    ]
    masks = ancestor_masks(torch.tensor(parents, device=DEVICE).expand(B, W - 1))
    columns = torch.arange(W, device=DEVICE).repeat(B, 1)
    columns[:, 1] = path + 1
    rows, zeros = torch.arange(B, device=DEVICE), torch.zeros(B, device=DEVICE, dtype=torch.int64)

    def grow() -> Callable[[], object]:
        scores = random(B, path, k, dtype=torch.float32).sort(dim=2, descending=True).values
        ids = torch.randint(V, (B, path, k), device=DEVICE)
        lattice = (scores, ids, random(B, path, 256), random(V, 256), random(V, 256))
        temperatures = torch.ones(B, device=DEVICE)
        limits = (zeros + W, zeros + 8)
        return lambda: candidate_tree(*lattice, zeros, temperatures, rows, zeros, *limits, width=W)

    def accept() -> Callable[[], object]:
        p = random(B, W, V, dtype=torch.float32).softmax(dim=2)
        ids = torch.arange(k, device=DEVICE).expand(B, W - 1, k)
        law = torch.full((B, W - 1, k), 1 / k, device=DEVICE)
        tokens = (torch.arange(W - 1, device=DEVICE) % k).expand(B, W - 1)
        return lambda: tree_accept(p, tokens, zeros + W - 1, masks, ids, law, rows, zeros)

    def compact() -> Callable[[], object]:
        planes = [*records(g, g.gdn_layers, B, W), random(1, B, W, g.hidden)]
        pages = random(g.gdn_layers // 3, 2 * B, PAGE, g.key_heads, g.head_dim)
        table = torch.arange(2 * B, device=DEVICE).view(B, 2)

        def moved() -> None:
            compact_columns(planes, columns)
            compact_pages(pages, pages, table, zeros, columns)

        return moved

    yield from attentions(g, B, W, contexts, masks)
    yield from recurrences(g, B, W, masks)
    yield Case("candidate_tree", f"{B} x {W}, path of {path}", 2 * B * W * (k + 2) * 256, grow)
    yield Case("tree_accept", f"{B} x {W}", 4 * B * W * V, accept)
    entry = g.channels + 2 * g.gdn_value_heads * g.gdn_dim
    size = 4 * B * (g.gdn_layers * entry + g.hidden)
    yield Case("tree_compact", f"{B} rows, one column", size, compact)


def experts(g: Geometry, B: int, W: int) -> Iterator[Case]:
    """The experts of one layer; the floor counts those that random rows choose."""
    if not g.experts:
        return
    H, inner, E = g.hidden, g.intermediate, g.experts
    chosen = E * (1 - (1 - g.top_k / E) ** (B * W)) + 1

    def made() -> Callable[[], object]:
        x, router = random(B * W, H), random(E, H, scale=0.02)
        gate_up, down = random(E, 2 * inner, H, scale=0.02), random(E, H, inner, scale=0.02)
        shared = (
            random(2 * inner, H, scale=0.02),
            random(H, inner, scale=0.02),
            random(1, H, scale=0.02),
        )
        return lambda: moe(x, router, gate_up, down, *shared, g.top_k)

    size = 2 * (chosen * 3 * inner * H + E * H)
    yield Case("moe", f"{B * W} rows, {chosen:.0f} of {E} experts", size, made)


def chains(g: Geometry, B: int, W: int, contexts: list[int]) -> Iterator[Case]:
    """A period of a dense target's layers as a verify block runs them: each kernel needs the last.

    Three GDN layers and one of attention, each with weights of its own.
    """
    if g.experts:
        return
    Hv, D, C = g.gdn_value_heads, g.gdn_dim, g.channels
    cells = g.key_heads * g.head_dim
    slots = torch.arange(B, device=DEVICE)
    counts = torch.full((B,), W, device=DEVICE)

    def weight(name: str) -> torch.Tensor:
        N, K = g.weights[name]
        return torch.empty(N, K, device=DEVICE, dtype=BF16).normal_(std=K**-0.5)

    def gain(width: int) -> torch.Tensor:
        return torch.ones(width, device=DEVICE)

    def gdn() -> tuple[Mixer, torch.Tensor]:
        enter, leave, channel_weights = weight("gdn in"), weight("gdn out"), random(C, 4)
        rates = [random(Hv, dtype=torch.float32) for _ in range(2)]
        state = random(B, Hv, D, D, dtype=torch.float32, scale=0.1)
        history, record = random(B, 3, C), records(g, B, W)
        inner_gain = gain(D)

        def mixed(normed: torch.Tensor) -> torch.Tensor:
            qkv, z, a, b = torch.split(linear(normed, enter), [C, Hv * D, Hv, Hv], dim=-1)
            constants = (channel_weights, *rates)
            out = gdn_verify(qkv, a, b, *constants, state, history, slots, counts, record)
            gate = z.unflatten(-1, (Hv, D))
            return gated_rms_norm(out, gate, inner_gain, 1e-6).flatten(2)

        return mixed, leave

    def attention(context: int) -> tuple[Mixer, torch.Tensor]:
        enter, leave = weight("attention in"), weight("attention out")
        gains = torch.ones(g.heads + g.key_heads, g.head_dim, device=DEVICE)
        pages = -(-(context + W) // PAGE)
        key_pages = random(B * pages, PAGE, g.key_heads, g.head_dim)
        value_pages = key_pages.half()
        order = torch.randperm(B * pages, device=DEVICE).view(B, pages)
        frontiers = torch.full((B,), context, device=DEVICE)
        positions = frontiers[:, None] + torch.arange(W, device=DEVICE)
        rope = {"eps": 1e-6, "theta": 1e7, "rotary_dim": g.head_dim // 4}

        def mixed(normed: torch.Tensor) -> torch.Tensor:
            columns = linear(normed, enter).unflatten(-1, (-1, g.head_dim))
            turned, gate, value = columns.split([g.heads + g.key_heads, g.heads, g.key_heads], 2)
            query, key = head_norm_rope(turned, gains, positions, **rope).split(
                [g.heads, g.key_heads], 2
            )
            planes = (query, key, value, gate, key_pages, value_pages)
            return causal_attention(*planes, order, frontiers, counts)

        return mixed, leave

    for context in contexts:

        def made(context: int = context) -> Callable[[], object]:
            x = random(B, W, g.hidden)
            layers = [
                (mixer, gain(g.hidden), gain(g.hidden), weight("gate and up"), weight("down"))
                for mixer in (gdn(), gdn(), gdn(), attention(context))
            ]

            def period() -> tuple[torch.Tensor, torch.Tensor]:
                residual, normed = x, rms_norm(x, layers[0][1], 1e-6)
                for (mixer, leave), after, between, gate_up, down in layers:
                    ended = mixer(normed), leave, residual, between, 1e-6
                    residual, normed = linear_add_rms_norm(*ended)
                    ended = gate_up_swiglu(normed, gate_up), down, residual, after, 1e-6
                    residual, normed = linear_add_rms_norm(*ended)
                return residual, normed

            return period

        products = {name: 2 * N * K for name, (N, K) in g.weights.items()}
        size = 3 * (products["gdn in"] + products["gdn out"] + 4 * B * Hv * D * D)
        size += products["attention in"] + products["attention out"] + 4 * B * context * cells
        size += 4 * (products["gate and up"] + products["down"])
        yield Case("layers", f"{B} x {W}, context {context}", size, made)


def cases(g: Geometry, B: int, W: int, contexts: list[int]) -> Iterator[Case]:
    """All cases of B rows of W columns."""
    yield from linears(g, B, W)
    yield from fused(g, B, W)
    yield from norms(g, B, W)
    yield from attentions(g, B, W, contexts)
    yield from recurrences(g, B, W)
    yield from trees(g, B, W, contexts)
    yield from experts(g, B, W)
    yield from drafts(g, B, W)
    yield from chains(g, B, W, contexts)


def measure(case: Case, replays: int, bandwidth: float) -> Row:
    """Captures a case over enough sets and times the replays."""
    sets = int(min(max(COLD_BYTES // case.bytes, 2), MOST_SETS))
    calls = [case.call() for _ in range(sets)]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(1e3 * first.elapsed_time(last) / sets)
    took = statistics.median(times)
    floor = case.bytes / bandwidth / 1e6
    return Row(case.op, case.shape, took, floor, took / floor)


def main(argv: list[str] | None = None) -> int:
    """Runs the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=GEOMETRIES, default="27b")
    parser.add_argument("--ops", help="names, comma-separated; all when absent")
    parser.add_argument("--rows", default="1,8", help="rows B of the batch, comma-separated")
    parser.add_argument("--columns", type=int, default=8, help="columns W of a row")
    parser.add_argument("--contexts", default="1024,32768", help="positions before the block")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--bandwidth", type=float, default=4.46, help="bytes a second, in TB")
    parser.add_argument("--apart", action="store_true", help="no overlap between kernels")
    parser.add_argument("--json", type=Path, help="keeps the rows")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.ops needs a CUDA device", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    if arguments.apart:
        # Triton is there where a device is
        from kernels.overlap import OVERLAPPED

        OVERLAPPED["launch_pdl"] = False
    wanted = arguments.ops.split(",") if arguments.ops else None
    contexts = [int(c) for c in arguments.contexts.split(",")]
    rows = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.geometry}")
    print(f"{'op':<26}{'shape':<42}{'us':>9}{'floor':>9}{'ratio':>7}")
    for B in (int(b) for b in arguments.rows.split(",")):
        for case in cases(GEOMETRIES[arguments.geometry], B, arguments.columns, contexts):
            if wanted and case.op not in wanted:
                continue
            row = measure(case, arguments.replays, arguments.bandwidth)
            rows.append(row)
            print(
                f"{row.op:<26}{row.shape:<42}{row.microseconds:>9.1f}"
                f"{row.floor_microseconds:>9.1f}{row.ratio:>7.2f}",
                flush=True,
            )
            torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
