"""The target: parameters carry the published names, so a state dict is an export."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .gated_delta import padded_rule, step_rule
from .layers import CentredNorm, FeedForward, PlainNorm, rotate, spread
from .shapes import TargetShape

MATRIX_GAIN = 0.6


@dataclass
class DeltaState:
    """What a gated delta-rule layer carries: raw columns [B, taps-1, C], matrices [B,Hv,D,D]."""

    columns: Tensor
    matrices: Tensor


@dataclass
class KeyValues:
    """What an attention layer carries: keys and values [B, kv_heads, L, D]."""

    keys: Tensor
    values: Tensor


class DeltaMixer(nn.Module):
    """Gated delta rule behind a short causal convolution."""

    def __init__(self, shape: TargetShape) -> None:
        """Makes the parameters; decay rates are spread over short and long memories."""
        super().__init__()
        self.shape = shape
        self.key_width = shape.key_heads * shape.delta_dim
        self.value_width = shape.value_heads * shape.delta_dim
        channels = 2 * self.key_width + self.value_width
        self.in_proj_qkv = nn.Linear(shape.hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden, self.value_width, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden, shape.value_heads, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden, shape.value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, shape.conv_taps, groups=channels, bias=False)
        rates = torch.empty(shape.value_heads).uniform_(math.log(1), math.log(16))
        self.A_log = nn.Parameter(rates)
        steps = torch.empty(shape.value_heads).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(steps.expm1().log())
        self.norm = PlainNorm(shape.delta_dim)
        self.out_proj = nn.Linear(self.value_width, shape.hidden, bias=False)

    def convolve(self, window: Tensor, length: int) -> Tensor:
        """Returns SiLU of the causal convolution. window [B, taps-1+T, C] -> [B, T, C]."""
        taps = self.conv1d.weight[:, 0]
        parts = [taps[:, j] * window[:, j : j + length] for j in range(self.shape.conv_taps)]
        return functional.silu(sum(parts[1:], parts[0]))

    def split(self, mixed: Tensor, normed: Tensor) -> tuple[Tensor, ...]:
        """Returns query, key, value [B, T, Hv, D], decay and beta [B, T, Hv], in float32."""
        query, key, value = mixed.float().split(
            (self.key_width, self.key_width, self.value_width), -1
        )
        repeats = self.shape.value_heads // self.shape.key_heads
        query, key = (
            x.unflatten(-1, (-1, self.shape.delta_dim)).repeat_interleave(repeats, -2)
            for x in (query, key)
        )
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
        step = functional.softplus(self.in_proj_a(normed).float() + self.dt_bias.float())
        return (
            query * self.shape.delta_dim**-0.5,
            key,
            value.unflatten(-1, (-1, self.shape.delta_dim)),
            -self.A_log.float().exp() * step,
            self.in_proj_b(normed).float().sigmoid(),
        )

    def finish(self, read: Tensor, normed: Tensor) -> Tensor:
        """Gates and projects what was read. read [B, T, Hv, D] -> [B, T, H]."""
        gate = functional.silu(self.in_proj_z(normed).float())
        return self.out_proj(self.norm(read).flatten(-2) * gate)

    def forward(self, normed: Tensor) -> Tensor:
        """Mixes a whole sequence from a zero state. [B, T, H] -> [B, T, H]."""
        length = normed.shape[1]
        window = functional.pad(self.in_proj_qkv(normed), (0, 0, self.shape.conv_taps - 1, 0))
        parts = self.split(self.convolve(window, length), normed)
        with torch.autocast(normed.device.type, enabled=False):
            read = padded_rule(*(part.transpose(1, 2) for part in parts)).transpose(1, 2)
        return self.finish(read, normed)

    def step(self, normed: Tensor, state: DeltaState) -> Tensor:
        """Mixes one position and advances the state in place. [B, 1, H] -> [B, 1, H]."""
        window = torch.cat((state.columns, self.in_proj_qkv(normed).float()), 1)
        parts = self.split(self.convolve(window, 1), normed)
        state.columns.copy_(window[:, 1:])
        with torch.autocast(normed.device.type, enabled=False):
            read, matrices = step_rule(state.matrices, *(part[:, 0] for part in parts))
        state.matrices.copy_(matrices)
        return self.finish(read[:, None], normed)


class GatedAttention(nn.Module):
    """Grouped-query attention with partial rotary positions and a sigmoid output gate."""

    def __init__(self, shape: TargetShape) -> None:
        """Makes the parameters."""
        super().__init__()
        self.shape = shape
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, 2 * query, bias=False)
        self.k_proj = nn.Linear(shape.hidden, key, bias=False)
        self.v_proj = nn.Linear(shape.hidden, key, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden, bias=False)
        self.q_norm = CentredNorm(shape.head_dim)
        self.k_norm = CentredNorm(shape.head_dim)

    def split(self, normed: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Returns query, key, value [B, heads, T, D] and gate [B, T, heads * D]."""
        size, width = self.shape.head_dim, self.shape.rotary_dim
        query, gate = self.q_proj(normed).unflatten(-1, (-1, 2 * size)).chunk(2, -1)
        key, value = (
            x.unflatten(-1, (-1, size)) for x in (self.k_proj(normed), self.v_proj(normed))
        )
        query = rotate(self.q_norm(query), positions, width).to(value.dtype)
        key = rotate(self.k_norm(key), positions, width).to(value.dtype)
        return *(x.transpose(1, 2) for x in (query, key, value)), gate.flatten(-2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
        """Returns [B, T, heads * D]; causal when no mask is given."""
        groups = self.shape.heads // self.shape.kv_heads
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=visible is None
        )
        return mixed.transpose(1, 2).flatten(-2)

    def forward(self, normed: Tensor) -> Tensor:
        """Mixes a whole sequence. [B, T, H] -> [B, T, H]."""
        positions = torch.arange(normed.shape[1], device=normed.device)
        query, key, value, gate = self.split(normed, positions)
        return self.o_proj(self.attend(query, key, value, None) * gate.sigmoid())

    def step(self, normed: Tensor, state: KeyValues, position: Tensor) -> Tensor:
        """Mixes one position, a tensor [1], and stores its key and value. [B, 1, H]."""
        query, key, value, gate = self.split(normed, position)
        state.keys.index_copy_(2, position, key.to(state.keys.dtype))
        state.values.index_copy_(2, position, value.to(state.values.dtype))
        visible = torch.arange(state.keys.shape[2], device=normed.device) <= position
        keys, values = state.keys.to(query.dtype), state.values.to(query.dtype)
        return self.o_proj(self.attend(query, keys, values, visible[None]) * gate.sigmoid())


