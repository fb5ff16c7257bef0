"""Drafts that a service must refuse to start with, or read in just one way; and their windows."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import drafter.__main__ as drafter_process
import verifier.__main__ as verifier_process
from drafter.config import DrafterOptions
from kernels.sliding_window_attention import sliding_window_attention
from outrider.client import Client
from outrider.pair import DraftFacts, TargetFacts
from tests.system.conftest import greedy, prompt
from tests.tiny_pair import draft_config, served
from verifier.options import VerifierOptions

ABSENT = object()


@pytest.fixture
def edited(dense: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a draft with other config fields; dflash__NAME reaches dflash_config."""

    def edit(kind: str, **changes: Any) -> Path:
        folder = tmp_path / kind
        folder.mkdir(exist_ok=True)
        if not (folder / "model.safetensors").exists():
            (folder / "model.safetensors").symlink_to(dense / kind / "model.safetensors")
        config = json.loads((dense / kind / "config.json").read_text())
        for name, value in changes.items():
            holder = config["dflash_config"] if name.startswith("dflash__") else config
            holder.pop(name.removeprefix("dflash__"), None)
            if value is not ABSENT:
                holder[name.removeprefix("dflash__")] = value
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return edit


def start_drafter(target: Path, draft: Path, **options: Any) -> drafter_process.Running:
    return drafter_process.start(
        DrafterOptions(**{"target": target, "draft": draft, "max_context": 256, **options})
    )


def start_verifier(target: Path, draft: Path, **options: Any) -> verifier_process.Running:
    given = {"target": target, "draft": draft, "max_context": 256, **options}
    return verifier_process.start(
        VerifierOptions(drafter="127.0.0.1:1", listen="127.0.0.1:0", **given)
    )


def refused(target: Path, draft: Path, message: str, **options: Any) -> None:
    """Both services refuse to start, with the same reason."""
    for start in (start_drafter, start_verifier):
        with pytest.raises(ValueError, match=message):
            start(target, draft, **options)


def accepted(target: Path, draft: Path, **options: Any) -> tuple[int, DraftFacts]:
    """Both services start; K as they took it, and the draft as they read it."""
    running = [start(target, draft, **options) for start in (start_drafter, start_verifier)]
    try:
        config = running[0]._service._engine.config
        with Client(running[1].address) as client:
            assert client.model_info().draft_tokens == config.draft_tokens
        return config.draft_tokens, config.draft
    finally:
        for each in running:
            each.stop(0)


def test_distance_S_is_outside_the_window_and_S_minus_1_inside():
    """D1: S=4, F=10, K=4, full left context; values one-hot in position tell the keys."""
    size = 15
    basis = torch.eye(size).view(size, 1, size)
    ring = torch.zeros(1, 4, 1, size)
    for p in range(6, 10):
        ring[0, p % 4] = basis[p]
    block = basis[10:15].unsqueeze(0)
    one = torch.tensor([1])
    out = sliding_window_attention(
        torch.zeros(1, 5, 1, size),
        torch.zeros_like(block),
        block,
        torch.zeros_like(ring),
        ring,
        0 * one,
        0 * one,
        10 * one,
        5 * one,
        window=4,
        causal=False,
    )
    seen = [row.nonzero().flatten().tolist() for row in out[0]]
    assert seen[0] == [7, 8, 9, 10, 11, 12, 13]
    assert seen[2] == [9, 10, 11, 12, 13, 14]
    assert seen[4] == [11, 12, 13, 14]


def test_a_rotary_base_is_found_at_either_level_and_must_be_somewhere(dense, edited, caplog):
    """D3: top only; nested only; both, conflicting; neither."""
    target, plain = dense / "target", {"rope_type": "default"}
    top = edited("dflash2", rope_theta=1e7, rope_parameters=plain)
    assert accepted(target, top)[1].rope_theta == 1e7
    only_top = edited("dflash2", rope_theta=1e7, rope_parameters=ABSENT)
    assert accepted(target, only_top)[1].rope_theta == 1e7
    nested = edited("dflash2", rope_theta=ABSENT, rope_parameters={**plain, "rope_theta": 1e7})
    with caplog.at_level(logging.WARNING):
        assert accepted(target, nested)[1].rope_theta == 1e7
        assert "rope_theta" not in caplog.text
        both = edited("dflash2", rope_theta=1e6, rope_parameters={**plain, "rope_theta": 1e7})
        assert accepted(target, both)[1].rope_theta == 1e7
        assert "rope_theta: 10000000.0 inside" in caplog.text
        assert "beats 1000000.0" in caplog.text
    neither = edited("dflash2", rope_theta=ABSENT, rope_parameters=plain)
    refused(target, neither, "rope_theta: expected a base, nested or at the top, got nothing")


