"""What the target computes, as checked numbers.

`TargetConfig` holds every field of a target's config that its maths depends on. Fields that the
family's maths does not honour are accepted with their usual value and refused with any other, so
that no checkpoint is served as something that it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from outrider.checkpoint import Fields
from outrider.pair import FULL, LINEAR, TargetFacts

# taps of the causal convolution; its history is one shorter
CONV_TAPS = 4
# rotated share of a head where a config is silent: the family's own default
_PARTIAL_ROTARY_FACTOR = 0.25

# fields that this family's maths does not honour, with the values that agree with it
_FIXED_FIELDS: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attn_output_gate": (True,),  # the attention gate is always there, and a sigmoid
    "output_gate_type": ("swish", "silu"),  # of the GDN output norm, not of attention
    "linear_conv_kernel_dim": (CONV_TAPS,),
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
}


@dataclass(frozen=True)
class MixtureConfig:
    """Sizes of a mixture-of-experts feed-forward layer."""

    expert_count: int
    top_k: int  # experts a token
    intermediate_size: int
    shared_intermediate_size: int  # of the expert that every token passes


@dataclass(frozen=True)
class TargetConfig:
    """Sizes and constants of a hybrid GDN and attention target."""

    hidden_size: int
    vocab_size: int  # rows of embedding and head
    public_vocab: int  # ids in [0, public_vocab) may be sampled
    layer_types: tuple[str, ...]  # `linear_attention` (GDN) or `full_attention`, by block
    norm_eps: float
    tied: bool  # whether the head is the embedding
    max_position: int  # positions the target was made for
    stop_ids: frozenset[int]
    # attention blocks
    head_count: int
    key_value_head_count: int
    head_dim: int
    rotary_dim: int  # leading dimensions of a head that are rotated
    rope_theta: float
    rope_sections: tuple[int, ...] | None  # pairs of the temporal, height and width axes
    # GDN blocks
    gdn_key_head_count: int
    gdn_value_head_count: int
    gdn_key_dim: int
    gdn_value_dim: int
    # exactly one is set
    intermediate_size: int | None  # dense feed-forward
    mixture: MixtureConfig | None

    @classmethod
    def read(cls, facts: TargetFacts) -> Self:
        """Checks the rest of a target's config.

        Raises:
            CheckpointError: naming the field, what was expected and what is there.
        """
        fields = Fields(facts.text, facts.where)
        for key, allowed in _FIXED_FIELDS.items():
            fields.only(key, *allowed)
        head_count = fields.integer("num_attention_heads")
        key_value_head_count = fields.integer("num_key_value_heads")
        if head_count % key_value_head_count:
            raise fields.error("num_key_value_heads", f"a divisor of {head_count} heads")
        gdn_key_heads = fields.integer("linear_num_key_heads")
        gdn_value_heads = fields.integer("linear_num_value_heads")
        if gdn_value_heads % gdn_key_heads:
            raise fields.error("linear_num_key_heads", f"a divisor of {gdn_value_heads} heads")
        head_dim = fields.integer("head_dim")
        return cls(
            hidden_size=facts.hidden_size,
            vocab_size=facts.vocab_size,
            public_vocab=facts.public_vocab,
            layer_types=facts.layer_types,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            tied=facts.tied,
            max_position=facts.max_position,
            stop_ids=facts.stop_ids,
            head_count=head_count,
            key_value_head_count=key_value_head_count,
            head_dim=head_dim,
            rotary_dim=_rotary_dim(facts, fields, head_dim),
            rope_theta=facts.rotary.theta,
            rope_sections=facts.rotary.sections,
            gdn_key_head_count=gdn_key_heads,
            gdn_value_head_count=gdn_value_heads,
            gdn_key_dim=fields.integer("linear_key_head_dim"),
            gdn_value_dim=fields.integer("linear_value_head_dim"),
            intermediate_size=None if facts.mixture else fields.integer("intermediate_size"),
            mixture=_mixture(fields) if facts.mixture else None,
        )

    @property
    def layer_count(self) -> int:
        """Blocks."""
        return len(self.layer_types)

    @property
    def gdn_layer_count(self) -> int:
        """Blocks whose mixer is GDN."""
        return self.layer_types.count(LINEAR)

    @property
    def full_layer_count(self) -> int:
        """Blocks whose mixer is attention."""
        return self.layer_types.count(FULL)

    @property
    def gdn_key_width(self) -> int:
        """Channels of all GDN keys (and of all queries)."""
        return self.gdn_key_head_count * self.gdn_key_dim

    @property
    def gdn_value_width(self) -> int:
        """Channels of all GDN values."""
        return self.gdn_value_head_count * self.gdn_value_dim

    @property
    def conv_channels(self) -> int:
        """C: channels that pass the convolution: query, key and value."""
        return 2 * self.gdn_key_width + self.gdn_value_width


def _rotary_dim(facts: TargetFacts, fields: Fields, head_dim: int) -> int:
    factor = facts.rotary.partial_factor
    rotated = head_dim * (_PARTIAL_ROTARY_FACTOR if factor is None else factor)
    if rotated != int(rotated) or int(rotated) % 2 or not 0 < rotated <= head_dim:
        raise fields.error("head_dim", f"an even count of rotated dimensions, not {rotated:g}")
    sections = facts.rotary.sections
    if sections is not None and (len(sections) != 3 or 2 * sum(sections) != rotated):
        found = Fields({"mrope_section": list(sections)}, fields.where)
        raise found.error("mrope_section", f"three sections that sum to {int(rotated) // 2}")
    return int(rotated)


def _mixture(fields: Fields) -> MixtureConfig:
    expert_count = fields.integer("num_experts")
    return MixtureConfig(
        expert_count=expert_count,
        top_k=fields.integer("num_experts_per_tok", most=expert_count),
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size"),
    )
