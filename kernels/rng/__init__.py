"""Stateless uniform draws, keyed by what they are for.

Maths:
    F is the SplitMix64 finaliser on unsigned 64-bit words:
        z = x + 0x9E3779B97F4A7C15
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        F(x) = z ^ (z >> 31)
    k1 = F(seed ^ (u32(position) * 0xD1B54A32D192ED03))
    k2 = F(k1 ^ (u32(purpose) << 21) ^ (u32(sub) * 0x2545F4914F6CDD1D))
    uniform = (k2 >> 40) / 2**24

Shapes:
    seeds, positions, purpose, sub: int64 tensors or integers that broadcast together.
    Returns FP32 of the broadcast shape (a scalar tensor when all four are integers).

Domain:
    A seed is a uint64; in a tensor it is the int64 with the same bits, as an integer it may be
    given either way. Position, purpose and sub count modulo 2**32.

Numerics:
    Integer arithmetic modulo 2**64; every draw is one of the 2**24 multiples of 2**-24 in [0, 1).
    Every form of the op returns the same bits.

Effects:
    None: no generator, no global state. Equal keys give equal draws wherever and however often
    they are asked for, so draws that must be independent differ in position, purpose or sub.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from kernels.dispatch import select


class Purpose(IntEnum):
    """What a draw decides. Draws of one position that must be independent differ in it."""

    PREFILL = 0  # reserved: a prompt's first token is a plain step at its last column
    DECODE = 1  # reserved: a plain step draws its bonus
    ACCEPT = 2  # whether a proposal passes
    CORRECTION = 3  # the token after a rejected proposal
    BONUS = 4  # the token after all proposals passed
    PROPOSAL = 5  # a proposal drawn from q


def uniform(
    seeds: Tensor | int, positions: Tensor | int, purpose: Tensor | int, sub: Tensor | int = 0
) -> Tensor:
    """Draws one uniform number in [0, 1) for each broadcast key; see the module's contract.

    Args:
        seeds: int64 bit patterns of the requests' uint64 seeds.
        positions: absolute token positions.
        purpose: `Purpose` of the draw.
        sub: number of the draw where one position and purpose need several.

    Returns:
        FP32 tensor of the broadcast shape.

    Raises:
        ValueError: a tensor that is not int64.
    """
    device = torch.device("cpu")
    for name, value in (
        ("seeds", seeds),
        ("positions", positions),
        ("purpose", purpose),
        ("sub", sub),
    ):
        if isinstance(value, Tensor):
            if value.dtype is not torch.int64:
                raise ValueError(f"{name}: expected int64, got {value.dtype}")
            device = value.device
    if not isinstance(seeds, Tensor):
        # an integer seed may be the unsigned value; a tensor holds the same bits signed
        seeds = torch.tensor(_signed(int(seeds)), dtype=torch.int64, device=device)
    result: Tensor = select("rng", seeds).uniform(seeds, positions, purpose, sub)
    return result


def _signed(word: int) -> int:
    word &= 0xFFFFFFFFFFFFFFFF
    return word - (1 << 64) if word >= 1 << 63 else word
