"""A tiny random pair in the published formats, and both services over it in one process.

Random drafts are bad drafts: nearly every round rolls GDN state back, which is what tests want.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import drafter.__main__ as drafter_process
import verifier.__main__ as verifier_process
from drafter.config import DrafterOptions
from tests.tiny_target import TEXT, Variant, save_target
from verifier.options import VerifierOptions

TAPS = (0, 2, 3)
WINDOW = 16
LAYER_TYPES = {
    "dflash2": ("sliding_attention",) * 2,
    "dflash": ("sliding_attention", "full_attention"),
}


def draft_config(
    kind: str, *, layer_types: Sequence[str] = (), window: int = WINDOW
) -> dict[str, Any]:
    """A draft's config.json for the tiny target."""
    layers = tuple(layer_types) or LAYER_TYPES[kind]
    nested: dict[str, Any] = {
        "block_size": 8,
        "mask_token_id": TEXT["vocab_size"] - 1,
        "target_layer_ids": list(TAPS),
    }
    if kind == "dflash2":
        nested |= {
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 8,
            "selector_top_k": 16,
        }
    return {
        "architectures": ["DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": TEXT["hidden_size"],
        "vocab_size": TEXT["vocab_size"],
        "num_hidden_layers": len(layers),
        "num_target_layers": TEXT["num_hidden_layers"],
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "layer_types": list(layers),
        "use_sliding_window": True,
        "sliding_window": window,
        "max_position_embeddings": 4096,
        "is_causal": False,
        "dflash_config": nested,
    }


def save_draft(folder: Path, kind: str, *, seed: int = 0, **options: Any) -> None:
    """Writes a random draft of ``kind`` to ``folder``."""
    config = draft_config(kind, **options)
    generator = torch.Generator().manual_seed(seed)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    key_values, dim = config["num_key_value_heads"], config["head_dim"]
    inner, vocab = config["intermediate_size"], config["vocab_size"]

    def drawn(*shape: int, scale: float = 0.2, mean: float = 0.0) -> torch.Tensor:
        return mean + scale * torch.randn(*shape, generator=generator)

    tensors = {
        "fc.weight": drawn(hidden, len(TAPS) * hidden),
        "hidden_norm.weight": drawn(hidden, mean=1.0),
        "norm.weight": drawn(hidden, mean=1.0),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}."
        tensors |= {
            f"{at}input_layernorm.weight": drawn(hidden, mean=1.0),
            f"{at}post_attention_layernorm.weight": drawn(hidden, mean=1.0),
            f"{at}self_attn.q_proj.weight": drawn(heads * dim, hidden),
            f"{at}self_attn.k_proj.weight": drawn(key_values * dim, hidden),
            f"{at}self_attn.v_proj.weight": drawn(key_values * dim, hidden),
            f"{at}self_attn.o_proj.weight": drawn(hidden, heads * dim),
            f"{at}self_attn.q_norm.weight": drawn(dim, mean=1.0),
            f"{at}self_attn.k_norm.weight": drawn(dim, mean=1.0),
            f"{at}mlp.gate_proj.weight": drawn(inner, hidden),
            f"{at}mlp.up_proj.weight": drawn(inner, hidden),
            f"{at}mlp.down_proj.weight": drawn(hidden, inner),
        }
        if kind == "dflash2":
            for side in ("attention_conv", "mlp_conv"):
                tensors[f"{at}{side}.base_kernel"] = drawn(2, 2, hidden, mean=0.5)
                tensors[f"{at}{side}.kernel_projection.weight"] = drawn(4 * hidden // 16, hidden)
    if kind == "dflash2":
        rank = config["dflash_config"]["selector_rank"]
        tensors |= {
            "candidate_selector.hidden_projection.weight": drawn(rank, hidden),
            "candidate_selector.predecessor_codebook": drawn(vocab, rank, scale=0.5),
            "candidate_selector.successor_codebook": drawn(vocab, rank, scale=0.5),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def save_pair(folder: Path, variant: Variant | None = None) -> Path:
    """Writes target/, dflash2/ and dflash/ below ``folder``."""
    save_target(folder / "target", variant or Variant("dense"), seed=3)
    for kind in LAYER_TYPES:
        save_draft(folder / kind, kind, seed=5)
    return folder


@dataclass
class Pair:
    """Both services, running in this process."""

    drafter: drafter_process.Running
    verifier: verifier_process.Running

    @property
    def address(self) -> str:
        """Where the verifier listens."""
        return self.verifier.address

    def wait_for_drafter(self, state: str = "connected") -> None:
        """Blocks until the verifier's link is in ``state``."""
        engine = self.verifier.engine
        assert engine is not None
        deadline = time.monotonic() + 20
        while engine.status().drafter_state != state:
            assert time.monotonic() < deadline, engine.status()
            time.sleep(0.005)

    def expect_idle(self) -> None:
        """Fails unless lanes, slots, pages and the drafter's contexts all come back, soon.

        What checkpoints hold counts as come back; both services must agree on the checkpoints.
        """
        engine = self.verifier.engine
        assert engine is not None
        deadline = time.monotonic() + 10
        while (found := self._found(engine)) != (wanted := self._wanted(engine)):
            assert time.monotonic() < deadline, (found, wanted)
            time.sleep(0.01)

    def _found(self, engine: Any) -> dict[str, Any]:
        state, link, host = engine._state, engine._link, engine._host
        status = engine.status()
        drafter = self.drafter._service._engine
        kept = list(engine._checkpoints._kept.values())
        images = [c.image for c in kept if c.image is not None]
        replicas = [c.replica for c in kept if c.replica is not None]
        return {
            "samples": (status.resident, status.queued, len(engine._paused), len(engine._live)),
            "lanes": len(state._free_lanes),
            "slots": len(state._free_slots),
            "pages": state.free_page_count + len({p for image in images for p in image.pages}),
            "images": state.free_image_count + len(images),
            "host images": host.free_image_count + len(replicas),
            "host pages": host.free_page_count + sum(len(r.pages) for r in replicas),
            "leases": sum(c.leases for c in kept),
            "contexts": (drafter._graphs.memory.free_count, len(link._contexts)),
            "captures": len(link._capturing),
            "draft halves": link._held,
            "known halves": link._held <= {c.checkpoint_id for c in kept},
        }

    def _wanted(self, engine: Any) -> dict[str, Any]:
        state, host = engine._state, engine._host
        lanes = state.page_tables.shape[0]
        drafter = self.drafter._service._engine
        tables = drafter._checkpoints._tables.values()
        return {
            "samples": (0, 0, 0, 0),
            "lanes": lanes,
            "slots": lanes,
            "pages": state.page_count,
            "images": state.gdn.shape[1] - lanes,
            "host images": host.image_count,
            "host pages": host.page_count,
            "leases": 0,
            "contexts": (drafter.config.max_concurrency, 0),
            "captures": 0,
            "draft halves": {i for table in list(tables) for i in table.ids},
            "known halves": True,
        }

    def expect_nothing_left(self) -> None:
        """Forgets all checkpoints and fails unless both services are as they were at start."""
        self.expect_idle()
        engine = self.verifier.engine
        assert engine is not None
        engine._checkpoints.clear()
        engine.wake()
        self.expect_idle()
        state = engine._state
        assert state.free_page_count == state.page_count
        assert not any(state._holders)
        slots = self.drafter._service._engine._checkpoints._slots
        assert slots.free_count(slots.device_cells) == slots.device_count
        assert slots.free_count(slots.host_cells) == slots.host_count


@contextlib.contextmanager
def served(
    target: Path,
    draft: Path,
    *,
    draft_tokens: int = 7,
    max_concurrency: int = 4,
    max_context: int = 512,
    drafter_context: int | None = None,
    drafter_lanes: int | None = None,
    dtype: str = "float32",
    load_format: str = "auto",
    checkpoint_slots: int = 0,
    checkpoint_host_mib: int = 0,
    spin_ms: int = 0,
    draft_tree_nodes: str = "off",
    drafter_tree_nodes: str | None = None,
    drafter_via: Callable[[str], str] = lambda address: address,
    **verifier_options: Any,
) -> Iterator[Pair]:
    """Starts drafter and verifier over loopback gRPC and stops them at the end.

    The verifier dials what ``drafter_via`` makes of the drafter's address.
    """
    drafter = drafter_process.start(
        DrafterOptions(
            target=target,
            draft=draft,
            listen="127.0.0.1:0",
            draft_tokens=draft_tokens,
            max_concurrency=drafter_lanes or max_concurrency,
            max_context=drafter_context or max_context,
            dtype=dtype,
            load_format=load_format,
            checkpoint_slots=checkpoint_slots,
            checkpoint_host_mib=checkpoint_host_mib,
            spin_ms=spin_ms,
            draft_tree_nodes=drafter_tree_nodes or draft_tree_nodes,
        )
    )
    try:
        verifier = verifier_process.start(
            VerifierOptions(
                target=target,
                draft=draft,
                drafter=drafter_via(drafter.address),
                listen="127.0.0.1:0",
                draft_tokens=draft_tokens,
                max_concurrency=max_concurrency,
                max_context=max_context,
                dtype=dtype,
                load_format=load_format,
                checkpoint_slots=checkpoint_slots,
                checkpoint_host_mib=checkpoint_host_mib,
                draft_tree_nodes=draft_tree_nodes,
                **verifier_options,
            )
        )
        try:
            pair = Pair(drafter, verifier)
            pair.wait_for_drafter()
            yield pair
        finally:
            verifier.stop(0)
    finally:
        drafter.stop(0)
