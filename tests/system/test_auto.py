"""`--draft-policy auto`: drafts only where it pays, and never otherwise than the target decides."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.checkpoint import bundled
from outrider.cli import demo
from tests.system.conftest import greedy, prompt
from verifier.draft_policy import DraftPolicy

K = 7


@pytest.fixture
def cost(monkeypatch):
    """Scripts what rounds cost, in plain rounds: a test must not hang on the machine's mood."""
    whole = DraftPolicy.round_ended

    def script(drafted_cost: float) -> None:
        def ended(self, row_count, elapsed_ns, *, drafted):
            whole(self, row_count, int(1000 * (drafted_cost if drafted else 1)), drafted=drafted)

        monkeypatch.setattr(DraftPolicy, "round_ended", ended)

    return script


@pytest.mark.parametrize("kind", ["dflash2", "dflash"])
def test_drafts_that_are_rejected_are_given_up_and_the_output_stays(
    dense, serve, oracle, cost, kind
):
    """A random draft of a random target: hardly anything is accepted."""
    cost(1.5)
    pair, client = serve(dense, kind, draft_tokens=K, draft_policy="auto")
    completion = client.generate(
        prompt_ids=prompt(20), max_tokens=300, temperature=0, ignore_eos=True, return_rounds=True
    )
    assert list(completion.token_ids) == greedy(oracle, prompt(20), 300)
    usage = completion.usage
    assert usage.undrafted_rounds > 0.9 * usage.rounds
    drafted = [r for r in completion.rounds if r.proposed]
    assert len(drafted) + usage.undrafted_rounds + usage.plain_rounds <= usage.rounds + 1
    assert client.server_info().counters["undrafted_rounds"] == usage.undrafted_rounds
    pair.expect_nothing_left()


def test_drafts_that_are_accepted_are_used(serve, cost):
    cost(1.5)
    pair, client = serve(bundled("target").parent, "dflash2", draft_policy="auto", max_context=1024)
    completion = client.generate(demo.PROMPT, max_tokens=300, temperature=0, ignore_eos=True)
    plain = client.generate(
        demo.PROMPT, max_tokens=300, temperature=0, ignore_eos=True, draft_tokens=0
    )
    assert completion.token_ids == plain.token_ids
    assert completion.usage.undrafted_rounds < 0.2 * completion.usage.rounds
    assert plain.usage.undrafted_rounds == 0
    pair.expect_nothing_left()


@pytest.mark.parametrize("kind", ["dflash2", "dflash"])
def test_samples_that_change_their_minds_equal_their_solo_runs(
    dense, serve, oracle, monkeypatch, kind
):
    """Every third round drafts, whatever it would bring: contexts catch up each time."""
    rounds = iter(range(10**9))
    monkeypatch.setattr(DraftPolicy, "drafts", lambda *_: next(rounds) % 3 == 0)
    monkeypatch.setattr(DraftPolicy, "trial_is_next", property(lambda _: True))
    pair, client = serve(
        dense, kind, draft_tokens=K, draft_policy="auto", checkpoint_slots=4, max_concurrency=4
    )

    def run(i: int) -> list[int]:
        return list(
            client.generate(
                prompt_ids=prompt(20 + 9 * i, seed=i),
                max_tokens=90,
                temperature=0,
                ignore_eos=True,
            ).token_ids
        )

    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(run, range(6)))
    for i, tokens in enumerate(outputs):
        assert tokens == greedy(oracle, prompt(20 + 9 * i, seed=i), 90)
    seeded = client.generate(
        prompt_ids=prompt(30), max_tokens=60, temperature=0.9, seed=3, ignore_eos=True
    )
    assert seeded.usage.output_tokens == 60, "a seeded sample waits for nothing"
    pair.expect_nothing_left()
