"""Tiny random pairs: a target's embedding and head, and drafts as `dflash` saves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from drafter.config import DraftConfig, DrafterOptions
from drafter.context import Append, Context, ContextMemory
from drafter.graphs import BlockBuffers, DraftGraphs
from drafter.model import DraftBlock, DraftModel, ProposalAsk
from drafter.selector import Selector, selector_for
from drafter.service import DraftService, Engine
from drafter.weights import DraftWeights, load_weights
from outrider import serving
from outrider.checkpoint import Checkpoint
from outrider.tensors import row_bytes

VOCAB, HIDDEN, TAPS, WINDOW, MASK = 160, 64, (0, 2, 3), 8, 155

TARGET_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "full_attention_interval": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True)
class Pair:
    """Folders of a pair, and the draft as the oracle holds it."""

    target: Path
    draft: Path
    oracle: nn.Module
    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]


@dataclass(frozen=True)
class Drafting:
    """A loaded drafter, below the service."""

    config: DraftConfig
    weights: DraftWeights
    memory: ContextMemory
    model: DraftModel
    selector: Selector
    graphs: DraftGraphs

    def append(self, *pieces: tuple[Context, Tensor]) -> Append:
        """Materializes rows of several contexts at once."""
        append = self.memory.append([(context, len(rows)) for context, rows in pieces])
        self.graphs.materialize([row_bytes(rows) for _, rows in pieces], append)
        append.commit()
        return append

    def block(self, *asks: ProposalAsk) -> DraftBlock:
        """One masked block's inputs."""
        buffers = BlockBuffers(self.config, len(asks))
        buffers.write(asks)
        buffers.send()
        return buffers.block(self.memory, self.memory.plan.pages_per_sequence)


def write_target(folder: Path, **changes: Any) -> tuple[Tensor, Tensor]:
    """Writes what a drafter reads of a target; returns embedding and head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TARGET_CONFIG, **changes}))
    generator = torch.Generator().manual_seed(7)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.5
    head = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    save_file(tensors, folder / "model.safetensors")
    return embedding, head


def oracle_model(draft_format: str, layer_types: list[str], **fields: Any) -> nn.Module:
    """A random draft of the `dflash` package; fields of ``dflash_config`` come as dflash__NAME."""
    from dflash.model import DFlash2DraftModel, DFlashDraftModel, Qwen3Config

    nested: dict[str, Any] = {
        "target_layer_ids": list(TAPS),
        "mask_token_id": MASK,
        "block_size": 8,
    }
    if draft_format == "dflash2":
        nested |= {
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 8,
            "selector_top_k": 16,
        }
    for name in [name for name in fields if name.startswith("dflash__")]:
        nested[name.removeprefix("dflash__")] = fields.pop(name)
    config = Qwen3Config(
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": len(layer_types),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": layer_types,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
            "num_target_layers": 4,
            "dflash_config": nested,
            **fields,
        }
    )
    model = (DFlash2DraftModel if draft_format == "dflash2" else DFlashDraftModel)(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                drawn = 1.0 + 0.2 * drawn
            elif "codebook" not in name:
                drawn = 0.08 * drawn
            parameter.copy_(drawn)
    return model.eval().float()


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """Builds and saves a pair; the same arguments give the same folders."""
    made: dict[str, Pair] = {}

    def make(draft_format: str, layers: str, **fields: Any) -> Pair:
        """`layers` has a letter a layer: l is local, f is full."""
        key = f"{draft_format} {layers} {sorted(fields.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp("pair")
            embedding, head = write_target(folder / "target")
            types = [{"l": "sliding_attention", "f": "full_attention"}[kind] for kind in layers]
            oracle = oracle_model(draft_format, types, **fields)
            oracle.save_pretrained(folder / "draft")
            # features come projected: the verifier holds what the oracle would begin with
            oracle.fc = oracle.hidden_norm = nn.Identity()
            made[key] = Pair(folder / "target", folder / "draft", oracle, embedding, head)
        return made[key]

    return make


@pytest.fixture(scope="session")
def load() -> Callable[..., Drafting]:
    """Loads a pair below the service."""

    def load(pair: Pair, **options: Any) -> Drafting:
        given = DrafterOptions(**{"target": pair.target, "draft": pair.draft, **options})
        with Checkpoint(given.target) as target, Checkpoint(given.draft) as draft:
            config = DraftConfig.read(given, target, draft)
            weights = load_weights(config, target, draft, given.proposal_head)
        memory = ContextMemory(config.context_plan, config.device)
        # what no test wrote must reach no result
        for cells in (memory.key_rings, memory.value_rings, memory.key_pages, memory.value_pages):
            cells.fill_(torch.nan)
        model = DraftModel(config.draft, weights, memory)
        selector = selector_for(config, weights)
        graphs = DraftGraphs(config, model, selector)
        return Drafting(config, weights, memory, model, selector, graphs)

    return load


@pytest.fixture(scope="session")
def features() -> Callable[..., Tensor]:
    """Random projected features [count, H], each its own function of seed and position."""

    def features(count: int, seed: int = 0) -> Tensor:
        return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(100 + seed))

    return features


@pytest.fixture
def serve() -> Iterator[Callable[[Engine], tuple[DraftService, grpc.Channel]]]:
    """Serves an engine on loopback until the test ends."""
    running = []

    def serve(engine: Engine) -> tuple[DraftService, grpc.Channel]:
        server = grpc.server(futures.ThreadPoolExecutor(16), options=serving.SERVER_OPTIONS)
        service = DraftService()
        service.register(server)
        service.attach(engine)
        address = serving.bind(server, "127.0.0.1:0")
        server.start()
        channel = grpc.insecure_channel(address, options=serving.CHANNEL_OPTIONS)
        running.append((server, service, channel))
        return service, channel

    yield serve
    for server, service, channel in running:
        channel.close()
        service.drain()
        server.stop(5).wait()
        service.close()
