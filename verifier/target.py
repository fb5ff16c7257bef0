"""The target model: a hybrid of GDN and attention blocks, read from top to bottom.

Two ways through the same blocks. `prefill` processes prompt positions of one sequence and moves
its state on at once. `verify` processes a block of proposals for many sequences, each at its own
frontier; it writes KV ahead of the frontier and records what GDN would have done, and only `commit`
moves the state, by as many columns as were kept. A plain step is a block of one column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.causal_attention import causal_attention
from kernels.gated_rms_norm import gated_rms_norm
from kernels.gdn_fold import gdn_fold
from kernels.gdn_prefill import gdn_prefill
from kernels.gdn_verify import GdnRecord, gdn_verify
from kernels.head_norm_rope import head_norm_rope
from kernels.linear import linear
from kernels.moe import moe
from kernels.rms_norm import rms_norm
from kernels.swiglu import swiglu
from verifier.config import TargetConfig
from verifier.state import Residency, TargetState
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

    logits: Tensor | None  # FP32 [B, W, V]; prefill gives the last column alone, or none
    hidden: Tensor  # [B, W, H] after the final norm: what the head multiplies
    features: Tensor  # [B, W, taps*H] residuals after the tapped blocks, in tap order
    records: GdnRecord | None  # of a verify block: planes [Lg, B, W, ...]
    block_index: int  # which verify block the records are of


@dataclass(frozen=True)
class _Span:
    """Where a call's columns lie."""

    positions: Tensor  # [B, W] int64
    page_tables: Tensor  # [B, N] int64
    frontiers: Tensor  # [B] int64, position of column 0
    counts: Tensor  # [B] int64, live columns
    slots: Tensor  # [B] int64, state slots
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
        self._device = weights.embedding.device
        self._block_index = 0

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
        span = self._span([residency], width, torch.tensor([first]), torch.tensor([width]), None)
        x, features = self._blocks(token_ids.to(self._device).unsqueeze(0), span)
        hidden = self._final_norm(x[:, -1:])
        self.state.continuation[residency.lane] = hidden[0, 0]
        logits = self._logits(hidden) if want_logits else None
        return Forward(logits, hidden, features, records=None, block_index=0)

    @torch.inference_mode()
    def verify(
        self,
        residencies: Sequence[Residency],
        token_ids: Tensor,
        frontiers: Tensor,
        counts: Tensor,
    ) -> Forward:
        """Runs a block of proposals causally, without moving any GDN state.

        Writes KV at positions F..F+count-1, where only a commit makes it count.

        Args:
            residencies: B sequences, each at most once.
            token_ids: [B, W] int64, the anchor and its proposals; dead columns hold any id.
            frontiers: [B] int64, F: position of column 0.
            counts: [B] int64 live columns.

        Returns:
            Logits, hidden and features of all columns, and the records that `commit` folds.
        """
        rows, width = token_ids.shape
        records = self.state.record_view(rows, width)
        span = self._span(residencies, width, frontiers, counts, records)
        self._block_index += 1
        x, features = self._blocks(token_ids.to(self._device), span)
        hidden = self._final_norm(x)
        return Forward(self._logits(hidden), hidden, features, records, self._block_index)

    @torch.inference_mode()
    def commit(self, residencies: Sequence[Residency], forward: Forward, counts: Tensor) -> None:
        """Adopts the first columns of the last verify block, all rows at once.

        Folds the records into every GDN state and convolution history and keeps the hidden of
        column N-1 as continuation. KV needs nothing: it is already in place.

        Args:
            residencies: as they were verified.
            forward: what `verify` returned; no other block may have been verified since.
            counts: [B] int64, N: columns to keep; a row with 0 is left untouched.
        """
        # the records' memory belongs to the newest block
        assert forward.records is not None and forward.block_index == self._block_index
        counts = counts.to(self._device)
        slots = self._slots(residencies)
        gdn_fold(forward.records, self.state.gdn, self.state.conv_history, slots, slots, counts)
        lanes = self._lanes(residencies)
        last = (counts - 1).clamp_min(0)
        kept = forward.hidden[torch.arange(len(counts), device=self._device), last]
        self.state.continuation[lanes] = torch.where(
            counts.unsqueeze(1) > 0, kept, self.state.continuation[lanes]
        )

    def _blocks(self, token_ids: Tensor, span: _Span) -> tuple[Tensor, Tensor]:
        """Embedding and all blocks: the residual stream [B, W, H] and the features."""
        weights, eps = self.weights, self.config.norm_eps
        x = weights.embedding[token_ids]
        taps: dict[int, Tensor] = {}
        gdn_layer = full_layer = 0
        for index, block in enumerate(weights.blocks):
            normed = rms_norm(x, block.mixer_gain, eps)
            if isinstance(block.mixer, GdnWeights):
                x = x + self._gdn(block.mixer, normed, gdn_layer, span)
                gdn_layer += 1
            else:
                x = x + self._attention(block.mixer, normed, full_layer, span)
                full_layer += 1
            normed = rms_norm(x, block.feed_forward_gain, eps)
            x = x + self._feed_forward(block.feed_forward, normed)
            if index in self.target_layer_ids:
                taps[index] = x
        return x, torch.cat([taps[index] for index in self.target_layer_ids], dim=-1)

    def _gdn(self, gdn: GdnWeights, normed: Tensor, layer: int, span: _Span) -> Tensor:
        """out_proj(rms(delta_rule(conv(qkv), a, b)) * SiLU(z)), value head by value head."""
        config = self.config
        heads, value_dim = config.gdn_value_head_count, config.gdn_value_dim
        qkv, z, a, b = torch.split(
            linear(normed, gdn.projection),
            [config.conv_channels, config.gdn_value_width, heads, heads],
            dim=-1,
        )
        mixed = self._delta_rule(gdn, layer, span, qkv, a, b)
        gate = torch.unflatten(z, -1, (heads, value_dim))
        return linear(gated_rms_norm(mixed, gate, gdn.norm, config.norm_eps).flatten(2), gdn.output)

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
        return gdn_verify(qkv, a, b, *constants, state, history, span.slots, span.counts, record)

    def _attention(
        self, attention: AttentionWeights, normed: Tensor, layer: int, span: _Span
    ) -> Tensor:
        """o_proj(softmax(query . keys) values * sigmoid(gate)) over paged past and block."""
        config = self.config
        queries = config.head_count * config.head_dim
        key_values = config.key_value_head_count * config.head_dim
        query, gate, key, value = (
            torch.unflatten(part, -1, (-1, config.head_dim))
            for part in torch.split(
                linear(normed, attention.projection),
                [queries, queries, key_values, key_values],
                dim=-1,
            )
        )
        attended = causal_attention(
            self._rotated(query, attention.query_gain, span),
            self._rotated(key, attention.key_gain, span),
            value,
            gate,
            self.state.key_pages[layer],
            self.state.value_pages[layer],
            span.page_tables,
            span.frontiers,
            span.counts,
        )
        return linear(attended, attention.output)

    def _rotated(self, heads: Tensor, gain: Tensor, span: _Span) -> Tensor:
        """Heads normalised one by one, their leading dimensions rotated by position."""
        config = self.config
        return head_norm_rope(
            heads,
            gain,
            span.positions,
            eps=config.norm_eps,
            theta=config.rope_theta,
            rotary_dim=config.rotary_dim,
        )

    def _feed_forward(self, layer: DenseWeights | MixtureWeights, normed: Tensor) -> Tensor:
        """down(SiLU(gate) * up), of one layer or of the experts that the router picks."""
        if isinstance(layer, DenseWeights):
            return linear(swiglu(linear(normed, layer.gate_up)), layer.down)
        assert self.config.mixture is not None
        return moe(
            normed.flatten(0, 1),
            layer.router,
            layer.gate_up,
            layer.down,
            layer.shared_gate_up,
            layer.shared_down,
            layer.shared_gate,
            self.config.mixture.top_k,
        ).view_as(normed)

    def _final_norm(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weights.final_gain, self.config.norm_eps)

    def _logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weights.head).float()

    def _span(
        self,
        residencies: Sequence[Residency],
        width: int,
        frontiers: Tensor,
        counts: Tensor,
        records: GdnRecord | None,
    ) -> _Span:
        frontiers = frontiers.to(self._device)
        columns = torch.arange(width, device=self._device)
        return _Span(
            positions=frontiers.unsqueeze(1) + columns,
            page_tables=self.state.page_tables[self._lanes(residencies)],
            frontiers=frontiers,
            counts=counts.to(self._device),
            slots=self._slots(residencies),
            records=records,
        )

    def _lanes(self, residencies: Sequence[Residency]) -> Tensor:
        return torch.tensor([r.lane for r in residencies], device=self._device)

    def _slots(self, residencies: Sequence[Residency]) -> Tensor:
        return torch.tensor([r.state_slot for r in residencies], device=self._device)
