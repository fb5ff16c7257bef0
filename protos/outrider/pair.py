"""What verifier and drafter must both know about a target and its draft, read from two folders.

The verifier needs the draft's taps and window, the drafter the target's embedding and vocabulary;
`geometry` is what they compare when they meet. Every config that one of them could not serve
exactly is refused here, by field.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from outrider.checkpoint import Checkpoint, CheckpointError, Fields, known_token_ids, stop_ids
from outrider.v1 import draft_service_pb2, tensor_pb2

if TYPE_CHECKING:
    import torch

log = logging.getLogger("outrider.pair")

# architectures and model types of the target family; the value says whether it is MoE
TARGET_ARCHITECTURES = {
    "Qwen3_5ForConditionalGeneration": False,
    "Qwen3_5ForCausalLM": False,
    "Qwen3_5MoeForConditionalGeneration": True,
    "Qwen3_5MoeForCausalLM": True,
}
TARGET_MODEL_TYPES = {
    "qwen3_5": False,
    "qwen3_5_text": False,
    "qwen3_5_moe": True,
    "qwen3_5_moe_text": True,
}
TARGET_PREFIXES = ("model.language_model.", "model.")
DRAFT_ARCHITECTURES = {"DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2"}
DRAFT_FORMATS = {
    "dflash": draft_service_pb2.DRAFT_FORMAT_DFLASH,
    "dflash2": draft_service_pb2.DRAFT_FORMAT_DFLASH2,
}
ACTIVATION_DTYPES = {
    "float32": tensor_pb2.DTYPE_FLOAT32,
    "bfloat16": tensor_pb2.DTYPE_BFLOAT16,
}
# K, and so the widths that rounds are planned for
MOST_DRAFT_TOKENS = 15
# candidates a position that the wire's Conditional holds
MOST_CANDIDATES = 16
# a draft's projection of its features, and the gain of the norm after it
PROJECTION, PROJECTION_GAIN = "fc.weight", "hidden_norm.weight"
# rows at either end of a matrix that the digests cover
DIGEST_ROWS = 64

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"

# the text fields that decide what the target computes; all else may differ between two copies
_TARGET_MATHS = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "rms_norm_eps",
)
_SELECTOR_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# fields of other vendors' drafts, with the values under which they mean nothing
_FOREIGN_FIELDS: dict[str, tuple[object, ...]] = {
    "use_swa": (False,),
    "swa_window_size": (),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "projector_type": (),
    "sample_from_anchor": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (),
    "logit_scale": (1.0,),
    "hidden_act": ("silu",),
    "model_type": ("qwen3",),
}


@dataclass(frozen=True)
class Rotary:
    """A plain rotary embedding."""

    theta: float  # base of the frequencies
    partial_factor: float | None  # rotated share of a head; None where the config is silent
    sections: tuple[int, ...] | None  # pairs of the temporal, height and width axes


def read_rotary(config: Mapping[str, Any], where: str) -> Rotary:
    """Merges the places that a rotary embedding may be described in.

    rope_parameters and rope_scaling are nested sections, older files keep fields at the top. A
    nested base beats one at the top, with a warning; any other contradiction is refused.

    Raises:
        CheckpointError: no base anywhere, a contradiction, or a scaled embedding.
    """
    sections: list[Fields] = []
    for name in ("rope_parameters", "rope_scaling"):
        section = config.get(name)
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise Fields(config, where).error(name, "an object or null")
        fields = Fields(section, f"{where}: {name}")
        fields.only("rope_type", "default")
        fields.only("type", "default")
        fields.only("factor", 1.0)
        fields.only("mrope_interleaved", True)
        sections.append(fields)

    def merged(key: str) -> Fields | None:
        having = [fields for fields in sections if fields.has(key)]
        for other in having[1:]:
            if other.values[key] != having[0].values[key]:
                raise other.error(key, f"{having[0].values[key]!r} as in rope_parameters")
        top = Fields(config, where)
        if not top.has(key):
            return having[0] if having else None
        if having and top.values[key] != having[0].values[key]:
            if key != "rope_theta":
                raise top.error(key, f"{having[0].values[key]!r} as in {having[0].where}")
            log.warning(
                "%s: rope_theta: %r inside %s beats %r beside it",
                where,
                having[0].values[key],
                having[0].where,
                top.values[key],
            )
        return having[0] if having else top

    theta, factor, mrope = (
        merged(key) for key in ("rope_theta", "partial_rotary_factor", "mrope_section")
    )
    if theta is None:
        raise Fields(config, where).error("rope_theta", "a base, nested or at the top")
    return Rotary(
        theta=theta.number("rope_theta"),
        partial_factor=None if factor is None else factor.number("partial_rotary_factor"),
        sections=None if mrope is None else mrope.integers("mrope_section"),
    )


@dataclass(frozen=True)
class TargetFacts:
    """The target as both services see it. Tensors are looked at only for names and digests."""

    checkpoint: Checkpoint = field(repr=False, compare=False)
    text: dict[str, Any] = field(repr=False)  # the text section of config.json
    where: str  # names the config file in messages
    architecture: str
    mixture: bool  # whether the feed-forward layers are mixtures of experts
    hidden_size: int
    vocab_size: int  # rows of the embedding matrix
    public_vocab: int  # ids in [0, public_vocab) may be sampled
    layer_count: int
    max_position: int  # positions the target was made for
    tied: bool  # whether the head is the embedding
    rotary: Rotary
    stop_ids: frozenset[int]  # end-of-text and end-of-turn ids

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Self:
        """Reads and checks the target's config and tokenizer files.

        Raises:
            CheckpointError: another family, a quantized checkpoint, or a field out of range.
        """
        where = str(checkpoint.folder / "config.json")
        root = Fields(checkpoint.config, where)
        text = root.values.get("text_config", checkpoint.config)
        if not isinstance(text, dict):
            raise root.error("text_config", "an object")
        fields = Fields(text, where)
        architecture, mixture = _target_family(root, fields)
        for section in (root, fields):
            section.only("quantization_config")
        tie = fields if fields.has("tie_word_embeddings") else root
        vocab_size = fields.integer("vocab_size")
        known = known_token_ids(checkpoint)
        public_vocab = max(known) + 1 if known else vocab_size
        if public_vocab > vocab_size:
            raise fields.error("vocab_size", f"at least the tokenizer's {public_vocab} ids")
        stops = stop_ids(checkpoint)
        if stops and max(stops) >= public_vocab:
            raise CheckpointError(
                f"{checkpoint.folder}: stop ids: expected ids below {public_vocab}, "
                f"got {max(stops)}"
            )
        return cls(
            checkpoint=checkpoint,
            text=text,
            where=where,
            architecture=architecture,
            mixture=mixture,
            hidden_size=fields.integer("hidden_size"),
            vocab_size=vocab_size,
            public_vocab=public_vocab,
            layer_count=fields.integer("num_hidden_layers"),
            max_position=fields.integer("max_position_embeddings"),
            tied=tie.flag("tie_word_embeddings", False),
            rotary=read_rotary(text, where),
            stop_ids=stops,
        )

    @cached_property
    def layer_types(self) -> tuple[str, ...]:
        """`linear_attention` or `full_attention` for each block.

        layer_types decides where it is given, else every full_attention_interval-th block is full.
        """
        fields = Fields(self.text, self.where)
        if not fields.has("layer_types"):
            interval = fields.integer("full_attention_interval")
            return tuple(
                LINEAR if (block + 1) % interval else FULL for block in range(self.layer_count)
            )
        types = fields.words("layer_types", (LINEAR, FULL))
        if len(types) != self.layer_count:
            raise fields.error("layer_types", f"{self.layer_count} entries")
        return types

    @cached_property
    def prefix(self) -> str:
        """What the text tensors' names begin with."""
        if self.checkpoint.is_random:
            # as a release of such a config would name them
            return TARGET_PREFIXES[0 if "text_config" in self.checkpoint.config else 1]
        names = self.checkpoint.names
        found = [p for p in TARGET_PREFIXES if f"{p}embed_tokens.weight" in names]
        if len(found) != 1:
            expected = " or ".join(f"{p}embed_tokens.weight" for p in TARGET_PREFIXES)
            raise CheckpointError(
                f"{self.checkpoint.folder}: expected {expected}, got {'both' if found else 'none'}"
            )
        return found[0]

    @property
    def embedding_name(self) -> str:
        """Name of the embedding table, [vocab_size, hidden_size]."""
        return f"{self.prefix}embed_tokens.weight"

    @property
    def head_name(self) -> str:
        """Name of the head, [vocab_size, hidden_size]; the embedding when tied."""
        return self.embedding_name if self.tied else "lm_head.weight"

    @cached_property
    def config_digest(self) -> bytes:
        """SHA-256 over the text fields that decide what the target computes."""
        normalised = {key: self.text.get(key) for key in _TARGET_MATHS}
        normalised |= {
            "layer_types": self.layer_types,
            "mixture": self.mixture,
            "tied": self.tied,
            "rope_theta": self.rotary.theta,
            "partial_rotary_factor": self.rotary.partial_factor,
            "mrope_section": self.rotary.sections,
        }
        return hashlib.sha256(json.dumps(normalised, sort_keys=True).encode()).digest()

    @cached_property
    def tokenizer_digest(self) -> bytes:
        """SHA-256 over tokenizer.json and added_tokens_decoder; of nothing without a tokenizer."""
        digest = hashlib.sha256(self.checkpoint.file_bytes("tokenizer.json"))
        added = self.checkpoint.tokenizer_config.get("added_tokens_decoder") or {}
        digest.update(json.dumps(added, sort_keys=True).encode())
        return digest.digest()

    @cached_property
    def embedding_digest(self) -> bytes:
        """SHA-256 over the first and last 64 rows of the embedding, as stored."""
        return self._ends_digest(self.embedding_name)

    @cached_property
    def head_digest(self) -> bytes:
        """SHA-256 over the first and last 64 rows of the head, as stored."""
        return self._ends_digest(self.head_name)

    def _ends_digest(self, name: str) -> bytes:
        return ends_digest(self.checkpoint, name, (self.vocab_size, self.hidden_size))


