"""Weights drawn from a seed instead of read: the geometry of a checkpoint without its files.

For measuring speed and memory. Every element is a function of its tensor's name and its index
alone, computed in integers: a device, a chunk or a profile does not change it. So two processes
that draw the same geometry agree about every byte, and the digests that they compare are real.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.checkpoint import Checkpoint, CheckpointError

if TYPE_CHECKING:
    import torch

LOAD_FORMATS = ("auto", "random")

_SEED = b"outrider 1"
# elements drawn at a time: 64 MiB of 64-bit words, and as much again for what they are mixed with
_CHUNK = 1 << 23
# SplitMix64
_INCREMENT = 0x9E3779B97F4A7C15
_MIXES = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def open_checkpoint(folder: str | Path, load_format: str) -> Checkpoint:
    """A model folder, with its own weights ("auto") or with drawn ones ("random").

    Raises:
        CheckpointError: as `Checkpoint`.
        ValueError: another load format.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format: expected {' or '.join(LOAD_FORMATS)}, got {load_format!r}")
    return RandomCheckpoint(folder) if load_format == "random" else Checkpoint(folder)


@dataclass(frozen=True)
class Law:
    """Uniform in [mean - spread, mean + spread)."""

    mean: float
    spread: float


class RandomCheckpoint(Checkpoint):
    """A folder of which the config counts alone. Tensors exist once `expect` has named them.

    Elements are BF16 values, as a release stores them, in every profile. Products keep the scale of
    what they take, norms are near their neutral gain, and decay and time step lie in the range of
    trained models, so that activations stay finite at any depth.
    """

    is_random = True

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._shapes: dict[str, tuple[int, ...]] = {}
        architectures = self.config.get("architectures") or [""]
        # a draft stores gains as they are, a target as their distance from one
        self._plain_gains = str(architectures[0]).startswith("DFlash")

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that were asked for so far."""
        return frozenset(self._shapes)

    def expect(self, shapes: Mapping[str, tuple[int, ...]], *, unused: Iterable[str] = ()) -> None:
        """Makes these tensors exist.

        Raises:
            CheckpointError: one of them exists with other extents.
        """
        for name, shape in shapes.items():
            if self._shapes.setdefault(name, tuple(shape)) != tuple(shape):
                raise CheckpointError(
                    f"{self.folder}: {name}: expected {list(shape)}, got {list(self.shape(name))}"
                )

    def shape(self, name: str) -> tuple[int, ...]:
        """Extents of a tensor, slowest first."""
        if name not in self._shapes:
            raise CheckpointError(f"{self.folder}: no tensor named {name}")
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        """BF16, for every tensor that exists."""
        self.shape(name)
        return "BF16"

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU."""
        return self.rows(name, 0, self.shape(name)[0])

    def rows(self, name: str, first: int, end: int) -> torch.Tensor:
        """Rows [first, end) of dimension 0, on the CPU."""
        import torch

        shape = self.shape(name)
        if not 0 <= first <= end <= shape[0]:
            raise CheckpointError(
                f"{self.folder}: {name}: expected rows within [0, {shape[0]}), got [{first}, {end})"
            )
        rows = torch.empty((end - first, *shape[1:]), dtype=torch.bfloat16)
        self._draw(rows, name, first * math.prod(shape[1:]))
        return rows

    def copy_into(self, destination: torch.Tensor, name: str) -> None:
        """Draws a tensor where `destination` lies; it has as many elements, in the same order."""
        self._draw(destination, name, 0)

    def _draw(self, destination: torch.Tensor, name: str, first_index: int) -> None:
        shape = self.shape(name)
        law = _law(name, shape, plain_gains=self._plain_gains)
        key = int.from_bytes(hashlib.sha256(_SEED + name.encode()).digest()[:8], "little")
        line = math.prod(destination.shape[1:])
        step = max(1, _CHUNK // max(1, line))
        for first in range(0, destination.shape[0], step):
            part = destination[first : first + step]
            index = first_index + first * line
            part.copy_(_drawn(key, index, part.numel(), law, part.device).view(part.shape))


def _law(name: str, shape: tuple[int, ...], *, plain_gains: bool) -> Law:
    """What the elements of a tensor of this name are drawn from."""
    last = name.removesuffix(".weight").rpartition(".")[2]
    laws = {
        # exp(A_log) in [1, 16], and softplus(dt_bias) in [0.001, 0.1]
        "A_log": Law(math.log(4.0), math.log(4.0)),
        "dt_bias": Law(-4.6, 2.3),
        "conv1d": Law(0.0, 0.5),
        "base_kernel": Law(0.5, 0.3),
        "embed_tokens": Law(0.0, 1.0),
        "predecessor_codebook": Law(0.0, 0.4),
        "successor_codebook": Law(0.0, 0.4),
    }
    if last in laws:
        return laws[last]
    if len(shape) == 1:
        # the gated norm of a delta rule mixer is plain in a target too
        plain = plain_gains or name.endswith("linear_attn.norm.weight")
        return Law(1.0 if plain else 0.0, 0.1)
    return Law(0.0, math.sqrt(3.0 / shape[-1]))  # variance 1 / fan-in


def _drawn(key: int, first: int, count: int, law: Law, device: torch.device) -> torch.Tensor:
    """Elements [first, first + count) of the tensor that `key` stands for, BF16."""
    import torch

    word = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=device)
    word.mul_(_signed(_INCREMENT)).add_(_signed(key))
    shifted = torch.empty_like(word)
    for shift, factor in _MIXES:
        torch.bitwise_right_shift(word, shift, out=shifted)
        # an arithmetic shift and a mask stand for the logical shift
        word.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            word.mul_(_signed(factor))
    torch.bitwise_right_shift(word, 40, out=shifted)
    # 24 bits are exact in FP32; each further step rounds once, on any device alike
    values = shifted.bitwise_and_((1 << 24) - 1).float()
    return values.mul_(2.0**-23).sub_(1.0).mul_(law.spread).add_(law.mean).to(torch.bfloat16)


def _signed(word: int) -> int:
    """The int64 with the bits of a 64-bit word."""
    return word - (1 << 64) if word >= 1 << 63 else word
