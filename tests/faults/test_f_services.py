"""What two services must not do to each other or to a client."""

from __future__ import annotations

import pytest

import drafter.__main__ as drafter_process
import verifier.__main__ as verifier_process
from drafter.config import DrafterOptions
from outrider import pair as pair_facts
from outrider.client import Client, ServerError
from tests.system.conftest import greedy, prompt
from tests.tiny_pair import Pair
from verifier.options import VerifierOptions
from verifier.scheduler import Engine
from verifier.target import Target


def test_absent_sampling_fields_are_neutral_and_a_temperature_of_0_is_greedy(
    dense, serve, oracle, monkeypatch
):
    """F9: a request of a prompt alone samples at temperature 1 with all filters off."""
    submitted = []
    submit = Engine.submit

    def listening(self, requests, sinks):
        submitted.extend(requests)
        submit(self, requests, sinks)

    monkeypatch.setattr(Engine, "submit", listening)
    _, client = serve(dense, "dflash2", draft_tokens=3, max_context=64)
    bare = client.generate(prompt_ids=prompt(9))
    assert len(bare.token_ids) == 64 - 9, "as many as the context leaves"
    (request,) = submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.0, 1.0)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.0, 0.0)
    assert (request.draft_tokens, request.min_tokens, request.logprobs) == (3, 0, None)
    assert bare.usage.proposed > 0
    spelt_out = client.generate(
        prompt_ids=prompt(9), seed=bare.usage.seed, temperature=1.0, top_p=1.0, top_k=0
    )
    assert spelt_out.token_ids == bare.token_ids
    zero = client.generate(prompt_ids=prompt(9), temperature=0, max_tokens=20)
    assert list(zero.token_ids) == greedy(oracle, prompt(9), 20) != list(bare.token_ids[:20])


def test_a_drafter_for_another_width_is_refused_at_the_handshake_with_both_values(
    dense, monkeypatch, oracle
):
    """F10: 1024 against 5120; nobody waits, and requests run plainly."""
    geometry = pair_facts.geometry

    def claiming(hidden_size: int) -> None:
        def claimed(*arguments):
            said = geometry(*arguments)
            said.hidden_size = hidden_size
            return said

        monkeypatch.setattr(pair_facts, "geometry", claimed)

    claiming(1024)
    drafter = drafter_process.start(
        DrafterOptions(
            target=dense / "target", draft=dense / "dflash2", draft_tokens=3, max_context=256
        )
    )
    claiming(5120)
    verifier = verifier_process.start(
        VerifierOptions(
            target=dense / "target",
            draft=dense / "dflash2",
            drafter=drafter.address,
            listen="127.0.0.1:0",
            draft_tokens=3,
            max_context=256,
        )
    )
    try:
        Pair(drafter, verifier).wait_for_drafter("refused")
        with Client(verifier.address) as client:
            info = client.server_info()
            assert info.drafter_detail == "MODEL_MISMATCH: hidden_size: expected 1024, got 5120"
            completion = client.generate(prompt_ids=prompt(9), max_tokens=12, temperature=0)
            assert list(completion.token_ids) == greedy(oracle, prompt(9), 12)
            assert completion.usage.proposed == 0
    finally:
        verifier.stop(0)
        drafter.stop(0)


@pytest.mark.parametrize("phase", ["verify", "commit", "prefill"])
def test_an_error_inside_a_round_ends_its_stream_with_internal_and_frees_it(
    dense, serve, oracle, monkeypatch, phase
):
    """F10: the caller hears of it, nothing stays behind, and the next request is served."""
    served, client = serve(dense, "dflash2", draft_tokens=3)
    whole, calls = getattr(Target, phase), []

    def breaks(self, *arguments, **keywords):
        calls.append(phase)
        if len(calls) == (1 if phase == "prefill" else 3):
            raise RuntimeError("planted")
        return whole(self, *arguments, **keywords)

    monkeypatch.setattr(Target, phase, breaks)
    with pytest.raises(ServerError, match="INTERNAL") as error:
        client.generate(prompt_ids=prompt(8), max_tokens=60, temperature=0, timeout=30)
    assert error.value.reason == "INTERNAL"
    served.expect_idle()
    completion = client.generate(prompt_ids=prompt(8), max_tokens=20, temperature=0)
    assert list(completion.token_ids) == greedy(oracle, prompt(8), 20)
    assert completion.usage.proposed > 0
