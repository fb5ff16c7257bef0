"""The plan of all memory counts what is allocated and refuses, with the sum, what does not fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider import serving
from outrider.pair import DraftFacts, TargetFacts
from outrider.random_weights import open_checkpoint
from tests.shrunken import GEOMETRY
from tests.tiny_pair import save_pair, served
from verifier import memory
from verifier.__main__ import Plan, start
from verifier.config import TargetConfig
from verifier.options import OptionError, VerifierOptions

MIB = 1 << 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"))


def options_of(folder: Path, **changes) -> VerifierOptions:
    given = VerifierOptions(
        target=folder / "target",
        draft=folder / "dflash2",
        drafter="127.0.0.1:1",
        listen="127.0.0.1:0",
        max_context=512,
        checkpoint_slots=3,
        checkpoint_host_mib=4,
    )
    return replace(given, **changes)


def plan_of(options: VerifierOptions) -> Plan:
    with (
        open_checkpoint(options.target, options.load_format) as target,
        open_checkpoint(options.draft, options.load_format) as draft,
    ):
        facts = TargetFacts.read(target)
        return Plan(options, TargetConfig.read(facts), facts, DraftFacts.load(draft, facts))


def total(sizes: memory.Sizes) -> int:
    return sum(size for _, size in sizes)


def test_a_plan_that_lacks_one_byte_is_refused_with_every_term(tiny, monkeypatch):
    plan = plan_of(options_of(tiny))
    sizes = [*plan.sizes, *plan.host_sizes]
    monkeypatch.setattr(serving, "memory_bytes", lambda device: total(sizes) - 1)
    with pytest.raises(OptionError, match=r"^memory: expected at most") as refused:
        start(options_of(tiny))
    for what, size in sizes:
        assert f"{what} {size}" in str(refused.value)
    assert str(refused.value).endswith(f"= {total(sizes)}")
    numbers = [int(text) for text in re.findall(r"(?<= )\d+(?= bytes|$)", str(refused.value))]
    assert numbers == [total(sizes) - 1, total(sizes)]
    monkeypatch.setattr(serving, "memory_bytes", lambda device: total(sizes))
    plan_of(options_of(tiny))


@pytest.mark.parametrize("trees", ["0", "31"], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", ["dflash2", "dflash"])
def test_what_is_allocated_was_planned(tiny, kind, trees):
    more = {"draft_tree_nodes": trees} if kind == "dflash2" else {}
    kept = {"checkpoint_slots": 3, "checkpoint_host_mib": 4}
    plan = plan_of(options_of(tiny, draft=tiny / kind, **more))
    planned = dict([*plan.sizes, *plan.host_sizes])
    with served(tiny / "target", tiny / kind, **kept, **more) as pair:
        engine = pair.verifier.engine
        blocks, state = engine._rounds.blocks, engine._state
        for rows in range(1, 5):
            for width in blocks._widths(rows):
                blocks._of(rows, width)
        taken = dict([*state.plan(), *blocks.plan()])
        taken["sampling tables"] = blocks.tables.byte_count()
        taken["staged pages"] = engine._host.staged_bytes
        taken["host: checkpoints and paused samples"] = engine._host.byte_count
        taken["host: feature rows on their way"] = blocks.host_features.nbytes
    assert taken.pop("graphs") == 0
    staged, staged_planned = (sizes.pop("block: inputs and outcomes") for sizes in (taken, planned))
    assert staged <= staged_planned <= 2 * staged
    # two chunks are on their way beside a block
    assert taken.pop("host: feature rows on their way") < planned["host: feature rows on their way"]
    assert taken == {what: planned[what] for what in taken}


@pytest.fixture
def large() -> VerifierOptions:
    """A 27B target on a device that is only planned for."""
    return VerifierOptions(
        target=GEOMETRY / "qwen3.5-27b",
        draft=GEOMETRY / "qwen3.5-27b-dflash2",
        drafter="127.0.0.1:1",
        listen="127.0.0.1:0",
        load_format="random",
        device=torch.device("cuda"),
        dtype="bfloat16",
        max_concurrency=8,
        prefill_chunk=1024,
        checkpoint_slots=8,
        checkpoint_host_mib=8192,
    )


def limits(monkeypatch, device: int, host: int) -> None:
    monkeypatch.setattr(serving, "memory_bytes", lambda where: host if where == "cpu" else device)


def test_graphs_and_scratch_are_reserved_on_a_device(large, monkeypatch):
    limits(monkeypatch, 140 << 30, 128 << 30)
    sizes = dict(plan_of(large).sizes)
    # 40 graphs took 134 MiB there, and p of a block alone is 61
    assert 134 * MIB < sizes["graphs"] < 300 * MIB
    assert sizes["block: logits"] == 64 * 248320 * 4
    assert 100 * MIB < sizes["scratch: a chunk"] < 400 * MIB
    without = total([(what, size) for what, size in sizes.items() if what != "graphs"])
    limits(monkeypatch, without, 128 << 30)
    with pytest.raises(OptionError, match=r"^memory: .* \+ graphs \d+ = \d+$"):
        plan_of(large)


def test_host_memory_is_a_sum_of_its_own_beside_a_device(large, monkeypatch):
    limits(monkeypatch, 140 << 30, 4 << 30)
    with pytest.raises(OptionError, match=r"^host memory: .*checkpoints and paused samples 8\d{9}"):
        plan_of(large)
    plan_of(replace(large, checkpoint_host_mib=1024))


def test_a_device_that_has_less_than_it_said_is_an_error_with_the_sum(tiny, monkeypatch):
    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(Plan, "load_blocks", exhausted)
    with pytest.raises(OptionError, match=r"^memory: .*block: logits \d+.*Tried to allocate 2 GiB"):
        start(options_of(tiny))
