"""Where the time of a prompt goes: every op of its chunks on a CUDA device, at a geometry's shapes.

``python -m bench.prefill --geometry 27b`` times each op of a GDN layer and of an attention layer on
chunks of ``--chunks`` columns, on random weights, by the graph replays of ``bench.ops``, and adds
up what a prompt of ``--prompt`` tokens takes in all layers: attention at each chunk's own frontier.
The head, the features' way to the drafter and the host are not in it; `bench.rounds` has the whole.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bench.ops import BF16, GEOMETRIES, PAGE, Case, Geometry, bytes_of, measure, random
from kernels.gated_rms_norm import gated_rms_norm
from kernels.gdn_prefill import gdn_prefill
from kernels.head_norm_rope import head_norm_rope
from kernels.linear import linear
from kernels.moe import moe
from kernels.prefill_attention import prefill_attention
from kernels.rms_norm import rms_norm
from kernels.swiglu import swiglu

ROTARY = {"eps": 1e-6, "theta": 1e7, "rotary_dim": 64}


@dataclass(frozen=True)
class Part:
    """An op of a chunk, and how many times a chunk calls it."""

    name: str
    calls: int
    make: Callable[[], tuple[int, Callable[[], object]]]  # bytes that it touches, and the call


def product(T: int, N: int, K: int) -> tuple[int, Callable[[], object]]:
    """A weight's product with every column."""
    x, weight = random(T, K), torch.empty(N, K, device="cuda", dtype=BF16).normal_(std=K**-0.5)
    return bytes_of(x, weight), lambda: linear(x, weight)


def norm(g: Geometry, T: int) -> tuple[int, Callable[[], object]]:
    """The norm before a mixer or a feed-forward layer."""
    x, gain = random(T, g.hidden), random(g.hidden, dtype=torch.float32)
    return 2 * bytes_of(x), lambda: rms_norm(x, gain, 1e-6)


def residual(g: Geometry, T: int) -> tuple[int, Callable[[], object]]:
    """A residual sum."""
    x, z = random(T, g.hidden), random(T, g.hidden)
    return 3 * bytes_of(x), lambda: x + z


def activation(g: Geometry, T: int) -> tuple[int, Callable[[], object]]:
    """A dense layer's activation."""
    x = random(T, 2 * g.intermediate)
    return bytes_of(x), lambda: swiglu(x)


def mixture(g: Geometry, T: int) -> tuple[int, Callable[[], object]]:
    """A layer of experts."""
    hidden, inner, experts = g.hidden, g.intermediate, g.experts
    x = random(T, hidden)
    shapes = (
        *((experts, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner)),
        *((2 * inner, hidden), (hidden, inner), (1, hidden)),
    )
    weights = [random(*shape, scale=shape[-1] ** -0.5) for shape in shapes]
    return bytes_of(x, *weights), lambda: moe(x, *weights, g.top_k)


def recurrence(g: Geometry, T: int) -> tuple[int, Callable[[], object]]:
    """Convolution and gated delta rule, over part of wider columns."""
    heads, dim = g.gdn_value_heads, g.gdn_dim
    wide = random(T, g.weights["gdn in"][0])
    qkv, _, a, b = wide.split((g.channels, heads * dim, heads, heads), dim=-1)
    constants = random(g.channels, 4), *(random(heads, dtype=torch.float32) for _ in range(2))
    state = random(2, heads, dim, dim, dtype=torch.float32, scale=0.1)
    history, slot = random(2, 3, g.channels), torch.tensor(1, device="cuda")
    call = lambda: gdn_prefill(qkv, a, b, *constants, state, history, slot)  # noqa: E731
    return 2 * bytes_of(qkv), call


def gated_norm(g: Geometry, T: int) -> tuple[int, Callable[[], object]]:
    """The delta rule's output norm."""
    heads, dim = g.gdn_value_heads, g.gdn_dim
    x, gain = random(1, T, heads, dim), random(dim, dtype=torch.float32)
    gate = random(1, T, g.weights["gdn in"][0])[..., g.channels :]
    gate = gate[..., : heads * dim].unflatten(-1, (heads, dim))
    return 3 * bytes_of(x), lambda: gated_rms_norm(x, gate, gain, 1e-6)


