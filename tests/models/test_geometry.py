"""The geometries that come without weights have the sizes that are known of the releases."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import models
from drafter.config import DraftConfig, DrafterOptions
from drafter.weights import draft_shapes
from outrider.pair import DraftFacts, TargetFacts
from outrider.random_weights import open_checkpoint
from verifier.config import TargetConfig
from verifier.state import state_plan
from verifier.weights import weight_plan

GEOMETRY = Path(models.__file__).parent / "geometry"
MIB = 2**20
# tensors, parameters, window, rings of one sequence in bytes, local and full layers
DRAFTS = {
    "qwen3.5-27b-dflash2": (81, 1_924_404_480, 2048, 40 * MIB, 5, 0),
    "qwen3.5-27b-dflash": (58, 1_730_213_120, 2048, 32 * MIB, 4, 1),
    "qwen3.5-35b-a3b-dflash": (69, 385_906_176, 4096, 80 * MIB, 5, 1),
    "qwen3.5-35b-a3b-dflash2": (96, 526_251_520, 2048, 48 * MIB, 6, 0),
}


def target(name: str) -> tuple[TargetFacts, TargetConfig]:
    facts = TargetFacts.read(open_checkpoint(GEOMETRY / name, "random"))
    return facts, TargetConfig.read(facts)


def test_a_verify_of_27b_reads_51_2_gb_of_weights():
    sizes = dict(weight_plan(*target("qwen3.5-27b"), torch.bfloat16))
    # rows of the embedding are looked up, the rest is read
    read = sum(sizes.values()) - sizes["weights: embedding"]
    assert read == pytest.approx(51.25e9, rel=1e-4)


def test_35b_has_the_parameters_of_its_release():
    facts, config = target("qwen3.5-35b-a3b")
    from verifier.weights import tensor_shapes

    shapes = tensor_shapes(facts, config)
    assert len(shapes) == 693
    assert sum(map(math.prod, shapes.values())) == 34_660_610_688


def test_a_state_slot_of_27b_is_144_mib_of_states_and_2_8_of_history():
    _, config = target("qwen3.5-27b")
    plan = dict(state_plan(config, lanes=1, max_context=64, width=8, dtype=torch.bfloat16))
    assert plan["GDN states"] == 144 * MIB
    assert plan["convolution history"] / MIB == 2.8125
    assert plan["KV: keys"] + plan["KV: values"] == 64 * 64 * 1024  # 64 KiB a position


@pytest.mark.parametrize("name", DRAFTS)
def test_drafts_have_the_tensors_and_rings_of_their_releases(name: str):
    tensors, parameters, window, rings, local, full = DRAFTS[name]
    base = name.rpartition("-")[0]
    checkpoint = open_checkpoint(GEOMETRY / base, "random")
    options = DrafterOptions(dtype="bfloat16", max_concurrency=1, max_context=4096)
    config = DraftConfig.read(options, checkpoint, open_checkpoint(GEOMETRY / name, "random"))
    shapes = draft_shapes(config)
    assert (len(shapes), sum(map(math.prod, shapes.values()))) == (tensors, parameters)
    plan = config.context_plan
    assert (config.draft.window, plan.ring_bytes) == (window, rings)
    assert (plan.local_layer_count, plan.full_layer_count) == (local, full)


def test_a_target_without_a_tokenizer_has_all_its_rows_public_and_a_stop_id():
    facts, _ = target("qwen3.5-27b")
    assert facts.public_vocab == facts.vocab_size == 248_320
    assert facts.stop_ids == {248_044}


def test_taps_are_those_of_the_release():
    facts, _ = target("qwen3.5-27b")
    draft = DraftFacts.load(open_checkpoint(GEOMETRY / "qwen3.5-27b-dflash2", "random"), facts)
    assert draft.target_layer_ids == (5, 19, 33, 47, 61)
    assert (draft.mask_token_id, draft.block_size) == (248_070, 8)
    assert replace(draft).layer_causal == (False,) * 5
