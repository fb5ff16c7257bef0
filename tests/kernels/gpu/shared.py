"""What the modules of this folder share."""

import torch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")
# relative L2 of two roundings to BF16 of nearly the same numbers, each up to 2^-9 of its own
ROUNDED = 2.5e-3


def on_device(arguments):
    """A tensor, or a tuple, list or dictionary of tensors, on the device."""
    if isinstance(arguments, torch.Tensor):
        return arguments.cuda()
    if isinstance(arguments, dict):
        return {name: on_device(value) for name, value in arguments.items()}
    if hasattr(arguments, "_fields"):
        return type(arguments)(*map(on_device, arguments))
    if isinstance(arguments, list | tuple):
        return type(arguments)(map(on_device, arguments))
    return arguments


def same(a, b):
    """Equal bits, not-a-numbers in equal places."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
