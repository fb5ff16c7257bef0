"""Chunked prefill of the gated delta rule against column by column."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from kernels.gdn_fold import gdn_fold
from kernels.gdn_prefill import gdn_prefill
from kernels.gdn_verify import GdnRecord, gdn_verify

NAN = float("nan")
LENGTHS = [1, 2, 63, 64, 65, 128, 300]
NAMES = ("projected", "a", "b", "conv_weight", "a_log", "dt_bias", "state", "conv_history")


def prompt(gdn, T, geometry, **options):
    """The op's arguments for one row of a block of T columns."""
    arguments = gdn.block(1, T, geometry, **options)
    own = {name: arguments[name] for name in NAMES}
    for name in ("projected", "a", "b"):
        own[name] = own[name][0]
    return {**own, "slot": arguments["slots"][0]}, arguments


def run(own):
    """Runs on copies; returns outputs, state, history."""
    own = {**own, "state": own["state"].clone(), "conv_history": own["conv_history"].clone()}
    return gdn_prefill(**own), own["state"], own["conv_history"]


@pytest.mark.parametrize("geometry", [(1, 1, 4, 4), (2, 6, 12, 20)], ids=str)
@pytest.mark.parametrize("T", LENGTHS)
def test_equals_formula_column_by_column(gdn, T, geometry):
    own, block = prompt(gdn, T, geometry)
    expected, states, _ = gdn.formula(block)
    out, state, history = run(own)
    slot = own["slot"]
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(state[slot].double(), states[0, -1], rtol=1e-5, atol=5e-6)
    raw = torch.cat((own["conv_history"][slot], own["projected"]))
    assert torch.equal(history[slot], raw[-3:])


@pytest.mark.parametrize("T", LENGTHS)
def test_equals_verify_and_fold(gdn, T):
    own, block = prompt(gdn, T, (4, 8, 32, 32))
    expected = gdn_verify(**block)
    state, history = block["state"].clone()[None], block["conv_history"].clone()[None]
    records = GdnRecord(*(plane[None] for plane in block["record"]))
    gdn_fold(records, state, history, block["slots"], block["slots"], block["counts"])
    out, own_state, own_history = run(own)
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(own_state, state[0], rtol=1e-5, atol=5e-6)
    assert torch.equal(own_history, history[0])


@pytest.mark.parametrize("T", [65, 200])
def test_equals_the_reference_model(gdn, T):
    Hk, Hv, Dk, Dv = 4, 8, 32, 32
    own, _ = prompt(gdn, T, (Hk, Hv, Dk, Dv))
    slot = own["slot"]
    raw = torch.cat((own["conv_history"][slot], own["projected"]))
    mixed = F.silu(F.conv1d(raw.T[None], own["conv_weight"].unsqueeze(1), groups=raw.shape[1]))
    q, k, v = mixed[0].T.split((Hk * Dk, Hk * Dk, Hv * Dv), dim=-1)
    expected, after = torch_chunk_gated_delta_rule(
        q.reshape(1, T, Hk, Dk),
        k.reshape(1, T, Hk, Dk),
        v.reshape(1, T, Hv, Dv),
        g=(-own["a_log"].exp() * F.softplus(own["a"] + own["dt_bias"]))[None],
        beta=own["b"].sigmoid()[None],
        initial_state=own["state"][slot][None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    out, state, _ = run(own)
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(state[slot], after[0], rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("pieces", [(300,), (64, 236), (1, 63, 64, 172), (130, 1, 169)], ids=str)
def test_pieces_equal_one_pass(gdn, pieces):
    own, _ = prompt(gdn, 300, (2, 4, 16, 16))
    expected, expected_state, expected_history = run(own)
    state, history = own["state"].clone(), own["conv_history"].clone()
    outs, first = [], 0
    for count in pieces:
        piece = {**own, "state": state, "conv_history": history}
        for name in ("projected", "a", "b"):
            piece[name] = own[name][first : first + count]
        outs.append(gdn_prefill(**piece))
        first += count
    torch.testing.assert_close(torch.cat(outs), expected, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(state, expected_state, rtol=1e-5, atol=5e-6)
    assert torch.equal(history, expected_history)


@pytest.mark.parametrize("T", [1, 2, 3, 70])
def test_other_slots_are_neither_read_nor_written(gdn, T):
    own, _ = prompt(gdn, T, (2, 4, 8, 8))
    expected, expected_state, expected_history = run(own)
    slot = int(own["slot"])
    others = [s for s in range(own["state"].shape[0]) if s != slot]
    own["state"][others], own["conv_history"][others] = NAN, NAN
    out, state, history = run(own)
    assert torch.equal(out, expected)
    assert torch.equal(state[slot], expected_state[slot])
    assert torch.equal(history[slot], expected_history[slot])
    assert state[others].isnan().all()
    assert history[others].isnan().all()


@pytest.mark.parametrize("a", [-60.0, 60.0, 3e4])
def test_extreme_gates_neither_overflow_nor_vanish(gdn, a):
    own, block = prompt(gdn, 80, (2, 4, 8, 8))
    # strong decay on every fifth column of an otherwise mild chunk
    own["a"][::5] = a
    expected, states, _ = gdn.formula(block)
    out, state, _ = run(own)
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[own["slot"]].double(), states[0, -1], rtol=1e-5, atol=1e-5)


def test_tiny_keys_stay_finite(gdn):
    own, block = prompt(gdn, 70, (2, 4, 8, 8))
    for tensor in (own["projected"], own["conv_history"]):
        tensor[..., :32] *= 1e-20
    expected, _, _ = gdn.formula(block)
    out, _, _ = run(own)
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-5, atol=5e-6)


def test_bfloat16_stays_near_the_formula(gdn):
    own, block = prompt(gdn, 70, (2, 4, 8, 8), dtype=torch.bfloat16)
    expected, states, _ = gdn.formula(block)
    out, state, history = run(own)
    assert out.dtype is torch.bfloat16
    assert history.dtype is torch.bfloat16
    assert (out.double() - expected[0]).norm() / expected.norm() < 4e-3
    after = states[0, -1]
    assert (state[own["slot"]].double() - after).norm() / after.norm() < 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"projected": torch.zeros(0, 64)}, "projected: expected at least one column, got 0"),
        ({"a": torch.zeros(3, 4)}, r"a: expected \[5, 4\], got \[3, 4\]"),
        ({"slot": torch.tensor([1])}, r"slot: expected \[\], got \[1\]"),
        ({"state": torch.zeros(5, 4, 8, 8).double()}, r"state: expected .* float32"),
        ({"conv_history": torch.zeros(5, 2, 64)}, r"conv_history: expected \[5, 3, 64\]"),
    ],
    ids=["empty", "a", "slot", "state", "history"],
)
def test_what_does_not_fit_is_refused(gdn, change, message):
    own, _ = prompt(gdn, 5, (2, 4, 8, 8))
    with pytest.raises(ValueError, match=message):
        gdn_prefill(**{**own, **change})
