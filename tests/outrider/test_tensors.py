"""Tensor messages: exact both ways, refused before a byte is read."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import tensors
from outrider.faults import FaultError
from outrider.v1 import tensor_pb2

DTYPES = [torch.float32, torch.bfloat16, torch.int32]


def random_bits(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 0, 5), (0,), (2, 3, 5)], ids=str)
def test_every_bit_pattern_survives_the_wire(shape, dtype):
    tensor = random_bits(shape, dtype)  # NaN payloads among them
    wire = tensors.encode(tensor).SerializeToString()
    back = tensors.decode(tensor_pb2.Tensor.FromString(wire), shape, dtype)
    assert back.dtype == dtype
    assert tuple(back.shape) == shape
    assert bits(back) == bits(tensor)


@settings(max_examples=30, deadline=None)
@given(shape=st.lists(st.integers(0, 6), max_size=4), index=st.integers(0, 2))
def test_any_shape_survives_with_wildcards(shape, index):
    tensor = random_bits(tuple(shape), DTYPES[index], seed=index)
    back = tensors.decode(tensors.encode(tensor), [None] * len(shape), DTYPES[index])
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize(
    "view",
    [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:], lambda x: x.expand(2, 4, 6)],
    ids=["transposed", "strided", "offset", "expanded"],
)
def test_a_view_is_sent_row_major(view):
    tensor = view(torch.arange(24, dtype=torch.float32).view(4, 6))
    message = tensors.encode(tensor)
    assert list(message.shape) == list(tensor.shape)
    assert torch.equal(tensors.decode(message, tensor.shape, torch.float32), tensor)


def test_bytes_are_little_endian_bfloat16():
    message = tensors.encode(torch.tensor([1.0, -2.0], dtype=torch.bfloat16))
    assert message.data == bytes([0x80, 0x3F, 0x00, 0xC0])
    assert message.dtype == tensor_pb2.DTYPE_BFLOAT16


def test_decoding_shares_the_bytes_and_reads_them_once():
    class Counted:
        dtype, shape = tensor_pb2.DTYPE_INT32, [4]
        reads = 0

        @property
        def data(self):
            self.reads += 1
            return buffer

    buffer = bytearray(16)
    message = Counted()
    tensor = tensors.decode(message, (4,), torch.int32)
    assert message.reads == 1
    buffer[0] = 7
    assert tensor.tolist() == [7, 0, 0, 0]


def test_a_dtype_that_never_crosses_the_wire_is_refused():
    with pytest.raises(
        ValueError, match=r"expected float32, bfloat16 or int32, got torch\.float16"
    ):
        tensors.encode(torch.zeros(2, dtype=torch.float16))


def tensor_message(dtype=tensor_pb2.DTYPE_BFLOAT16, shape=(3, 8), size=48):
    return tensor_pb2.Tensor(dtype=dtype, shape=shape, data=bytes(size))


@pytest.mark.parametrize(
    ("message", "expected", "actual"),
    [
        (tensor_message(shape=(3, 10), size=60), "[*, 8] bfloat16", "[3, 10] bfloat16"),
        (tensor_message(shape=(24,)), "[*, 8] bfloat16", "[24] bfloat16"),
        (tensor_message(shape=(1, 3, 8)), "[*, 8] bfloat16", "[1, 3, 8] bfloat16"),
        (tensor_message(shape=(-3, 8)), "[*, 8] bfloat16", "[-3, 8] bfloat16"),
        (tensor_message(dtype=1, size=96), "[*, 8] bfloat16", "[3, 8] float32"),
        (tensor_message(dtype=0), "[*, 8] bfloat16", "[3, 8] dtype 0"),
        (tensor_message(dtype=99), "[*, 8] bfloat16", "[3, 8] dtype 99"),
        (tensor_message(size=47), "48 bytes", "47 bytes"),
        (tensor_message(size=96), "48 bytes", "96 bytes"),
        (tensor_message(size=0), "48 bytes", "0 bytes"),
        (tensor_message(shape=(2**62, 8), size=16), f"{2**66} bytes", "16 bytes"),
        (tensor_message(shape=(0, 8), size=2), "0 bytes", "2 bytes"),
    ],
)
def test_a_message_that_is_not_as_agreed_is_refused(message, expected, actual):
    with pytest.raises(FaultError) as caught:
        tensors.decode(message, (None, 8), torch.bfloat16, "rows")
    assert caught.value.reason == "TENSOR_SHAPE"
    assert caught.value.message == f"rows: expected {expected}, got {actual}"
    assert caught.value.metadata == {"field": "rows", "expected": expected, "actual": actual}
