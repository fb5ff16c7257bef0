"""State after partial accepts, and chunks that are longer than the drafter's ring."""

from __future__ import annotations

import json

import pytest
import torch

from drafter.context import ContextMemory, ContextPlan
from tests.faults.doubles import Foretelling, overhear, plant
from tests.system.conftest import greedy, prompt
from tests.tiny_pair import save_draft
from tests.tiny_target import load_target
from verifier.state import StateRows
from verifier.target import Target


def test_rounds_of_3_0_7_and_1_accepts_then_plain_ones_equal_a_token_by_token_run(
    dense, serve, oracle, monkeypatch
):
    """C1: K=7, accepts 3, 0, 7, 1, then P=0 because the drafter's range ends, then plain on."""
    ids, new_tokens = prompt(30), 40
    continuation = greedy(oracle, ids, new_tokens)
    plant(monkeypatch, Foretelling([*ids, *continuation], wrong=(3, 0, 7, 1)))
    _, client = serve(dense, "dflash", draft_tokens=7, drafter_context=52)
    states: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    commit = Target.commit

    def committed(self, rows, forward, counts):
        commit(self, rows, forward, counts)
        slot = int(rows.slots[0])
        states.append(
            (int(counts[0]), self.state.gdn[:, slot].clone(), self.state.conv_history[:, slot] + 0)
        )

    with monkeypatch.context() as patch:
        patch.setattr(Target, "commit", committed)
        completion = client.generate(
            prompt_ids=ids,
            max_tokens=new_tokens,
            temperature=0,
            ignore_eos=True,
            return_rounds=True,
            logprobs=0,
        )
    assert list(completion.token_ids) == continuation
    accepts = [r.accepted if r.proposed else None for r in completion.rounds]
    assert accepts[:4] == [3, 0, 7, 1]
    assert accepts[4:] == [None] * (new_tokens - 1 - 15)
    assert [count for count, _, _ in states] == [4, 1, 8, 2] + [1] * (new_tokens - 1 - 15)

    plain = load_target(dense / "target", lanes=1)
    alone = plain.state.acquire(200)
    assert alone is not None
    plain.prefill(alone, torch.tensor(ids), 0, want_logits=False)
    position, rows = len(ids), StateRows.of([alone], plain.device)
    for count, gdn, history in states:
        for _ in range(count):
            token = torch.tensor([[[*ids, *continuation][position]]])
            step = plain.verify(rows, token, torch.tensor([position]), torch.tensor([1]))
            plain.commit(rows, step, torch.tensor([1]))
            position += 1
        assert (gdn - plain.state.gdn[:, alone.state_slot]).abs().max() < 1e-4
        assert (history - plain.state.conv_history[:, alone.state_slot]).abs().max() < 1e-4
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*ids, *continuation]])).logits[0, len(ids) - 1 : -1]
    law = logits.double().log_softmax(1)
    for index, entry in enumerate(completion.logprobs):
        assert entry.logprob == pytest.approx(float(law[index, continuation[index]]), abs=1e-4)


def test_a_chunk_of_200_rows_into_a_ring_of_64_keeps_the_last_64():
    """C9: frontier 200, and each ring cell is written at most once, by positions 136..199."""
    plan = ContextPlan(2, 512, 64, 1, 0, 1, 2, torch.float32, torch.float32)
    memory = ContextMemory(plan, torch.device("cpu"))
    context = memory.open(0)
    append = memory.append([(context, 200)])
    append.commit()
    assert context.frontier == 200
    live = append.ring_cells[0] >= 0
    assert append.positions[0][live].tolist() == list(range(136, 200))
    cells = append.ring_cells[0][live] - context.slot * 64
    assert cells.tolist() == [p % 64 for p in range(136, 200)]


@pytest.mark.parametrize("layers", ["local", "local-and-full"])
def test_a_prompt_chunk_longer_than_the_ring_drafts_as_shorter_chunks_do(
    dense, serve, oracle, monkeypatch, tmp_path, layers
):
    """C9: S=64, a prefill chunk of 200 rows; the context ends at 200 and proposals are the same."""
    kind = "dflash2" if layers == "local" else "dflash"
    save_draft(tmp_path / kind, kind, seed=5, window=64)
    assert json.loads((tmp_path / kind / "config.json").read_text())["sliding_window"] == 64
    (tmp_path / "target").symlink_to(dense / "target")
    ids, runs = prompt(200), []
    for chunk in (200, 16):
        heard = overhear(monkeypatch)
        _, client = serve(tmp_path, kind, draft_tokens=7, prefill_chunk=chunk)
        completion = client.generate(
            prompt_ids=ids,
            max_tokens=24,
            temperature=0.7,
            seed=3,
            ignore_eos=True,
            return_rounds=True,
        )
        if layers == "local":
            assert heard.features[0][0] == 200 - 64, "a ring keeps the last S rows"
        else:
            assert heard.features[0] == (0, chunk)
        assert completion.rounds[0].frontier == 200
        assert completion.rounds[0].proposed
        runs.append(completion)
        plain = client.generate(prompt_ids=ids, max_tokens=24, temperature=0, ignore_eos=True)
        assert list(plain.token_ids) == greedy(oracle, ids, 24)
    assert runs[0].rounds == runs[1].rounds
    assert runs[0].token_ids == runs[1].token_ids
