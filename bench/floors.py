"""What a round must read and write, and so the time that no engine can beat.

Weights count once a round, KV and states as often as they are read and written: a GDN state is read
by the verify and read and written by the fold. Rows of the embedding, of the draft's codebooks and
of activations are too few to count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from drafter.config import DraftConfig, DrafterOptions
from drafter.weights import draft_shapes
from outrider.pair import TargetFacts
from outrider.random_weights import open_checkpoint
from verifier.config import TargetConfig
from verifier.state import state_plan
from verifier.weights import tensor_shapes


@dataclass(frozen=True)
class RoundBytes:
    """Bytes of one round, by what they are of."""

    target_weights: int
    kv: int
    states: int
    draft_weights: int
    draft_context: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(vars(self).values())

    def milliseconds(self, bytes_per_second: float) -> float:
        """The floor at a read bandwidth."""
        return self.total / bytes_per_second * 1e3


class Geometry:
    """The sizes of a pair, from its configs."""

    def __init__(self, target: Path, draft: Path, load_format: str, dtype: str) -> None:
        checkpoint = open_checkpoint(target, load_format)
        self.facts = TargetFacts.read(checkpoint)
        self.config = TargetConfig.read(self.facts)
        self.dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        # K and the context do not change a byte of what is used of it
        options = DrafterOptions(dtype=dtype, draft_tokens=1, max_concurrency=1, max_context=4096)
        self.draft = DraftConfig.read(options, checkpoint, open_checkpoint(draft, load_format))

    def round_bytes(self, rows: int, columns: int, context: float, *, drafted: bool) -> RoundBytes:
        """Bytes of a round of ``rows`` sequences and ``columns`` each, at a mean frontier."""
        size, config = self.dtype.itemsize, self.config
        head = config.vocab_size * config.hidden_size * size
        positions = state_plan(config, lanes=1, max_context=64, width=1, dtype=self.dtype)
        plan = dict(positions)
        kv_position = (plan["KV: keys"] + plan["KV: values"]) / 64
        slot = plan["GDN states"] + plan["convolution history"]
        contexts = self.draft.context_plan
        cell = contexts.cell_bytes
        local = contexts.local_layer_count * min(context, contexts.window) * cell
        full = contexts.full_layer_count * context * cell
        return RoundBytes(
            target_weights=int(self._target_weights(rows * columns)),
            kv=int(rows * context * kv_position),
            states=3 * rows * slot,
            draft_weights=self._draft_weights() + head if drafted else 0,
            draft_context=int(rows * (local + full)) if drafted else 0,
        )

    def _target_weights(self, columns: int) -> float:
        """Bytes of the target that a block of so many columns reads."""
        total = 0.0
        mixture = self.config.mixture
        for name, shape in tensor_shapes(self.facts, self.config).items():
            if name == self.facts.embedding_name and not self.config.tied:
                continue
            share = 1.0
            if mixture is not None and ".mlp.experts." in name:
                # experts that are touched when each column picks its own, evenly
                missed = 1 - mixture.top_k / mixture.expert_count
                share = 1 - missed**columns
            total += share * math.prod(shape) * self.dtype.itemsize
        return total

    def _draft_weights(self) -> int:
        return self.dtype.itemsize * sum(
            math.prod(shape)
            for name, shape in draft_shapes(self.draft).items()
            if not name.endswith("_codebook")
        )
