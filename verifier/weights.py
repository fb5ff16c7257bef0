"""The target's weights: from checkpoint names and layouts to what the maths multiplies with.

Products that share an input are one matrix here: gate|up of a feed-forward layer,
qkv|z|a|b of a GDN mixer, query|key|gate|value of an attention mixer. Norms that checkpoints store
zero-centred are FP32 gains of 1 + w. `A_log`, `dt_bias` and the GDN output norm are FP32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.checkpoint import Checkpoint
from outrider.pair import LINEAR, TargetFacts
from verifier.config import CONV_TAPS, MixtureConfig, TargetConfig

# tensors of the family's checkpoints that text serving has no use for
UNUSED_PREFIXES = ("mtp.", "model.visual.")

Progress = Callable[[int, int], None]  # tensors read, tensors in all


@dataclass(frozen=True)
class GdnWeights:
    """A gated delta rule mixer."""

    projection: Tensor  # [C + Hv*Dv + 2*Hv, H], rows qkv | z | a | b
    conv: Tensor  # [C, 4], tap 3 is the current column
    a_log: Tensor  # [Hv] FP32
    dt_bias: Tensor  # [Hv] FP32
    norm: Tensor  # [Dv] FP32, plain gain
    output: Tensor  # [H, Hv*Dv]


@dataclass(frozen=True)
class AttentionWeights:
    """A gated attention mixer."""

    projection: Tensor  # [(2*Hq + 2*Hkv)*D, H], rows query | key | gate | value
    head_gains: Tensor  # [Hq + Hkv, D] FP32, of each query and key head
    output: Tensor  # [H, Hq*D]


@dataclass(frozen=True)
class DenseWeights:
    """A SwiGLU feed-forward layer."""

    gate_up: Tensor  # [2*I, H], gate rows first
    down: Tensor  # [H, I]


@dataclass(frozen=True)
class MixtureWeights:
    """A mixture-of-experts feed-forward layer with one shared expert."""

    router: Tensor  # [E, H]
    gate_up: Tensor  # [E, 2*Im, H], gate rows first
    down: Tensor  # [E, H, Im]
    shared_gate_up: Tensor  # [2*Is, H]
    shared_down: Tensor  # [H, Is]
    shared_gate: Tensor  # [1, H]


@dataclass(frozen=True)
class BlockWeights:
    """One transformer block."""

    mixer_gain: Tensor  # [H] FP32, norm before the mixer
    mixer: GdnWeights | AttentionWeights
    feed_forward_gain: Tensor  # [H] FP32, norm before the feed-forward layer
    feed_forward: DenseWeights | MixtureWeights


@dataclass(frozen=True)
class TargetWeights:
    """All weights of a target."""

    embedding: Tensor  # [V, H]
    blocks: tuple[BlockWeights, ...]
    final_gain: Tensor  # [H] FP32
    head: Tensor  # [V, H]; the embedding itself when tied


def load_weights(
    facts: TargetFacts,
    config: TargetConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> TargetWeights:
    """Reads a target's weights, one tensor at a time, into their final place.

    Args:
        facts: where to read from.
        config: what to expect.
        dtype: of matrices and activations, FP32 or BF16.
        device: where the weights go.
        progress: called after each tensor with how many were read of how many.

    Raises:
        CheckpointError: missing, extra or misshaped tensors, by name.
    """
    checkpoint = facts.checkpoint
    shapes = tensor_shapes(facts, config)
    checkpoint.expect(shapes, unused=UNUSED_PREFIXES)
    read = _Reader(checkpoint, shapes, dtype, torch.device(device), progress)
    prefix = facts.prefix
    embedding = read.table(facts.embedding_name)
    return TargetWeights(
        embedding=embedding,
        blocks=tuple(
            _block(read, f"{prefix}layers.{block}.", kind, config)
            for block, kind in enumerate(config.layer_types)
        ),
        final_gain=read.zero_centred(f"{prefix}norm.weight"),
        head=embedding if config.tied else read.matrix(facts.head_name),
    )


def tensor_shapes(facts: TargetFacts, config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the target is read from, with its extents."""
    hidden, vocab, prefix = config.hidden_size, config.vocab_size, facts.prefix
    shapes: dict[str, tuple[int, ...]] = {
        facts.embedding_name: (vocab, hidden),
        f"{prefix}norm.weight": (hidden,),
        facts.head_name: (vocab, hidden),
    }
    checkpoint = facts.checkpoint
    for block, kind in enumerate(config.layer_types):
        at = f"{prefix}layers.{block}."
        shapes[f"{at}input_layernorm.weight"] = (hidden,)
        shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
        mixer = _gdn_shapes(config) if kind == LINEAR else _attention_shapes(config)
        if config.mixture is None:
            feed_forward = _swiglu_shapes("mlp.", config.intermediate_size or 0, hidden)
        else:
            # as releases store experts, and so as they are drawn
            fused = checkpoint.is_random or f"{at}mlp.experts.gate_up_proj" in checkpoint.names
            feed_forward = _mixture_shapes(config.mixture, hidden, fused=fused)
        shapes |= {f"{at}{name}": shape for name, shape in (mixer | feed_forward).items()}
    return shapes