def rotation(g: Geometry, T: int) -> tuple[int, Callable[[], object]]:
    """Head norms and rotations of queries and keys."""
    D = g.head_dim
    query, key = random(1, T, g.heads, D), random(1, T, g.key_heads, D)
    gain, at = random(D, dtype=torch.float32), torch.arange(T, device="cuda").unsqueeze(0)

    def call() -> None:
        head_norm_rope(query, gain, at, **ROTARY)
        head_norm_rope(key, gain, at, **ROTARY)

    return 2 * bytes_of(query, key), call


def attention(g: Geometry, T: int, frontier: int) -> tuple[int, Callable[[], object]]:
    """Attention from a frontier on, over scattered pages."""
    query, gate = (random(T, g.heads, g.head_dim) for _ in range(2))
    key, value = (random(T, g.key_heads, g.head_dim) for _ in range(2))
    count = -(-(frontier + T) // PAGE)
    pages = random(count, PAGE, g.key_heads, g.head_dim)
    pool = pages, pages.to(torch.float16)
    table, at = torch.randperm(count, device="cuda"), torch.tensor(frontier, device="cuda")
    call = lambda: prefill_attention(query, key, value, gate, *pool, table, at)  # noqa: E731
    return bytes_of(query, gate, *pool), call


def parts(g: Geometry, T: int, frontier: int) -> Iterator[Part]:
    """The ops of a chunk of T columns from a frontier on."""
    layers, full = g.gdn_layers, g.gdn_layers // 3
    counts = {"gdn in": layers, "gdn out": layers, "attention in": full, "attention out": full}
    for name, (N, K) in g.weights.items():
        if name != "head":
            calls = counts.get(name, layers + full)
            yield Part(name, calls, lambda N=N, K=K: product(T, N, K))
    yield Part("gdn_prefill", layers, lambda: recurrence(g, T))
    yield Part("gated_rms_norm", layers, lambda: gated_norm(g, T))
    yield Part("head_norm_rope", full, lambda: rotation(g, T))
    yield Part("rms_norm", 2 * (layers + full), lambda: norm(g, T))
    yield Part("residual sums", 2 * (layers + full), lambda: residual(g, T))
    if g.experts:
        yield Part("moe", layers + full, lambda: mixture(g, T))
    else:
        yield Part("swiglu", layers + full, lambda: activation(g, T))
    yield Part(f"prefill_attention at {frontier}", full, lambda: attention(g, T, frontier))


def main(argv: list[str] | None = None) -> int:
    """Prints a table a chunk size."""
    parser = argparse.ArgumentParser(prog="python -m bench.prefill", description=__doc__)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="27b")
    parser.add_argument("--chunks", default="1024,2048,4096", help="columns, comma-separated")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens; whole chunks of each")
    parser.add_argument("--replays", type=int, default=10)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.prefill: needs a CUDA device", file=sys.stderr)
        return 1
    geometry = GEOMETRIES[arguments.geometry]
    for T in map(int, arguments.chunks.split(",")):
        frontiers = range(0, arguments.prompt, T)
        spent: dict[str, float] = {}
        for frontier in frontiers:
            for part in parts(geometry, T, frontier):
                if part.name in spent:
                    continue
                size, _ = part.make()
                case = Case(part.name, "", size, lambda part=part: part.make()[1])
                took = measure(case, arguments.replays, bandwidth=1.0).microseconds
                often = 1 if " at " in part.name else len(frontiers)
                spent[part.name] = 1e-3 * took * part.calls * often
                if frontier == 0:
                    print(f"{T:6} {part.name:28} {took:8.1f} us {spent[part.name]:8.1f} ms")
                torch.cuda.empty_cache()
        whole = sum(spent.values())
        attended = sum(time for name, time in spent.items() if " at " in name)
        rate = T * len(frontiers) / whole * 1e3
        print(f"{T:6} attention at all frontiers {attended:19.1f} ms")
        print(f"{T:6} {arguments.prompt} tokens {whole:26.1f} ms, {rate:.0f} tokens a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
