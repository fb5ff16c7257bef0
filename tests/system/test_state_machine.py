"""Anything in any order, turn by turn, against a plain oracle.

The engine's turns are run by the test itself, so that hypothesis decides what happens between
which two of them: requests come and are cancelled, samples are paused, checkpoints move and go,
draft halves get lost, the stream breaks, the drafter is started anew and empty. Every output must
equal that of a cold run alone, and at the end nothing may be left in either service.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import drafter.__main__ as drafter_process
from drafter.config import DrafterOptions
from outrider.checkpoint import Checkpoint
from outrider.pair import DraftFacts, TargetFacts
from outrider.tracing import Tracer
from tests.system.conftest import greedy, prompt
from tests.system.test_drafter_away import free_port
from tests.tiny_pair import Pair
from verifier.__main__ import Plan
from verifier.config import TargetConfig
from verifier.metrics import VerifierMetrics
from verifier.options import VerifierOptions
from verifier.request import Delta, Finish, FinishReason, Request, Sampling
from verifier.scheduler import Engine

LANES, K, CHUNK, MOST = 3, 3, 32, 24
KINDS = ["dflash2", "dflash"]


class Recorder:
    """A client that keeps what it is told."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.finish_seen: Finish | None = None
        self.gone = self.full = False
        self.overdue = None

    def delta(self, delta: Delta) -> None:
        self.token_ids += delta.token_ids

    def finish(self, finish: Finish) -> None:
        self.finish_seen = finish

    def fail(self, fault: Exception) -> None:
        raise AssertionError(fault)


def greedy_request(
    name: str, index: int, ids: list[int], count: int, draft_tokens: int = K
) -> Request:
    return Request(
        request_id=name,
        sample_index=index,
        prompt_ids=tuple(ids),
        sampling=Sampling(temperature=0.0),
        max_tokens=count,
        min_tokens=0,
        stop=(),
        stop_token_ids=frozenset(),
        logprobs=None,
        draft_tokens=draft_tokens,
        return_rounds=False,
        arrival_ns=time.monotonic_ns(),
        deadline_ns=None,
        boundary=max(0, len(ids) - 4),
    )


class NoServer:
    """What a served verifier would bring beside its engine."""

    def __init__(self) -> None:
        self.metrics = VerifierMetrics()
        self.tracer = Tracer("outrider-verifier")

    def drafter_connected(self, connected: bool) -> None:
        pass