def test_rope_scaling_null_is_plain_and_yarn_is_refused(dense, edited):
    """D3: null means no scaling."""
    target = dense / "target"
    null = edited("dflash2", rope_scaling=None)
    assert accepted(target, null)[1].rope_theta == 1e7
    yarn = edited("dflash2", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    refused(target, yarn, "rope_type: expected")


def test_block_size_at_either_level_sets_only_the_default_K(dense, edited, caplog):
    """D5: nested 8; top-level 8; both, 8 and 16; none."""
    target = dense / "target"
    nested = edited("dflash2", dflash__block_size=8)
    assert accepted(target, nested)[0] == 7
    top = edited("dflash2", dflash__block_size=ABSENT, block_size=8)
    assert accepted(target, top)[0] == 7
    both = edited("dflash2", dflash__block_size=8, block_size=16)
    refused(target, both, "block_size: expected 16 as at the root, got 8")
    none = edited("dflash2", dflash__block_size=ABSENT, block_size=ABSENT)
    refused(target, none, "draft tokens: expected a number.*got none")
    assert accepted(target, none, draft_tokens=3)[0] == 3
    with caplog.at_level(logging.WARNING):
        nested = edited("dflash2", dflash__block_size=8)
        assert [accepted(target, nested, draft_tokens=k)[0] for k in (1, 7)] == [1, 7]
        assert "more than the 7" not in caplog.text
        assert accepted(target, nested, draft_tokens=15)[0] == 15
        assert "15 is more than the 7 that the draft was trained with" in caplog.text
    for k in (0, 16):
        refused(target, nested, f"draft tokens: expected 1..15, got {k}", draft_tokens=k)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (ABSENT, "mask_token_id: expected an integer in 0..248319, got nothing"),
        (248070, None),
        (999999, "mask_token_id: expected an integer in 0..248319, got 999999"),
        (-1, "mask_token_id: expected an integer in 0..248319, got -1"),
    ],
    ids=["absent", "248070", "999999", "-1"],
)
def test_a_mask_is_never_made_up(dense, mask, message):
    """D8: against an embedding of 248320 rows."""
    from outrider.checkpoint import Checkpoint

    with Checkpoint(dense / "target") as checkpoint:
        checkpoint.config["vocab_size"] = 248320
        target = TargetFacts.read(checkpoint)
        config = draft_config("dflash2") | {"vocab_size": 248320}
        del config["dflash_config"]["mask_token_id"]
        if mask is not ABSENT:
            config["dflash_config"]["mask_token_id"] = mask
        if message is None:
            assert DraftFacts.read(config, target).mask_token_id == mask
            return
        with pytest.raises(ValueError, match=message):
            DraftFacts.read(config, target)


@pytest.mark.parametrize(
    ("mask", "message"),
    [(ABSENT, "mask_token_id: expected .* got nothing"), (160, "mask_token_id: .* got 160")],
    ids=["absent", "outside-the-embedding"],
)
def test_services_refuse_to_start_without_a_mask(dense, edited, mask, message):
    """D8: at start, by both services."""
    draft = edited("dflash2", dflash__mask_token_id=mask)
    refused(dense / "target", draft, message)


def test_a_target_with_an_fp8_head_is_refused_by_name(dense, tmp_path):
    """D10: at start, by both services, with the reason."""
    (tmp_path / "config.json").write_bytes((dense / "target" / "config.json").read_bytes())
    tensors = load_file(dense / "target" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, dense / "dflash2", "lm_head.weight: expected one of F32.*got F8_E4M3")


