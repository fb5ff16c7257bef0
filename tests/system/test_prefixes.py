"""Prefix checkpoints through both services: a hit continues as a cold run would."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.checkpoint import bundled
from outrider.client import Completion
from tests.faults.doubles import Foretelling, plant
from tests.system.conftest import greedy, prompt

KINDS = ["dflash2", "dflash"]
K = 3
SLOTS = {"checkpoint_slots": 6, "draft_tokens": K, "prefill_chunk": 64}


def ask(client, ids, **changes) -> Completion:
    arguments = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_rounds": True}
    return client.generate(prompt_ids=ids, **(arguments | changes))


def settled(pair) -> None:
    """Waits until both services agree on what is kept."""
    pair.expect_idle()


def expect_equal(warm: Completion, cold: Completion) -> None:
    assert warm.token_ids == cold.token_ids
    assert warm.rounds == cold.rounds, "the same proposals, so the same rounds"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 15, 64, 133])
def test_the_same_prompt_again_is_not_processed_again(dense, serve, oracle, kind, length):
    pair, client = serve(dense, kind, **SLOTS)
    cold = ask(client, prompt(length))
    settled(pair)
    warm = ask(client, prompt(length))
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, length)
    assert list(warm.token_ids) == greedy(oracle, prompt(length), 20)
    assert warm.usage.proposed > 0
    expect_equal(warm, cold)
    pair.expect_nothing_left()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [1, 5, 40, 200])
def test_a_turn_continues_the_one_before(dense, serve, oracle, kind, more):
    """All but the last published token have been processed; WINDOW is 16."""
    pair, client = serve(dense, kind, **SLOTS)
    first = ask(client, prompt(70))
    settled(pair)
    longer = [*prompt(70), *first.token_ids, *prompt(more, seed=5)]
    warm = ask(client, longer)
    assert warm.usage.cached_tokens == 70 + 19
    pair.verifier.engine._checkpoints.clear()
    cold = ask(client, longer)
    assert cold.usage.cached_tokens == 0
    assert list(warm.token_ids) == greedy(oracle, longer, 20)
    expect_equal(warm, cold)
    pair.expect_nothing_left()


@pytest.mark.parametrize("kind", KINDS)
def test_three_units_and_five_tokens_twice(dense, serve, kind):
    """Drafting must not cost the last part of a prefix."""
    pair, client = serve(dense, kind, **SLOTS)
    ids = prompt(3 * 64 + 5)
    ask(client, ids)
    settled(pair)
    assert ask(client, [*ids, 7]).usage.cached_tokens == len(ids)
    assert ask(client, ids[:-1]).usage.cached_tokens == 0, "state cannot be cut back"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [(0,), (99,), (1, 99, 0)], ids=["none", "all", "mixed"])
def test_sessions_that_share_a_prefix_do_not_disturb_one_another(
    dense, serve, oracle, monkeypatch, kind, wrong
):
    """X, Y, X with accept counts forced to 0, to K, and mixed, equal their cold runs."""
    shared = prompt(3 * 64)
    sessions = {"x": [*shared, 3, 9], "y": [*shared, 4, 4, 8]}
    expected = {name: greedy(oracle, ids, 30) for name, ids in sessions.items()}

    class PerSession(Foretelling):
        def select(self, hidden, block):
            # the two continuations differ, and the anchor tells them apart
            for name, ids in sessions.items():
                whole = [*ids, *expected[name]]
                if whole[block.rows.frontiers[0]] == int(block.anchors[0]):
                    self.sequence = whole
            return super().select(hidden, block)

    plant(monkeypatch, PerSession([], wrong))
    pair, client = serve(dense, kind, **SLOTS)
    ask(client, shared, max_tokens=1)
    settled(pair)
    for name in ("x", "y", "x"):
        completion = ask(client, sessions[name], max_tokens=30)
        assert completion.usage.cached_tokens >= len(shared)
        assert list(completion.token_ids) == expected[name]
        settled(pair)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda n: ask(client, sessions[n], max_tokens=30), ("x", "y")))
    assert [list(c.token_ids) for c in both] == [expected["x"], expected["y"]]
    pair.expect_nothing_left()


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_draft_half_is_no_error(dense, serve, oracle, kind):
    """The target half goes on; the draft context is seeded, or begins with honest coverage."""
    pair, client = serve(dense, kind, **SLOTS)
    cold = ask(client, prompt(70))
    settled(pair)
    lost = pair.verifier.engine._checkpoints.find(prompt(70)).checkpoint_id
    (table,) = pair.drafter._service._engine._checkpoints._tables.values()
    table.drop(lost)
    warm = ask(client, prompt(70))
    assert warm.usage.cached_tokens == 70
    assert warm.token_ids == cold.token_ids
    assert warm.usage.proposed > 0
    if kind == "dflash2":
        # local layers alone: the kept rows are all it needs
        caught_up = [r for r in warm.rounds if r.proposed]
        as_cold = [r for r in cold.rounds if r.frontier >= caught_up[0].frontier and r.proposed]
        assert caught_up == as_cold
    counters = client.server_info().counters
    assert counters["drafter_fault_checkpoint_not_found"] == 1
    settled(pair)
    pair.expect_nothing_left()


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_come_back_from_host_memory(dense, serve, oracle, kind):
    pair, client = serve(dense, kind, **(SLOTS | {"checkpoint_slots": 2}), checkpoint_host_mib=64)
    prompts = [prompt(40 + i, seed=i) for i in range(6)]
    cold = [ask(client, ids) for ids in prompts]
    settled(pair)
    counters = client.server_info().counters
    assert counters["checkpoint_demotions"] >= 8
    assert pair.drafter._service._engine.counters["checkpoint_demotions"] >= 8
    for ids, before in zip(prompts, cold, strict=True):
        warm = ask(client, ids)
        assert warm.usage.cached_tokens == len(ids)
        expect_equal(warm, before)
    assert client.server_info().counters["checkpoint_host_hits"] >= 4
    pair.expect_nothing_left()


@pytest.mark.parametrize("kind", KINDS)
def test_a_seeded_sample_is_the_same_with_and_without_a_hit(dense, serve, kind):
    pair, client = serve(dense, kind, **SLOTS)
    seeded = {"temperature": 0.9, "seed": 11}
    cold = ask(client, prompt(70), **seeded)
    settled(pair)
    warm = ask(client, prompt(70), **seeded)
    assert warm.usage.cached_tokens == 70
    expect_equal(warm, cold)
    settled(pair)
    # without its draft half a full layer would see less: then the prefix is not used
    drafter = pair.drafter._service._engine
    for checkpoint in list(pair.verifier.engine._checkpoints._kept.values()):
        pair.verifier.engine._link._held.discard(checkpoint.checkpoint_id)
    for table in drafter._checkpoints._tables.values():
        table.clear()
    again = ask(client, prompt(70), **seeded)
    assert again.usage.cached_tokens == (70 if kind == "dflash2" else 0)
    assert again.token_ids == cold.token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_one_request_share_one_prefill(dense, serve, monkeypatch, kind):
    pair, client = serve(dense, kind, draft_tokens=K, prefill_chunk=32)
    arguments = {
        "prompt_ids": prompt(140),
        "max_tokens": 16,
        "temperature": 0.9,
        "seed": 3,
        "ignore_eos": True,
        "return_rounds": True,
    }
    alone = [
        client.generate(**(arguments | {"seed": c.usage.seed}))
        for c in client.samples(n=1, **arguments)
    ]
    samples = client.samples(n=4, **arguments)
    solo = [client.generate(**(arguments | {"seed": c.usage.seed})) for c in samples]
    assert samples[0].token_ids == alone[0].token_ids
    for sample, lone in zip(samples, solo, strict=True):
        assert sample.token_ids == lone.token_ids
        assert sample.rounds == lone.rounds
    assert len({c.token_ids for c in samples}) > 1
    assert client.server_info().counters["forks"] == 3
    assert pair.drafter._service._engine.counters["fault_ring_capacity"] == 0
    pair.expect_nothing_left()


def test_the_samples_go_on_when_the_one_that_prefills_for_them_ends(dense, serve, oracle):
    """Its stop comes with the first token; theirs must not."""
    pair, client = serve(dense, "dflash2", draft_tokens=K, prefill_chunk=16)
    completions = client.samples(
        prompt_ids=prompt(50), n=3, max_tokens=1, temperature=0, ignore_eos=True
    )
    assert {c.token_ids for c in completions} == {tuple(greedy(oracle, prompt(50), 1))}
    pair.expect_nothing_left()


def test_a_checkpoint_is_not_used_beyond_what_it_was_captured_for(dense, serve, oracle):
    """Penalties and biases are the request's, not the prefix's."""
    pair, client = serve(dense, "dflash2", **SLOTS)
    cold = {}
    for penalty, use in itertools.product((0.0, 1.5), (0, 1)):
        completion = ask(client, prompt(30), presence_penalty=penalty, max_tokens=40)
        settled(pair)
        if use == 0 and penalty not in cold:
            cold[penalty] = completion.token_ids
        assert completion.token_ids == cold[penalty]
    assert cold[0.0] != cold[1.5]


@pytest.fixture
def thinking(serve):
    """The bundled pair, whose template opens a think block and drops earlier reasoning."""
    folder = bundled("target").parent
    return serve(folder, "dflash2", checkpoint_slots=8, max_context=4096, prefill_chunk=256)


def test_a_second_turn_with_thinking_does_not_process_the_first_again(thinking):
    """Neither the first prompt's end nor its answer's is a prefix of the second prompt."""
    pair, client = thinking
    document = "\n".join(f"def step_{i}(x):\n    return x + {i * i}\n" for i in range(180))
    turns = [{"role": "user", "content": f"Explain:\n{document}"}]
    arguments = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    first = client.generate(messages=turns, **arguments)
    assert first.usage.prompt_tokens > 3000
    settled(pair)
    turns += [
        {"role": "assistant", "content": first.text, "reasoning_content": "long thoughts"},
        {"role": "user", "content": "Now in one line."},
    ]
    warm = client.generate(messages=turns, **arguments)
    settled(pair)
    opening = client.tokenize(messages=turns[:1]).token_ids
    # all of the first turn up to the beginning of its answer
    assert len(opening) - 8 <= warm.usage.cached_tokens < len(opening)
    pair.verifier.engine._checkpoints.clear()
    cold = client.generate(messages=turns, **arguments)
    assert cold.usage.cached_tokens == 0
    assert warm.token_ids == cold.token_ids
    assert warm.usage.ttft_ns < 0.5 * cold.usage.ttft_ns
    pair.expect_nothing_left()


def test_an_answer_without_thinking_is_a_prefix_of_the_next_turn(thinking):
    pair, client = thinking
    turns = [{"role": "user", "content": "Count."}]
    arguments = {"temperature": 0, "enable_thinking": False, "max_tokens": 64, "ignore_eos": True}
    first = client.generate(messages=turns, **arguments)
    settled(pair)
    again = client.generate(messages=turns, **arguments)
    assert again.usage.cached_tokens == again.usage.prompt_tokens
    assert again.token_ids == first.token_ids
