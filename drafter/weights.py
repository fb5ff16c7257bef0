"""The draft's weights, and of the target's its embedding and head, checked and laid out for ops.

Gains stay FP32 (they are read once a norm and cost nothing); everything else takes the profile's
activation type. K and V projections serve the block and the context alike and are held once: the
context's are a view of the block's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafter.config import FULL_HEAD, DraftConfig
from outrider.checkpoint import Checkpoint, CheckpointError, TensorFile
from outrider.pair import FULL, PROJECTION, PROJECTION_GAIN, SLIDING, draft_prefix

SIDES = 2  # of a convolution: before its branch and after it
# the verifier projects features; here it only counts that the folder is whole
ELSEWHERE = (PROJECTION, PROJECTION_GAIN)

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class ConvolutionWeights:
    """One branch's dynamic grouped convolution."""

    base: Tensor  # [2 sides, taps, H]
    projection: Tensor  # [2 * taps * groups, H]


@dataclass(frozen=True)
class LayerWeights:
    """One draft layer."""

    input_norm: Tensor  # [H] FP32
    query_key_value: Tensor  # [(Hq + 2 Hkv) * D, H]
    query_norm: Tensor  # [D] FP32
    key_norm: Tensor  # [D] FP32
    output: Tensor  # [H, Hq * D]
    post_attention_norm: Tensor  # [H] FP32
    gate_up: Tensor  # [2 I, H], the SiLU gate first
    down: Tensor  # [H, I]
    attention_conv: ConvolutionWeights | None  # DFlash2
    mlp_conv: ConvolutionWeights | None


@dataclass(frozen=True)
class LayerGroup:
    """The layers of one attention type, in order: their context is materialized together."""

    layers: tuple[int, ...]  # indexes into the draft's layers
    key_value: Tensor  # [n, 2 * Hkv * D, H], K rows first
    key_norm: Tensor  # [n, D] FP32


@dataclass(frozen=True)
class SelectorWeights:
    """DFlash2's candidate selector."""

    hidden_projection: Tensor  # [R, H]
    predecessor: Tensor  # [V, R]
    successor: Tensor  # [V, R]


@dataclass(frozen=True)
class HeadWeights:
    """The rows of the target's head that may propose."""

    rows: Tensor  # [n, H]
    token_ids: Tensor | None  # [n] int64 of an indexed head; None: row i is id i


@dataclass(frozen=True)
class DraftWeights:
    """Everything a drafter computes with."""

    embedding: Tensor  # [V, H], the target's
    layers: tuple[LayerWeights, ...]
    local: LayerGroup
    full: LayerGroup
    final_norm: Tensor  # [H] FP32
    head: HeadWeights
    selector: SelectorWeights | None  # DFlash2


class _Reader:
    """Copies the draft's tensors, under the names its file uses, to their place on the device."""

    def __init__(self, config: DraftConfig, draft: Checkpoint, progress: Progress) -> None:
        self._draft = draft
        self._device = config.device
        self._dtype = config.profile.activation
        self._progress = progress
        names = draft.names
        self._prefix = draft_prefix(draft)
        # releases store the codebooks bare; a model saved anew stores them as embeddings
        bare = f"{self._prefix}candidate_selector.predecessor_codebook"
        self._codebook_suffix = ".weight" if f"{bare}.weight" in names else ""
        self._shapes = {self._stored(n): shape for n, shape in draft_shapes(config).items()}
        draft.expect(self._shapes)
        elsewhere = {self._stored(name) for name in ELSEWHERE}
        self._total = sum(
            self._bytes(shape) for name, shape in self._shapes.items() if name not in elsewhere
        )
        self._done = 0

    def _stored(self, name: str) -> str:
        suffix = self._codebook_suffix if name.endswith("_codebook") else ""
        return f"{self._prefix}{name}{suffix}"

    def _bytes(self, shape: tuple[int, ...]) -> int:
        return torch.Size(shape).numel() * self._dtype.itemsize

    def has(self, name: str) -> bool:
        """Whether a draft of this config has the tensor."""
        return self._stored(name) in self._shapes

    def tensor(self, *names: str) -> Tensor:
        """Tensors of the activation type, joined along dimension 0."""
        shapes = [self._shapes[self._stored(name)] for name in names]
        rows = sum(shape[0] for shape in shapes)
        joined = torch.empty((rows, *shapes[0][1:]), dtype=self._dtype, device=self._device)
        self.into(joined, *names)
        return joined

    def into(self, destination: Tensor, *names: str) -> None:
        """Fills a tensor of the activation type, one name after another along dimension 0."""
        rows = [self._shapes[self._stored(name)][0] for name in names]
        for part, name in zip(torch.split(destination, rows), names, strict=True):
            self._copy(part, name)

    def gain(self, name: str) -> Tensor:
        """A norm's gain, FP32."""
        shape = self._shapes[self._stored(name)]
        gain = torch.empty(shape, dtype=torch.float32, device=self._device)
        self._copy(gain, name)
        return gain

    def _copy(self, destination: Tensor, name: str) -> None:
        self._draft.copy_into(destination, self._stored(name))
        self._done += self._bytes(tuple(destination.shape))
        self._progress(self._done, self._total)


