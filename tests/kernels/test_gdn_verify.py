"""Gated delta rule over a block: outputs and records against FP64 and against transformers."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from kernels.gdn_verify import GdnRecord, gdn_verify
from kernels.trees import ancestor_masks
from tests.kernels.test_trees import random_parents

NAN = float("nan")
# (Hk, Hv, Dk, Dv)
GEOMETRIES = [(1, 1, 4, 4), (2, 2, 8, 8), (2, 6, 12, 20), (4, 8, 32, 32)]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize(("B", "W"), [(1, 1), (1, 3), (2, 8), (3, 2)], ids=str)
def test_outputs_and_records_equal_formula(gdn, geometry, B, W):
    arguments = gdn.block(B, W, geometry)
    expected, _, record = gdn.formula(arguments)
    actual = gdn_verify(**arguments)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)
    for plane, wanted in zip(arguments["record"], record, strict=True):
        torch.testing.assert_close(plane.double(), wanted, rtol=1e-5, atol=2e-6)
    # the raw column is copied, not computed
    assert torch.equal(arguments["record"].conv, arguments["projected"])


@pytest.mark.parametrize("W", range(1, 33))
def test_every_width_equals_formula(gdn, W):
    arguments = gdn.block(2, W, (1, 2, 4, 4), seed=W)
    arguments["counts"] = torch.tensor([W, W // 2])
    expected, _, _ = gdn.formula(arguments)
    torch.testing.assert_close(gdn_verify(**arguments).double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "oracle",
    [torch_recurrent_gated_delta_rule, torch_chunk_gated_delta_rule],
    ids=["step", "chunk"],
)
@pytest.mark.parametrize("W", [1, 7, 16])
def test_equals_the_reference_model(gdn, oracle, W):
    Hk, Hv, Dk, Dv = 4, 8, 32, 32
    x = gdn.block(2, W, (Hk, Hv, Dk, Dv))
    raw = torch.cat((x["conv_history"][x["slots"]], x["projected"]), dim=1)
    mixed = F.silu(
        F.conv1d(raw.transpose(1, 2), x["conv_weight"].unsqueeze(1), groups=raw.shape[-1])
    ).transpose(1, 2)
    q, k, v = mixed.split((Hk * Dk, Hk * Dk, Hv * Dv), dim=-1)
    expected, _ = oracle(
        q.reshape(2, W, Hk, Dk),
        k.reshape(2, W, Hk, Dk),
        v.reshape(2, W, Hv, Dv),
        g=-x["a_log"].exp() * F.softplus(x["a"] + x["dt_bias"]),
        beta=x["b"].sigmoid(),
        initial_state=x["state"][x["slots"]],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(gdn_verify(**x), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("counts", [(0, 0), (0, 4), (1, 3), (4, 2), (3, 3)], ids=str)
def test_dead_columns_are_zero_and_never_read_or_recorded(gdn, counts):
    arguments = gdn.block(2, 4, (2, 4, 8, 8))
    arguments["counts"] = torch.tensor(counts)
    expected, _, record = gdn.formula(arguments)
    for row, count in enumerate(counts):
        for name in ("projected", "a", "b"):
            arguments[name][row, count:] = NAN
    # a row with no live column may stand on any slot, a ruined one too
    for row, count in enumerate(counts):
        if count == 0:
            arguments["state"][arguments["slots"][row]] = NAN
            arguments["conv_history"][arguments["slots"][row]] = NAN
    actual = gdn_verify(**arguments)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)
    for row, count in enumerate(counts):
        assert torch.equal(actual[row, count:], torch.zeros_like(actual[row, count:]))
        for plane, wanted in zip(arguments["record"], record, strict=True):
            torch.testing.assert_close(
                plane[row, :count].double(), wanted[row, :count], rtol=1e-5, atol=2e-6
            )
            assert plane[row, count:].isnan().all()


def test_state_history_and_inputs_are_left_alone(gdn):
    arguments = gdn.block(2, 4, (2, 4, 8, 8))
    kept = {n: t.clone() for n, t in arguments.items() if n != "record"}
    gdn_verify(**arguments)
    assert all(torch.equal(arguments[name], tensor) for name, tensor in kept.items())


def test_history_reaches_the_first_three_columns_only(gdn):
    arguments = gdn.block(1, 5, (1, 1, 4, 4))
    first = gdn_verify(**arguments)
    planes = [plane.clone() for plane in arguments["record"]]
    arguments["conv_history"] = torch.randn_like(arguments["conv_history"])
    assert not torch.equal(gdn_verify(**arguments), first)
    for before, after in zip(planes[1:3], arguments["record"][1:3], strict=True):
        assert torch.equal(before[:, 3:], after[:, 3:])
        assert not torch.equal(before[:, 2], after[:, 2])


def test_rows_may_read_one_slot(gdn):
    arguments = gdn.block(2, 3, (2, 4, 8, 8))
    arguments["slots"] = torch.tensor([1, 1])
    for name in ("projected", "a", "b"):
        arguments[name][1] = arguments[name][0]
    actual = gdn_verify(**arguments)
    torch.testing.assert_close(actual[0], actual[1], rtol=1e-6, atol=1e-7)
    expected, _, _ = gdn.formula(arguments)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)


def part(arguments, row, columns):
    """The arguments of one row with these columns alone, and a record of its own."""
    alone = {**arguments, "counts": torch.tensor([len(columns)])}
    for name in ("projected", "a", "b"):
        alone[name] = arguments[name][row : row + 1, columns]
    alone["slots"] = arguments["slots"][row : row + 1]
    record = (torch.full_like(p[row : row + 1, columns], NAN) for p in arguments["record"])
    alone["record"] = GdnRecord(*record)
    return alone


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_row_does_not_depend_on_neighbours_or_width(gdn, geometry):
    together = gdn.block(3, 8, geometry)
    out = gdn_verify(**together)
    for row in range(3):
        for width in (1, 5, 8):
            alone = part(together, row, list(range(width)))
            assert torch.equal(gdn_verify(**alone)[0], out[row, :width])


def in_trees(arguments, *, seed=0):
    """Every row a tree of its own; masks of dead columns are wrong."""
    rows, width = arguments["projected"].shape[:2]
    masks = ancestor_masks(random_parents(rows, width - 1, seed=seed))
    for row, count in enumerate(arguments["counts"].tolist()):
        masks[row, count:] = -1
    return arguments | {"ancestors": masks}


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize(("counts", "W"), [((2, 3), 3), ((12, 0, 7), 12), ((32,), 32)], ids=str)
def test_trees_equal_formula(gdn, geometry, counts, W):
    arguments = gdn.block(len(counts), W, geometry)
    arguments["counts"] = torch.tensor(counts)
    arguments = in_trees(arguments, seed=W)
    expected, _, record = gdn.formula(arguments)
    for row, count in enumerate(counts):
        for name in ("projected", "a", "b"):
            arguments[name][row, count:] = NAN
    actual = gdn_verify(**arguments)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)
    for row, count in enumerate(counts):
        for plane, wanted in zip(arguments["record"], record, strict=True):
            torch.testing.assert_close(
                plane[row, :count].double(), wanted[row, :count], rtol=1e-5, atol=2e-6
            )
            assert plane[row, count:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_every_path_is_a_chain_of_its_own_columns_bit_for_bit(gdn, geometry, dtype):
    arguments = gdn.block(3, 16, geometry, dtype=dtype)
    arguments["counts"] = torch.tensor([16, 9, 16])
    arguments = in_trees(arguments)
    out = gdn_verify(**arguments)
    for row, count in enumerate(arguments["counts"].tolist()):
        for column in range(count):
            mask = int(arguments["ancestors"][row, column])
            path = [j for j in range(column + 1) if mask >> j & 1]
            alone = part(arguments, row, path) | {"ancestors": None}
            assert torch.equal(gdn_verify(**alone)[0], out[row, path])
            for plane, recorded in zip(alone["record"], arguments["record"], strict=True):
                assert torch.equal(plane[0], recorded[row, path])


def test_masks_of_a_chain_change_no_bit(gdn):
    arguments = gdn.block(2, 7, (2, 6, 12, 20))
    arguments["counts"] = torch.tensor([7, 4])
    expected = gdn_verify(**arguments)
    masks = ancestor_masks(torch.arange(6).expand(2, 6))
    assert torch.equal(gdn_verify(**arguments, ancestors=masks), expected)


@pytest.mark.parametrize("key_scale", [0.0, 1e-20, 1e-5])
def test_tiny_keys_and_queries_stay_finite(gdn, key_scale):
    arguments = gdn.block(1, 6, (2, 4, 8, 8))
    arguments["projected"][..., :32] *= key_scale
    arguments["conv_history"][..., :32] *= key_scale
    expected, _, _ = gdn.formula(arguments)
    actual = gdn_verify(**arguments)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("a", "b"), [(60.0, 60.0), (-60.0, -60.0), (60.0, -60.0), (-60.0, 60.0)])
def test_extreme_gates_equal_formula(gdn, a, b):
    arguments = gdn.block(1, 6, (2, 4, 8, 8))
    arguments["a"].fill_(a)
    arguments["b"].fill_(b)
    arguments["a"][:, 3] = 0.0
    expected, _, _ = gdn.formula(arguments)
    torch.testing.assert_close(gdn_verify(**arguments).double(), expected, rtol=1e-5, atol=2e-6)


def test_bfloat16_stays_near_the_formula(gdn):
    arguments = gdn.block(2, 6, (2, 4, 8, 8), dtype=torch.bfloat16)
    actual = gdn_verify(**arguments)
    assert actual.dtype is torch.bfloat16
    record = arguments["record"]
    assert record.gate.dtype is torch.float32
    expected, _, planes = gdn.formula(arguments)
    for plane, wanted in zip(record, planes, strict=True):
        torch.testing.assert_close(plane.double(), wanted, rtol=2**-7, atol=1e-5)
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < 4e-3


def test_strided_views_are_taken(gdn):
    arguments = gdn.block(2, 4, (2, 4, 8, 8))
    expected = gdn_verify(**arguments)
    C = arguments["projected"].shape[-1]
    packed = torch.cat((arguments["projected"], arguments["a"], arguments["b"]), dim=-1)
    arguments["projected"], arguments["a"] = packed[..., :C], packed[..., C : C + 4]
    arguments["b"] = packed[..., C + 4 :]
    arguments["conv_weight"] = arguments["conv_weight"].T.contiguous().T
    torch.testing.assert_close(gdn_verify(**arguments), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("a", torch.zeros(2, 4, 2), r"a: expected \[2, 4, 4\]"),
        ("b", torch.zeros(2, 1, 4), r"b: expected \[2, 4, 4\]"),
        ("conv_weight", torch.zeros(64, 3), r"conv_weight: expected \[64, 4\]"),
        ("state", torch.zeros(5, 4, 8, 8).bfloat16(), r"state: expected .* float32"),
        ("conv_history", torch.zeros(5, 4, 64), r"conv_history: expected \[5, 3, 64\]"),
        ("counts", torch.zeros(1, dtype=torch.int64), r"counts: expected \[2\]"),
        ("projected", torch.zeros(2, 4, 63), r"projected: expected"),
        ("ancestors", torch.zeros(2, 4).long(), r"ancestors: expected \[2, 4\] int32"),
    ],
    ids=["a", "b", "taps", "state", "history", "counts", "channels", "ancestors"],
)
def test_what_does_not_fit_is_refused(gdn, name, tensor, message):
    arguments = gdn.block(2, 4, (2, 4, 8, 8))
    with pytest.raises(ValueError, match=message):
        gdn_verify(**{**arguments, name: tensor})


@pytest.mark.parametrize("plane", GdnRecord._fields)
def test_record_of_another_shape_or_dtype_is_refused(gdn, plane):
    arguments = gdn.block(2, 4, (2, 4, 8, 8))
    record = arguments["record"]
    for wrong in (getattr(record, plane)[:1], getattr(record, plane).double()):
        with pytest.raises(ValueError, match=rf"record\.{plane}: expected"):
            gdn_verify(**{**arguments, "record": record._replace(**{plane: wrong})})
