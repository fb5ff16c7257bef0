"""The bench of rounds: what it plans, what it invents and says so, and that it can go on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import device_rounds, rig
from bench.device_rounds import Cell, Options, cells_of, summarise
from bench.floors import Geometry
from bench.rig import Orders, simulated
from outrider.client import Client
from tests.shrunken import GEOMETRY, save_shrunken
from tests.tiny_pair import served
from verifier.acceptance import LicensedRow
from verifier.options import VerifierOptions
from verifier.proposals import Drafted

OPTIONS = Options(target=GEOMETRY / "qwen3.5-27b", draft=GEOMETRY / "qwen3.5-27b-dflash2")


def test_floors_are_those_of_the_design():
    """At 4.46 TB/s, without the KV that the design leaves out."""
    geometry = Geometry(OPTIONS.target, OPTIONS.draft, "random", "bfloat16")
    for rows, columns, drafted, floor in (
        (1, 1, False, 11.6),
        (1, 8, True, 13.0),
        (8, 8, True, 13.7),
    ):
        size = geometry.round_bytes(rows, columns, 0, drafted=drafted)
        assert size.milliseconds(4.46e12) == pytest.approx(floor, abs=0.06)
    assert geometry.round_bytes(1, 1, 1024, drafted=False).kv == 64 * 1024 * 1024


def test_a_mixture_reads_the_experts_that_its_columns_pick():
    target, draft = GEOMETRY / "qwen3.5-35b-a3b", GEOMETRY / "qwen3.5-35b-a3b-dflash"
    geometry = Geometry(target, draft, "random", "bfloat16")
    one, eight = (geometry.round_bytes(1, n, 0, drafted=False).target_weights for n in (1, 8))
    expert = 3 * 512 * 2048 * 2
    # 8 experts of 256 at one column, 57.42 at eight that pick evenly
    assert (eight - one) / (40 * expert) == pytest.approx(57.42 - 8, abs=0.01)


def test_every_cell_has_its_widths_and_plain_steps_run_once():
    planned = cells_of(OPTIONS)
    assert list(planned) == [7, 15]
    cells = [cell for group in planned.values() for cell in group]
    assert len({cell.key("w") for cell in cells}) == len(cells) == 3 * 16 + 4
    assert all(
        cell.draft_tokens in (0, width) for width, group in planned.items() for cell in group
    )
    assert {c.accept for c in cells if c.draft_tokens == 15} == {3, 15}
    assert {c.accept for c in cells if not c.draft_tokens} == {0}
    only_plain = cells_of(replace(OPTIONS, draft_tokens=(0,)))
    assert [cell.draft_tokens for cell in only_plain[7]] == [0] * 16


def test_trees_are_cells_beside_their_chain():
    planned = cells_of(replace(OPTIONS, draft_tokens=(0, 7), tree_nodes=(12, 16)))
    cells = planned[7]
    assert len({cell.key("w") for cell in cells}) == len(cells)
    assert {cell.tree_nodes for cell in cells if cell.draft_tokens == 7} == {0, 12, 16}
    assert {cell.tree_nodes for cell in cells if not cell.draft_tokens} == {0}
    assert {(cell.tree_nodes, cell.proposed) for cell in cells if cell.draft_tokens} == {
        (0, 7),
        (12, 11),
        (16, 15),
    }
    with pytest.raises(SystemExit, match=r"--tree-nodes: expected of \(12, 16, 24\) at K=7"):
        cells_of(replace(OPTIONS, tree_nodes=(13,)))


def test_orders_travel_in_a_request_s_id():
    orders = Orders("cell", rows=8, accept=3, synthetic=True)

    class Request:
        request_id = orders.request_id(5)

    assert Orders.of(Request) == orders
    Request.request_id = "anything"
    assert Orders.of(Request) is None
    plain = Orders("cell")
    Request.request_id = plain.request_id(0)
    assert Orders.of(Request) == plain


@pytest.mark.parametrize(("accept", "expected"), [(0, (9,)), (2, (4, 5, 9)), (7, (4, 5, 6, 9))])
def test_simulation_replaces_the_count_and_the_tokens_alone(accept: int, expected: tuple[int, ...]):
    allowed = LicensedRow(token_ids=(4, 9), accepted=1, logprobs=(), finite=True)
    drafted = Drafted((4, 5, 6))
    row = simulated(allowed, drafted, Orders("cell", accept=accept))
    assert (row.token_ids, row.accepted, row.finite) == (expected, len(expected) - 1, True)
    assert simulated(allowed, None, Orders("cell", accept=accept)) is allowed
    assert simulated(allowed, drafted, Orders("cell")) is allowed
    assert simulated(allowed, drafted, None) is allowed
    tree = replace(drafted, parents=(0, 1, 0))
    branching = replace(allowed, columns=(3,))
    simulated_tree = simulated(branching, tree, Orders("cell", accept=accept))
    assert simulated_tree.columns == tuple(range(1, len(expected)))
    broken = replace(allowed, token_ids=(), finite=False)
    assert simulated(broken, drafted, Orders("cell", accept=accept)) is broken


def test_a_server_takes_no_orders(tmp_path: Path):
    """What the bench invents cannot be had from a verifier that serves."""
    folder = save_shrunken(tmp_path)
    prompt = list(range(1, 40))
    with (
        served(folder / "target", folder / "dflash2", load_format="random") as pair,
        Client(pair.address) as client,
    ):
        options = {"prompt_ids": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        ordered = Orders("cell", rows=4, accept=7, synthetic=True).request_id(0)
        assert (
            client.generate(**options, request_id=ordered).token_ids
            == client.generate(**options).token_ids
        )
    assert not any("simulate" in name or "synthetic" in name for name in vars(VerifierOptions))


def test_a_round_s_parts_add_up_to_it():
    def record(start: int) -> dict:
        return {
            "started_ns": start * 20_000_000,
            "verify_ns": 12_000_000,
            "previous_commit_ns": 200_000,
            "draft_ns": 2_000_000,
            "service_ns": 2_500_000,
            "waited_ns": 3_000_000,
            "accepted": [3],
            "frontiers": [100],
            "sent_bytes": 1000,
            "shared_bytes": 200_000,
            "received_bytes": 100,
            "verbs_ns": {"verify": 12_500_000},
        }

    measured = summarise(Cell(7, 1, 1024, 3), [record(i) for i in range(5)], [0.02] * 4)
    assert measured["wall_ms"] == 20
    parts = [measured[f"{name}_ms"] for name in ("verify", "draft", "wire", "host")]
    assert parts == [12, 2, 1, 5]
    assert measured["beyond_device_ms"] == 6
    assert measured["tokens_per_second"] == 200


@pytest.mark.parametrize("processes", ["two", "one"])
def test_cells_are_measured_kept_and_not_measured_again(
    tmp_path: Path, processes: str, monkeypatch
):
    folder, kept = save_shrunken(tmp_path), tmp_path / "cells.json"
    options = Options(
        target=folder / "target",
        draft=folder / "dflash2",
        device="cpu",
        dtype="float32",
        processes=processes,
        draft_tokens=(0, 3),
        tree_nodes=(8,),
        concurrency=(2,),
        contexts=(600,),
        simulate_accept=2,
        synthetic_context=True,
        rounds=4,
        prefill=0,
        peer=False,
        seconds=0.0,
        json=kept,
    )
    device_rounds.run(options, "nothing yet")
    assert json.loads(kept.read_text())["cells"] == {}
    device_rounds.run(replace(options, seconds=60.0), "about")
    report = json.loads(kept.read_text())
    plain, drafted, tree = report["cells"].values()
    assert [cell["accepted"] for cell in (plain, drafted, tree)] == [0, 2, 2]
    assert tree["tree_nodes"] == 8
    assert tree["received_bytes"] > 2 * drafted["received_bytes"]
    assert plain["sent_bytes"] == 0
    # three rows of features a sequence, which do not go through the message
    rows, rest = divmod(drafted["shared_bytes"], 2 * 3 * 64 * 4)
    assert (rows > 0, rest) == (True, 0)
    assert 0 < drafted["sent_bytes"] < 400
    # the first rounds of a synthetic context begin where the prompt ends
    assert plain["frontier"] > 600
    assert {"plan K=3", "read_bytes_per_second"} <= report.keys()

    def refuse(*arguments: object) -> None:
        raise AssertionError("nothing was left to start services for")

    monkeypatch.setattr(device_rounds, "running", refuse)
    device_rounds.run(replace(options, seconds=60.0), "about")


def test_the_rig_puts_nothing_in_place_until_it_is_told():
    import verifier.__main__
    from verifier.rounds import Rounds

    assert verifier.__main__.Rounds is Rounds
    assert issubclass(rig.MeasuredRounds, Rounds)
    assert not torch.is_inference_mode_enabled()
