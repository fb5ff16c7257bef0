"""`outrider check` passes a sound pair, and fails each of three doubles that break losslessness."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels.candidate_selector.reference as selector
import kernels.gdn_fold.reference as fold
import kernels.rng.reference as rng
from kernels.rng import Purpose
from outrider import cli
from outrider.cli import check
from tests.tiny_pair import save_pair


@pytest.fixture(scope="module")
def matched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random pair whose draft and target like the same tokens, so that many proposals pass.

    A large constant in the residual stream meets a column of the head: both models see the same
    preferences there, beside what each makes of the context.
    """
    folder = save_pair(tmp_path_factory.mktemp("matched"))
    path = folder / "target" / "model.safetensors"
    target = load_file(path)
    target["model.embed_tokens.weight"][:, 0] = 4.0
    liking = torch.randn(
        target["lm_head.weight"].shape[0], generator=torch.Generator().manual_seed(0)
    )
    target["lm_head.weight"][:, 0] = 0.35 * liking
    save_file(target, path, {"format": "pt"})
    for kind in ("dflash2", "dflash"):
        path = folder / kind / "model.safetensors"
        draft = load_file(path)
        for name, weight in draft.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight *= 0.1
                weight[0] = 0.0
            if name.endswith("codebook"):
                weight *= 0.5
        save_file(draft, path, {"format": "pt"})
    return folder


@pytest.fixture
def laws(monkeypatch: pytest.MonkeyPatch):
    """Leaves one of the sampling settings."""

    def keep(name: str) -> None:
        monkeypatch.setattr(check, "LAWS", {name: check.LAWS[name]})

    return keep


def run(folder: Path, kind: str, *, samples: int, greedy_tokens: int = 12) -> int:
    return cli.main(
        [
            "check",
            f"--target={folder / 'target'}",
            f"--draft={folder / kind}",
            "--device=cpu",
            "--draft-tokens=3",
            "--max-context=320",
            f"--samples={samples}",
            f"--greedy-tokens={greedy_tokens}",
        ]
    )


def failures(output: str) -> list[str]:
    return [line for line in output.splitlines() if "FAILED" in line]


@pytest.mark.parametrize("kind", ["dflash2", "dflash"])
def test_a_sound_pair_passes(matched, laws, capsys, kind):
    laws("temperature 0.7, top-k 12")
    assert run(matched, kind, samples=240) == 0
    output = capsys.readouterr().out
    assert failures(output) == []
    for line in ("first token", "second token", "proposal", "accept rate", "correction"):
        assert line in output
    assert "0 failed" in output


def test_a_fold_one_row_short_fails(matched, laws, capsys, monkeypatch):
    laws("temperature 0.7, top-k 12")
    real = fold.gdn_fold

    def short(records, state, history, sources, destinations, counts):
        real(records, state, history, sources, destinations, (counts - 1).clamp_min(0))

    monkeypatch.setattr(fold, "gdn_fold", short)
    assert run(matched, "dflash2", samples=8) == cli.FAILED
    assert any("log-probabilities" in line for line in failures(capsys.readouterr().out))


def test_a_wrong_q_fails(matched, laws, capsys, monkeypatch):
    laws("temperature 0.7, top-k 12")
    real = selector.candidate_selector

    def flattened(*arguments):
        tokens, q = real(*arguments)
        flat = q.sqrt()
        return tokens, flat / flat.sum(-1, keepdim=True)

    monkeypatch.setattr(selector, "candidate_selector", flattened)
    assert run(matched, "dflash2", samples=320) == cli.FAILED
    assert any("proposal" in line for line in failures(capsys.readouterr().out))


@pytest.mark.parametrize(
    ("one", "other", "line", "samples"),
    [
        (Purpose.CORRECTION, Purpose.PROPOSAL, "independent draws", 640),
        (Purpose.PROPOSAL, Purpose.BONUS, "proposal", 160),
    ],
    ids=["correction_as_proposal", "proposal_as_bonus"],
)
def test_a_shared_rng_purpose_fails(matched, laws, capsys, monkeypatch, one, other, line, samples):
    laws("temperature 0.9, min-p 0.1")
    real = rng.uniform

    def shared(seeds, positions, purpose, sub):
        if isinstance(purpose, torch.Tensor):
            purpose = torch.where(purpose == one, int(other), purpose)
        elif purpose == one:
            purpose = other
        return real(seeds, positions, purpose, sub)

    monkeypatch.setattr(rng, "uniform", shared)
    assert run(matched, "dflash2", samples=samples) == cli.FAILED
    assert any(line in each for each in failures(capsys.readouterr().out))


def test_no_samples_is_wrong_use(matched, capsys):
    assert run(matched, "dflash2", samples=0) == cli.USAGE
    assert "expected at least 1" in capsys.readouterr().err


def test_a_pair_that_does_not_load_is_named(tmp_path, capsys):
    assert run(tmp_path, "dflash2", samples=8) == cli.FAILED
    assert "target" in capsys.readouterr().err
