"""The fold: exact states for every N, and nothing else touched."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels.gdn_verify.reference as verify_reference
from kernels.gdn_fold import gdn_fold
from kernels.gdn_verify import GdnRecord, gdn_verify

NAN = float("nan")
GEOMETRIES = [(1, 1, 4, 4), (2, 6, 12, 20), (4, 8, 32, 32), (2, 4, 7, 5), (1, 2, 128, 128)]


def same_bits(a, b):
    """Equality of what is stored, NaN included."""
    width = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return a.dtype is b.dtype and torch.equal(
        a.contiguous().view(width), b.contiguous().view(width)
    )


class Layers:
    """L layers of verify blocks over slots, their records, and the states the blocks had."""

    def __init__(self, gdn, monkeypatch, B, W, geometry, *, L=2, slots=6, change=None, **options):
        layers = [
            gdn.block(B, W, geometry, slots=slots, seed=layer, **options) for layer in range(L)
        ]
        for arguments in layers:
            arguments["slots"] = torch.arange(B) + 1
            if change:
                change(arguments)
        self.slots = layers[0]["slots"]
        self.state = torch.stack([x["state"] for x in layers])
        self.history = torch.stack([x["conv_history"] for x in layers])
        planes = zip(*(x["record"] for x in layers), strict=True)
        self.records = GdnRecord(*(torch.stack(plane) for plane in planes))
        seen = []
        real = verify_reference.block_states

        def observed(*arguments):
            seen.append(real(*arguments))
            return seen[-1]

        with monkeypatch.context() as patch:
            patch.setattr(verify_reference, "block_states", observed)
            for layer, arguments in enumerate(layers):
                arguments["record"] = GdnRecord(*(plane[layer] for plane in self.records))
                gdn_verify(**arguments)
        self.after = torch.stack(seen)  # [L, B, W, Hv, Dk, Dv]
        self.projected = torch.stack([x["projected"] for x in layers])

    def fold(self, counts, *, source=None, destination=None, state=None, history=None):
        """Folds copies and returns them."""
        state = self.state.clone() if state is None else state.clone()
        history = self.history.clone() if history is None else history.clone()
        gdn_fold(
            self.records,
            state,
            history,
            self.slots if source is None else torch.tensor(source),
            self.slots if destination is None else torch.tensor(destination),
            torch.tensor(counts),
        )
        return state, history

    def expected(self, counts, destination=None):
        """State and history from the blocks' own states."""
        state, history = self.state.clone(), self.history.clone()
        for row, count in enumerate(counts):
            if count:
                source = int(self.slots[row])
                target = source if destination is None else destination[row]
                state[:, target] = self.after[:, row, count - 1]
                raw = torch.cat((self.history[:, source], self.projected[:, row, :count]), dim=1)
                history[:, target] = raw[:, -3:]
        return state, history


def check(layers, counts, destination=None):
    state, history = layers.fold(counts, destination=destination)
    expected_state, expected_history = layers.expected(counts, destination)
    assert same_bits(state, expected_state)
    assert same_bits(history, expected_history)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("W", [1, 2, 8])
def test_state_equals_the_blocks_own_for_every_count(gdn, monkeypatch, geometry, W):
    layers = Layers(gdn, monkeypatch, 2, W, geometry)
    for count in range(W + 1):
        check(layers, (count, W - count))


@pytest.mark.parametrize("W", [16, 32])
def test_wide_blocks_fold_exactly(gdn, monkeypatch, W):
    layers = Layers(gdn, monkeypatch, 1, W, (2, 4, 16, 16), L=3)
    for count in range(W + 1):
        check(layers, (count,))


@pytest.mark.parametrize("B", [1, 3, 5])
@pytest.mark.parametrize("L", [1, 6])
def test_state_does_not_depend_on_rows_and_layers(gdn, monkeypatch, B, L):
    layers = Layers(gdn, monkeypatch, B, 4, (4, 8, 32, 32), L=L, slots=8)
    check(layers, [4, 1, 0, 3, 2][:B])


def test_slot_to_slot_leaves_the_source(gdn, monkeypatch):
    layers = Layers(gdn, monkeypatch, 3, 5, (2, 4, 8, 8), slots=9)
    for counts in ((5, 5, 5), (1, 0, 4), (2, 3, 0)):
        check(layers, counts, destination=[7, 2, 5])