def with_tensors(edited, dense, kind, change) -> Path:
    """A copy of a draft whose tensors ``change`` has edited."""
    folder = edited(kind)
    tensors = load_file(dense / kind / "model.safetensors")
    change(tensors)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_drafts_own_head_and_id_map_are_refused(dense, edited):
    """D10: an own head of 32 rows with its map is not overwritten quietly."""

    def own_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.zeros(32, 64)
        tensors["d2t"] = torch.zeros(32, dtype=torch.int64)

    draft = with_tensors(edited, dense, "dflash2", own_head)
    with pytest.raises(ValueError, match=r"d2t: expected no such tensor.*lm_head.weight: expected"):
        start_drafter(dense / "target", draft)
    draft = edited("dflash2", draft_vocab_size=32)
    refused(dense / "target", draft, "draft_vocab_size: expected absent or 160, got 32")


def test_a_shortlist_serves_global_ids_and_the_targets_own_text(
    dense, oracle, tmp_path, monkeypatch
):
    """D10: rows of the shortlist become global ids before the codebooks are read."""
    ids = torch.arange(30, 110, 2, dtype=torch.int32)
    path = tmp_path / "shortlist.safetensors"
    save_file({"token_ids": ids}, path)
    options = DrafterOptions
    monkeypatch.setattr(
        "tests.tiny_pair.DrafterOptions", lambda **given: options(**given, proposal_head=str(path))
    )
    with (
        served(dense / "target", dense / "dflash2", draft_tokens=7) as pair,
        Client(pair.address) as client,
    ):
        completion = client.generate(
            prompt_ids=prompt(20),
            max_tokens=40,
            temperature=0,
            ignore_eos=True,
            return_rounds=True,
        )
    assert list(completion.token_ids) == greedy(oracle, prompt(20), 40)
    proposed = {token for r in completion.rounds for token in r.proposed}
    assert len(proposed) > 5
    assert proposed <= set(ids.tolist())


def test_float16_is_refused(dense):
    """D11: by both services."""
    refused(
        dense / "target",
        dense / "dflash2",
        "dtype: expected float32 or bfloat16, got float16",
        dtype="float16",
    )


def test_a_dflash2_draft_without_its_selector_is_refused(dense, edited):
    """D12: it does not run as DFlash."""

    def without_selector(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("candidate_selector.")]:
            del tensors[name]

    draft = with_tensors(edited, dense, "dflash2", without_selector)
    with pytest.raises(ValueError, match=r"hidden_projection.weight: expected \[8, 64\], got no"):
        start_drafter(dense / "target", draft)


@pytest.mark.parametrize("field", ["conv_kernel_size", "conv_group_size", "selector_rank"])
def test_a_dflash_draft_with_fields_of_dflash2_is_refused(dense, edited, field):
    """D12: by both services."""
    draft = edited("dflash", **{f"dflash__{field}": 2})
    refused(dense / "target", draft, f"{field}: expected absent, got 2")


@pytest.mark.parametrize("kind", ["dflash2", "dflash"])
def test_the_active_format_is_named_everywhere(dense, kind):
    """D12: in the drafter's handshake and in what a client may ask."""
    from outrider.v1 import draft_service_pb2 as wire

    with served(dense / "target", dense / kind) as pair, Client(pair.address) as client:
        assert client.model_info().draft_format == kind
        geometry = pair.verifier.engine._link._hello.geometry
        assert wire.DraftFormat.Name(geometry.format) == f"DRAFT_FORMAT_{kind.upper()}"
        assert pair.drafter._service._engine.geometry == geometry


def test_a_verifier_of_one_format_is_refused_by_a_drafter_of_the_other(dense):
    """D12: with both names; the verifier serves plainly and says so."""
    drafter = start_drafter(dense / "target", dense / "dflash2", draft_tokens=7)
    verifier = verifier_process.start(
        VerifierOptions(
            target=dense / "target",
            draft=dense / "dflash",
            drafter=drafter.address,
            listen="127.0.0.1:0",
            draft_tokens=7,
            max_context=256,
        )
    )
    try:
        from tests.tiny_pair import Pair

        Pair(drafter, verifier).wait_for_drafter("refused")
        with Client(verifier.address) as client:
            detail = client.server_info().drafter_detail
            assert "format: expected DRAFT_FORMAT_DFLASH2, got DRAFT_FORMAT_DFLASH;" in detail
            completion = client.generate(prompt_ids=[3], max_tokens=4, temperature=0)
            assert len(completion.token_ids) == 4
    finally:
        verifier.stop(0)
        drafter.stop(0)
