"""How many launches one draft takes, at the official shapes: nothing runs, everything is counted.

Tensors are on the meta device, so that a launch has shapes and no data; kernels stop where they
would be launched, and of torch's operators those count that would launch or copy something.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from drafter.config import DraftConfig, DrafterOptions
from drafter.context import ContextMemory
from drafter.graphs import BlockBuffers
from drafter.model import DraftModel
from drafter.selector import selector_for
from drafter.weights import load_weights
from outrider.random_weights import RandomCheckpoint, open_checkpoint

GEOMETRIES = Path(__file__).parents[3] / "models" / "geometry"
META = torch.device("meta")
# besides views, operators that only take memory or name it anew
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}


def is_free(func):
    returned = [value.alias_info for value in func._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in returned)
    return is_view or func.overloadpacket.__name__ in FREE


class Launches(TorchDispatchMode):
    """Counts what would be launched, by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        to_host = name == "copy_" and args[0].device != META
        result = args[0] if to_host else func(*args, **(kwargs or {}))
        # what has no elements is not launched
        if not is_free(func) and result.numel():
            self.counts[name] += 1
        return result


@pytest.fixture
def launches(monkeypatch):
    counted = Launches()

    def launched(executor, *args, **kwargs):
        counted.counts[executor.fn.__name__] += 1

    monkeypatch.setattr(GridExecutor, "__call__", launched)
    monkeypatch.setattr(RandomCheckpoint, "copy_into", lambda *_: None)
    zeros = torch.zeros
    # no memory is pinned where no device is
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))
    return counted


def drafter_of(name, tree_nodes):
    target_name = name.removesuffix("-dflash").removesuffix("-dflash2")
    folders = GEOMETRIES / target_name, GEOMETRIES / name
    target, draft = (open_checkpoint(folder, "random") for folder in folders)
    options = DrafterOptions(
        dtype="bfloat16",
        draft_tokens=7,
        draft_tree_nodes=tree_nodes,
        max_concurrency=8,
        max_context=4096,
    )
    config = replace(DraftConfig.read(options, target, draft), device=META)
    weights = load_weights(config, target, draft)
    model = DraftModel(config.draft, weights, ContextMemory(config.context_plan, META))
    return config, model, selector_for(config, weights)


@pytest.mark.parametrize(
    ("name", "tree_nodes", "rows", "most"),
    [
        ("qwen3.5-27b-dflash2", "off", 1, 87),
        ("qwen3.5-27b-dflash2", "off", 8, 88),
        ("qwen3.5-27b-dflash2", "16", 1, 88),
        ("qwen3.5-27b-dflash2", "16", 8, 89),
        ("qwen3.5-35b-a3b-dflash", "off", 1, 65),
        ("qwen3.5-35b-a3b-dflash", "off", 8, 66),
    ],
)
def test_a_draft_and_its_materialization_take_no_more(launches, name, tree_nodes, rows, most):
    config, model, selector = drafter_of(name, tree_nodes)
    buffers = BlockBuffers(config, rows)
    features = torch.empty(8, config.feature_width, dtype=torch.bfloat16, device=META)
    destinations = torch.empty(3, 8, dtype=torch.int64, device=META)

    def draft():
        model.materialize(features, destinations)
        buffers.send()
        pages = config.context_plan.pages_per_sequence
        block = buffers.block(model.memory, pages, config.tree_nodes)
        buffers.keep(selector.select(model.draft_block(block), block))

    with launches:
        draft()
        # what is kept between calls is there now
        launches.counts.clear()
        draft()
    assert launches.counts["copy_"] == 2  # to the device, and back
    assert launches.counts.total() <= most, launches.counts