def test_only_destinations_are_written(gdn, monkeypatch):
    layers = Layers(gdn, monkeypatch, 2, 4, (2, 4, 8, 8))
    layers.state[:, [0, 3, 4, 5]] = NAN
    layers.history[:, [0, 3, 4, 5]] = NAN
    check(layers, (4, 2))


def test_count_zero_reads_and_writes_nothing(gdn, monkeypatch):
    layers = Layers(gdn, monkeypatch, 3, 4, (2, 4, 8, 8))
    expected = layers.expected((0, 3, 0))
    for plane in layers.records:
        plane[:, [0, 2]] = NAN
    # slots that do not exist, and one that is another row's
    state, history = layers.fold((0, 3, 0), source=[-7, 2, 10**6], destination=[2, 2, 10**6])
    assert same_bits(state, expected[0])
    assert same_bits(history, expected[1])
    state, history = layers.fold((0, 0, 0), source=[9, 9, 9], destination=[1, 1, 1])
    assert same_bits(state, layers.state)
    assert same_bits(history, layers.history)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_rejected_suffix_is_never_read(gdn, monkeypatch, count):
    layers = Layers(gdn, monkeypatch, 2, 6, (2, 4, 8, 8))
    expected = layers.fold((count, count))
    for rewritten in (NAN, float("inf"), 0.0):
        for plane in layers.records:
            plane[:, :, count:] = rewritten
        state, history = layers.fold((count, count))
        assert same_bits(state, expected[0])
        assert same_bits(history, expected[1])


@pytest.mark.parametrize("kept", [(1,), (2,), (3,), (5,)], ids=str)
def test_history_is_the_last_three_raw_columns(gdn, monkeypatch, kept):
    layers = Layers(gdn, monkeypatch, 1, 5, (1, 1, 4, 4))
    _, history = layers.fold(kept)
    old, raw = layers.history[:, 1], layers.projected[:, 0]
    wanted = {
        1: torch.stack((old[:, 1], old[:, 2], raw[:, 0]), 1),
        2: torch.stack((old[:, 2], raw[:, 0], raw[:, 1]), 1),
        3: raw[:, 0:3],
        5: raw[:, 2:5],
    }[kept[0]]
    assert torch.equal(history[:, 1], wanted)


@pytest.mark.parametrize("cut", [(8,), (1,) * 8, (3, 5), (5, 0, 3), (1, 2, 4, 1), (7, 1)], ids=str)
def test_chain_of_folds_equals_one(gdn, monkeypatch, cut):
    layers = Layers(gdn, monkeypatch, 2, 8, (4, 8, 32, 32), L=3)
    expected_state, expected_history = layers.fold((8, 8))
    whole, first = layers.records, 0
    state, history = layers.state, layers.history
    for count in cut:
        # each link is a narrower re-view of the recorded block
        layers.records = GdnRecord(*(plane[:, :, first : first + count] for plane in whole))
        state, history = layers.fold((count, count), state=state, history=history)
        first += count
    assert same_bits(state, expected_state)
    assert same_bits(history, expected_history)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_rounds_of_mixed_counts_equal_token_by_token(gdn, counts):
    """Verify four columns, keep some, go on from there: as if only the kept ones had ever run."""
    geometry, total = (2, 4, 8, 8), sum(counts) + 4
    stream = gdn.block(1, total, geometry, slots=2, seed=3)

    def run(slot_state, slot_history, first, width, kept):
        piece = {**stream, "state": slot_state[0], "conv_history": slot_history[0]}
        for name in ("projected", "a", "b"):
            piece[name] = stream[name][:, first : first + width]
        piece["counts"] = torch.tensor([width])
        piece["record"] = GdnRecord(*(torch.full_like(p[:, :width], NAN) for p in stream["record"]))
        out = gdn_verify(**piece)
        records = GdnRecord(*(plane.unsqueeze(0) for plane in piece["record"]))
        slots = stream["slots"]
        gdn_fold(records, slot_state, slot_history, slots, slots, torch.tensor([kept]))
        return out

    def fresh():
        return stream["state"].clone().unsqueeze(0), stream["conv_history"].clone().unsqueeze(0)

    rounds, single = fresh(), fresh()
    frontier = 0
    for kept in counts:
        block = run(*rounds, frontier, 4, kept)
        for i in range(kept):
            alone = run(*single, frontier + i, 1, 1)
            torch.testing.assert_close(alone[0, 0], block[0, i], rtol=1e-5, atol=1e-6)
        frontier += kept
        # gates of one and of four columns may differ in the last bit, and no more
        torch.testing.assert_close(rounds[0], single[0], rtol=1e-5, atol=1e-6)
        assert same_bits(rounds[1], single[1])


