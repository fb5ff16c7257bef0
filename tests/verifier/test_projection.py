"""The projection of features equals what a draft of the `dflash` package begins with."""

from __future__ import annotations

import pytest
import torch

from outrider.checkpoint import Checkpoint, CheckpointError
from outrider.pair import DraftFacts, TargetFacts
from tests.drafter.conftest import HIDDEN, TAPS, oracle_model, write_target
from verifier.projection import Projection, projection_plan


@pytest.fixture
def draft(tmp_path):
    """Folder of a draft, its facts, and the oracle."""
    write_target(tmp_path / "target")
    oracle = oracle_model("dflash2", ["sliding_attention"] * 2, is_causal=False)
    oracle.save_pretrained(tmp_path / "draft")
    with Checkpoint(tmp_path / "target") as target, Checkpoint(tmp_path / "draft") as checkpoint:
        facts = DraftFacts.load(checkpoint, TargetFacts.read(target))
    return tmp_path / "draft", facts, oracle


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_projected_features_equal_the_oracles(draft, dtype):
    folder, facts, oracle = draft
    with Checkpoint(folder) as checkpoint:
        projection = Projection.load(checkpoint, facts, dtype=dtype, device=torch.device("cpu"))
    features = torch.randn(3, 5, len(TAPS) * HIDDEN, generator=torch.Generator().manual_seed(1))
    features = features.to(dtype)
    with torch.no_grad():
        expected = oracle.hidden_norm(oracle.fc(features.float()))
    actual = projection(features)
    assert actual.dtype == dtype
    assert actual.shape == (3, 5, HIDDEN)
    distance = (actual.float() - expected).norm() / expected.norm()
    assert distance < (1e-6 if dtype == torch.float32 else 1e-2)


def test_the_plan_is_what_is_loaded(draft):
    folder, facts, _ = draft
    with Checkpoint(folder) as checkpoint:
        projection = Projection.load(
            checkpoint, facts, dtype=torch.float32, device=torch.device("cpu")
        )
    ((_, planned),) = projection_plan(facts, torch.float32)
    assert planned == projection.weight.nbytes + projection.gain.nbytes
    assert projection.width == HIDDEN


def test_a_draft_folder_without_its_projection_is_refused(draft):
    folder, facts, _ = draft
    (folder / "model.safetensors").unlink()
    with Checkpoint(folder) as checkpoint, pytest.raises(CheckpointError):
        Projection.load(checkpoint, facts, dtype=torch.float32, device=torch.device("cpu"))


def test_another_projection_is_another_pair(draft, tmp_path):
    _, facts, _ = draft
    other = oracle_model("dflash2", ["sliding_attention"] * 2, is_causal=False)
    with torch.no_grad():
        other.fc.weight.add_(1.0)
    other.save_pretrained(tmp_path / "other")
    with Checkpoint(tmp_path / "target") as target, Checkpoint(tmp_path / "other") as checkpoint:
        theirs = DraftFacts.load(checkpoint, TargetFacts.read(target))
    assert theirs.projection_digest != facts.projection_digest