class Services:
    """A verifier's engine that nobody runs but the test, and a drafter that can be replaced."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind, self.port = folder, kind, free_port()
        self.drafter = self._start_drafter()
        options = VerifierOptions(
            target=folder / "target",
            draft=folder / kind,
            drafter=f"127.0.0.1:{self.port}",
            draft_tokens=K,
            max_concurrency=LANES,
            max_context=256,
            prefill_chunk=CHUNK,
            checkpoint_slots=3,
            checkpoint_host_mib=1,
            kv_pages=7,
            max_queue=1000,
            draft_timeout_ms=5000,
        )
        with Checkpoint(folder / "target") as target, Checkpoint(folder / kind) as draft:
            facts = TargetFacts.read(target)
            plan = Plan(options, TargetConfig.read(facts), facts, DraftFacts.load(draft, facts))
            self.engine: Engine
            self.engine, _ = plan.build(target, draft, NoServer())  # type: ignore[arg-type]
        self.engine._link.start()
        self.wait_until_connected()

    def _start_drafter(self) -> drafter_process.Running:
        return drafter_process.start(
            DrafterOptions(
                target=self.folder / "target",
                draft=self.folder / self.kind,
                listen=f"127.0.0.1:{self.port}",
                draft_tokens=K,
                max_concurrency=LANES,
                max_context=256,
                checkpoint_slots=3,
                checkpoint_host_mib=1,
            )
        )

    def wait_until_connected(self) -> None:
        deadline = time.monotonic() + 20
        while not self.engine._link.connected:
            self.engine._link.poll()
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def turn(self) -> bool:
        with torch.inference_mode():
            ran = self.engine._turn()
            self.engine._rounds.deliver()
        return ran

    def replace_drafter(self) -> None:
        self.drafter.stop(0)
        self.drafter = self._start_drafter()

    def cut_stream(self) -> None:
        stream = self.engine._link._stream
        if stream is not None:
            stream.call.cancel()

    @property
    def tables(self) -> list[Any]:
        return list(self.drafter._service._engine._checkpoints._tables.values())

    def close(self) -> None:
        self.engine._link.stop()
        self.drafter.stop(0)


def machine(folder: Path, kind: str, expected: Any) -> type[RuleBasedStateMachine]:
    """The machine over one pair; ``expected(prompt)`` is the greedy continuation."""

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.services = Services(folder, kind)
            self.engine = self.services.engine
            self.requests: dict[str, tuple[list[int], int, list[Recorder]]] = {}
            self.cancelled: set[str] = set()

        # ---- what may happen ------------------------------------------------------------------

        @rule(
            stem=st.sampled_from([5, 31, 32, 64, 70]),
            turns=st.integers(0, 2),
            count=st.sampled_from([1, 2, 9, MOST]),
            draft_tokens=st.sampled_from([K, K, 1, 0]),
            samples=st.sampled_from([1, 1, 2, 3]),
        )
        def admit(self, stem: int, turns: int, count: int, draft_tokens: int, samples: int) -> None:
            ids = prompt(70, seed=1)[:stem]
            for turn in range(turns):
                ids = [*ids, *expected(tuple(ids))[:10], 7 + turn]
            name = f"r{len(self.requests)}"
            sinks = [Recorder() for _ in range(samples)]
            self.engine.submit(
                [greedy_request(name, i, ids, count, draft_tokens) for i in range(samples)], sinks
            )
            self.requests[name] = (ids, count, sinks)

        @rule(turns=st.sampled_from([1, 1, 2, 5]))
        def turn(self, turns: int) -> None:
            for _ in range(turns):
                self.services.turn()

        # which of those that are there is chosen by a number: what is there depends on threads, and
        # what hypothesis draws must not

        @rule(which=st.integers(0, 7), politely=st.booleans())
        def cancel(self, which: int, politely: bool) -> None:
            names = sorted({name for name, _ in self.engine._live})
            if not names:
                return
            name = names[which % len(names)]
            if politely:
                self.engine.cancel(name)
            else:
                for sink in self.requests[name][2]:
                    sink.gone = True
            self.cancelled.add(name)
            # within two turns both services are free of it
            for _ in range(2):
                self.services.turn()
            assert not any(n == name for n, _ in self.engine._live)

        @rule(which=st.integers(0, 7))
        def pause(self, which: int) -> None:
            leading = [s for s in self.engine._resident if s.leader is None]
            if leading:
                with torch.inference_mode():
                    self.engine._pause(leading[which % len(leading)])

        @rule(which=st.integers(0, 7), forget=st.booleans())
        def move_or_forget_a_checkpoint(self, which: int, forget: bool) -> None:
            checkpoints = self.engine._checkpoints
            kept = sorted(checkpoints._kept.values(), key=lambda c: c.checkpoint_id)
            if not kept:
                return
            chosen = kept[which % len(kept)]
            with torch.inference_mode():
                if forget or chosen.image is None:
                    checkpoints._evict(chosen)
                else:
                    checkpoints._demote_or_evict(chosen)

        @rule(which=st.integers(0, 7))
        def lose_a_draft_half(self, which: int) -> None:
            held = sorted(self.engine._link._held)
            if not held:
                return
            lost = held[which % len(held)]
            for table in self.services.tables:
                table.drop(lost)
            # as if it had been named by a reply
            self.engine._link._held.discard(lost)

        @rule()
        def break_the_stream(self) -> None:
            self.services.cut_stream()

        @rule(wait=st.booleans())
        def replace_the_drafter(self, wait: bool) -> None:
            self.services.replace_drafter()
            if wait:
                deadline = time.monotonic() + 20
                while True:
                    self.services.turn()
                    if self.engine._link.connected:
                        break
                    assert time.monotonic() < deadline
                    time.sleep(0.01)

        # ---- what must hold -------------------------------------------------------------------

        @invariant()
        def every_page_has_the_holders_that_it_counts(self) -> None:
            state, counted = self.engine._state, [0] * self.engine._state.page_count
            images = [c.image for c in self.engine._checkpoints._kept.values() if c.image]
            for holder in [*state._residents.values(), *images]:
                for page in holder.pages:
                    counted[page] += 1
            assert counted == state._holders
            assert sorted(state._free_pages) == [p for p, n in enumerate(counted) if not n]

        @invariant()
        def lanes_and_slots_are_held_by_residents_alone(self) -> None:
            state, resident = self.engine._state, self.engine._resident
            assert {s.residency.lane for s in resident} == set(state._residents)
            assert len(state._free_lanes) == len(state._free_slots) == LANES - len(resident)

        @invariant()
        def what_was_published_is_what_a_cold_run_publishes(self) -> None:
            for ids, count, sinks in self.requests.values():
                for sink in sinks:
                    whole = expected(tuple(ids))[:count]
                    assert sink.token_ids == whole[: len(sink.token_ids)]

        def teardown(self) -> None:
            try:
                self._finish()
            finally:
                self.services.close()

        def _finish(self) -> None:
            deadline = time.monotonic() + 60
            while self.engine._live:
                self.services.turn()
                assert time.monotonic() < deadline
            for name, (ids, count, sinks) in self.requests.items():
                if name in self.cancelled:
                    continue
                for sink in sinks:
                    assert sink.token_ids == expected(tuple(ids))[:count]
                    assert sink.finish_seen.reason is FinishReason.LENGTH
            self.services.wait_until_connected()
            pair = Pair(self.services.drafter, _Verifier(self.engine))  # type: ignore[arg-type]
            self._settle(pair)
            self.engine._checkpoints.clear()
            self._settle(pair)
            assert not any(self.engine._state._holders)

        def _settle(self, pair: Pair) -> None:
            """Both services agree on all that is held."""
            deadline = time.monotonic() + 10
            while pair._found(self.engine) != pair._wanted(self.engine):
                self.services.turn()
                message = (pair._found(self.engine), pair._wanted(self.engine))
                assert time.monotonic() < deadline, message
                time.sleep(0.005)

    return Machine


class _Verifier:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine


def run(folder: Path, kind: str, oracle: torch.nn.Module, examples: int, steps: int) -> None:
    known: dict[tuple[int, ...], list[int]] = {}

    def expected(ids: tuple[int, ...]) -> list[int]:
        if ids not in known:
            known[ids] = greedy(oracle, ids, MOST)
        return known[ids]

    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine(folder, kind, expected),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_samples_whose_leader_is_paused_prefill_for_themselves_and_draft(dense, oracle, kind):
    services = Services(dense, kind)
    try:
        engine, sinks, ids = services.engine, [Recorder(), Recorder()], prompt(90, seed=4)
        engine.submit([greedy_request("two", index, ids, MOST) for index in range(2)], sinks)
        services.turn()
        leader = next(s for s in engine._resident if s.leader is None)
        assert leader.frontier == CHUNK
        with torch.inference_mode():
            engine._pause(leader)
        while engine._live:
            services.turn()
        for sink in sinks:
            assert sink.token_ids == greedy(oracle, ids, MOST)
            assert sink.finish_seen.usage.proposed > 0
        assert "forks" not in engine._counters
    finally:
        services.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_whose_reader_is_behind_gives_its_pages_to_others(dense, oracle, kind):
    services = Services(dense, kind)
    try:
        engine, behind, other = services.engine, Recorder(), Recorder()
        ids, others = prompt(200, seed=4), prompt(220, seed=5)  # four pages each, of seven
        engine.submit([greedy_request("behind", 0, ids, MOST)], [behind])
        while not behind.token_ids:
            services.turn()
        behind.full = True
        engine.submit([greedy_request("other", 0, others, MOST)], [other])
        for _ in range(2000):
            services.turn()
            if other.finish_seen is not None:
                break
        assert other.token_ids == greedy(oracle, others, MOST)
        assert behind.finish_seen is None
        assert engine._counters["pauses"] == 1
        behind.full = False
        while engine._live:
            services.turn()
        assert behind.token_ids == greedy(oracle, ids, MOST)
        assert engine._counters["resumes"] == 1
    finally:
        services.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_paused_sample_comes_back_over_one_whose_reader_is_behind(dense, oracle, kind):
    services = Services(dense, kind)
    try:
        engine, sinks = services.engine, [Recorder(), Recorder()]
        paused, behind = sinks
        prompts = [prompt(200, seed=4), prompt(220, seed=5)]  # four pages each, of seven
        for index, (ids, sink) in enumerate(zip(prompts, sinks, strict=True)):
            engine.submit([greedy_request(str(index), 0, ids, MOST)], [sink])
            while not sink.token_ids:
                services.turn()
            sink.full = True
        assert engine._counters["pauses"] == 1
        paused.full = False
        for _ in range(2000):
            services.turn()
            if paused.finish_seen is not None:
                break
        assert paused.finish_seen is not None
        assert behind.finish_seen is None
        behind.full = False
        while engine._live:
            services.turn()
        for ids, sink in zip(prompts, sinks, strict=True):
            assert sink.token_ids == greedy(oracle, ids, MOST)
        assert "failed_turns" not in engine._counters
    finally:
        services.close()


@pytest.mark.parametrize("kind", KINDS)
def test_anything_in_any_order(dense, oracle, kind):
    run(dense, kind, oracle, examples=8, steps=25)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_anything_in_any_order_at_length(dense, oracle, kind):
    run(dense, kind, oracle, examples=150, steps=50)