def draft_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Names and extents of every tensor that a draft of this config has.

    Codebooks are named as releases name them, without ``.weight``.
    """
    draft = config.draft
    hidden, head_dim = draft.hidden_size, draft.head_dim
    query, key = draft.head_count * head_dim, draft.key_value_head_count * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "mlp.gate_proj.weight": (draft.intermediate_size, hidden),
        "mlp.up_proj.weight": (draft.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, draft.intermediate_size),
    }
    shapes: dict[str, tuple[int, ...]] = {
        PROJECTION: draft.projection_shape,
        PROJECTION_GAIN: (hidden,),
        "norm.weight": (hidden,),
    }
    if draft.format == "dflash2":
        taps, rank = draft.conv_kernel_size, draft.selector_rank
        deltas = SIDES * taps * (hidden // draft.conv_group_size)
        for branch in ("attention_conv", "mlp_conv"):
            layer[f"{branch}.base_kernel"] = (SIDES, taps, hidden)
            layer[f"{branch}.kernel_projection.weight"] = (deltas, hidden)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
        for side in ("predecessor", "successor"):
            shapes[f"candidate_selector.{side}_codebook"] = (draft.vocab_size, rank)
    for index in range(draft.layer_count):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def weight_plan(config: DraftConfig) -> list[tuple[str, int]]:
    """Bytes that the weights will take, by what they are for, with a full head."""
    facts, activation = config.target, config.profile.activation
    table = facts.vocab_size * facts.hidden_size * activation.itemsize
    draft = sum(
        math.prod(shape) * (torch.float32 if len(shape) == 1 else activation).itemsize
        for name, shape in draft_shapes(config).items()
        if name not in ELSEWHERE
    )
    tables = [("embedding and head", table)]
    if not facts.tied:
        tables = [("embedding", table), ("head", table)]
    return [(f"weights: {what}", size) for what, size in [*tables, ("draft", draft)]]


def load_weights(
    config: DraftConfig,
    target: Checkpoint,
    draft: Checkpoint,
    proposal_head: str = FULL_HEAD,
    progress: Progress = lambda done, total: None,
) -> DraftWeights:
    """Reads and checks all weights.

    Args:
        config: The pair.
        target: Folder with the embedding and the head.
        draft: Folder with everything else.
        proposal_head: "full", or the path of a shortlist file.
        progress: Told how many bytes are done.

    Raises:
        CheckpointError: names every tensor that is missing, extra, misshaped or of a type that
            needs scales, and what is wrong with a shortlist.
    """
    facts = config.target
    table = (facts.vocab_size, facts.hidden_size)
    target.expect({facts.embedding_name: table, facts.head_name: table}, unused=("",))
    shortlist = (
        None
        if proposal_head == FULL_HEAD
        else read_shortlist(Path(proposal_head), facts.public_vocab, config.draft.selector_top_k)
    )
    read = _Reader(config, draft, progress)
    local, local_layers = _group(config, read, SLIDING)
    full, full_layers = _group(config, read, FULL)
    layers = local_layers | full_layers
    embedding = _on_device(config, target, facts.embedding_name)
    head = embedding if facts.tied else _on_device(config, target, facts.head_name)
    return DraftWeights(
        embedding=embedding,
        layers=tuple(layers[index] for index in range(len(layers))),
        local=local,
        full=full,
        final_norm=read.gain("norm.weight"),
        head=_head(config, head, shortlist),
        selector=_selector(read) if config.draft.format == "dflash2" else None,
    )


def read_shortlist(path: Path, public_vocab: int, least_rows: int) -> Tensor:
    """The token ids of an indexed proposal head, in row order, int64.

    Raises:
        CheckpointError: no ``token_ids`` int32 vector of distinct public ids, or too few of them.
    """
    file = TensorFile(path)
    try:
        if file.names != ("token_ids",):
            raise CheckpointError(
                f"{path}: expected token_ids alone, got {', '.join(file.names) or 'nothing'}"
            )
        shape, dtype = file.shape("token_ids"), file.dtype("token_ids")
        if dtype != "I32" or len(shape) != 1:
            raise CheckpointError(f"{path}: token_ids: expected [*] I32, got {list(shape)} {dtype}")
        token_ids = file.tensor("token_ids").long()
    finally:
        file.close()
    count, least_rows = len(token_ids), max(1, least_rows)
    if count < least_rows:
        raise CheckpointError(f"{path}: token_ids: expected at least {least_rows}, got {count}")
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= public_vocab:
        raise CheckpointError(
            f"{path}: token_ids: expected ids in [0, {public_vocab}), got [{lowest}, {highest}]"
        )
    distinct = len(torch.unique(token_ids))
    if distinct != count:
        raise CheckpointError(
            f"{path}: token_ids: expected distinct ids, got {distinct} among {count}"
        )
    return token_ids


def _head(config: DraftConfig, head: Tensor, shortlist: Tensor | None) -> HeadWeights:
    if shortlist is None:
        return HeadWeights(head[: config.target.public_vocab], None)
    token_ids = shortlist.to(config.device)
    return HeadWeights(head[token_ids], token_ids)


def _on_device(config: DraftConfig, checkpoint: Checkpoint, name: str) -> Tensor:
    shape, dtype = checkpoint.shape(name), config.profile.activation
    tensor = torch.empty(shape, dtype=dtype, device=config.device)
    checkpoint.copy_into(tensor, name)
    return tensor


def _group(
    config: DraftConfig, read: _Reader, kind: str
) -> tuple[LayerGroup, dict[int, LayerWeights]]:
    """The layers of one attention type, and what their contexts need."""
    draft = config.draft
    indexes = tuple(i for i, layer_type in enumerate(draft.layer_types) if layer_type == kind)
    rows = (draft.head_count + 2 * draft.key_value_head_count) * draft.head_dim
    stacked = torch.empty(
        (len(indexes), rows, draft.hidden_size),
        dtype=config.profile.activation,
        device=config.device,
    )
    key_norms = torch.empty((len(indexes), draft.head_dim), device=config.device)
    layers = {}
    for place, index in enumerate(indexes):
        attention = f"layers.{index}.self_attn"
        read.into(stacked[place], *(f"{attention}.{side}_proj.weight" for side in "qkv"))
        key_norms[place] = read.gain(f"{attention}.k_norm.weight")
        layers[index] = _layer(read, index, stacked[place], key_norms[place])
    first_key_row = draft.head_count * draft.head_dim
    return LayerGroup(indexes, stacked[:, first_key_row:], key_norms), layers


def _layer(read: _Reader, index: int, query_key_value: Tensor, key_norm: Tensor) -> LayerWeights:
    layer = f"layers.{index}"
    return LayerWeights(
        input_norm=read.gain(f"{layer}.input_layernorm.weight"),
        query_key_value=query_key_value,
        query_norm=read.gain(f"{layer}.self_attn.q_norm.weight"),
        key_norm=key_norm,
        output=read.tensor(f"{layer}.self_attn.o_proj.weight"),
        post_attention_norm=read.gain(f"{layer}.post_attention_layernorm.weight"),
        gate_up=read.tensor(f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight"),
        down=read.tensor(f"{layer}.mlp.down_proj.weight"),
        attention_conv=_convolution(read, f"{layer}.attention_conv"),
        mlp_conv=_convolution(read, f"{layer}.mlp_conv"),
    )


def _convolution(read: _Reader, name: str) -> ConvolutionWeights | None:
    if not read.has(f"{name}.base_kernel"):
        return None
    return ConvolutionWeights(
        base=read.tensor(f"{name}.base_kernel"),
        projection=read.tensor(f"{name}.kernel_projection.weight"),
    )


def _selector(read: _Reader) -> SelectorWeights:
    return SelectorWeights(
        hidden_projection=read.tensor("candidate_selector.hidden_projection.weight"),
        predecessor=read.tensor("candidate_selector.predecessor_codebook"),
        successor=read.tensor("candidate_selector.successor_codebook"),
    )
