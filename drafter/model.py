"""The draft model: features into context, and one masked block into hidden states.

With F the frontier, the block's columns sit at positions F..F+W-1 and hold the anchor and W-1
masks. Every column predicts the token at its own position; column 0 is the anchor and is never
sampled. Attention is not causal unless a layer says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.context import Context, ContextMemory, ContextRows
from drafter.weights import DraftWeights, LayerGroup, LayerWeights
from kernels import dynamic_grouped_conv
from kernels.context_attention import context_attention
from kernels.context_kv_materialize import context_kv_materialize
from kernels.gate_up_swiglu import gate_up_swiglu
from kernels.head_norm_rope import head_norm_rope
from kernels.linear import linear
from kernels.linear_add_rms_norm import linear_add_rms_norm
from kernels.rms_norm import rms_norm
from kernels.sliding_window_attention import sliding_window_attention
from outrider.pair import DraftFacts


@dataclass(frozen=True)
class ProposalAsk:
    """What one sequence wants drafted."""

    context: Context
    anchor: int  # a = x_F
    live: int  # P, 1..K
    temperature: float
    seed: int  # uint64
    tree_nodes: int = 0  # most columns of a tree, the anchor's among them; 0: the path alone
    tree_paths: int = 1  # most leaves of it


@dataclass(frozen=True)
class DraftBlock:
    """The device inputs of one masked block; one entry a row."""

    rows: ContextRows
    tokens: Tensor  # [B, W] int64: the anchor, then masks
    positions: Tensor  # [B, W] int64
    anchors: Tensor  # [B] int64
    counts: Tensor  # [B] int64: live columns; 0 in a row that stands for nothing
    lives: Tensor  # [B] int64: P
    temperatures: Tensor  # [B] FP32
    seeds: Tensor  # [B] int64 bit patterns
    tree_nodes: Tensor  # [B] int64: most columns of each row's tree; 0: the path alone
    tree_paths: Tensor  # [B] int64: most leaves of it, at least 1
    most_lines: Tensor  # [B] int64: P without a tree, else no limit
    width: int  # W: columns computed, live or not
    tree_width: int = 0  # columns of the trees to grow, live or not; 0 grows none

    @property
    def most_live(self) -> int:
        """K: positions that are proposed for, live or not."""
        return self.width - 1


class DraftModel:
    """Draft weights over a context memory."""

    def __init__(self, draft: DraftFacts, weights: DraftWeights, memory: ContextMemory) -> None:
        self.memory = memory
        self._draft = draft
        self._weights = weights
        # cells of all rings, and of all pages, in one run a layer
        self._ring_cells = (memory.key_rings.flatten(1, 2), memory.value_rings.flatten(1, 2))
        self._page_cells = (memory.key_pages.flatten(1, 2), memory.value_pages.flatten(1, 2))
        places = {
            index: place
            for group in (weights.local, weights.full)
            for place, index in enumerate(group.layers)
        }
        self._places = tuple(places[index] for index in range(draft.layer_count))
        # the query heads' gain for each of them, then the key heads'
        self._head_gains = tuple(
            torch.cat(
                (
                    layer.query_norm.expand(draft.head_count, -1),
                    layer.key_norm.expand(draft.key_value_head_count, -1),
                )
            )
            for layer in weights.layers
        )

    def materialize(self, features: Tensor, destinations: Tensor) -> None:
        """Writes the context keys and values of new positions in every layer.

        Args:
            features: [rows, H] projected features c_t, activation type.
            destinations: [3, rows] int64, as `drafter.context.Append` has them; a row whose cells
                are all -1 is kept nowhere, whatever its features hold.
        """
        positions, ring_cells, page_cells = destinations.unsqueeze(1)
        context = features.unsqueeze(0)
        self._keep(self._weights.local, context, positions, ring_cells)
        self._keep(self._weights.full, context, positions, page_cells)

    def _keep(
        self, group: LayerGroup, context: Tensor, positions: Tensor, destinations: Tensor
    ) -> None:
        if not group.layers:
            return
        keys, values = self._ring_cells if group is self._weights.local else self._page_cells
        context_kv_materialize(
            context,
            positions,
            destinations,
            group.key_value,
            group.key_norm,
            keys,
            values,
            eps=self._draft.norm_eps,
            theta=self._draft.rope_theta,
        )

    def draft_block(self, block: DraftBlock) -> Tensor:
        """Runs one masked block; contexts stay as they are.

        Returns:
            [B, width, H] final-normed hidden states, activation type. Columns beyond a row's count
            mean nothing.
        """
        x = self._weights.embedding[block.tokens]
        if self._draft.input_embedding_scale != 1.0:
            x = x * self._draft.input_embedding_scale
        through = self._convolved_layers if self._draft.conv_kernel_size else self._plain_layers
        return through(x, block)

    def _plain_layers(self, x: Tensor, block: DraftBlock) -> Tensor:
        """All layers of a DFlash draft and the final norm: each product ends in the next norm."""
        weights, eps = self._weights, self._draft.norm_eps
        gains = [layer.input_norm for layer in weights.layers] + [weights.final_norm]
        normed = rms_norm(x, gains[0], eps)
        for index, layer in enumerate(weights.layers):
            attended = self._attend(index, layer, normed, block)
            into = layer.output, x, layer.post_attention_norm
            x, normed = linear_add_rms_norm(attended, *into, eps)
            fed = gate_up_swiglu(normed, layer.gate_up)
            x, normed = linear_add_rms_norm(fed, layer.down, x, gains[index + 1], eps)
        return normed

    def _convolved_layers(self, x: Tensor, block: DraftBlock) -> Tensor:
        """All layers of a DFlash2 draft and the final norm: each branch is convolved around."""
        eps = self._draft.norm_eps
        for index, layer in enumerate(self._weights.layers):
            around, behind = layer.attention_conv, layer.mlp_conv
            assert around is not None
            assert behind is not None
            sides = around.base, around.projection
            prepared, delta = dynamic_grouped_conv.prepare(x, layer.input_norm, *sides, eps)
            attended = self._attend(index, layer, prepared, block)
            z = linear(attended, layer.output)
            x = dynamic_grouped_conv.finish_add(x, z, around.base, delta)
            sides = behind.base, behind.projection
            prepared, delta = dynamic_grouped_conv.prepare(
                x, layer.post_attention_norm, *sides, eps
            )
            z = linear(gate_up_swiglu(prepared, layer.gate_up), layer.down)
            x = dynamic_grouped_conv.finish_add(x, z, behind.base, delta)
        return rms_norm(x, self._weights.final_norm, eps)

    def _attend(self, index: int, layer: LayerWeights, x: Tensor, block: DraftBlock) -> Tensor:
        draft, memory, rows = self._draft, self.memory, block.rows
        heads, key_heads = draft.head_count, draft.key_value_head_count
        projected = linear(x, layer.query_key_value)
        projected = projected.view(*x.shape[:2], -1, draft.head_dim)
        rotated = head_norm_rope(
            projected[:, :, :-key_heads],
            self._head_gains[index],
            block.positions,
            eps=draft.norm_eps,
            theta=draft.rope_theta,
            rotary_dim=draft.head_dim,
        )
        query, key = rotated[:, :, :heads], rotated[:, :, heads:]
        value = projected[:, :, -key_heads:]
        place, causal = self._places[index], draft.layer_causal[index]
        if index in self._weights.full.layers:
            return context_attention(
                query,
                key,
                value,
                memory.key_pages[place],
                memory.value_pages[place],
                rows.page_tables,
                rows.coverage_first,
                rows.frontiers,
                block.counts,
                causal=causal,
            )
        return sliding_window_attention(
            query,
            key,
            value,
            memory.key_rings[place],
            memory.value_rings[place],
            rows.slots,
            rows.coverage_first,
            rows.frontiers,
            block.counts,
            window=draft.window,
            causal=causal,
        )
