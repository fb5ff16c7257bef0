"""Runs a step from a CUDA graph, so that the host's launches do not set the pace."""

from collections.abc import Callable

import torch
from torch import Tensor

WARM_UP = 3


def captured(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Returns a callable that runs `step`; on CUDA it replays a graph of it.

    The step must have static shapes, draw its random numbers on the device and keep its state in
    place. It is run three times first. Its result is overwritten by the next call. Where capture
    fails the step itself is returned.
    """
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = step()
    except RuntimeError as error:
        print(f"no graph, running eagerly: {error}", flush=True)
        return step

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def mixed_precision(device: torch.device) -> torch.autocast:
    """Returns bfloat16 autocast on CUDA, and none elsewhere."""
    # cached casts would outlive the graph that made them
    return torch.autocast(
        device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False
    )
