"""The kernels of the gated delta rule: verify against its reference, fold against verify."""

import pytest
import torch

from kernels.gdn_fold import gdn_fold
from kernels.gdn_fold.reference import gdn_fold as fold_reference
from kernels.gdn_verify import GdnRecord, gdn_verify
from kernels.gdn_verify.reference import gdn_verify as verify_reference
from kernels.trees import ancestor_masks
from tests.kernels.test_trees import few_paths

NAN = float("nan")
GEOMETRIES = [(1, 1, 4, 4), (2, 4, 7, 5), (1, 2, 16, 20)]  # Hk, Hv, Dk, Dv


def unwritten(record):
    return GdnRecord(*(torch.full_like(plane, NAN) for plane in record))


def both(arguments):
    """Outputs and records of kernel and reference."""
    mine, theirs = unwritten(arguments["record"]), unwritten(arguments["record"])
    actual = gdn_verify(**arguments | {"record": mine})
    expected = verify_reference(**arguments | {"record": theirs})
    return actual, mine, expected, theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_verify_equals_reference(gdn, distance, geometry, dtype):
    arguments = gdn.block(2, 5, geometry, dtype=dtype)
    arguments["counts"] = torch.tensor([5, 3])
    arguments["projected"][1, 3:] = NAN
    actual, mine, expected, theirs = both(arguments)
    tight = dtype.itemsize == 4
    assert distance(actual, expected) < (2e-6 if tight else 1e-3)
    assert not actual[1, 3:].any()
    assert torch.equal(mine.conv[0], theirs.conv[0])
    for plane, other in zip(mine, theirs, strict=True):
        assert plane[1, 3:].isnan().all()
        assert distance(plane[0], other[0]) < (2e-6 if tight else 1e-3)
        assert distance(plane[1, :3], other[1, :3]) < (2e-6 if tight else 1e-3)


def test_no_live_column_writes_zeros_and_no_record(gdn):
    arguments = gdn.block(1, 3, (1, 1, 4, 4))
    arguments["counts"] = torch.tensor([0])
    record = arguments["record"]
    assert not gdn_verify(**arguments).any()
    assert all(plane.isnan().all() for plane in record)


def test_gates_at_their_extremes(gdn):
    arguments = gdn.block(1, 4, (1, 1, 4, 4))
    arguments["a"][0, :, 0] = torch.tensor([-60.0, -17.0, 30.0, 90.0])
    arguments["b"][0, :, 0] = torch.tensor([-90.0, 90.0, 0.0, -9.0])
    arguments["dt_bias"].zero_()
    _, mine, _, theirs = both(arguments)
    torch.testing.assert_close(mine.gate, theirs.gate, atol=1e-30, rtol=2e-6)


def test_row_does_not_depend_on_width_or_neighbours(gdn):
    arguments = gdn.block(3, 8, (1, 2, 16, 20))
    together = gdn_verify(**arguments)
    alone = {
        name: value[1:2] for name, value in arguments.items() if name in ("projected", "a", "b")
    }
    for width in (1, 3, 8):
        narrow = {name: value[:, :width] for name, value in alone.items()}
        narrow["record"] = GdnRecord(*(plane[1:2, :width] for plane in arguments["record"]))
        narrow |= {"slots": arguments["slots"][1:2], "counts": torch.tensor([width])}
        assert torch.equal(gdn_verify(**arguments | narrow), together[1:2, :width])


def test_inputs_may_be_part_of_wider_columns(gdn):
    arguments = gdn.block(2, 3, (1, 2, 4, 5))
    expected = gdn_verify(**arguments)
    wide = torch.cat([arguments[name] for name in ("projected", "a", "b")], dim=-1)
    C = arguments["projected"].shape[-1]
    parts = {
        "projected": wide[..., :C],
        "a": wide[..., C : C + 2],
        "b": wide[..., C + 2 :],
        "conv_weight": arguments["conv_weight"].t().contiguous().t(),
    }
    assert torch.equal(gdn_verify(**arguments | parts), expected)


def in_trees(arguments, *, seed=0, most=8):
    """Every row a tree of its own; masks of dead columns are wrong."""
    rows, width = arguments["projected"].shape[:2]
    masks = ancestor_masks(few_paths(rows, width - 1, seed=seed, most=most))
    for row, count in enumerate(arguments["counts"].tolist()):
        masks[row, count:] = -1
    return arguments | {"ancestors": masks}