def ends_digest(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> bytes:
    """SHA-256 over the first and last 64 rows of a matrix, as stored."""
    checkpoint.expect({name: shape}, unused=("",))
    count = min(DIGEST_ROWS, shape[0])
    digest = hashlib.sha256(checkpoint.dtype(name).encode())
    for first in (0, shape[0] - count):
        digest.update(_stored_bytes(checkpoint.rows(name, first, first + count)))
    return digest.digest()


@dataclass(frozen=True)
class DraftFacts:
    """A DFlash or DFlash2 draft's config, checked against the target it was made for."""

    format: str  # "dflash" or "dflash2"
    target_layer_ids: tuple[int, ...]  # zero-based target blocks, in concatenation order
    mask_token_id: int  # row of the target's embedding; may lie beyond the public vocabulary
    layer_types: tuple[str, ...]  # `sliding_attention` or `full_attention` by draft layer
    layer_causal: tuple[bool, ...]  # whether a layer masks later columns of its own block
    window: int  # S: local layers see distances below it; 0 without local layers
    block_size: int | None  # anchor and masks that the draft was trained with, if recorded
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    head_count: int
    key_value_head_count: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_position: int  # positions the draft was made for
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float  # 0 when off
    # DFlash2 alone; 0 otherwise
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    # of the matrix that projects features; empty where only the config was read
    projection_digest: bytes = b""

    @property
    def projection_shape(self) -> tuple[int, int]:
        """[H, taps * H] of the matrix W in c_t = rms_norm(W s_t), the projected features."""
        return self.hidden_size, len(self.target_layer_ids) * self.hidden_size

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, target: TargetFacts, *, causal_local_layers: bool = False
    ) -> Self:
        """Reads the draft folder's config, see `read`, and the ends of its projection."""
        if checkpoint.has_file("mask_embedding.pt"):
            raise CheckpointError(
                f"{checkpoint.folder / 'mask_embedding.pt'}: expected no embedding of the draft's "
                "own, got one"
            )
        draft = cls.read(
            checkpoint.config,
            target,
            where=str(checkpoint.folder / "config.json"),
            causal_local_layers=causal_local_layers,
        )
        name = f"{draft_prefix(checkpoint)}{PROJECTION}"
        return replace(
            draft, projection_digest=ends_digest(checkpoint, name, draft.projection_shape)
        )

    @classmethod
    def read(
        cls,
        config: Mapping[str, Any],
        target: TargetFacts,
        *,
        where: str = "draft config",
        causal_local_layers: bool = False,
    ) -> Self:
        """Checks a draft's config against the target.

        A field of dflash_config beats the same field at the root. Block causality is the root's
        is_causal, else dflash_config.causal, else none; `causal_local_layers` makes every local
        layer causal whatever the config says.

        Raises:
            CheckpointError: naming the field, what was expected and what is there.
        """
        nested = config.get("dflash_config") or {}
        root = Fields(config, where)
        if not isinstance(nested, Mapping):
            raise root.error("dflash_config", "an object")
        fields = Fields({**config, **{k: v for k, v in nested.items() if v is not None}}, where)
        draft_format = _draft_format(root)
        for key, neutral in _FOREIGN_FIELDS.items():
            fields.only(key, *neutral)
        fields.only("hidden_size", target.hidden_size)
        fields.only("vocab_size", target.vocab_size)
        fields.only("draft_vocab_size", target.vocab_size)
        fields.only("num_target_layers", target.layer_count)

        rotary = read_rotary(config, where)
        if rotary.partial_factor not in (None, 1.0):
            raise CheckpointError(
                f"{where}: partial_rotary_factor: expected absent or 1, got {rotary.partial_factor}"
            )
        if rotary.sections is not None:
            raise CheckpointError(
                f"{where}: mrope_section: expected absent, got {list(rotary.sections)}"
            )
        layer_types = _draft_layer_types(root)
        head_count = fields.integer("num_attention_heads")
        key_value_head_count = fields.integer("num_key_value_heads")
        if head_count % key_value_head_count:
            raise fields.error("num_key_value_heads", f"a divisor of {head_count} heads")
        head_dim = fields.integer("head_dim")
        if head_dim % 2:
            raise fields.error("head_dim", "an even number")
        return cls(
            format=draft_format,
            target_layer_ids=_taps(fields, target),
            mask_token_id=fields.integer("mask_token_id", least=0, most=target.vocab_size - 1),
            layer_types=layer_types,
            layer_causal=_layer_causal(root, nested, layer_types, causal_local_layers),
            window=_window(root, layer_types),
            block_size=_block_size(root, Fields(nested, f"{where}: dflash_config")),
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            intermediate_size=fields.integer("intermediate_size"),
            head_count=head_count,
            key_value_head_count=key_value_head_count,
            head_dim=head_dim,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=rotary.theta,
            max_position=fields.integer("max_position_embeddings"),
            input_embedding_scale=fields.number("input_embedding_scale", 1.0),
            output_multiplier=fields.number("output_multiplier", 1.0),
            final_logit_softcapping=_softcap(fields),
            projection_digest=b"",
            **_selector_fields(fields, draft_format, target),
        )

    @property
    def layer_count(self) -> int:
        """Draft layers, local and full."""
        return len(self.layer_types)

    @property
    def full_layer_count(self) -> int:
        """Draft layers that see the whole context."""
        return self.layer_types.count(FULL)

    def draft_tokens(self, wanted: int | None) -> int:
        """K: what was asked for, else what the draft was trained with.

        Raises:
            CheckpointError: outside 1..15, narrower than the convolution, or nothing to go by.
        """
        if wanted is None:
            if self.block_size is None:
                raise CheckpointError(
                    "draft tokens: expected a number, as the draft's config records no block_size, "
                    "got none"
                )
            wanted = self.block_size - 1
        if not 1 <= wanted <= MOST_DRAFT_TOKENS:
            raise CheckpointError(f"draft tokens: expected 1..{MOST_DRAFT_TOKENS}, got {wanted}")
        if wanted + 1 < self.conv_kernel_size:
            raise CheckpointError(
                f"draft tokens: expected at least {self.conv_kernel_size - 1}, for a convolution "
                f"of {self.conv_kernel_size} taps, got {wanted}"
            )
        if self.block_size is not None and wanted > self.block_size - 1:
            log.warning(
                "draft tokens: %d is more than the %d that the draft was trained with",
                wanted,
                self.block_size - 1,
            )
        return wanted


