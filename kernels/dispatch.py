"""Chooses, once an op and device, between an op's plain torch form and its Triton kernel.

`OUTRIDER_KERNELS` is read when an op is first used on a device:

* `auto` (the default): the kernel on CUDA where the op has one, else the reference;
* `reference`: the reference everywhere;
* `triton`: the kernel everywhere; an op without one, or a tensor that is not on CUDA, raises. Under
  Triton's interpreter (TRITON_INTERPRET=1, set before Triton is imported) CPU tensors will do.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    import torch

VARIABLE = "OUTRIDER_KERNELS"
CHOICES = ("auto", "triton", "reference")

_chosen: dict[tuple[str, torch.device], ModuleType] = {}


def select(op_name: str, tensor: torch.Tensor) -> ModuleType:
    """Returns the module that runs an op for tensors on the device of `tensor`.

    Args:
        op_name: folder of the op inside `kernels`, e.g. "rms_norm".
        tensor: any input of the op; only its device counts.

    Returns:
        `kernels.<op_name>.reference` or `kernels.<op_name>.kernel`.

    Raises:
        ValueError: `OUTRIDER_KERNELS` is not one of its values, or asks for a kernel that the op
            does not have or that cannot run on this device.
    """
    # a dictionary hit costs less than reading the environment, or a device's type
    device = tensor.device
    module = _chosen.get((op_name, device))
    if module is None:
        module = import_module(_module_name(op_name, device.type))
        _chosen[op_name, device] = module
    return module


def forget() -> None:
    """Drops every choice made so far, so that the environment is read again."""
    _chosen.clear()


def _module_name(op_name: str, device_type: str) -> str:
    choice = os.environ.get(VARIABLE, "") or "auto"
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE}: expected one of {', '.join(CHOICES)}, got {choice!r}")
    kernel = f"kernels.{op_name}.kernel"
    if choice == "triton":
        if device_type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(f"{VARIABLE}=triton: expected a cuda tensor, got {device_type}")
        if find_spec(kernel) is None:
            raise ValueError(f"{VARIABLE}=triton: expected a kernel for {op_name}, got none")
        return kernel
    if choice == "auto" and device_type == "cuda" and find_spec(kernel) is not None:
        return kernel
    return f"kernels.{op_name}.reference"
