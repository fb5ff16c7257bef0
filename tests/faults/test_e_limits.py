"""Many sequences, wide blocks, and requests that outgrow their drafter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.checkpoint import bundled
from outrider.client import Client
from tests.system.conftest import greedy, prompt
from tests.tiny_pair import served


@pytest.mark.parametrize("kind", ["dflash2", "dflash"])
def test_eight_sequences_of_sixteen_columns_under_a_chunk_of_64(dense, serve, oracle, kind):
    """E1: 8 x 16 columns a round are twice the prefill chunk; all outputs are the target's."""
    pair, client = serve(dense, kind, draft_tokens=15, max_concurrency=8, prefill_chunk=64)

    def run(i: int) -> tuple[list[int], int]:
        completion = client.generate(
            prompt_ids=prompt(60 + i, seed=i), max_tokens=40, temperature=0, ignore_eos=True
        )
        return list(completion.token_ids), completion.usage.proposed

    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(run, range(8)))
    for i, (tokens, proposed) in enumerate(runs):
        assert tokens == greedy(oracle, prompt(60 + i, seed=i), 40)
        assert proposed > 15
    pair.expect_idle()


@pytest.mark.parametrize(
    "sampling",
    [
        # no longer than a block, so that even a greedy session never waits for its context
        pytest.param({"prompt": "The king", "temperature": 0}, id="greedy"),
        pytest.param(
            {"prompt": "Once upon a time " * 8, "seed": 17, "temperature": 0.6}, id="seeded"
        ),
    ],
)
@pytest.mark.parametrize("kind", ["dflash2", "dflash"])
def test_a_prompt_is_accepted_alike_in_1_4_and_8_sessions(kind, sampling):
    """E2: with trained weights, each session's accept counts are those of the session alone."""
    wanted = {"max_tokens": 32, "ignore_eos": True, "return_rounds": True, **sampling}
    with (
        served(bundled("target"), bundled(kind), max_concurrency=8) as pair,
        Client(pair.address) as client,
    ):
        alone = client.generate(**wanted)
        accepts = [r.accepted for r in alone.rounds]
        assert sum(accepts) >= 4
        assert len(set(accepts)) > 1
        for sessions in (4, 8):
            with ThreadPoolExecutor(sessions) as pool:
                runs = list(pool.map(lambda _: client.generate(**wanted), range(sessions)))
            for run in runs:
                assert [r.accepted for r in run.rounds] == accepts
                assert run.token_ids == alone.token_ids


def test_a_request_beyond_the_drafters_256_positions_goes_on_plainly(dense, serve, oracle):
    """E5: it grows to 300; drafting ends where a block would not fit, and a counter says so."""
    pair, client = serve(dense, "dflash2", draft_tokens=7, drafter_context=256, max_context=512)
    ids = prompt(200)
    completion = client.generate(
        prompt_ids=ids, max_tokens=100, temperature=0, ignore_eos=True, return_rounds=True
    )
    assert list(completion.token_ids) == greedy(oracle, ids, 100)
    drafted = [r.frontier for r in completion.rounds if r.proposed]
    plain = [r.frontier for r in completion.rounds if not r.proposed]
    assert max(drafted) + 8 <= 256
    assert min(plain) + 8 > 256
    # the last round has room for no proposal in any case
    assert len(plain) - 1 == completion.usage.plain_rounds > 40
    assert pair.verifier.engine.status().counters["drafter_sequences_out_of_range"] == 1
    # the next one drafts
    again = client.generate(prompt_ids=prompt(20), max_tokens=20, temperature=0, ignore_eos=True)
    assert again.usage.proposed > 0
    pair.expect_idle()