def weight_plan(
    facts: TargetFacts, config: TargetConfig, dtype: torch.dtype
) -> list[tuple[str, int]]:
    """Bytes that the weights will take, by what they are for."""
    sizes: dict[str, int] = {}
    # these gains are kept once a head
    copies = {"q_norm.weight": config.head_count, "k_norm.weight": config.key_value_head_count}
    for name, shape in tensor_shapes(facts, config).items():
        if name == facts.embedding_name:
            what = "embedding and head" if config.tied else "embedding"
        elif name == facts.head_name:
            what = "head"
        else:
            what = "feed-forward layers" if ".mlp." in name else "mixers and norms"
        vector = len(shape) == 1
        size = math.prod(shape) * (torch.float32 if vector else dtype).itemsize
        size *= copies.get(name.rpartition("self_attn.")[2], 1)
        sizes[what] = sizes.get(what, 0) + size
    return [(f"weights: {what}", size) for what, size in sizes.items()]


def _gdn_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.hidden_size, config.gdn_value_head_count
    return {
        "linear_attn.in_proj_qkv.weight": (config.conv_channels, hidden),
        "linear_attn.in_proj_z.weight": (config.gdn_value_width, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (config.conv_channels, 1, CONV_TAPS),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config.gdn_value_dim,),
        "linear_attn.out_proj.weight": (hidden, config.gdn_value_width),
    }


def _attention_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config.hidden_size, config.head_dim
    queries = config.head_count * head_dim
    key_values = config.key_value_head_count * head_dim
    return {
        "self_attn.q_proj.weight": (2 * queries, hidden),
        "self_attn.k_proj.weight": (key_values, hidden),
        "self_attn.v_proj.weight": (key_values, hidden),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "self_attn.o_proj.weight": (hidden, queries),
    }


def _swiglu_shapes(at: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}gate_proj.weight": (width, hidden),
        f"{at}up_proj.weight": (width, hidden),
        f"{at}down_proj.weight": (hidden, width),
    }


def _mixture_shapes(
    mixture: MixtureConfig, hidden: int, *, fused: bool
) -> dict[str, tuple[int, ...]]:
    experts, width = mixture.expert_count, mixture.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.shared_expert_gate.weight": (1, hidden),
        **_swiglu_shapes("mlp.shared_expert.", mixture.shared_intermediate_size, hidden),
    }
    if fused:
        shapes["mlp.experts.gate_up_proj"] = (experts, 2 * width, hidden)
        shapes["mlp.experts.down_proj"] = (experts, hidden, width)
    else:
        for expert in range(experts):
            shapes |= _swiglu_shapes(f"mlp.experts.{expert}.", width, hidden)
    return shapes


