"""How fast a device reads: what floors are made of."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

READ_BYTES = {"cuda": 8 << 30, "cpu": 64 << 20}
REPEATS = 5


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that a reduction over several GB reads, the best of a few ways and times."""
    words = torch.ones(READ_BYTES[device.type] // 4, dtype=torch.int32, device=device)
    ways: list[Callable[[], object]] = [words.amax]
    if device.type == "cuda":
        ways.append(_streamed(words))
    best = max(words.numel() * 4 / _seconds(way, device) for way in ways)
    del words, ways
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return best


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few runs; the first, which may compile, does not count."""
    work()
    times = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            first, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            end.record()
            end.synchronize()
            times.append(first.elapsed_time(end) / 1e3)
        else:
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
    return min(times)


def _streamed(words: torch.Tensor) -> Callable[[], object]:
    """A kernel that reads all words once and keeps a sum of each stretch."""
    from bench.stream_kernel import TILE, read_tiles

    count = words.numel() // TILE
    sums = torch.empty(count, dtype=torch.int32, device=words.device)
    return lambda: read_tiles[(count,)](words, sums, num_warps=8)