def activation_dtype(name: str) -> tensor_pb2.DType:
    """The wire's element type for a numeric profile.

    Raises:
        CheckpointError: neither float32 nor bfloat16. FP16 overflows in a draft's convolution.
    """
    if name not in ACTIVATION_DTYPES:
        raise CheckpointError(f"dtype: expected {' or '.join(ACTIVATION_DTYPES)}, got {name}")
    return ACTIVATION_DTYPES[name]


def draft_prefix(checkpoint: Checkpoint) -> str:
    """What the names of a draft's tensors begin with: some are saved as part of a larger model."""
    return "model." if f"model.{PROJECTION}" in checkpoint.names else ""


def geometry(target: TargetFacts, draft: DraftFacts, dtype: str) -> draft_service_pb2.DraftGeometry:
    """What the two services compare in Hello. Reads the ends of embedding and head."""
    return draft_service_pb2.DraftGeometry(
        format=DRAFT_FORMATS[draft.format],
        target_layer_ids=draft.target_layer_ids,
        mask_token_id=draft.mask_token_id,
        window=draft.window,
        layer_count=draft.layer_count,
        full_layer_count=draft.full_layer_count,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        public_vocab=target.public_vocab,
        rope_theta=draft.rope_theta,
        activation_dtype=activation_dtype(dtype),
        target_config_digest=target.config_digest,
        tokenizer_digest=target.tokenizer_digest,
        embedding_digest=target.embedding_digest,
        head_digest=target.head_digest,
        projection_digest=draft.projection_digest,
        target_layer_count=target.layer_count,
    )


