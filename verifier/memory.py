"""What a verifier takes beside weights and state, known from shapes before anything is allocated.

Every line is (what, bytes), named as what was allocated in the end is named in the log. Two lines
are reserves: what a forward needs while it runs, summed over everything that one block of layers
makes, and what the graphs will take. That is the law p of the largest block, once and once again
for what it is made from, the forward's own, and 2 MiB a graph; 40 graphs of a 27B target (B = 8, W
= 8) took 134 MiB of the 216 reserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from verifier.config import TargetConfig

Sizes = list[tuple[str, int]]
GRAPH_BYTES = 2 << 20
_FLOAT32, _INT64, _INT32 = 4, 8, 4


@dataclass(frozen=True)
class BlockExtents:
    """How large the blocks of a verifier are, and how many kinds of them there are.

    Attributes:
        columns: Of the largest block, over all of its rows.
        kinds: (rows, width) of every block that has buffers of its own.
        support: Candidates of a proposal's law.
        feature_width: Values of a position's features, over all taps.
        row_width: And of the row that they are projected to.
        graph_count: Graphs that will be captured; 0 where nothing is.
    """

    columns: int
    kinds: Sequence[tuple[int, int]]
    support: int
    feature_width: int
    row_width: int
    graph_count: int


def block_plan(config: TargetConfig, extents: BlockExtents, dtype: torch.dtype) -> Sizes:
    """Buffers of the blocks on the device."""
    columns, size = extents.columns, dtype.itemsize
    return [
        ("block: logits", columns * config.vocab_size * _FLOAT32),
        ("block: hidden", columns * config.hidden_size * size),
        ("block: features", columns * extents.feature_width * size),
        ("block: projected features", columns * extents.row_width * size),
        ("block: inputs and outcomes", _staged_bytes(extents)),
    ]


def pinned_plan(extents: BlockExtents, chunk: int, dtype: torch.dtype) -> Sizes:
    """The host's side of the same: rows of a block, of two chunks, and what is staged."""
    rows = (extents.columns + 2 * chunk) * extents.row_width * dtype.itemsize
    return [("host: feature rows on their way", rows), ("host: staged", _staged_bytes(extents))]


def sampling_plan(lanes: int, vocab_size: int) -> Sizes:
    """What `SamplingTables` takes."""
    by_token = _INT32 + _FLOAT32 + 2  # counts, bias, two masks
    by_lane = 6 * _FLOAT32 + 3 * _INT64
    return [("sampling tables", lanes * (vocab_size * by_token + by_lane))]


def reserves(config: TargetConfig, extents: BlockExtents, chunk: int, dtype: torch.dtype) -> Sizes:
    """What comes and goes: a forward of a chunk, and of a block with its law."""
    size = dtype.itemsize
    chunk_bytes = chunk * (_layer_width(config) + extents.feature_width) * size
    law = 2 * extents.columns * config.vocab_size * _FLOAT32
    block = law + extents.columns * _layer_width(config) * size
    if extents.graph_count:
        graphs = ("graphs", block + extents.graph_count * GRAPH_BYTES)
        return [("scratch: a chunk", chunk_bytes), graphs]
    # they do not run at the same time
    return [("scratch: a chunk or a block", max(chunk_bytes, block))]


def _staged_bytes(extents: BlockExtents) -> int:
    """Inputs, kept counts and outcomes of every kind of block, and what aligning them may add."""
    by_column = 3 * _INT64 + 2 * _INT64 + extents.support * (_INT64 + _FLOAT32) + _INT32
    by_row, alignment = 9 * _INT64, 16 * 16
    return sum(rows * (by_row + width * by_column) + alignment for rows, width in extents.kinds)


def _layer_width(config: TargetConfig) -> int:
    """Values of one position that a block of layers makes: residual, mixer and feed-forward."""
    hidden = config.hidden_size
    gdn = config.conv_channels + 2 * config.gdn_key_width + 4 * config.gdn_value_width
    heads = 2 * config.head_count + 2 * config.key_value_head_count
    attention = 2 * heads * config.head_dim
    mixture = config.mixture
    if mixture is None:
        assert config.intermediate_size is not None
        fed = 3 * config.intermediate_size
    else:
        expert = 3 * mixture.intermediate_size + hidden
        fed = mixture.top_k * expert + 3 * mixture.shared_intermediate_size
    return 6 * hidden + max(gdn, attention) + fed


def refusal(sizes: Sizes, available: int, where: str = "memory") -> str | None:
    """The sum in words where it does not fit; None where it does."""
    needed = sum(size for _, size in sizes)
    if needed <= available:
        return None
    return f"{where}: expected at most {available} bytes, got {arithmetic(sizes)}"


def arithmetic(sizes: Sizes) -> str:
    """Every term and their sum."""
    terms = " + ".join(f"{what} {size}" for what, size in sizes)
    return f"{terms} = {sum(size for _, size in sizes)}"
