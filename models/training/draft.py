"""The drafts: one masked block conditioned on the target's features; published names."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .layers import FeedForward, PlainNorm, rotate, spread
from .shapes import DraftShape


class BlockConv(nn.Module):
    """Dynamic grouped convolution inside the block, one side before and one after a branch."""

    def __init__(self, shape: DraftShape) -> None:
        """Starts as the identity."""
        super().__init__()
        self.taps, self.groups = shape.conv_taps, shape.hidden // shape.conv_group
        self.base_kernel = nn.Parameter(torch.zeros(2, shape.conv_taps, shape.hidden))
        self.kernel_projection = nn.Linear(
            shape.hidden, 2 * shape.conv_taps * self.groups, bias=False
        )
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def increments(self, normed: Tensor) -> Tensor:
        """Returns both sides' increments [2, ..., W, taps, groups] of a branch's normed input."""
        delta = self.kernel_projection(normed).unflatten(-1, (2, self.taps, self.groups))
        return delta.movedim(-3, 0)

    def convolve(self, x: Tensor, side: int, increments: Tensor) -> Tensor:
        """Applies one side. x [..., W, H], increments [..., W, taps, groups] -> [..., W, H]."""
        base = self.base_kernel[side].unflatten(-1, (self.groups, -1))
        grouped = x.unflatten(-1, (self.groups, -1))
        y = (base[0] + increments[..., 0, :, None]) * grouped
        for tap in range(1, self.taps):
            earlier = functional.pad(grouped, (0, 0, 0, 0, tap, 0))[..., :-tap, :, :]
            y = y + (base[tap] + increments[..., tap, :, None]) * earlier
        return y.flatten(-2)


class BlockAttention(nn.Module):
    """Non-causal attention of a block to the context before its anchor and to itself."""

    def __init__(self, shape: DraftShape, window: int | None) -> None:
        """Makes the parameters; no window means a full layer."""
        super().__init__()
        self.shape, self.window = shape, window
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden, key, bias=False)
        self.v_proj = nn.Linear(shape.hidden, key, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden, bias=False)
        self.q_norm = PlainNorm(shape.head_dim)
        self.k_norm = PlainNorm(shape.head_dim)

    def heads_of(self, x: Tensor, norm: PlainNorm, positions: Tensor) -> Tensor:
        """Normalises and rotates projected heads. [..., heads * D] -> [..., heads, D]."""
        size = self.shape.head_dim
        return rotate(norm(x.unflatten(-1, (-1, size))), positions, size).to(x.dtype)

    def context_scores(self, query: Tensor, context: Tensor, positions: Tensor) -> Tensor:
        """Returns masked scores against the context.

        query [B, A, W, kv, G, D], context [B, T, H], positions [B, A, W]; a key is visible
        strictly before the anchor and, in a local layer, closer than the window.
        """
        at = torch.arange(context.shape[1], device=context.device)
        key = self.heads_of(self.k_proj(context), self.k_norm, at)
        scores = torch.einsum("bawkgd,btkd->bkgawt", query, key).float()
        visible = (at < positions[:, :, :1, None]).expand(*positions.shape, -1)
        if self.window is not None:
            visible = visible & ((positions[..., None] - at).abs() < self.window)
        return scores.masked_fill(~visible[:, None, None], -torch.inf)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor) -> Tensor:
        """Mixes blocks. x [B, A, W, H], context [B, T, H], positions [B, A, W]."""
        shape = self.shape
        query = self.heads_of(self.q_proj(x), self.q_norm, positions)
        query = query.unflatten(-2, (shape.kv_heads, -1)) * shape.head_dim**-0.5
        key = self.heads_of(self.k_proj(x), self.k_norm, positions)
        value = self.v_proj(x).unflatten(-1, (-1, shape.head_dim))
        far = self.context_scores(query, context, positions)
        # a block is narrower than any window, so all of it is visible to itself
        near = torch.einsum("bawkgd,bavkd->bkgawv", query, key).float()
        weights = torch.cat((far, near), -1).softmax(-1).to(value.dtype)
        far, near = weights.split((far.shape[-1], near.shape[-1]), -1)
        old = self.v_proj(context).unflatten(-1, (-1, shape.head_dim))
        mixed = torch.einsum("bkgawt,btkd->bawkgd", far, old)
        mixed = mixed + torch.einsum("bkgawv,bavkd->bawkgd", near, value)
        return self.o_proj(mixed.flatten(-3))


class DraftLayer(nn.Module):
    """Attention and a feed-forward network; in DFlash2 each between the sides of a conv."""

    def __init__(self, shape: DraftShape, layer_type: str) -> None:
        """Makes the layer."""
        super().__init__()
        self.input_layernorm = PlainNorm(shape.hidden)
        self.post_attention_layernorm = PlainNorm(shape.hidden)
        window = shape.window if layer_type == "sliding_attention" else None
        self.self_attn = BlockAttention(shape, window)
        self.mlp = FeedForward(shape.hidden, shape.intermediate)
        if shape.selector_rank:
            self.attention_conv = BlockConv(shape)
            self.mlp_conv = BlockConv(shape)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor) -> Tensor:
        """Runs the layer. [B, A, W, H] -> [B, A, W, H]."""
        normed = self.input_layernorm(x)
        if not hasattr(self, "attention_conv"):
            x = x + self.self_attn(normed, context, positions)
            return x + self.mlp(self.post_attention_layernorm(x))
        conv, sides = self.attention_conv, self.attention_conv.increments(normed)
        branch = self.self_attn(conv.convolve(normed, 0, sides[0]), context, positions)
        x = x + conv.convolve(branch, 1, sides[1])
        normed = self.post_attention_layernorm(x)
        conv, sides = self.mlp_conv, self.mlp_conv.increments(normed)
        return x + conv.convolve(self.mlp(conv.convolve(normed, 0, sides[0])), 1, sides[1])


class CandidateSelector(nn.Module):
    """Scores of candidates given the token before them."""

    def __init__(self, shape: DraftShape) -> None:
        """Makes the codebooks; the successor's starts small, so that scores start unary."""
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(shape.vocab, shape.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(shape.vocab, shape.selector_rank))
        self.hidden_projection = nn.Linear(shape.hidden, shape.selector_rank, bias=False)
        nn.init.normal_(self.predecessor_codebook, std=0.3)
        nn.init.normal_(self.successor_codebook, std=0.05)

    def forward(self, hidden: Tensor, before: Tensor, unary: Tensor, candidates: Tensor) -> Tensor:
        """Returns edge scores [..., k], float32.

        hidden [..., H], before [...] ids, unary and candidates [..., k].
        """
        projected = self.hidden_projection(hidden).float()
        given = functional.embedding(before, self.predecessor_codebook) * projected
        edges = functional.embedding(candidates, self.successor_codebook) @ given[..., None]
        return unary.float() + edges.squeeze(-1)


