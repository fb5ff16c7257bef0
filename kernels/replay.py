"""Functions of fixed buffers, captured once as CUDA graphs and replayed.

A decode round is several hundred short kernels; launched one by one from Python they would cost
more than they compute. What is captured takes no arguments: it reads and writes buffers that stay
where they are, and what changes between calls is written into them first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")


class Replays:
    """The stream that one engine thread launches on, and the graphs captured for it.

    All graphs share one memory pool, because they never run at the same time: what a graph holds
    beyond its results is free for the next. On a device other than CUDA functions run as they are.

    Attributes:
        graph_count: graphs captured so far.
        byte_count: device memory that they took together.
    """

    def __init__(self, device: torch.device) -> None:
        self.graph_count = 0
        self.byte_count = 0
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def stream(self) -> AbstractContextManager[object]:
        """Makes the stream current in this thread; an engine launches everything under it."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Blocks until the stream has carried out everything launched so far."""
        if self._stream is not None:
            self._stream.synchronize()

    def record(self, event: torch.cuda.Event) -> None:
        """Marks the end of everything launched so far; on CUDA alone.

        An event that is not told its stream asks for the current one, at several times the cost.
        """
        event.record(self._stream)

    @torch.inference_mode()
    def capture(self, function: Callable[[], T]) -> Callable[[], T]:
        """Returns a call that does what `function` does now, launched as one graph.

        `function` runs twice before this returns: once as it is, so that kernels are compiled and
        caches filled, and once under capture. The call returns the tensors that the captured run
        returned; they hold a replay's results until the next replay of the same graph.
        """
        if self._stream is None:
            return function
        with self.stream():
            function()
        self.wait()
        # a capture begins with giving back what is free, which is not the graph's doing
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        # other threads of the process may use the device meanwhile
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            results = function()
        self.graph_count += 1
        self.byte_count += torch.cuda.memory_reserved(self._device) - before

        def replay() -> T:
            graph.replay()
            return results

        return replay
