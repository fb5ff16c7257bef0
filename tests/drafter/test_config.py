"""Which pairs and options a drafter refuses to start with, and how it says so."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.__main__ import start
from drafter.config import DraftConfig, DrafterOptions
from drafter.context import ContextPlan
from drafter.weights import load_weights, weight_plan
from outrider import serving
from outrider.checkpoint import Checkpoint

REMOVED = object()


def edited(pair, folder, **changes):
    """A copy of the pair's draft with other config fields; dflash__NAME reaches dflash_config."""
    shutil.copytree(pair.draft, folder / "draft")
    path = folder / "draft" / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        holder = config["dflash_config"] if name.startswith("dflash__") else config
        holder.pop(name.removeprefix("dflash__"), None)
        if value is not REMOVED:
            holder[name.removeprefix("dflash__")] = value
    path.write_text(json.dumps(config))
    return folder / "draft"


def read(pair, **options):
    given = DrafterOptions(**{"target": pair.target, "draft": pair.draft, **options})
    with Checkpoint(given.target) as target, Checkpoint(given.draft) as draft:
        return DraftConfig.read(given, target, draft)


REFUSED = {
    # rotary base: it must be somewhere, and nothing but the plain embedding is computed
    "rope base nowhere": ({"rope_parameters": None}, "rope_theta: expected"),
    "rope yarn": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0}},
        "rope_type: expected",
    ),
    "rope scaling yarn": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        "type: expected",
    ),
    # block size: it only sets K, so two values are a contradiction
    "block size twice": ({"block_size": 16}, "block_size: expected 16"),
    # taps: they are not derived from the layer count
    "taps absent": ({"dflash__target_layer_ids": REMOVED}, "target_layer_ids: expected"),
    "taps beyond the target": (
        {"dflash__target_layer_ids": [0, 4]},
        r"target_layer_ids: expected a list of integers in 0..3, got \[0, 4\]",
    ),
    "taps repeated": ({"dflash__target_layer_ids": [1, 1]}, "target_layer_ids: expected"),
    "target layers": ({"num_target_layers": 5}, "num_target_layers: expected absent or 4, got 5"),
    # mask: any row of the embedding, and never a fallback
    "mask absent": ({"dflash__mask_token_id": REMOVED}, "mask_token_id: expected"),
    "mask outside the embedding": (
        {"dflash__mask_token_id": 160},
        r"mask_token_id: expected an integer in 0..159, got 160",
    ),
    "mask negative": ({"dflash__mask_token_id": -1}, "mask_token_id: expected"),
    # architecture and format
    "architecture unknown": ({"architectures": ["LlamaForCausalLM"]}, "architectures: expected"),
    "architecture absent": ({"architectures": REMOVED}, "architectures: expected"),
    "DFlash with a selector": (
        {"dflash__selector_rank": 8},
        "selector_rank: expected absent, got 8",
    ),
    "DFlash with a convolution": (
        {"dflash__conv_kernel_size": 2},
        "conv_kernel_size: expected absent, got 2",
    ),
    "DFlash2 without its fields": (
        {"architectures": ["DFlash2DraftModel"]},
        "conv_kernel_size: expected",
    ),
    # widths
    "hidden size": ({"hidden_size": 1024}, "hidden_size: expected absent or 64, got 1024"),
    "vocabulary": ({"vocab_size": 32}, "vocab_size: expected absent or 160, got 32"),
    "own vocabulary": ({"draft_vocab_size": 32}, "draft_vocab_size: expected .*160, got 32"),
    "heads": ({"num_key_value_heads": 3}, "num_key_value_heads: expected"),
    "attention bias": ({"attention_bias": True}, "attention_bias: expected"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    # attention types and window
    "layer type unknown": (
        {"layer_types": ["sliding_attention", "chunked_attention"]},
        "layer_types: expected",
    ),
    "layer types short": ({"layer_types": ["full_attention"]}, "layer_types: expected 2"),
    "window switched off": ({"use_sliding_window": False}, "use_sliding_window: expected"),
    "window absent": ({"sliding_window": None}, "sliding_window: expected"),
    # other vendors' variants
    "shifted anchor": ({"dflash__sample_from_anchor": True}, "sample_from_anchor: expected"),
    "attention sink": ({"dflash__attention_sink_bias": True}, "attention_sink_bias: expected"),
    "value scale": ({"dflash__attention_value_scale": 0.5}, "attention_value_scale: expected"),
    "projector": ({"dflash__projector_type": "mlp"}, "projector_type: expected"),
    "own window": ({"dflash__use_swa": True}, "use_swa: expected"),
    "causality": ({"is_causal": "yes"}, "is_causal: expected true or false, got 'yes'"),
    "negative multiplier": ({"dflash__output_multiplier": -1.0}, "output_multiplier: expected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_draft_that_cannot_be_served_exactly_is_refused(make_pair, tmp_path, name):
    changes, message = REFUSED[name]
    pair = make_pair("dflash", "lf", is_causal=False)
    with pytest.raises(ValueError, match=message) as refused:
        read(pair, draft=edited(pair, tmp_path, **changes))
    assert "got" in str(refused.value)


ACCEPTED = {
    "rope base at the top": ({"rope_parameters": None, "rope_theta": 1e7}, "rope_theta", 1e7),
    "rope base nested": ({}, "rope_theta", 1e7),
    "rope base twice: the nested one wins": ({"rope_theta": 1e4}, "rope_theta", 1e7),
    "rope scaling null is plain": ({"rope_scaling": None}, "rope_theta", 1e7),
    "block size at the root": (
        {"dflash__block_size": REMOVED, "block_size": 16},
        "block_size",
        16,
    ),
    "block size in both places": ({"block_size": 8}, "block_size", 8),
    "mask at the root": (
        {"dflash__mask_token_id": REMOVED, "mask_token_id": 159},
        "mask_token_id",
        159,
    ),
    "taps at the root, last block included": (
        {"dflash__target_layer_ids": REMOVED, "target_layer_ids": [3, 0, 2]},
        "target_layer_ids",
        (3, 0, 2),
    ),
    "causality absent": ({"is_causal": REMOVED}, "layer_causal", (False, False)),
    "causality of the root": ({"is_causal": True}, "layer_causal", (True, True)),
    "causality of the section": (
        {"is_causal": REMOVED, "dflash__causal": True},
        "layer_causal",
        (True, True),
    ),
    "the root's causality beats the section's": (
        {"is_causal": False, "dflash__causal": True},
        "layer_causal",
        (False, False),
    ),
    "cap zero is off": ({"dflash__final_logit_softcapping": 0}, "final_logit_softcapping", 0.0),
    "neutral values of other vendors": (
        {"dflash__sample_from_anchor": False, "dflash__use_swa": False, "attention_bias": False},
        "format",
        "dflash",
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_every_published_way_to_say_it_is_read(make_pair, tmp_path, name):
    changes, field, value = ACCEPTED[name]
    pair = make_pair("dflash", "lf", is_causal=False)
    config = read(pair, draft=edited(pair, tmp_path, **changes))
    assert getattr(config.draft, field) == value


def test_causal_local_layers_leave_full_layers_alone(make_pair):
    config = read(make_pair("dflash", "lf", is_causal=False), causal_local_layers=True)
    assert config.draft.layer_causal == (True, False)


def test_K_is_a_choice_of_the_run(make_pair, tmp_path, caplog):
    pair = make_pair("dflash", "lf", is_causal=False)
    assert read(pair).draft_tokens == 7, "block_size - 1 unless told otherwise"
    with caplog.at_level(logging.WARNING):
        assert [read(pair, draft_tokens=k).draft_tokens for k in (1, 7)] == [1, 7]
        assert not caplog.records
        assert read(pair, draft_tokens=15).draft_tokens == 15
        assert "15" in caplog.text
    for wrong in (0, 16, -3):
        with pytest.raises(ValueError, match=f"expected 1..15, got {wrong}"):
            read(pair, draft_tokens=wrong)
    silent = edited(pair, tmp_path, dflash__block_size=REMOVED)
    with pytest.raises(ValueError, match="block_size, got none"):
        read(pair, draft=silent)
    assert read(pair, draft=silent, draft_tokens=5).draft_tokens == 5


OPTIONS = {
    "float16 overflows": (
        {"dtype": "float16"},
        "dtype: expected float32 or bfloat16, got float16",
    ),
    "no sequence": ({"max_concurrency": 0}, "max_concurrency: expected 1..8, got 0"),
    "nine sequences": ({"max_concurrency": 9}, "max_concurrency: expected 1..8, got 9"),
    "a context shorter than a block": ({"max_context": 8}, "max_context: expected 9..4096, got 8"),
    "a context beyond the pair": (
        {"max_context": 4097},
        "max_context: expected 9..4096, got 4097",
    ),
    "another device": ({"device": "tpu"}, "device: expected cpu, cuda or cuda:N, got 'tpu'"),
    "a device that is not there": ({"device": "cuda:99"}, "that is there, got 'cuda:99'"),
    "checkpoints": ({"checkpoint_slots": -1}, "checkpoint_slots: expected 0.*got -1"),
    "host": ({"checkpoint_host_mib": -1}, "checkpoint_host_mib: expected 0.*got -1"),
    "grace": ({"checkpoint_grace": float("nan")}, "checkpoint_grace: expected 0.*got nan"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_out_of_range_are_refused(make_pair, name):
    options, message = OPTIONS[name]
    with pytest.raises(ValueError, match=message):
        read(make_pair("dflash", "lf", is_causal=False), **options)


def test_a_context_beyond_the_drafts_own_is_shortened(make_pair, tmp_path):
    """The verifier goes on without proposals from there."""
    pair = make_pair("dflash", "lf", is_causal=False)
    draft = edited(pair, tmp_path, max_position_embeddings=256)
    assert read(pair, draft=draft).max_context == 256
    assert read(pair, draft=draft, max_context=1000).max_context == 256
    assert read(pair, draft=draft, max_context=100).max_context == 100


def test_a_block_narrower_than_the_convolution_is_refused(make_pair):
    pair = make_pair("dflash2", "ll", is_causal=False, dflash__conv_kernel_size=4)
    with pytest.raises(ValueError, match="at least 3"):
        read(pair, draft_tokens=2)


def test_eight_sequences_of_fifteen_proposals_are_planned_for(make_pair):
    config = read(make_pair("dflash", "lf", is_causal=False), draft_tokens=15, max_concurrency=8)
    plan = config.context_plan
    assert (plan.sequence_count, config.width) == (8, 16)
    # 8 slots of S = 8 cells of 2 heads x 16 FP32 keys and values
    assert plan.ring_bytes == 8 * 8 * 2 * 16 * 8
    assert plan.page_bytes == 8 * 4096 * 2 * 16 * 8


def test_memory_that_does_not_suffice_is_refused_with_the_sum(make_pair):
    config = read(make_pair("dflash", "lf", is_causal=False), max_concurrency=2)
    full = config.context_plan.ring_bytes + config.context_plan.page_bytes
    assert config.fitting_memory(full, 9, may_shorten=False) is config
    with pytest.raises(ValueError, match=rf"at most {full - 1} bytes, got rings .* pages 1 layers"):
        config.fitting_memory(full - 1, 9, may_shorten=False)


def test_an_unstated_context_takes_what_half_of_the_memory_holds(make_pair):
    config = read(make_pair("dflash", "lf", is_causal=False), max_concurrency=2)
    shorter = config.fitting_memory(2_000_000, 9, may_shorten=True)
    plan = shorter.context_plan
    assert plan.ring_bytes + plan.page_bytes <= 1_000_000 < 1_000_000 + 64 * 2 * plan.cell_bytes
    assert shorter.max_context % 64 == 0
    assert 1500 < shorter.max_context < 4096
    with pytest.raises(ValueError, match="context memory: expected at most 500 bytes"):
        config.fitting_memory(1000, 9, may_shorten=True)


def test_a_plan_that_does_not_fit_is_refused_with_every_term(make_pair, monkeypatch):
    pair = make_pair("dflash2", "lf", is_causal=False)
    given = DrafterOptions(target=pair.target, draft=pair.draft, max_concurrency=2, max_context=64)
    config = read(pair, max_concurrency=2, max_context=64)
    plan = config.context_plan
    sizes = [*(size for _, size in weight_plan(config)), plan.ring_bytes, plan.page_bytes]
    monkeypatch.setattr(serving, "memory_bytes", lambda device: sum(sizes) - 1)
    with pytest.raises(ValueError, match=r"^memory: expected at most") as refused:
        start(given)
    # the sum's own terms, and its limit and its total around them
    terms = [int(text) for text in re.findall(r"\d+", str(refused.value))]
    assert terms == [sum(sizes) - 1, *sizes, sum(sizes)]
    monkeypatch.setattr(serving, "memory_bytes", lambda device: sum(sizes))
    start(given).stop(0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft_format", ["dflash", "dflash2"])
def test_the_weights_take_what_is_planned_for_them(make_pair, draft_format, dtype):
    pair = make_pair(draft_format, "lfl", is_causal=False)
    held: dict[int, int] = {}

    def count(part):
        if isinstance(part, torch.Tensor):
            storage = part.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
        elif dataclasses.is_dataclass(part):
            for field in dataclasses.fields(part):
                count(getattr(part, field.name))
        elif isinstance(part, tuple):
            for each in part:
                count(each)

    count(load(pair, pair.draft, dtype=dtype))
    assert sum(held.values()) == sum(size for _, size in weight_plan(read(pair, dtype=dtype)))


def test_the_official_rings_take_forty_mebibytes_a_sequence():
    """Five local layers, S = 2048, 8 heads of 128, BF16 keys and FP16 values."""
    plan = ContextPlan(1, 262144, 2048, 5, 0, 8, 128, torch.bfloat16, torch.float16)
    assert plan.ring_bytes == 40 * 2**20
    assert plan.page_bytes == 0


# ---- weights ------------------------------------------------------------------------------------


def with_tensors(pair, folder, change):
    """A copy of the pair's draft whose tensors `change` has edited in place."""
    shutil.copytree(pair.draft, folder / "draft")
    path = folder / "draft" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return folder / "draft"


def load(pair, draft, **options):
    given = DrafterOptions(**{"target": pair.target, "draft": draft, **options})
    with Checkpoint(given.target) as target, Checkpoint(draft) as checkpoint:
        config = DraftConfig.read(given, target, checkpoint)
        return load_weights(config, target, checkpoint, given.proposal_head)


WRONG_TENSORS = {
    "selector missing": (
        lambda t: t.pop("candidate_selector.hidden_projection.weight"),
        r"candidate_selector.hidden_projection.weight: expected \[8, 64\], got no such tensor",
    ),
    "codebook missing": (
        lambda t: t.pop("candidate_selector.successor_codebook.weight"),
        r"successor_codebook.weight: expected \[160, 8\], got no such tensor",
    ),
    "convolution missing": (
        lambda t: t.pop("layers.1.mlp_conv.base_kernel"),
        r"layers.1.mlp_conv.base_kernel: expected \[2, 2, 64\], got no such tensor",
    ),
    "own head": (
        lambda t: t.update({"lm_head.weight": torch.zeros(32, 64)}),
        r"lm_head.weight: expected no such tensor, got \[32, 64\]",
    ),
    "own id map": (
        lambda t: t.update({"d2t": torch.zeros(32, dtype=torch.int64)}),
        r"d2t: expected no such tensor, got \[32\]",
    ),
    "taps x H": (
        lambda t: t.update({"fc.weight": torch.zeros(64, 128)}),
        r"fc.weight: expected \[64, 192\], got \[64, 128\]",
    ),
    "FP8": (
        lambda t: t.update({"fc.weight": torch.zeros(64, 192).to(torch.float8_e4m3fn)}),
        "fc.weight: expected one of F32, BF16, F16, got F8_E4M3",
    ),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_wrong_tensors_are_named_with_expected_and_actual(make_pair, tmp_path, name):
    change, message = WRONG_TENSORS[name]
    pair = make_pair("dflash2", "ll", is_causal=False)
    with pytest.raises(ValueError, match=message):
        load(pair, with_tensors(pair, tmp_path, change))


def test_a_quantized_head_of_the_target_is_refused(make_pair, tmp_path):
    pair = make_pair("dflash2", "ll", is_causal=False)
    shutil.copytree(pair.target, tmp_path / "target")
    path = tmp_path / "target" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"lm_head.weight: expected one of .*, got F8_E4M3"):
        load(pair, pair.draft, target=tmp_path / "target")


def test_every_published_tensor_name_is_read(make_pair, tmp_path):
    """Codebooks with and without .weight, and names under model., give the same weights."""
    pair = make_pair("dflash2", "ll", is_causal=False)

    def as_released(tensors):
        for name in list(tensors):
            tensors[name.removesuffix(".weight") if "codebook" in name else name] = tensors.pop(
                name
            )

    def with_prefix(tensors):
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    plain = load(pair, pair.draft)
    for place, change in (("a", as_released), ("b", with_prefix)):
        other = load(pair, with_tensors(pair, tmp_path / place, change))
        assert torch.equal(other.selector.predecessor, plain.selector.predecessor)
        assert torch.equal(other.layers[1].down, plain.layers[1].down)


def test_context_and_block_share_key_and_value_weights(make_pair):
    pair = make_pair("dflash", "lfl", is_causal=False)
    weights = load(pair, pair.draft)
    assert (weights.local.layers, weights.full.layers) == ((0, 2), (1,))
    block = weights.layers[2].query_key_value
    context = weights.local.key_value[1]
    assert torch.equal(block[64:], context)
    assert block.untyped_storage().data_ptr() == context.untyped_storage().data_ptr()


SHORTLISTS = {
    "no file": (None, "no such file"),
    "other tensors": ({"ids": torch.zeros(20, dtype=torch.int32)}, "expected token_ids alone"),
    "int64": ({"token_ids": torch.arange(20)}, r"expected \[\*\] I32, got \[20\] I64"),
    "matrix": ({"token_ids": torch.zeros(4, 5, dtype=torch.int32)}, r"got \[4, 5\] I32"),
    "too few": ({"token_ids": torch.arange(15, dtype=torch.int32)}, "at least 16, got 15"),
    "twice": ({"token_ids": torch.tensor([*range(19), 3], dtype=torch.int32)}, "got 19 among 20"),
    "beyond": ({"token_ids": torch.arange(141, 161, dtype=torch.int32)}, r"in \[0, 160\)"),
    "negative": ({"token_ids": torch.arange(-1, 19, dtype=torch.int32)}, r"in \[0, 160\)"),
}


@pytest.mark.parametrize("name", SHORTLISTS)
def test_a_wrong_shortlist_is_refused(make_pair, tmp_path, name):
    tensors, message = SHORTLISTS[name]
    pair = make_pair("dflash2", "ll", is_causal=False)
    path = tmp_path / "shortlist.safetensors"
    if tensors is not None:
        save_file(tensors, path)
    with pytest.raises(ValueError, match=message):
        load(pair, pair.draft, proposal_head=str(path))