def mismatches(
    mine: draft_service_pb2.DraftGeometry, theirs: draft_service_pb2.DraftGeometry
) -> list[tuple[str, str, str]]:
    """Fields that differ, each as (field, expected, actual); expected is `mine`."""
    return [
        (entry.name, _shown(mine, entry), _shown(theirs, entry))
        for entry in mine.DESCRIPTOR.fields
        if getattr(mine, entry.name) != getattr(theirs, entry.name)
    ]


def _shown(message: draft_service_pb2.DraftGeometry, entry: Any) -> str:
    value = getattr(message, entry.name)
    if entry.enum_type is not None:
        known = entry.enum_type.values_by_number.get(value)
        return str(value) if known is None else known.name
    if isinstance(value, bytes):
        return value.hex() or "nothing"
    return str(value) if isinstance(value, int | float) else str(list(value))


def _target_family(root: Fields, text: Fields) -> tuple[str, bool]:
    """Architecture and whether it is a mixture of experts."""
    architectures = root.values.get("architectures") or []
    if not isinstance(architectures, list) or any(
        name not in TARGET_ARCHITECTURES for name in architectures
    ):
        raise root.error("architectures", f"one of {', '.join(TARGET_ARCHITECTURES)}")
    model_types = [s.values["model_type"] for s in (root, text) if s.has("model_type")]
    for section in (root, text):
        section.only("model_type", *TARGET_MODEL_TYPES)
    if not architectures and not model_types:
        raise root.error("architectures", f"one of {', '.join(TARGET_ARCHITECTURES)}")
    mixture = any(TARGET_ARCHITECTURES[name] for name in architectures) or any(
        TARGET_MODEL_TYPES[name] for name in model_types
    )
    return (architectures or model_types)[0], mixture


