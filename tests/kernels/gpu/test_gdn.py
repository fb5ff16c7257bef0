"""The gated delta rule: verify, fold and prefill."""

import pytest
import torch

from kernels.gdn_fold import gdn_fold
from kernels.gdn_fold.reference import gdn_fold as fold_reference
from kernels.gdn_prefill import gdn_prefill
from kernels.gdn_prefill.reference import gdn_prefill as prefill_reference
from kernels.gdn_verify import GdnRecord, gdn_verify
from kernels.gdn_verify.reference import gdn_verify as verify_reference
from tests.kernels.gpu.shared import BF16, FP32, NAN, ROUNDED, on_device

pytestmark = pytest.mark.gpu
# Hk, Hv, Dk, Dv
GEOMETRIES = {"27B": (16, 48, 128, 128), "35B": (16, 32, 128, 128), "odd": (2, 6, 12, 20)}
official = pytest.mark.parametrize("geometry", ["27B", "35B"])


def block(gdn, B, W, geometry, dtype=BF16, **options):
    return on_device(gdn.block(B, W, GEOMETRIES[geometry], slots=9, dtype=dtype, **options))


def unwritten(record):
    return GdnRecord(*(torch.full_like(plane, NAN) for plane in record))


def part(arguments, row, columns, **others):
    """Some columns of one row, as arguments of their own."""
    rows = slice(row, row + 1)
    own = {name: arguments[name][rows, columns] for name in ("projected", "a", "b")}
    own["record"] = GdnRecord(*(plane[rows, columns] for plane in arguments["record"]))
    width = own["projected"].shape[1]
    own |= {"slots": arguments["slots"][rows], "counts": torch.tensor([width], device="cuda")}
    return arguments | own | others


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_verify_equals_reference(gdn, distance, geometry, dtype):
    arguments = block(gdn, 4, 16, geometry, dtype)
    arguments["counts"] = torch.tensor([16, 0, 1, 7], device="cuda")
    for row, count in enumerate((16, 0, 1, 7)):
        arguments["projected"][row, count:] = NAN
    mine, theirs = (unwritten(arguments["record"]) for _ in range(2))
    actual = gdn_verify(**arguments | {"record": mine})
    expected = verify_reference(**arguments | {"record": theirs})
    limit = 2e-6 if dtype is FP32 else ROUNDED
    assert distance(actual, expected) < limit
    for row, count in enumerate((16, 0, 1, 7)):
        assert not actual[row, count:].any()
        assert torch.equal(mine.conv[row, :count], theirs.conv[row, :count])
        for one, other in zip(mine, theirs, strict=True):
            assert one[row, count:].isnan().all()
            if count:
                assert distance(one[row, :count], other[row, :count]) < limit


@official
def test_verify_of_a_row_ignores_width_and_neighbours(gdn, geometry):
    arguments = block(gdn, 8, 16, geometry)
    together = gdn_verify(**arguments)
    for width in range(1, 17):
        alone = gdn_verify(**part(arguments, 5, slice(0, width)))
        assert torch.equal(alone[0], together[5, :width])


@official
def test_for_every_count_verify_continues_from_the_fold_bit_for_bit(gdn, geometry):
    """A fold of N columns, then a block of the rest, equals the block that recorded."""
    W = 16
    arguments = block(gdn, 8, W, geometry)
    together = gdn_verify(**arguments)
    records = GdnRecord(*(plane.clone().unsqueeze(0) for plane in arguments["record"]))
    for counts in (range(1, 9), range(8, 16)):
        state, history = (
            arguments[name].unsqueeze(0).clone() for name in ("state", "conv_history")
        )
        slots, adopted = arguments["slots"], torch.tensor(list(counts), device="cuda")
        gdn_fold(records, state, history, slots, slots, adopted)
        for row, count in enumerate(counts):
            moved = {"state": state[0], "conv_history": history[0]}
            rest = gdn_verify(**part(arguments, row, slice(count, W), **moved))
            assert torch.equal(rest[0], together[row, count:])


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_fold_equals_reference_and_zero_touches_nothing(gdn, distance, geometry):
    layers = [block(gdn, 4, 5, geometry, seed=layer) for layer in range(2)]
    for arguments in layers:
        gdn_verify(**arguments)
    records = GdnRecord(*(torch.stack(p) for p in zip(*(x["record"] for x in layers), strict=True)))
    state, history = (torch.stack([x[n] for x in layers]) for n in ("state", "conv_history"))
    sources = layers[0]["slots"]
    state[:, sources[1]], history[:, sources[1]] = NAN, NAN
    destinations, counts = sources.clone(), torch.tensor([5, 0, 1, 3], device="cuda")
    destinations[3], destinations[1] = 0, 10**9
    mine, theirs = [(state.clone(), history.clone()) for _ in range(2)]
    gdn_fold(records, *mine, sources, destinations, counts)
    destinations[1] = sources[1]
    fold_reference(records, *theirs, sources, destinations, counts)
    assert torch.equal(mine[1].nan_to_num(), theirs[1].nan_to_num())
    changed = [int(sources[0]), int(sources[2]), 0]
    assert distance(mine[0][:, changed], theirs[0][:, changed]) < 2e-6
    kept = [slot for slot in range(9) if slot not in changed and slot != sources[1]]
    assert torch.equal(mine[0][:, kept], state[:, kept])
    assert mine[0][:, sources[1]].isnan().all()


