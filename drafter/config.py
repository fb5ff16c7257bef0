"""What a drafter is started with, and the checked facts of the pair it drafts for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import structlog
import torch

from drafter.context import PAGE_SIZE, ContextPlan
from outrider import pair, serving
from outrider.checkpoint import Checkpoint
from outrider.pair import DraftFacts, TargetFacts
from outrider.security import ServerSecurity
from outrider.tree_nodes import TreeNodes

log = structlog.get_logger("outrider.drafter")

MOST_CONCURRENCY = 8
MOST_CHECKPOINT_SLOTS = 4096
MOST_HOST_MIB = 1 << 24
MOST_GRACE = 86400  # seconds
MOST_SPIN_MS = 60_000
# longer than a round of a large target takes; on a CPU the core is wanted for better things
SPIN_MS = {"cuda": 50, "cpu": 0}
FULL_HEAD = "full"


@dataclass(frozen=True)
class DrafterOptions:
    """The drafter's command line, as values."""

    target: Path | None = None  # folder: config, tokenizer, embedding, head; None: bundled
    draft: Path | None = None  # folder of the draft; None: the bundled DFlash2 one
    listen: str = "127.0.0.1:0"  # port 0 takes a free one
    device: str = "cpu"
    dtype: str = "float32"  # numeric profile: "float32" or "bfloat16"
    load_format: str = "auto"  # or "random": weights are drawn and proposals are noise
    draft_tokens: int | None = None  # K; None takes what the draft was trained with
    draft_tree_nodes: str = "off"  # as the flag has it
    max_concurrency: int = 4  # sequences at once, over all streams
    max_context: int | None = None  # positions of one sequence; None takes what the pair allows
    proposal_head: str = FULL_HEAD  # or a shortlist file
    checkpoint_slots: int = 0  # on the device, over all streams
    checkpoint_host_mib: int = 0  # budget of the replicas in host memory
    checkpoint_grace: float = 60.0  # seconds that checkpoints outlive their verifier's stream
    spin_ms: int = 0  # how long after a Round the next is looked for in shared memory
    causal_local_layers: bool = False
    security: ServerSecurity = field(default_factory=ServerSecurity)
    metrics_listen: str | None = None
    tracing: str = "off"


@dataclass(frozen=True)
class NumericProfile:
    """Element types of one profile: activations and weights, and what contexts keep."""

    activation: torch.dtype
    key: torch.dtype
    value: torch.dtype


# FP16 activations overflow in the convolution's output side; values in a ring are activations
# already rounded to BF16, which FP16 holds with three bits to spare
PROFILES = {
    "float32": NumericProfile(torch.float32, torch.float32, torch.float32),
    "bfloat16": NumericProfile(torch.bfloat16, torch.bfloat16, torch.float16),
}


