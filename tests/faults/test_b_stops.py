"""Stops, budget and usage as a client sees them, and what the services keep of a stopped block."""

from __future__ import annotations

import pytest
import torch

from tests.faults.conftest import EOS
from tests.faults.doubles import Foretelling, overhear, plant, saying, scripted
from tests.system.conftest import prompt
from tests.tiny_target import load_target
from tests.verifier.test_preview import Run, Scripted, request
from verifier.request import FinishReason
from verifier.state import StateRows

STOP = 13
FIRST = 30  # the token that the prompt itself yields, before the block in question
PROMPT = prompt(6)


def served_block(serve, monkeypatch, folder, licensed, *, draft_tokens):
    """A pair whose first round licenses ``licensed``; all but its last token are proposed."""
    scripted(monkeypatch, saying(PROMPT, [FIRST, *licensed]))
    plant(monkeypatch, Foretelling([*PROMPT, FIRST, *licensed]))
    return serve(folder, "dflash", draft_tokens=draft_tokens)


LICENSED = [10, 11, STOP, 20, 21, 22]


@pytest.mark.parametrize(
    ("budget", "ids", "reason"),
    [(5, [10, 11, STOP], FinishReason.STOP), (2, [10, 11], FinishReason.LENGTH)],
)
def test_a_preview_takes_the_stop_before_the_length_cap(budget, ids, reason):
    """B1: six licensed tokens with a stop in the middle, of which five or two are allowed."""
    wanted = request(max_tokens=budget, stop_token_ids=frozenset({STOP}))
    run = Run.of(Scripted([str(i) for i in range(30)]), wanted, [LICENSED])
    assert (run.token_ids, run.reason) == (ids, reason)
    assert run.text == "1011"


@pytest.mark.parametrize("kind", ["once", "token by token"])
@pytest.mark.parametrize(
    ("budget", "ids", "reason"), [(5, [10, 11, STOP], "stop"), (2, [10, 11], "length")]
)
def test_the_length_cap_hides_no_stop(dense, serve, monkeypatch, kind, budget, ids, reason):
    """B1: the same through both services; a round proposes no more than the budget allows."""
    pair, client = served_block(serve, monkeypatch, dense, LICENSED, draft_tokens=5)
    completion = client.generate(
        prompt_ids=PROMPT,
        max_tokens=1 + budget,
        temperature=0,
        stop_token_ids=[STOP],
        ignore_eos=True,
        draft_tokens=0 if kind == "token by token" else None,
        return_rounds=True,
    )
    assert list(completion.token_ids) == [FIRST, *ids]
    assert completion.finish_reason == reason
    assert completion.matched == (STOP if reason == "stop" else None)
    assert completion.usage.output_tokens == 1 + len(ids)
    if kind == "once":
        (only,) = completion.rounds
        assert (len(only.proposed), only.committed) == (budget - 1, len(ids))
    pair.expect_idle()


@pytest.mark.parametrize("ignored", [False, True], ids=["eos-stops", "eos-ignored"])
def test_an_end_token_inside_a_block_keeps_two_rows_of_everything(
    worded, serve, monkeypatch, ignored
):
    """B2: licensed [7, EOS, 9, 9]: two tokens, and KV, GDN state and features of two rows."""
    licensed = [7, EOS, 9, 9]
    pair, client = served_block(serve, monkeypatch, worded, licensed, draft_tokens=3)
    heard = overhear(monkeypatch)
    completion = client.generate(
        prompt_ids=PROMPT, max_tokens=5, temperature=0, ignore_eos=ignored, return_rounds=True
    )
    kept = 4 if ignored else 2
    assert list(completion.token_ids) == [FIRST, *licensed[:kept]]
    assert completion.finish_reason == ("length" if ignored else "stop")
    assert completion.text == ("<30>sevenninenine" if ignored else "<30>seven")
    (only,) = completion.rounds
    assert (only.frontier, only.accepted, only.committed) == (len(PROMPT), min(3, kept), kept)
    assert completion.usage.accepted == min(3, kept)
    ((residency, count),) = heard.commits
    assert count == kept
    assert heard.features[-1] == (len(PROMPT), kept)
    pair.expect_idle()

    # what the released slot still holds is the state of a run over exactly those rows
    plain = load_target(worded / "target", lanes=1)
    alone = plain.state.acquire(64)
    assert alone is not None
    plain.prefill(alone, torch.tensor(PROMPT), 0, want_logits=False)
    rows = StateRows.of([alone], plain.device)
    for offset, token in enumerate([FIRST, *licensed][:kept]):
        step = plain.verify(
            rows, torch.tensor([[token]]), torch.tensor([6 + offset]), torch.tensor([1])
        )
        plain.commit(rows, step, torch.tensor([1]))
    state, slot = pair.verifier.engine._state, residency.state_slot
    for ours, theirs in (
        (state.gdn[:, slot], plain.state.gdn[:, alone.state_slot]),
        (
            state.conv_history[:, slot],
            plain.state.conv_history[:, alone.state_slot],
        ),
    ):
        assert torch.allclose(ours, theirs, atol=5e-5)


BLOCK = [20, 21, 22, 23]  # "x", "EN", "D y", " z"


@pytest.mark.parametrize("way", ["streamed", "whole"])
@pytest.mark.parametrize("draft_tokens", [3, 1, 0])
def test_ids_logprobs_and_usage_end_with_the_token_that_completes_a_stop_string(
    worded, serve, monkeypatch, way, draft_tokens
):
    """B4: stop "END" over "x", "EN", "D y", " z": three tokens and their logprobs; text "x"."""
    _, client = served_block(serve, monkeypatch, worded, BLOCK, draft_tokens=3)
    wanted = {
        "prompt_ids": PROMPT,
        "max_tokens": 20,
        "temperature": 0,
        "stop": ["END"],
        "logprobs": 2,
        "draft_tokens": draft_tokens,
    }
    if way == "streamed":
        deltas = list(client.stream(**wanted))
        ids = [i for delta in deltas for i in delta.token_ids]
        text = "".join(delta.text for delta in deltas)
        logprobs = [entry for delta in deltas for entry in delta.logprobs]
        finish = deltas[-1].finish
        reason, matched, usage = finish.reason, finish.matched, finish.usage
    else:
        whole = client.generate(**wanted)
        ids, text, logprobs = list(whole.token_ids), whole.text, list(whole.logprobs)
        reason, matched, usage = whole.finish_reason, whole.matched, whole.usage
    assert ids == [FIRST, 20, 21, 22]
    assert text == "<30>x"
    assert [entry.top_token_ids[0] for entry in logprobs] == ids
    assert (reason, matched, usage.output_tokens) == ("stop", "END", 4)