def _draft_format(root: Fields) -> str:
    architectures = root.values.get("architectures")
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or architectures[0] not in DRAFT_ARCHITECTURES
    ):
        raise root.error("architectures", f"exactly one of {', '.join(DRAFT_ARCHITECTURES)}")
    return DRAFT_ARCHITECTURES[architectures[0]]


def _draft_layer_types(root: Fields) -> tuple[str, ...]:
    count = root.integer("num_hidden_layers")
    if not root.has("layer_types"):
        # the rule of the format's reference: layers from max_window_layers on are local
        if not root.flag("use_sliding_window", False):
            return (FULL,) * count
        full_count = root.integer("max_window_layers", 28, least=0)
        return tuple(FULL if layer < full_count else SLIDING for layer in range(count))
    types = root.words("layer_types", (SLIDING, FULL))
    if len(types) != count:
        raise root.error("layer_types", f"{count} entries")
    return types


def _window(root: Fields, layer_types: tuple[str, ...]) -> int:
    if SLIDING not in layer_types:
        return 0
    if not root.flag("use_sliding_window", True):
        # the reference drops the window then, and what the layers were trained with is unknown
        raise root.error("use_sliding_window", f"true or absent, as layer_types has {SLIDING}")
    return root.integer("sliding_window")


def _layer_causal(
    root: Fields, nested: Mapping[str, Any], layer_types: tuple[str, ...], local: bool
) -> tuple[bool, ...]:
    everywhere = (
        root.flag("is_causal")
        if root.has("is_causal")
        else Fields(nested, f"{root.where}: dflash_config").flag("causal", False)
    )
    return tuple(everywhere or (local and kind == SLIDING) for kind in layer_types)