@dataclass(frozen=True)
class DraftConfig:
    """Everything a drafter knows before it reads weights: pair, widths, memory, numerics."""

    target: TargetFacts
    draft: DraftFacts
    draft_tokens: int  # K
    max_concurrency: int
    max_context: int
    dtype: str
    device: torch.device
    tree_nodes: int = 0  # columns of the widest tree; 0 without trees
    checkpoint_slots: int = 0
    checkpoint_host_bytes: int = 0
    checkpoint_grace: float = 60.0

    @classmethod
    def read(cls, options: DrafterOptions, target: Checkpoint, draft: Checkpoint) -> Self:
        """Reads and checks both folders' configs and the options.

        Raises:
            CheckpointError: naming the field of a folder, what was expected and what is there.
            ValueError: naming the option in the same way.
        """
        # refuses every other profile, with the profiles it knows
        pair.activation_dtype(options.dtype)
        if not 1 <= options.max_concurrency <= MOST_CONCURRENCY:
            raise ValueError(
                f"max_concurrency: expected 1..{MOST_CONCURRENCY}, got {options.max_concurrency}"
            )
        for name, value, most in (
            ("checkpoint_slots", options.checkpoint_slots, MOST_CHECKPOINT_SLOTS),
            ("checkpoint_host_mib", options.checkpoint_host_mib, MOST_HOST_MIB),
            ("checkpoint_grace", options.checkpoint_grace, MOST_GRACE),
            ("spin_ms", options.spin_ms, MOST_SPIN_MS),
        ):
            if not 0 <= value <= most:
                raise ValueError(f"{name}: expected 0..{most}, got {value}")
        target_facts = TargetFacts.read(target)
        facts = DraftFacts.load(
            draft, target_facts, causal_local_layers=options.causal_local_layers
        )
        draft_tokens = facts.draft_tokens(options.draft_tokens)
        trees = TreeNodes.parse(options.draft_tree_nodes)
        trees.expect_served(draft_tokens, facts.selector_top_k)
        longest = min(target_facts.max_position, facts.max_position)
        # one processed position and a whole block behind it
        least = draft_tokens + 2
        wanted = options.max_context
        if wanted is not None and not least <= wanted <= target_facts.max_position:
            raise ValueError(
                f"max_context: expected {least}..{target_facts.max_position}, got {wanted}"
            )
        if wanted is not None and wanted > longest:
            # the verifier may go on beyond it, without proposals
            log.warning("max_context_shortened", wanted=wanted, draft_max_position=longest)
        config = cls(
            target=target_facts,
            draft=facts,
            draft_tokens=draft_tokens,
            max_concurrency=options.max_concurrency,
            max_context=longest if wanted is None else min(wanted, longest),
            dtype=options.dtype,
            device=choose_device(options.device),
            tree_nodes=trees.most(draft_tokens),
            checkpoint_slots=options.checkpoint_slots,
            checkpoint_host_bytes=options.checkpoint_host_mib << 20,
            checkpoint_grace=options.checkpoint_grace,
        )
        available = serving.memory_bytes(str(config.device))
        return config.fitting_memory(available, least, wanted is None)

    def fitting_memory(self, available_bytes: int, least: int, may_shorten: bool) -> Self:
        """This config, with as long a context as half of the memory holds if it may be shortened.

        Raises:
            ValueError: with the arithmetic, when the contexts do not fit.
        """
        plan = self.context_plan
        budget = available_bytes // 2 if may_shorten else available_bytes
        if plan.ring_bytes + plan.page_bytes <= budget:
            return self
        max_context = 0
        if may_shorten and plan.full_layer_count:
            position_bytes = plan.full_layer_count * plan.slot_count * plan.cell_bytes
            pages = (budget - plan.ring_bytes) // position_bytes // PAGE_SIZE
            max_context = pages * PAGE_SIZE
        if max_context < least:
            raise ValueError(
                f"context memory: expected at most {budget} bytes, got {plan.arithmetic()}"
            )
        return replace(self, max_context=max_context)

    @property
    def width(self) -> int:
        """W: anchor and K masks."""
        return self.draft_tokens + 1

    @property
    def fixed_width(self) -> int:
        """Columns that every row computes: W in DFlash2; 0 in DFlash, where a row takes P + 1."""
        return self.width if self.draft.format == "dflash2" else 0

    @property
    def profile(self) -> NumericProfile:
        """Element types in use."""
        return PROFILES[self.dtype]

    @property
    def feature_width(self) -> int:
        """H: values of one position's projected features."""
        return self.draft.hidden_size

    @property
    def context_plan(self) -> ContextPlan:
        """The context memory that these limits need."""
        return ContextPlan(
            sequence_count=self.max_concurrency,
            max_context=self.max_context,
            window=self.draft.window,
            local_layer_count=self.draft.layer_count - self.draft.full_layer_count,
            full_layer_count=self.draft.full_layer_count,
            key_value_heads=self.draft.key_value_head_count,
            head_dim=self.draft.head_dim,
            key_dtype=self.profile.key,
            value_dtype=self.profile.value,
            checkpoint_slots=self.checkpoint_slots,
        )


def choose_device(name: str | None) -> torch.device:
    """The device asked for; CUDA if there is one and none was asked for.

    Raises:
        ValueError: an unknown device, or one that is not there.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: expected one that is there, got {name!r}")
    return device
