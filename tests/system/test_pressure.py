"""Too few KV pages: samples are paused and come back, and their output does not show it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.client import ClientError, Completion
from tests.system.conftest import greedy, prompt

KINDS = ["dflash2", "dflash"]
K = 3
# 64 positions a page: a sample of 200 positions needs 4
TIGHT = {"draft_tokens": K, "prefill_chunk": 64, "max_concurrency": 4, "kv_pages": 8}


def ask(client, ids, **changes) -> Completion:
    arguments = {"max_tokens": 120, "temperature": 0, "ignore_eos": True, "return_rounds": True}
    return client.generate(prompt_ids=ids, **(arguments | changes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", [0, 64], ids=["replay", "snapshot"])
def test_paused_samples_end_as_if_they_had_been_alone(dense, serve, oracle, kind, host):
    pair, client = serve(dense, kind, **TIGHT, checkpoint_host_mib=host)
    prompts = [prompt(90 + 7 * i, seed=i) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda ids: ask(client, ids), prompts))
    counters = client.server_info().counters
    assert counters["pauses"] == counters["resumes"] >= 1
    for ids, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == greedy(oracle, ids, 120)
        assert output.usage.output_tokens == 120
        assert sum(r.committed for r in output.rounds) == 119, "nothing is published twice"
    pair.expect_nothing_left()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", [0, 64], ids=["replay", "snapshot"])
def test_a_seeded_sample_draws_the_same_whether_paused_or_not(dense, serve, kind, host):
    """The youngest is the one that is paused; penalties count what it had generated."""
    pair, client = serve(dense, kind, **TIGHT, checkpoint_host_mib=host)
    seeded = {"temperature": 0.8, "seed": 5, "frequency_penalty": 0.5, "presence_penalty": 0.3}
    alone = ask(client, prompt(100), **seeded)
    others = [
        client.stream(prompt_ids=prompt(90, seed=i), max_tokens=160, temperature=0, ignore_eos=True)
        for i in range(1, 3)
    ]
    for other in others:
        next(other)
    beside = ask(client, prompt(100), **seeded)
    for other in others:
        for _ in other:
            pass
    assert client.server_info().counters["pauses"] >= 1
    assert beside.token_ids == alone.token_ids
    assert beside.rounds == alone.rounds
    pair.expect_nothing_left()


@pytest.mark.parametrize("host", [0, 64], ids=["replay", "snapshot"])
def test_checkpoints_give_way_before_anybody_is_paused(dense, serve, oracle, host):
    pair, client = serve(dense, "dflash2", **TIGHT, checkpoint_slots=6, checkpoint_host_mib=host)
    for i in range(3):
        ask(client, prompt(70, seed=i), max_tokens=20)
    pair.expect_idle()
    long = ask(client, prompt(300), max_tokens=150)
    assert list(long.token_ids) == greedy(oracle, prompt(300), 150)
    counters = client.server_info().counters
    assert counters.get("pauses", 0) == 0
    assert counters["checkpoint_demotions" if host else "checkpoint_evictions"] >= 1
    pair.expect_nothing_left()


def test_a_request_that_alone_needs_more_than_there_is_ends_with_the_sum(dense, serve, oracle):
    pair, client = serve(
        dense, "dflash2", draft_tokens=K, prefill_chunk=64, max_concurrency=2, kv_pages=3
    )
    with pytest.raises(ClientError, match=r"KV_CAPACITY.*at most 192 positions"):
        ask(client, prompt(60), max_tokens=200)
    with pytest.raises(ClientError, match="KV_CAPACITY"):
        ask(client, prompt(300), max_tokens=5)
    pair.expect_nothing_left()
    fitting = ask(client, prompt(60), max_tokens=120)
    assert list(fitting.token_ids) == greedy(oracle, prompt(60), 120)


def test_what_is_paused_can_be_cancelled_and_leaves_nothing(dense, serve):
    pair, client = serve(dense, "dflash2", **TIGHT, checkpoint_host_mib=64)
    paused, go = threading.Event(), pair.verifier.engine
    whole = type(go)._pause

    def pause(self, sequence):
        whole(self, sequence)
        paused.set()

    type(go)._pause = pause
    try:
        streams = [
            client.stream(
                prompt_ids=prompt(90, seed=i), max_tokens=300, temperature=0, ignore_eos=True
            )
            for i in range(4)
        ]
        readers = [threading.Thread(target=lambda s=s: list(s)) for s in streams[:1]]
        for reader in readers:
            reader.start()
        assert paused.wait(30)
        for stream in streams[1:]:
            stream.cancel()
        for reader in readers:
            reader.join(60)
    finally:
        type(go)._pause = whole
    pair.expect_nothing_left()


def test_a_large_prompt_is_overtaken_a_bounded_number_of_times(dense, serve, oracle):
    """The one that lacks pages waits, small ones go by, and then it has its turn."""
    pair, client = serve(
        dense,
        "dflash2",
        draft_tokens=K,
        prefill_chunk=64,
        max_concurrency=2,
        kv_pages=8,
        max_queue=64,
    )
    order: list[str] = []

    def run(name: str, ids: list[int], count: int) -> None:
        stream = client.stream(prompt_ids=ids, max_tokens=count, temperature=0, ignore_eos=True)
        tokens: list[int] = []
        for delta in stream:
            if not tokens and delta.token_ids:
                order.append(name)
            tokens += delta.token_ids
        assert tokens == greedy(oracle, ids, count)

    holder = threading.Thread(target=run, args=("holder", prompt(200), 60))
    holder.start()
    while not order:
        holder.join(0.02)
    with ThreadPoolExecutor(16) as pool:
        large = pool.submit(run, "large", prompt(300), 10)
        while client.server_info().queued_requests == 0 and not large.done():
            holder.join(0.01)
        small = [pool.submit(run, f"small{i}", prompt(20, seed=i), 8) for i in range(8)]
        for each in [large, *small]:
            each.result()
    holder.join()
    assert order.index("large") <= 1 + 2 + 1, order
    pair.expect_nothing_left()