class TargetLayer(nn.Module):
    """A mixer and a feed-forward network, each behind a norm and a residual addition."""

    def __init__(self, shape: TargetShape, layer_type: str) -> None:
        """Makes the layer; the mixer's name follows its type."""
        super().__init__()
        self.input_layernorm = CentredNorm(shape.hidden)
        self.post_attention_layernorm = CentredNorm(shape.hidden)
        if layer_type == "full_attention":
            self.self_attn = GatedAttention(shape)
        else:
            self.linear_attn = DeltaMixer(shape)
        self.mlp = FeedForward(shape.hidden, shape.intermediate)

    @property
    def mixer(self) -> DeltaMixer | GatedAttention:
        """The layer's mixer, whichever it is."""
        return self.self_attn if hasattr(self, "self_attn") else self.linear_attn


class TargetBody(nn.Module):
    """Embedding, layers and final norm, under the published prefix."""

    def __init__(self, shape: TargetShape) -> None:
        """Makes the parameters."""
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(TargetLayer(shape, kind) for kind in shape.layer_types)
        self.norm = CentredNorm(shape.hidden)


class Target(nn.Module):
    """The hybrid language model with a tied head."""

    def __init__(self, shape: TargetShape, dropout: float = 0.0) -> None:
        """Makes and initialises the parameters; dropout acts on residual branches."""
        super().__init__()
        self.shape = shape
        self.dropout = dropout
        self.model = TargetBody(shape)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                spread(weight, MATRIX_GAIN / math.sqrt(2 * shape.layers))
            elif name.endswith("proj.weight") or ".in_proj_" in name:
                spread(weight, MATRIX_GAIN)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)

    @property
    def embedding(self) -> Tensor:
        """The embedding, which is the head as well: [V, H]."""
        return self.model.embed_tokens.weight

    def thin(self, branch: Tensor) -> Tensor:
        """Applies residual dropout while training."""
        return functional.dropout(branch, self.dropout, self.training and self.dropout > 0)

    def forward(self, token_ids: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """Runs whole sequences from position 0.

        token_ids [B, T]; returns the final-normed hidden [B, T, H], and the residuals after the
        blocks named by `taps` side by side, [B, T, len(taps) * H].
        """
        x = self.model.embed_tokens(token_ids)
        kept = [x[..., :0]]
        for block, layer in enumerate(self.model.layers):
            x = x + self.thin(layer.mixer(layer.input_layernorm(x)))
            x = x + self.thin(layer.mlp(layer.post_attention_layernorm(x)))
            if block in taps:
                kept.append(x)
        return self.model.norm(x), torch.cat(kept, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns scores over all vocabulary rows: [..., V]."""
        return functional.linear(hidden, self.embedding)

    def empty_states(self, lanes: int, length: int) -> list[DeltaState | KeyValues]:
        """Returns zero states for `lanes` sequences of at most `length` positions."""
        shape, device = self.shape, self.embedding.device
        channels = (2 * shape.key_heads + shape.value_heads) * shape.delta_dim
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        states: list[DeltaState | KeyValues] = []
        for kind in shape.layer_types:
            if kind == "full_attention":
                extents = (2, lanes, shape.kv_heads, length, shape.head_dim)
                keys, values = torch.zeros(extents, device=device, dtype=dtype)
                states.append(KeyValues(keys, values))
            else:
                columns = torch.zeros(lanes, shape.conv_taps - 1, channels, device=device)
                extents = (lanes, shape.value_heads, shape.delta_dim, shape.delta_dim)
                states.append(DeltaState(columns, torch.zeros(extents, device=device)))
        return states

    def step(
        self, token_ids: Tensor, position: Tensor, states: list[DeltaState | KeyValues]
    ) -> Tensor:
        """Runs one position for every lane. token_ids [B], position [1]; returns logits [B, V]."""
        x = self.model.embed_tokens(token_ids)[:, None]
        for layer, state in zip(self.model.layers, states, strict=True):
            normed = layer.input_layernorm(x)
            if isinstance(state, KeyValues):
                x = x + layer.self_attn.step(normed, state, position)
            else:
                x = x + layer.linear_attn.step(normed, state)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.logits(self.model.norm(x[:, 0]))
