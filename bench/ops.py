"""Each op's time on a CUDA device against the time its bytes take.

``python -m bench.ops --geometry 27b`` runs the ops of a target's decode round at that geometry's
shapes, on random weights, and prints one table; ``--json FILE`` keeps the rows. A case is captured
in one CUDA graph over as many input sets as keep the cache cold (its own weights or states in each
set), and the graph is replayed; a row's time is a call's share of the median replay, launch gaps
included. The floor is the bytes that the op must move, each once, over ``--bandwidth``.
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

from kernels.causal_attention import causal_attention
from kernels.gated_rms_norm import gated_rms_norm
from kernels.gdn_fold import gdn_fold
from kernels.gdn_verify import GdnRecord, gdn_verify
from kernels.head_norm_rope import head_norm_rope
from kernels.linear import linear
from kernels.moe import moe
from kernels.rms_norm import rms_norm
from kernels.swiglu import swiglu

COLD_BYTES = 600e6  # several times the cache
MOST_SETS = 64
PAGE = 64
BF16 = torch.bfloat16


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
    experts: int = 0
    top_k: int = 0

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
    "27b": Geometry(5120, 17408, 24, 4, 256, 16, 48, 128, 48, 248320),
    "35b": Geometry(2048, 512, 16, 2, 256, 16, 32, 128, 30, 248320, experts=256, top_k=8),
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
    return (torch.randn(*shape, device="cuda", dtype=torch.float32) * scale).to(dtype)


def bytes_of(*tensors: torch.Tensor) -> int:
    """What tensors hold."""
    return sum(t.numel() * t.element_size() for t in tensors)


def linears(g: Geometry, B: int, W: int) -> Iterator[Case]:
    """Every weight of the target, and the same through the BLAS."""
    for name, (N, K) in g.weights.items():
        size = 2 * (N * K + B * W * (N + K))
        for op, product in (("linear", linear), ("F.linear", F.linear)):

            def made(product: Callable = product, N: int = N, K: int = K) -> Callable[[], object]:
                x, weight = random(B, W, K), torch.empty(N, K, device="cuda", dtype=BF16)
                weight.normal_(std=0.02)
                return lambda: product(x, weight)

            yield Case(op, f"{name} {N}x{K}, {B * W} columns", size, made)


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
        positions = torch.arange(B * W, device="cuda").view(B, W)
        return lambda: head_norm_rope(
            x, gain, positions, eps=1e-6, theta=1e7, rotary_dim=D // 4, sections=(11, 11, 10)
        )

    def activation() -> Callable[[], object]:
        x = random(B, W, 2 * inner)
        return lambda: swiglu(x)

    yield Case("rms_norm", f"{B * W} x {H}", 4 * B * W * H, plain)
    yield Case("gated_rms_norm", f"{B * W} x {Hv} x {Dv}", 6 * B * W * Hv * Dv, gated)
    yield Case("head_norm_rope", f"{B * W} x {heads} x {D}", 4 * B * W * heads * D, rope)
    if not g.experts:
        yield Case("swiglu", f"{B * W} x {inner}", 6 * B * W * inner, activation)


def attentions(g: Geometry, B: int, W: int, contexts: list[int]) -> Iterator[Case]:
    """Paged attention at each context."""
    for context in contexts:
        pages = -(-(context + W) // PAGE)
        cells = g.key_heads * g.head_dim

        def made(context: int = context, pages: int = pages) -> Callable[[], object]:
            query, gate = (random(B, W, g.heads, g.head_dim) for _ in range(2))
            key, value = (random(B, W, g.key_heads, g.head_dim) for _ in range(2))
            key_pages = random(B * pages, PAGE, g.key_heads, g.head_dim)
            value_pages = key_pages.half()
            order = torch.randperm(B * pages, device="cuda").view(B, pages)
            frontiers = torch.full((B,), context, device="cuda")
            counts = torch.full((B,), W, device="cuda")
            planes = (query, key, value, gate, key_pages, value_pages)
            return lambda: causal_attention(*planes, order, frontiers, counts)

        size = 4 * B * (context + 2 * W) * cells + 6 * B * W * g.heads * g.head_dim
        yield Case("causal_attention", f"{B} x {W}, context {context}", size, made)


def records(g: Geometry, *lead: int) -> GdnRecord:
    """Random record planes with leading dimensions."""
    gate = torch.rand(*lead, g.gdn_value_heads, 2, device="cuda")
    gate[..., 0].neg_()
    return GdnRecord(
        random(*lead, g.channels),
        random(*lead, g.gdn_key_heads, g.gdn_dim),
        random(*lead, g.gdn_value_heads, g.gdn_dim),
        gate,
    )


def recurrences(g: Geometry, B: int, W: int) -> Iterator[Case]:
    """One layer's verify, and the fold of all layers."""
    Hv, D, C, L = g.gdn_value_heads, g.gdn_dim, g.channels, g.gdn_layers
    slots = torch.arange(B, device="cuda")
    counts = torch.full((B,), W, device="cuda")

    def verify() -> Callable[[], object]:
        gates = [random(B, W, Hv) for _ in range(2)]
        constants = random(C, 4), random(Hv, dtype=torch.float32), random(Hv, dtype=torch.float32)
        state = random(B, Hv, D, D, dtype=torch.float32, scale=0.1)
        history, record = random(B, 3, C), records(g, B, W)
        x = random(B, W, C)
        return lambda: gdn_verify(x, *gates, *constants, state, history, slots, counts, record)

    def fold() -> Callable[[], object]:
        state = random(L, B, Hv, D, D, dtype=torch.float32, scale=0.1)
        history, record = random(L, B, 3, C), records(g, L, B, W)
        return lambda: gdn_fold(record, state, history, slots, slots, counts)

    state_bytes = 4 * B * Hv * D * D
    column_bytes = 2 * B * W * (C + 2 * Hv)
    yield Case("gdn_verify", f"{B} x {W}", state_bytes + 3 * column_bytes, verify)
    size = L * (2 * state_bytes + column_bytes)
    yield Case("gdn_fold", f"{L} layers, {B} x {W}", size, fold)


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


def cases(g: Geometry, B: int, W: int, contexts: list[int]) -> Iterator[Case]:
    """All cases of B rows of W columns."""
    yield from linears(g, B, W)
    yield from norms(g, B, W)
    yield from attentions(g, B, W, contexts)
    yield from recurrences(g, B, W)
    yield from experts(g, B, W)


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
    parser.add_argument("--json", type=Path, help="keeps the rows")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.ops needs a CUDA device", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    wanted = arguments.ops.split(",") if arguments.ops else None
    contexts = [int(c) for c in arguments.contexts.split(",")]
    rows = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.geometry}")
    print(f"{'op':<18}{'shape':<42}{'us':>9}{'floor':>9}{'ratio':>7}")
    for B in (int(b) for b in arguments.rows.split(",")):
        for case in cases(GEOMETRIES[arguments.geometry], B, arguments.columns, contexts):
            if wanted and case.op not in wanted:
                continue
            row = measure(case, arguments.replays, arguments.bandwidth)
            rows.append(row)
            print(
                f"{row.op:<18}{row.shape:<42}{row.microseconds:>9.1f}"
                f"{row.floor_microseconds:>9.1f}{row.ratio:>7.2f}",
                flush=True,
            )
            torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
