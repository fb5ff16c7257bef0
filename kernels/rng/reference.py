"""Plain torch form: unsigned 64-bit arithmetic on int64 tensors, which wrap around alike."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFFFFFFFFFF
_HALF_WORD = 0xFFFFFFFF
_POSITION_FACTOR = 0xD1B54A32D192ED03
_SUB_FACTOR = 0x2545F4914F6CDD1D


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


# scalar tensors: a Python number costs as much as the operation that takes it
_INCREMENT, *_FACTORS = (
    torch.tensor(_signed(word))
    for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
# an arithmetic shift and a mask stand for the logical shift
_SHIFTS = [
    (torch.tensor(shift), torch.tensor((1 << (64 - shift)) - 1)) for shift in (30, 27, 31, 40)
]
_LOW_HALF = torch.tensor(_HALF_WORD)
_UNIT = torch.tensor(2.0**-24)


def uniform(
    seeds: Tensor, positions: Tensor | int, purpose: Tensor | int, sub: Tensor | int
) -> Tensor:
    """See the contract."""
    key = _finalise(seeds ^ _half_times(positions, _POSITION_FACTOR))
    key = key ^ _half_times(purpose, 1 << 21)
    # sub 0, the common case, leaves the key as it is
    if isinstance(sub, Tensor) or sub:
        key = key ^ _half_times(sub, _SUB_FACTOR)
    key = _finalise(key)
    shift, mask = _SHIFTS[3]
    # the top 24 bits are exact in FP32
    return torch.bitwise_right_shift(key, shift).bitwise_and_(mask).float().mul_(_UNIT)


def _finalise(word: Tensor) -> Tensor:
    """SplitMix64's finaliser F of the contract."""
    word = word + _INCREMENT
    shifted = torch.empty_like(word)
    for step, (shift, mask) in enumerate(_SHIFTS[:3]):
        torch.bitwise_right_shift(word, shift, out=shifted)
        word.bitwise_xor_(shifted.bitwise_and_(mask))
        if step < 2:
            word.mul_(_FACTORS[step])
    return word


def _half_times(value: Tensor | int, factor: int) -> Tensor | int:
    """The low 32 bits of value, times factor, modulo 2**64."""
    if isinstance(value, Tensor):
        return torch.bitwise_and(value, _LOW_HALF).mul_(_signed(factor))
    return _signed(((int(value) & _HALF_WORD) * factor) & _WORD)
