"""The draft's projection of the features, computed where the features are.

The drafter wants c_t = rms_norm(W s_t) of the residuals s_t that the target leaves after its tapped
blocks, and nothing else of them. c_t is as wide as one block's residual, s_t as wide as all: so the
verifier projects, and a fraction crosses to the host, waits there and travels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear import linear
from kernels.rms_norm import rms_norm
from outrider.checkpoint import Checkpoint
from outrider.pair import PROJECTION, PROJECTION_GAIN, DraftFacts, draft_prefix


@dataclass(frozen=True)
class Projection:
    """W and the norm after it."""

    weight: Tensor  # [H, taps * H]
    gain: Tensor  # [H] FP32
    norm_eps: float

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, draft: DraftFacts, *, dtype: torch.dtype, device: torch.device
    ) -> Projection:
        """Reads it from a draft's folder.

        Raises:
            CheckpointError: a tensor is missing or misshaped.
        """
        prefix, shape = draft_prefix(checkpoint), draft.projection_shape
        weight, gain = f"{prefix}{PROJECTION}", f"{prefix}{PROJECTION_GAIN}"
        checkpoint.expect({weight: shape, gain: shape[:1]}, unused=("",))
        if device.type == "cpu":
            # column by column in memory, as the target's matrices are there
            matrix = torch.empty(shape[::-1], dtype=dtype).t()
        else:
            matrix = torch.empty(shape, dtype=dtype, device=device)
        gains = torch.empty(shape[0], dtype=torch.float32, device=device)
        checkpoint.copy_into(matrix, weight)
        checkpoint.copy_into(gains, gain)
        return cls(matrix, gains, draft.norm_eps)

    @property
    def width(self) -> int:
        """Values of a projected row."""
        return len(self.gain)

    def __call__(self, features: Tensor) -> Tensor:
        """Projects rows [..., taps * H] to [..., H], of the same dtype."""
        return rms_norm(linear(features, self.weight), self.gain, self.norm_eps)


def projection_plan(draft: DraftFacts, dtype: torch.dtype) -> list[tuple[str, int]]:
    """Bytes that it will take, as (what, bytes)."""
    rows, columns = draft.projection_shape
    return [("weights: feature projection", rows * columns * dtype.itemsize + rows * 4)]
