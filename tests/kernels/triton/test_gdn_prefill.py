"""The kernels that run a prompt through the gated delta rule against their reference."""

import pytest
import torch

from kernels.gdn_prefill import gdn_prefill
from kernels.gdn_prefill.reference import gdn_prefill as reference

NAN = float("nan")
NAMES = ("conv_weight", "a_log", "dt_bias", "state", "conv_history")


def prompt(gdn, T, geometry, **options):
    """One row's columns; the slots of others are not a number."""
    arguments = gdn.block(1, T, geometry, **options)
    own = {name: arguments[name][0] for name in ("projected", "a", "b")}
    own |= {name: arguments[name] for name in NAMES} | {"slot": arguments["slots"][0]}
    others = torch.arange(len(own["state"])) != own["slot"]
    own["state"][others], own["conv_history"][others] = NAN, NAN
    return own


def run(op, own):
    own = own | {name: own[name].clone() for name in ("state", "conv_history")}
    return op(**own), own["state"], own["conv_history"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("T", "geometry"),
    [
        (1, (1, 1, 4, 4)),
        (2, (2, 4, 7, 5)),
        (3, (1, 2, 16, 20)),
        (63, (1, 2, 4, 4)),
        (65, (1, 1, 16, 70)),
        (130, (1, 3, 12, 20)),
    ],
    ids=str,
)
def test_equals_reference(gdn, distance, T, geometry, dtype):
    own = prompt(gdn, T, geometry, dtype=dtype)
    out, state, history = run(gdn_prefill, own)
    expected, expected_state, expected_history = run(reference, own)
    limit = 2e-6 if dtype is torch.float32 else 2e-3
    assert out.dtype is dtype
    assert distance(out, expected) < limit
    slot = own["slot"]
    assert distance(state[slot], expected_state[slot]) < limit
    assert torch.equal(history[slot], expected_history[slot])
    others = torch.arange(len(state)) != slot
    assert state[others].isnan().all()
    assert history[others].isnan().all()


@pytest.mark.parametrize("a", [-60.0, 60.0, 3e4])
def test_gates_at_their_extremes(gdn, distance, a):
    own = prompt(gdn, 70, (1, 2, 8, 8))
    own["a"][::5] = a
    out, state, _ = run(gdn_prefill, own)
    expected, expected_state, _ = run(reference, own)
    assert distance(out, expected) < 1e-5
    assert distance(state[own["slot"]], expected_state[own["slot"]]) < 1e-5


def test_equal_keys_written_in_full_do_not_cancel(gdn, distance):
    """The powers of a chunk's matrix grow like binomials here, and its inverse does not."""
    own = prompt(gdn, 64, (1, 1, 16, 8))
    own["projected"][:, 16:32] = own["projected"][:1, 16:32]
    own["conv_history"][own["slot"], :, 16:32] = own["projected"][0, 16:32]
    own["b"][:], own["a"][:] = 30.0, -60.0
    out, state, _ = run(gdn_prefill, own)
    expected, expected_state, _ = run(reference, own)
    assert distance(out, expected) < 1e-5
    assert distance(state[own["slot"]], expected_state[own["slot"]]) < 1e-5


def test_inputs_may_be_part_of_wider_columns(gdn):
    own = prompt(gdn, 5, (1, 2, 4, 5))
    expected, *_ = run(gdn_prefill, own)
    names = ("projected", "a", "b")
    wide = torch.cat([own[name] for name in names], dim=-1)
    parts = wide.split([own[name].shape[-1] for name in names], dim=-1)
    views = dict(zip(names, parts, strict=True))
    views["conv_weight"] = own["conv_weight"].t().contiguous().t()
    assert torch.equal(run(gdn_prefill, own | views)[0], expected)
