"""Tensor messages to torch and back, checked before a byte is touched."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.faults import FaultError
from outrider.v1 import tensor_pb2

if sys.byteorder != "little":
    raise ImportError("outrider.tensors: expected a little-endian host, got a big-endian one")

_WIRE: dict[torch.dtype, tensor_pb2.DType] = {
    torch.float32: tensor_pb2.DTYPE_FLOAT32,
    torch.bfloat16: tensor_pb2.DTYPE_BFLOAT16,
    torch.int32: tensor_pb2.DTYPE_INT32,
}
_NAMES: dict[int, str] = {int(wire): str(dtype)[6:] for dtype, wire in _WIRE.items()}
_SIZES: dict[int, int] = {int(wire): dtype.itemsize for dtype, wire in _WIRE.items()}
# feature rows in host memory are only ever copied, and of few bytes a piece: [n, bytes of a row]
RowBytes = NDArray[np.uint8]

# torch says once a process that a tensor over bytes cannot be written; here that is the contract
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def encode(tensor: torch.Tensor) -> tensor_pb2.Tensor:
    """The message of a float32, bfloat16 or int32 tensor of any shape, copied from its device.

    Raises:
        ValueError: For another dtype.
    """
    if tensor.dtype not in _WIRE:
        raise ValueError(f"tensor: expected float32, bfloat16 or int32, got {tensor.dtype}")
    # numpy has no bfloat16, and of two bytes it need not know more
    words = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    return tensor_pb2.Tensor(
        dtype=_WIRE[tensor.dtype],
        shape=tensor.shape,
        data=words.numpy(force=True).tobytes(),
    )


def row_bytes(rows: torch.Tensor) -> RowBytes:
    """Rows [n, width] in host memory as bytes, which they share where they are contiguous."""
    return rows.contiguous().view(torch.uint8).numpy()


def encode_rows(rows: RowBytes, dtype: tensor_pb2.DType) -> tensor_pb2.Tensor:
    """The message of rows of that type."""
    shape = (len(rows), rows.shape[1] // _SIZES[dtype])
    return tensor_pb2.Tensor(dtype=dtype, shape=shape, data=rows.tobytes())


def put_array(message: tensor_pb2.Tensor, values: NDArray[np.int32] | NDArray[np.float32]) -> None:
    """Fills an empty message with an int32 or float32 array, faster than with a tensor."""
    is_integer = values.dtype == np.int32
    message.dtype = tensor_pb2.DTYPE_INT32 if is_integer else tensor_pb2.DTYPE_FLOAT32
    message.shape.extend(values.shape)
    message.data = values.tobytes()


def decode(
    message: tensor_pb2.Tensor,
    shape: Sequence[int | None],
    dtype: torch.dtype,
    name: str = "rows",
) -> torch.Tensor:
    """The tensor in a message, sharing its bytes: read-only, so copy before writing.

    Args:
        message: As received.
        shape: What it must be; None matches any extent.
        dtype: torch.float32, torch.bfloat16 or torch.int32.
        name: The field, for the fault.

    Raises:
        FaultError: TENSOR_SHAPE when dtype, shape or byte count is not the expected one.
    """
    actual = tuple(message.shape)
    matches = len(actual) == len(shape) and all(
        extent >= 0 and wanted in (None, extent)
        for extent, wanted in zip(actual, shape, strict=True)
    )
    if message.dtype != _WIRE[dtype] or not matches:
        raise _fault(name, _describe(shape, _WIRE[dtype]), _describe(actual, message.dtype))
    data = message.data  # one copy out of the message; each access makes another
    count = math.prod(actual)
    if len(data) != count * dtype.itemsize:
        raise _fault(name, f"{count * dtype.itemsize} bytes", f"{len(data)} bytes")
    if count == 0:
        return torch.empty(actual, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(actual)


def _describe(shape: Sequence[int | None], number: int) -> str:
    extents = ", ".join("*" if extent is None else str(extent) for extent in shape)
    return f"[{extents}] {_NAMES.get(number, f'dtype {number}')}"


def _fault(name: str, expected: str, actual: str) -> FaultError:
    return FaultError(
        "TENSOR_SHAPE",
        f"{name}: expected {expected}, got {actual}",
        field=name,
        expected=expected,
        actual=actual,
    )