def _block_size(root: Fields, nested: Fields) -> int | None:
    sizes = {
        section.integer("block_size", least=2)
        for section in (root, nested)
        if section.has("block_size")
    }
    if len(sizes) > 1:
        raise nested.error("block_size", f"{root.values['block_size']!r} as at the root")
    return sizes.pop() if sizes else None


def _taps(fields: Fields, target: TargetFacts) -> tuple[int, ...]:
    taps = fields.integers("target_layer_ids", most=target.layer_count - 1)
    if not taps or len(set(taps)) != len(taps):
        raise fields.error("target_layer_ids", "one or more distinct block ids")
    return taps


def _softcap(fields: Fields) -> float:
    if fields.values.get("final_logit_softcapping") in (None, 0):
        return 0.0
    return fields.number("final_logit_softcapping")


def _selector_fields(fields: Fields, draft_format: str, target: TargetFacts) -> dict[str, int]:
    if draft_format == "dflash":
        for key in _SELECTOR_FIELDS:
            fields.only(key)
        return {}
    sizes = {key: fields.integer(key) for key in _SELECTOR_FIELDS}
    if target.hidden_size % sizes["conv_group_size"]:
        raise fields.error("conv_group_size", f"a divisor of hidden_size {target.hidden_size}")
    most = min(MOST_CANDIDATES, target.vocab_size)
    if sizes["selector_top_k"] > most:
        raise fields.error("selector_top_k", f"at most {most}")
    return sizes


def _stored_bytes(rows: torch.Tensor) -> bytes:
    import torch

    return rows.contiguous().view(torch.uint8).numpy().tobytes()