@pytest.mark.parametrize(
    ("counts", "W", "geometry"),
    [
        *(((2, 3), 3, geometry) for geometry in GEOMETRIES),
        ((12, 0, 7), 12, GEOMETRIES[-1]),
        ((32,), 32, GEOMETRIES[0]),
    ],
    ids=str,
)
def test_trees_equal_reference(gdn, distance, geometry, counts, W):
    arguments = gdn.block(len(counts), W, geometry)
    arguments["counts"] = torch.tensor(counts)
    arguments = in_trees(arguments, seed=W)
    for row, count in enumerate(counts):
        arguments["projected"][row, count:] = NAN
    actual, mine, expected, theirs = both(arguments)
    assert distance(actual, expected) < 2e-6
    for row, count in enumerate(counts):
        assert not actual[row, count:].any()
        for plane, other in zip(mine, theirs, strict=True):
            assert plane[row, count:].isnan().all()
            assert distance(plane[row, :count], other[row, :count]) < 2e-6


@pytest.mark.parametrize("most", [2, 8], ids="paths={}".format)
def test_every_path_is_a_chain_of_its_own_columns_bit_for_bit(gdn, most):
    arguments = in_trees(gdn.block(2, 14, (1, 2, 16, 5)), most=most)
    out = gdn_verify(**arguments)
    for row in range(2):
        masks = [int(mask) & 0xFFFFFFFF for mask in arguments["ancestors"][row]]
        for column in (9, 13):
            path = [j for j in range(14) if masks[column] >> j & 1]
            alone = arguments | {"ancestors": None, "counts": torch.tensor([len(path)])}
            for name in ("projected", "a", "b"):
                alone[name] = arguments[name][row : row + 1, path]
            alone["slots"] = arguments["slots"][row : row + 1]
            alone["record"] = GdnRecord(*(p[row : row + 1, path] for p in arguments["record"]))
            assert torch.equal(gdn_verify(**alone)[0], out[row, path])


class Layers:
    """Two layers' blocks of 5 columns in 2 rows, verified, and their records as the fold takes."""

    def __init__(self, gdn, dtype=torch.float32, geometry=(1, 2, 16, 20)):
        self.blocks = [gdn.block(2, 5, geometry, seed=layer, dtype=dtype) for layer in range(2)]
        for arguments in self.blocks:
            arguments["slots"] = torch.tensor([1, 3])
        self.outputs = [gdn_verify(**arguments) for arguments in self.blocks]
        planes = zip(*(x["record"] for x in self.blocks), strict=True)
        self.records = GdnRecord(*(torch.stack(plane) for plane in planes))
        self.state = torch.stack([x["state"] for x in self.blocks])
        self.history = torch.stack([x["conv_history"] for x in self.blocks])

    def fold(self, counts, destinations=(1, 3)):
        state, history = self.state.clone(), self.history.clone()
        moves = (torch.tensor([1, 3]), torch.tensor(destinations), torch.tensor(counts))
        gdn_fold(self.records, state, history, *moves)
        return state, history, moves


@pytest.mark.parametrize("counts", [(1, 5), (2, 3), (4, 0)], ids=str)
def test_block_continues_bit_for_bit_from_what_the_fold_left(gdn, counts):
    """Columns N.. verified from the folded state equal the columns of the block that recorded."""
    layers = Layers(gdn)
    state, history, _ = layers.fold(counts)
    for layer, arguments in enumerate(layers.blocks):
        for row, count in enumerate(counts):
            if count == 5:
                continue
            rest = {
                name: arguments[name][row : row + 1, count:] for name in ("projected", "a", "b")
            }
            rest |= {
                "record": GdnRecord(*(p[row : row + 1, count:] for p in arguments["record"])),
                "state": state[layer],
                "conv_history": history[layer],
                "slots": arguments["slots"][row : row + 1],
                "counts": torch.tensor([5 - count]),
            }
            expected = layers.outputs[layer][row : row + 1, count:]
            assert torch.equal(gdn_verify(**arguments | rest), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_fold_equals_reference(gdn, distance, dtype):
    layers = Layers(gdn, dtype)
    state, history, moves = layers.fold((2, 5), (1, 0))
    expected_state, expected_history = layers.state.clone(), layers.history.clone()
    fold_reference(layers.records, expected_state, expected_history, *moves)
    assert distance(state, expected_state) < 2e-6
    assert torch.equal(history, expected_history)


def test_folding_nothing_touches_nothing(gdn):
    layers = Layers(gdn)
    state, history, _ = layers.fold((0, 0), (9999, -9999))
    assert torch.equal(state, layers.state)
    assert torch.equal(history, layers.history)


def test_two_folds_equal_one(gdn):
    layers = Layers(gdn)
    whole, whole_history, _ = layers.fold((4, 4))
    layers.state, layers.history, _ = layers.fold((1, 3))
    layers.records = GdnRecord(
        *(torch.stack((p[:, 0].roll(-1, 1), p[:, 1].roll(-3, 1)), 1) for p in layers.records)
    )
    state, history, _ = layers.fold((3, 1))
    assert torch.equal(state, whole)
    assert torch.equal(history, whole_history)