class Draft(nn.Module):
    """A DFlash or DFlash2 draft; embedding and head are the target's."""

    def __init__(self, shape: DraftShape) -> None:
        """Makes and initialises the parameters."""
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = PlainNorm(shape.hidden)
        self.layers = nn.ModuleList(DraftLayer(shape, kind) for kind in shape.layer_types)
        self.norm = PlainNorm(shape.hidden)
        if shape.selector_rank:
            self.candidate_selector = CandidateSelector(shape)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                spread(weight, 0.6 / math.sqrt(2 * len(self.layers)))
            elif name.endswith(("_proj.weight", "fc.weight", "hidden_projection.weight")):
                spread(weight, 1.0)

    def forward(self, block: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """Runs blocks of embedded [anchor, mask, ...] rows.

        block [B, A, W, H], features [B, T, taps * H] from position 0, anchors [B, A] positions;
        returns final-normed hidden [B, A, W, H]; row 0 belongs to the anchor.
        """
        context = self.hidden_norm(self.fc(features))
        positions = anchors[..., None] + torch.arange(block.shape[2], device=block.device)
        x = block
        for layer in self.layers:
            x = layer(x, context, positions)
        return self.norm(x)

    def embed_block(self, embedding: Tensor, anchor_ids: Tensor, width: int) -> Tensor:
        """Returns the block's rows [..., width, H] for anchors' token ids [...]."""
        masks = embedding[self.shape.mask_token_id].expand(*anchor_ids.shape, width - 1, -1)
        return torch.cat((functional.embedding(anchor_ids, embedding)[..., None, :], masks), -2)
