"""What an op demands of its arguments, said in one form: name, expected, actual."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import EllipsisType

    import torch


def require(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | EllipsisType | None],
    dtype: torch.dtype | None = None,
) -> None:
    """Refuses a tensor of another shape or dtype.

    Args:
        name: the argument's name, for the message.
        tensor: the argument.
        shape: one entry a dimension: an extent, or None for any extent. A leading `...` stands
            for any number of dimensions.
        dtype: the dtype, or None for any.

    Raises:
        ValueError: e.g. "rows: expected [*, 25600] bfloat16, got [3, 10240] bfloat16".
    """
    if dtype is not None and tensor.dtype is not dtype:
        raise ValueError(_message(name, tensor, shape, dtype))
    actual = tensor.shape
    # most calls name every extent, and ops check on the hot path
    if actual == shape:
        return
    wanted = shape
    if wanted and wanted[0] is ...:
        wanted = wanted[1:]
        # a tensor with too few dimensions keeps its length and fails below
        actual = actual[max(len(actual) - len(wanted), 0) :]
    if len(actual) != len(wanted):
        raise ValueError(_message(name, tensor, shape, dtype))
    for extent, expected in zip(actual, wanted, strict=True):
        if extent != expected and expected is not None:
            raise ValueError(_message(name, tensor, shape, dtype))


def require_that(holds: bool, name: str, expected: str, actual: object) -> None:
    """Refuses a value for which a stated rule does not hold.

    Raises:
        ValueError: "name: expected <rule>, got <value>", unless `holds`.
    """
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {actual}")


def _message(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | EllipsisType | None],
    dtype: torch.dtype | None,
) -> str:
    extents = ", ".join("..." if e is ... else "*" if e is None else str(e) for e in shape)
    expected = f"[{extents}]" if dtype is None else f"[{extents}] {_dtype_name(dtype)}"
    return f"{name}: expected {expected}, got {list(tensor.shape)} {_dtype_name(tensor.dtype)}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