def prompt(gdn, T, geometry, dtype=BF16, **options):
    """Prefill's arguments, the columns being part of wider ones, other slots not a number."""
    arguments = block(gdn, 1, T, geometry, dtype, **options)
    wide = torch.cat([arguments[name][0] for name in ("projected", "a", "b")], dim=-1)
    Hv = arguments["a"].shape[-1]
    parts = wide.split((wide.shape[-1] - 2 * Hv, Hv, Hv), dim=-1)
    own = dict(zip(("projected", "a", "b"), parts, strict=True))
    own |= {name: arguments[name] for name in ("conv_weight", "a_log", "dt_bias")}
    slot = arguments["slots"][0]
    for name in ("state", "conv_history"):
        own[name] = torch.full_like(arguments[name], NAN)
        own[name][slot] = arguments[name][slot]
    return own | {"slot": slot}


def fresh(own):
    return own | {name: own[name].clone() for name in ("state", "conv_history")}


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("T", [1, 2, 3, 63, 64, 65, 1000])
def test_prefill_equals_reference(gdn, distance, T, geometry):
    own = prompt(gdn, T, geometry)
    mine, theirs = fresh(own), fresh(own)
    assert distance(gdn_prefill(**mine), prefill_reference(**theirs)) < 5e-3
    slot = int(own["slot"])
    assert distance(mine["state"][slot], theirs["state"][slot]) < 5e-3
    assert torch.equal(mine["conv_history"][slot], theirs["conv_history"][slot])
    for name in ("state", "conv_history"):
        others = mine[name][[s for s in range(9) if s != slot]]
        assert others.isnan().all()


def test_prefill_in_float32_keeps_float32(gdn, distance):
    own = prompt(gdn, 150, "27B", FP32)
    mine, theirs = fresh(own), fresh(own)
    assert distance(gdn_prefill(**mine), prefill_reference(**theirs)) < 2e-6
    slot = own["slot"]
    assert distance(mine["state"][slot], theirs["state"][slot]) < 2e-6


@pytest.mark.parametrize("case", ["strong decay", "equal keys", "tiny keys"])
def test_prefill_at_its_extremes(gdn, distance, case):
    own = prompt(gdn, 200, "27B")
    keys = slice(16 * 128, 32 * 128)
    if case == "strong decay":
        own["a"][::5] = 3e4
    elif case == "equal keys":
        # what a product of powers would lose to cancellation: every column writes the same key
        own["projected"][:, keys] = own["projected"][:1, keys]
        own["b"][:] = 20.0
        own["a"][:] = -20.0
    else:
        own["projected"][:, keys] *= 1e-20
    mine, theirs = fresh(own), fresh(own)
    assert distance(gdn_prefill(**mine), prefill_reference(**theirs)) < 6e-3
    slot = own["slot"]
    assert distance(mine["state"][slot], theirs["state"][slot]) < 6e-3


def test_prefill_waits_for_nothing_and_repeats_its_bits(gdn):
    own = prompt(gdn, 300, "27B")
    first = fresh(own)
    expected = gdn_prefill(**first)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = fresh(own)
        out = gdn_prefill(**again)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)
    slot = own["slot"]
    assert torch.equal(again["state"][slot], first["state"][slot])


def test_prefill_in_pieces_is_near_one_pass_and_near_verify(gdn, distance):
    arguments = block(gdn, 1, 32, "27B")
    expected = gdn_verify(**arguments)[0]
    names = ("projected", "a", "b")
    rest = {n: arguments[n] for n in ("conv_weight", "a_log", "dt_bias", "state", "conv_history")}
    rest["slot"] = arguments["slots"][0]
    pieces = [
        gdn_prefill(**{n: arguments[n][0, columns] for n in names}, **rest)
        for columns in (slice(0, 1), slice(1, 30), slice(30, 32))
    ]
    assert distance(torch.cat(pieces), expected) < 5e-3
