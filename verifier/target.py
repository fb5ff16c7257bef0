"""The target model: a hybrid of GDN and attention blocks, read from top to bottom.

Two ways through the same blocks. `prefill` processes prompt positions of one sequence and moves
its state on at once. `verify` processes a block of proposals for many sequences, each at its own
frontier; it writes KV ahead of the frontier and records what GDN would have done, and only `commit`
moves the state, by as many columns as were kept. A plain step is a block of one column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kernels.add_rms_norm import add_rms_norm
from kernels.causal_attention import causal_attention
from kernels.gate_up_swiglu import gate_up_swiglu
from kernels.gated_rms_norm import gated_rms_norm
from kernels.gdn_fold import gdn_fold
from kernels.gdn_prefill import gdn_prefill
from kernels.gdn_verify import GdnRecord, gdn_verify
from kernels.head_norm_rope import head_norm_rope
from kernels.linear import linear
from kernels.linear_add_rms_norm import linear_add_rms_norm
from kernels.moe import moe
from kernels.prefill_attention import prefill_attention
from kernels.rms_norm import rms_norm
from kernels.tree_compact import compact_columns, compact_pages
from kernels.trees import depths
from verifier.config import TargetConfig
from verifier.state import Residency, StateRows, TargetState
from verifier.weights import (
    AttentionWeights,
    DenseWeights,
    GdnWeights,
    MixtureWeights,
    TargetWeights,
)


@dataclass(frozen=True)
class Forward:
    """What the target computed for B rows of W columns; dead columns hold arbitrary values."""

    logits: Tensor | None  # [B, W, V]; prefill gives the last column alone, or none
    hidden: Tensor  # [B, W, H] after the final norm: what the head multiplies
    features: Tensor  # [B, W, taps*H] residuals after the tapped blocks, in tap order
    records: GdnRecord | None  # of a verify block: planes [Lg, B, W, ...]


@dataclass(frozen=True)
class Results:
    """Where a verify block leaves what it computed; see `Forward`."""

    logits: Tensor
    hidden: Tensor
    features: Tensor

    @classmethod
    def empty(cls, target: Target, rows: int, width: int) -> Self:
        """Room for the results of any block of up to rows x width columns."""
        columns, config = rows * width, target.config
        like = target.weights.embedding
        return cls(
            logits=like.new_empty(columns, config.vocab_size),
            hidden=like.new_empty(columns, config.hidden_size),
            features=like.new_empty(columns, target.feature_width),
        )

    def view(self, rows: int, width: int) -> Results:
        """The part that a block of rows x width takes: planes [rows, width, ...]."""
        return Results(
            *(
                plane[: rows * width].view(rows, width, -1)
                for plane in (self.logits, self.hidden, self.features)
            )
        )

    def plan(self) -> list[tuple[str, int]]:
        """What was allocated, as (what, bytes)."""
        planes = vars(self).items()
        return [(f"block: {name}", p.numel() * p.element_size()) for name, p in planes]


@dataclass(frozen=True)
class _Span:
    """Where a call's columns lie."""

    positions: Tensor  # [B, W] int64
    page_tables: Tensor  # [B, N] int64
    frontiers: Tensor  # [B] int64, position of column 0
    counts: Tensor  # [B] int64, live columns
    slots: Tensor  # [B] int64, state slots
    ancestors: Tensor | None  # [B, W] int32 masks of trees; None for chains
    records: GdnRecord | None  # where a verify block records; prefill moves the state instead


