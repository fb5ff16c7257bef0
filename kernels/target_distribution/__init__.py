"""Turns a block's raw logits into the distributions that tokens are accepted against.

Maths:
    Column i of a row, in this order; counts are the row's generated tokens plus the overlay
    d_1..d_i, seen are the prompt's tokens and those with a count:
        1. ids >= public_vocab have p = 0
        2. stop_mask ids have p = 0 while output_index + i < min_tokens
        3. repetition: z = z / r where z > 0, z * r elsewhere, for seen ids
        4. z += logit_bias
        5. z -= presence where count > 0;  z -= frequency * count
        temperature <= 0: p is one-hot at the largest z, ties to the lower id; nothing else applies
        6. w = exp((z - max z) / temperature)
        7. top_k > 0: the top_k first in the order (z descending, id ascending) stay
        8. min_p: those with w >= min_p stay
        9. top_p < 1: the shortest prefix of that order whose weights reach top_p * (sum of w over
           what step 7 left) stays, crossing token included
        p = w / sum of what stays; the first of the order always stays
    With ancestors the block is a tree (`kernels.trees`): the overlay is the tokens of the columns
    in the column's mask, the anchor's excepted, and its depth takes the place of i in step 2.

Shapes:
    logits [B, W, V]; proposals [B, K] int64, W <= K + 1; counts [B] int64 live columns
    rows: `SamplingRows`; ancestors [B, W] int32
    Returns p [B, W, V] FP32.

Domain:
    0 <= count <= W; 1 <= public_vocab <= V; repetition_penalty > 0; 0 <= min_p <= 1; biases and
    penalties finite; lanes index the tables. Proposals of live columns are below V. Steps 2 to 5
    leave at least one id.

Numerics:
    FP32. Rows and columns do not influence each other: each p is the same bits alone or in a
    batch, and in a tree as in a chain of its ancestors. A row with a live public logit that is not
    finite gets NaN in all of its live columns, so that p[b, 0, 0] tells.

Effects:
    None. Dead columns are exact zero and their logits are not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.checks import require, require_that
from kernels.dispatch import select
from kernels.trees import MOST_COLUMNS


@dataclass(frozen=True)
class SamplingRows:
    """How each row of a batch samples, and the per-lane tables that its penalties read.

    The first group has one entry a row, the tables one line a lane; `lanes` says which line a row
    reads. Neutral values switch a step off.
    """

    temperature: Tensor  # [B] FP32; <= 0 is greedy
    top_p: Tensor  # [B] FP32; >= 1 is off
    min_p: Tensor  # [B] FP32; 0 is off
    presence_penalty: Tensor  # [B] FP32; 0 is off
    frequency_penalty: Tensor  # [B] FP32; 0 is off
    repetition_penalty: Tensor  # [B] FP32; 1 is off
    top_k: Tensor  # [B] int64; 0 is off
    min_tokens: Tensor  # [B] int64; 0 is off
    output_index: Tensor  # [B] int64, tokens generated before column 0
    lanes: Tensor  # [B] int64
    generated_counts: Tensor  # [lanes, V] int32
    prompt_seen: Tensor  # [lanes, V] bool
    logit_bias: Tensor  # [lanes, V] FP32
    stop_mask: Tensor  # [lanes, V] bool, EOS and stop ids

    def __post_init__(self) -> None:
        """Checks shapes and dtypes.

        Raises:
            ValueError: a member of another shape or dtype.
        """
        rows = self.temperature.shape
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            require(name, getattr(self, name), rows, torch.float32)
        for name in ("top_k", "min_tokens", "output_index", "lanes"):
            require(name, getattr(self, name), rows, torch.int64)
        table = self.generated_counts.shape
        require("generated_counts", self.generated_counts, (None, None), torch.int32)
        require("prompt_seen", self.prompt_seen, table, torch.bool)
        require("logit_bias", self.logit_bias, table, torch.float32)
        require("stop_mask", self.stop_mask, table, torch.bool)


def target_distribution(
    logits: Tensor,
    proposals: Tensor,
    counts: Tensor,
    rows: SamplingRows,
    *,
    public_vocab: int,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Processes logits into p; see the module's contract.

    Args:
        logits: [B, W, V] raw logits.
        proposals: [B, K] int64, tokens of columns 1..K.
        counts: [B] int64 live columns.
        rows: how each row samples.
        public_vocab: ids from here on have p = 0.
        ancestors: [B, W] int32, bit j of entry i: column j is before column i, or is it. None: a
            chain.

    Returns:
        p [B, W, V] FP32.

    Raises:
        ValueError: an argument of another shape or dtype.
    """
    batch, width, vocab = logits.shape
    require("proposals", proposals, (batch, None), torch.int64)
    require_that(
        proposals.shape[1] >= width - 1, "proposals", f"at least {width - 1}", proposals.shape[1]
    )
    require("counts", counts, (batch,), torch.int64)
    require("temperature", rows.temperature, (batch,))
    require("generated_counts", rows.generated_counts, (None, vocab))
    require_that(1 <= public_vocab <= vocab, "public_vocab", f"1..{vocab}", public_vocab)
    if ancestors is not None:
        require("ancestors", ancestors, (batch, width), torch.int32)
        require_that(width <= MOST_COLUMNS, "logits", f"at most {MOST_COLUMNS} columns", width)
    result: Tensor = select("target_distribution", logits).target_distribution(
        logits, proposals, counts, rows, public_vocab=public_vocab, ancestors=ancestors
    )
    return result
