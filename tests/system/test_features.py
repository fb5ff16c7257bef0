"""What the drafter conditions on: projected features of committed positions, each once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from drafter.graphs import DraftGraphs
from tests.faults.doubles import Foretelling, plant
from tests.system.conftest import greedy, prompt
from tests.tiny_pair import TAPS
from tests.tiny_target import load_oracle, run_oracle
from verifier.blocks import HostRows
from verifier.rounds import Rounds


def projected(draft: Path, residuals: torch.Tensor) -> torch.Tensor:
    """c = rms_norm(W s) in FP64."""
    tensors = load_file(draft / "model.safetensors")
    eps = json.loads((draft / "config.json").read_text())["rms_norm_eps"]
    x = residuals @ tensors["fc.weight"].double().T
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * tensors["hidden_norm.weight"]


@pytest.mark.parametrize("chunk", [256, 16])
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_the_drafter_gets_the_features_of_every_committed_position(
    dense, serve, oracle, monkeypatch, kind, chunk
):
    ids, new_tokens = prompt(70), 40
    continuation = greedy(oracle, ids, new_tokens)
    # every number of accepted drafts, so that every number of rows is pending at some time
    wrong = (3, 0, 7, 1, 2, 5, 4, 6)
    plant(monkeypatch, Foretelling([*ids, *continuation], wrong))
    materialize = DraftGraphs.materialize
    arrived: dict[int, torch.Tensor] = {}

    def collected(self, features, append):
        rows = torch.from_numpy(np.concatenate(features)).view(torch.float32)
        for position, row in zip(append.positions[0].tolist(), rows, strict=True):
            assert position not in arrived, "a position came twice"
            arrived[position] = row.clone()
        return materialize(self, features, append)

    monkeypatch.setattr(DraftGraphs, "materialize", collected)
    pair, client = serve(dense, kind, draft_tokens=7, prefill_chunk=chunk)
    completion = client.generate(
        prompt_ids=ids, max_tokens=new_tokens, temperature=0, ignore_eos=True, return_rounds=True
    )
    assert list(completion.token_ids) == continuation
    assert len({r.committed for r in completion.rounds}) >= 6
    pair.expect_idle()
    # of local layers alone, S rows before the prompt's end; with a full layer, all
    first = 70 - 16 if kind == "dflash2" else 0
    last = completion.rounds[-1].frontier
    assert sorted(arrived) == list(range(first, last))
    # in FP64: of an FP32 oracle's error alone, half of the tolerance would be gone
    exact = load_oracle(dense / "target").double()
    residuals = run_oracle(exact, torch.tensor([*ids, *continuation])).features(TAPS)
    expected = projected(dense / kind, residuals)
    rows = torch.stack([arrived[position] for position in range(first, last)])
    torch.testing.assert_close(rows.double(), expected[first:last], atol=5e-5, rtol=0)


def test_rows_of_earlier_chunks_go_while_the_device_works_on_the_next(dense, serve, monkeypatch):
    """They are more than may be unanswered, so that each turn would leave some to the next."""
    send, left = Rounds._send_while_busy, []

    def sent(rounds, features):
        before = rounds.link.has_whole_messages
        send(rounds, features)
        left.append((before, rounds.link.has_whole_messages))

    monkeypatch.setattr(Rounds, "_send_while_busy", sent)
    pair, client = serve(dense, "dflash", draft_tokens=7, prefill_chunk=1024, max_context=4096)
    ask = {"max_tokens": 9, "temperature": 0, "ignore_eos": True}
    client.generate(prompt_ids=prompt(3000), **ask)
    assert left == [(False, False), (True, True), (True, True)]
    left.clear()
    monkeypatch.setattr(HostRows, "are_there", False)
    client.generate(prompt_ids=prompt(3000, seed=1), **ask)
    assert left == [(False, False), (True, False), (True, False)]
    pair.expect_idle()