class _Reader:
    """Copies tensors to their final place and counts them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._shapes = shapes
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._read_count = 0

    def into(self, destination: Tensor, name: str) -> None:
        """Copies a tensor over `destination`, which has as many elements."""
        self._checkpoint.copy_into(destination, name)
        self._read_count += 1
        if self._progress is not None:
            self._progress(self._read_count, len(self._shapes))

    def has(self, name: str) -> bool:
        """Whether the tensor is among those to read."""
        return name in self._shapes

    def empty(self, *shape: int) -> Tensor:
        """Room for a tensor of the activation dtype."""
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def empty_matrix(self, rows: int, columns: int) -> Tensor:
        """Room for a matrix to multiply with."""
        if self._device.type == "cpu":
            # column by column in memory: at the few rows of a round the CPU's product is faster
            return self.empty(columns, rows).t()
        return self.empty(rows, columns)

    def table(self, name: str) -> Tensor:
        """A matrix whose rows are looked up."""
        table = self.empty(*self._shapes[name])
        self.into(table, name)
        return table

    def matrix(self, *names: str) -> Tensor:
        """Matrices with the same input as one, rows in the order of the names."""
        rows = [self._shapes[name][0] for name in names]
        matrix = self.empty_matrix(sum(rows), self._shapes[names[0]][1])
        for part, name in zip(torch.split(matrix, rows), names, strict=True):
            self.into(part, name)
        return matrix

    def vector(self, name: str) -> Tensor:
        """A tensor in FP32."""
        vector = torch.empty(self._shapes[name], dtype=torch.float32, device=self._device)
        self.into(vector, name)
        return vector

    def zero_centred(self, name: str) -> Tensor:
        """The gain of a norm that is stored as its distance from one, in FP32."""
        return self.vector(name).add_(1.0)


def _block(read: _Reader, at: str, kind: str, config: TargetConfig) -> BlockWeights:
    return BlockWeights(
        mixer_gain=read.zero_centred(f"{at}input_layernorm.weight"),
        mixer=(
            _gdn(read, f"{at}linear_attn.", config)
            if kind == LINEAR
            else _attention(read, f"{at}self_attn.", config)
        ),
        feed_forward_gain=read.zero_centred(f"{at}post_attention_layernorm.weight"),
        feed_forward=(
            _dense(read, f"{at}mlp.")
            if config.mixture is None
            else _mixture(read, f"{at}mlp.", config.mixture, config.hidden_size)
        ),
    )


def _gdn(read: _Reader, at: str, config: TargetConfig) -> GdnWeights:
    conv = read.empty(config.conv_channels, CONV_TAPS)
    read.into(conv, f"{at}conv1d.weight")
    return GdnWeights(
        projection=read.matrix(
            f"{at}in_proj_qkv.weight",
            f"{at}in_proj_z.weight",
            f"{at}in_proj_a.weight",
            f"{at}in_proj_b.weight",
        ),
        conv=conv,
        a_log=read.vector(f"{at}A_log"),
        dt_bias=read.vector(f"{at}dt_bias"),
        norm=read.vector(f"{at}norm.weight"),
        output=read.matrix(f"{at}out_proj.weight"),
    )


def _attention(read: _Reader, at: str, config: TargetConfig) -> AttentionWeights:
    heads, keys, head_dim = config.head_count, config.key_value_head_count, config.head_dim
    projection = read.empty_matrix((2 * heads + 2 * keys) * head_dim, config.hidden_size)
    row, column = projection.stride()
    # stored head by head as query and gate in turn; here the gates lie behind all queries and keys
    stored = projection.as_strided(
        (heads, 2, head_dim, config.hidden_size),
        (head_dim * row, (heads + keys) * head_dim * row, row, column),
    )
    _, key, _, value = torch.split(
        projection, [count * head_dim for count in (heads, keys, heads, keys)]
    )
    read.into(stored, f"{at}q_proj.weight")
    read.into(key, f"{at}k_proj.weight")
    read.into(value, f"{at}v_proj.weight")
    query_gain = read.zero_centred(f"{at}q_norm.weight")
    key_gain = read.zero_centred(f"{at}k_norm.weight")
    return AttentionWeights(
        projection=projection,
        head_gains=torch.cat([query_gain.expand(heads, -1), key_gain.expand(keys, -1)]),
        output=read.matrix(f"{at}o_proj.weight"),
    )


def _dense(read: _Reader, at: str) -> DenseWeights:
    return DenseWeights(
        gate_up=read.matrix(f"{at}gate_proj.weight", f"{at}up_proj.weight"),
        down=read.matrix(f"{at}down_proj.weight"),
    )


def _mixture(read: _Reader, at: str, mixture: MixtureConfig, hidden: int) -> MixtureWeights:
    experts, width = mixture.expert_count, mixture.intermediate_size
    gate_up = read.empty(experts, 2 * width, hidden)
    down = read.empty(experts, hidden, width)
    if read.has(f"{at}experts.gate_up_proj"):
        read.into(gate_up, f"{at}experts.gate_up_proj")
        read.into(down, f"{at}experts.down_proj")
    else:
        for expert in range(experts):
            read.into(gate_up[expert, :width], f"{at}experts.{expert}.gate_proj.weight")
            read.into(gate_up[expert, width:], f"{at}experts.{expert}.up_proj.weight")
            read.into(down[expert], f"{at}experts.{expert}.down_proj.weight")
    shared = _dense(read, f"{at}shared_expert.")
    return MixtureWeights(
        router=read.matrix(f"{at}gate.weight"),
        gate_up=gate_up,
        down=down,
        shared_gate_up=shared.gate_up,
        shared_down=shared.down,
        shared_gate=read.matrix(f"{at}shared_expert_gate.weight"),
    )