class Target:
    """A loaded target with its state.

    Args:
        config: sizes and constants.
        weights: what to multiply with.
        state: what it remembers; sized for the same config.
        target_layer_ids: zero-based blocks whose residuals are the features, in this order.

    Raises:
        ValueError: no tapped block, or one that the target does not have.
    """

    def __init__(
        self,
        config: TargetConfig,
        weights: TargetWeights,
        state: TargetState,
        target_layer_ids: Sequence[int],
    ) -> None:
        blocks = range(config.layer_count)
        if not target_layer_ids or not all(block in blocks for block in target_layer_ids):
            raise ValueError(
                f"target_layer_ids: expected block ids in 0..{config.layer_count - 1}, "
                f"got {list(target_layer_ids)}"
            )
        self.config = config
        self.weights = weights
        self.state = state
        self.target_layer_ids = tuple(target_layer_ids)
        self.feature_width = len(self.target_layer_ids) * config.hidden_size
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._places = {index: place for place, index in enumerate(self.target_layer_ids)}

    @torch.inference_mode()
    def prefill(
        self, residency: Residency, token_ids: Tensor, first: int, *, want_logits: bool
    ) -> Forward:
        """Processes prompt positions [first, first + T) of one sequence and adopts them.

        Args:
            residency: whose state moves on; it must stand at `first`.
            token_ids: [T] int64, T >= 1.
            first: position of the first token.
            want_logits: whether to multiply the last column with the head.

        Returns:
            Features of all T columns [1, T, taps*H]; logits and hidden of the last column alone.
        """
        width = len(token_ids)
        device = self.device
        span = self._span(
            StateRows.of([residency], device),
            width,
            torch.tensor([first], device=device),
            torch.tensor([width], device=device),
            None,
            None,
            -(-(first + width) // self.state.page_size),
        )
        features = self.weights.embedding.new_empty(1, width, self.feature_width)
        hidden = self._blocks(token_ids.to(device).unsqueeze(0), span, features, _ignore)[:, -1:]
        self.state.continuation[residency.lane] = hidden[0, 0]
        logits = linear(hidden, self.weights.head) if want_logits else None
        return Forward(logits, hidden, features, records=None)

    @torch.inference_mode()
    def verify(
        self,
        rows: StateRows,
        token_ids: Tensor,
        frontiers: Tensor,
        counts: Tensor,
        *,
        ancestors: Tensor | None = None,
        results: Results | None = None,
        page_count: int | None = None,
        features_ready: Callable[[], None] | None = None,
    ) -> Forward:
        """Runs a block of proposals causally, without moving any GDN state.

        Writes KV into the cells of positions F..F+count-1, where only a commit makes it count.
        Reads nothing back: with its arguments on the device it may be captured as a graph.

        Args:
            rows: where the state of B sequences lies, each at most once among rows with a count.
            token_ids: [B, W] int64, the anchor and its proposals; dead columns hold any id.
            frontiers: [B] int64, F: position of column 0.
            counts: [B] int64 live columns; a row with 0 writes nothing.
            ancestors: [B, W] int32, the columns that each one sees (`kernels.trees`); None: all up
                to itself.
            results: [B, W, ...] planes to write; None makes new ones.
            page_count: leading entries of the page tables to look at; None for all.
            features_ready: called once the features are written, before the blocks after them.

        Returns:
            Logits, hidden and features of all columns, and the records that `commit` folds.
        """
        batch, width = token_ids.shape
        results = results or Results.empty(self, batch, width).view(batch, width)
        records = self.state.record_view(batch, width)
        device = self.device
        span = self._span(
            rows, width, frontiers.to(device), counts.to(device), records, ancestors, page_count
        )
        hidden = self._blocks(
            token_ids.to(device), span, results.features, features_ready or _ignore
        )
        results.hidden.copy_(hidden)
        linear(results.hidden, self.weights.head, results.logits)
        return Forward(results.logits, results.hidden, results.features, records)

    @torch.inference_mode()
    def next_logits(self, residency: Residency) -> Tensor:
        """Logits [1, 1, V] of the token that follows what a resident has processed."""
        hidden = self.state.continuation[residency.lane].view(1, 1, -1)
        return linear(hidden, self.weights.head)

    @torch.inference_mode()
    def compact(
        self, rows: StateRows, forward: Forward, frontiers: Tensor, columns: Tensor
    ) -> None:
        """Moves the columns of accepted branches to the front: after it `commit` sees chains.

        Args:
            rows: as they were verified.
            forward: what `verify` returned, of the newest block.
            frontiers: [B] int64, F.
            columns: [B, W] int64 as `kernels.tree_accept` gives them.
        """
        assert forward.records is not None
        state = self.state
        # features are read by the host, which knows the columns
        compact_columns([*forward.records, forward.hidden.unsqueeze(0)], columns)
        compact_pages(
            state.key_pages,
            state.value_pages,
            state.page_tables[rows.lanes],
            frontiers,
            columns,
        )

    @torch.inference_mode()
    def commit(self, rows: StateRows, forward: Forward, counts: Tensor) -> None:
        """Adopts the first columns of the last verify block, all rows at once.

        Folds the records into every GDN state and convolution history and keeps the hidden of
        column N-1 as continuation. KV needs nothing: it is already in place.

        Args:
            rows: as they were verified.
            forward: what `verify` returned; no other block may have been verified since, because
                the records' memory belongs to the newest.
            counts: [B] int64, N: columns to keep; a row with 0 is left untouched.
        """
        assert forward.records is not None
        counts = counts.to(self.device)
        state = self.state
        gdn_fold(forward.records, state.gdn, state.conv_history, rows.slots, rows.slots, counts)
        last = (counts - 1).clamp_min(0)
        kept = forward.hidden[torch.arange(len(counts), device=self.device), last]
        # rows that keep nothing may share a lane with one that does: they go to the spare line
        lanes = torch.where(counts > 0, rows.lanes, state.spare_lane)
        state.continuation.index_copy_(0, lanes, kept)

    def _blocks(
        self, token_ids: Tensor, span: _Span, features: Tensor, features_ready: Callable[[], None]
    ) -> Tensor:
        """Embedding, all blocks and the final norm: [B, W, H]; writes the features."""
        weights, eps, hidden = self.weights, self.config.norm_eps, self.config.hidden_size
        # each sum of the residual stream is normed in the same pass for what reads it next
        mixer_gains = [block.mixer_gain for block in weights.blocks]
        gains_after = [*mixer_gains[1:], weights.final_gain]
        x = weights.embedding[token_ids]
        normed = rms_norm(x, mixer_gains[0], eps)
        gdn_layer = full_layer = 0
        for index, block in enumerate(weights.blocks):
            if isinstance(block.mixer, GdnWeights):
                mixed = self._gdn(block.mixer, normed, gdn_layer, span)
                gdn_layer += 1
            else:
                mixed = self._attention(block.mixer, normed, full_layer, span)
                full_layer += 1
            gain = block.feed_forward_gain
            x, normed = linear_add_rms_norm(mixed, block.mixer.output, x, gain, eps)
            x, normed = self._feed_forward(block.feed_forward, normed, x, gains_after[index])
            place = self._places.get(index)
            if place is not None:
                features[..., place * hidden : (place + 1) * hidden] = x
            if index == max(self._places):
                features_ready()
        return normed

    def _gdn(self, gdn: GdnWeights, normed: Tensor, layer: int, span: _Span) -> Tensor:
        """rms(delta_rule(conv(qkv), a, b)) * SiLU(z), value head by value head."""
        config = self.config
        heads, value_dim = config.gdn_value_head_count, config.gdn_value_dim
        qkv, z, a, b = torch.split(
            linear(normed, gdn.projection),
            [config.conv_channels, config.gdn_value_width, heads, heads],
            dim=-1,
        )
        mixed = self._delta_rule(gdn, layer, span, qkv, a, b)
        gate = torch.unflatten(z, -1, (heads, value_dim))
        return gated_rms_norm(mixed, gate, gdn.norm, config.norm_eps).flatten(2)

    def _delta_rule(
        self, gdn: GdnWeights, layer: int, span: _Span, qkv: Tensor, a: Tensor, b: Tensor
    ) -> Tensor:
        """Convolution and gated delta rule over a span: [B, W, Hv, Dv]."""
        constants = (gdn.conv, gdn.a_log, gdn.dt_bias)
        state, history = self.state.gdn[layer], self.state.conv_history[layer]
        if span.records is None:
            # one sequence, whose state moves on
            mixed = gdn_prefill(qkv[0], a[0], b[0], *constants, state, history, span.slots[0])
            return mixed.unsqueeze(0)
        record = GdnRecord(*(plane[layer] for plane in span.records))
        return gdn_verify(
            qkv,
            a,
            b,
            *constants,
            state,
            history,
            span.slots,
            span.counts,
            record,
            span.ancestors,
        )

    def _attention(
        self, attention: AttentionWeights, normed: Tensor, layer: int, span: _Span
    ) -> Tensor:
        """softmax(query . keys) values * sigmoid(gate) over paged past and block."""
        config = self.config
        heads = torch.unflatten(linear(normed, attention.projection), -1, (-1, config.head_dim))
        queries, keys = config.head_count, config.key_value_head_count
        rotated, gate, value = torch.split(heads, [queries + keys, queries, keys], dim=2)
        query, key = torch.split(
            self._rotated(rotated, attention.head_gains, span), [queries, keys], dim=2
        )
        block = (query, key, value, gate)
        pages = self.state.key_pages[layer], self.state.value_pages[layer]
        if span.records is None:
            # one sequence, all of its columns live
            query, key, value, gate = (part[0] for part in block)
            place = span.page_tables[0], span.frontiers[0]
            return prefill_attention(query, key, value, gate, *pages, *place).unsqueeze(0)
        return causal_attention(
            *block, *pages, span.page_tables, span.frontiers, span.counts, span.ancestors
        )

    def _rotated(self, heads: Tensor, gains: Tensor, span: _Span) -> Tensor:
        """Heads normalised one by one, their leading dimensions rotated by position."""
        config = self.config
        return head_norm_rope(
            heads,
            gains,
            span.positions,
            eps=config.norm_eps,
            theta=config.rope_theta,
            rotary_dim=config.rotary_dim,
        )

    def _feed_forward(
        self, layer: DenseWeights | MixtureWeights, normed: Tensor, x: Tensor, gain: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x + down(SiLU(gate) * up), of one layer or of the router's experts, and its norm."""
        eps = self.config.norm_eps
        if isinstance(layer, DenseWeights):
            inner = gate_up_swiglu(normed, layer.gate_up)
            return linear_add_rms_norm(inner, layer.down, x, gain, eps)
        assert self.config.mixture is not None
        fed = moe(
            normed.flatten(0, 1),
            layer.router,
            layer.gate_up,
            layer.down,
            layer.shared_gate_up,
            layer.shared_down,
            layer.shared_gate,
            self.config.mixture.top_k,
        ).view_as(normed)
        return add_rms_norm(x, fed, gain, eps)

    def _span(
        self,
        rows: StateRows,
        width: int,
        frontiers: Tensor,
        counts: Tensor,
        records: GdnRecord | None,
        ancestors: Tensor | None,
        page_count: int | None,
    ) -> _Span:
        # a column's place in its branch is its distance from the anchor
        after = torch.arange(width, device=self.device) if ancestors is None else depths(ancestors)
        return _Span(
            positions=frontiers.unsqueeze(1) + after,
            page_tables=self.state.page_tables[:, :page_count][rows.lanes],
            frontiers=frontiers,
            counts=counts,
            slots=rows.slots,
            ancestors=ancestors,
            records=records,
        )


def _ignore() -> None:
    """Nobody waits for the features."""