def shrink_keys(scale):
    def change(arguments):
        end = arguments["projected"].shape[-1] - arguments["state"][0, :, 0].numel()
        for name in ("projected", "conv_history"):
            arguments[name][..., end // 2 : end] *= scale

    return change


def set_gates(a, b):
    def change(arguments):
        arguments["a"][:, ::2], arguments["b"][:, ::2] = a, b

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(shrink_keys(scale) for scale in (0.0, 1e-30, 1e-12, 1e-4)),
        *(set_gates(a, b) for a, b in itertools.product((-80.0, 0.0, 80.0, 3e4), (-80.0, 80.0))),
    ],
    ids=[
        *(f"keys-{scale}" for scale in ("0", "1e-30", "1e-12", "1e-4")),
        *(f"a={a},b={b}" for a, b in itertools.product((-80, 0, 80, 30000), (-80, 80))),
    ],
)
def test_tiny_keys_and_extreme_gates_fold_exactly(gdn, monkeypatch, change):
    layers = Layers(gdn, monkeypatch, 2, 6, (2, 4, 16, 16), change=change)
    assert layers.after.isfinite().all()
    for count in range(7):
        check(layers, (count, 6 - count))


def test_bfloat16_records_fold_exactly(gdn, monkeypatch):
    layers = Layers(gdn, monkeypatch, 2, 8, (2, 4, 16, 16), dtype=torch.bfloat16)
    assert layers.records.key.dtype is torch.bfloat16
    for count in range(9):
        check(layers, (count, 8 - count))


def test_partial_blocks_fold_exactly(gdn, monkeypatch):
    """Rows with dead columns were recorded under another mask and width than a full block."""

    def change(arguments):
        arguments["counts"] = torch.tensor([5, 3])
        for name in ("projected", "a", "b"):
            arguments[name][0, 5:] = NAN
            arguments[name][1, 3:] = NAN

    layers = Layers(gdn, monkeypatch, 2, 8, (4, 8, 32, 32), change=change)
    for counts in itertools.product(range(6), range(4)):
        check(layers, counts)


def test_two_threads_fold_exactly(gdn, monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        layers = Layers(gdn, monkeypatch, 4, 4, (4, 8, 32, 32), L=6)
        check(layers, (4, 3, 2, 1))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("geometry", GEOMETRIES[:3], ids=str)
def test_state_equals_formula_for_every_count(gdn, geometry):
    arguments = gdn.block(2, 8, geometry)
    _, states, _ = gdn.formula(arguments)
    gdn_verify(**arguments)
    records = GdnRecord(*(plane.unsqueeze(0) for plane in arguments["record"]))
    for count in range(1, 9):
        state = arguments["state"].clone().unsqueeze(0)
        history = arguments["conv_history"].clone().unsqueeze(0)
        slots = arguments["slots"]
        gdn_fold(records, state, history, slots, slots, torch.tensor([count, count]))
        torch.testing.assert_close(
            state[0, slots].double(), states[:, count - 1], rtol=1e-5, atol=2e-6
        )


@pytest.mark.parametrize("plane", GdnRecord._fields)
def test_records_that_do_not_fit_are_refused(gdn, monkeypatch, plane):
    layers = Layers(gdn, monkeypatch, 2, 4, (2, 4, 8, 8))
    layers.records = layers.records._replace(**{plane: getattr(layers.records, plane)[..., :1]})
    with pytest.raises(ValueError, match=r"records\.\w+: expected"):
        layers.fold((1, 1))


def test_counts_of_other_rows_are_refused(gdn, monkeypatch):
    layers = Layers(gdn, monkeypatch, 2, 4, (2, 4, 8, 8))
    with pytest.raises(ValueError, match=r"counts: expected \[2\], got \[3\]"):
        layers.fold((1, 1, 1))
