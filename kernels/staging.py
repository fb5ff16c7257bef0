"""Small tensors that cross between host and device together, in one copy.

A round's inputs are a handful of short vectors; copied one by one each would cost a call of its
own. A `Staging` packs named tensors into one pinned host buffer and one device buffer of the same
layout, both made once. On the CPU the two are the same memory and nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: what Triton specialises pointers for, so that it holds for every field


class Staging:
    """Named tensors with a host side and a device side.

    Whoever writes one side must know that the copy from it has been carried out: a caller waits for
    an event after it, or for something later on the same stream.

    Attributes:
        host: the tensors in host memory, pinned when the device is a CUDA one.
        device: the same tensors on the device.
    """

    def __init__(
        self,
        device: torch.device,
        fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    ) -> None:
        """Allocates both sides, zeroed.

        Args:
            device: where the device side lies.
            fields: dtype and extents of each tensor by name.
        """
        places, end = {}, 0
        for name, (dtype, shape) in fields.items():
            places[name] = end
            end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        apart = device.type != "cpu"
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=apart)
        self._device = torch.zeros(end, dtype=torch.uint8, device=device) if apart else self._host

        def views(memory: Tensor) -> dict[str, Tensor]:
            return {
                name: memory[places[name] : places[name] + math.prod(shape) * dtype.itemsize]
                .view(dtype)
                .view(shape)
                for name, (dtype, shape) in fields.items()
            }

        self.host = views(self._host)
        self.device = views(self._device)

    @property
    def byte_count(self) -> int:
        """Bytes of one side."""
        return self._host.numel()

    def to_device(self) -> None:
        """Copies the host side over the device side, in stream order, without waiting."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)

    def to_host(self) -> None:
        """Copies the device side over the host side, in stream order, without waiting."""
        if self._device is not self._host:
            self._host.copy_(self._device, non_blocking=True)
