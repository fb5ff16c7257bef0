"""The bench of state: what a gap was filled with, and that every part runs and can be bounded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import state
from bench.gaps import Events, Gap, Noted
from tests.shrunken import save_shrunken

MS = 1_000_000


def noted(tmp_path: Path, *lines: tuple) -> Noted:
    events = Events()
    events.lines += [(kind, at * MS, *rest) for kind, at, *rest in lines]
    events.write(tmp_path / "events")
    return Noted.read(tmp_path / "events")


def test_gaps_are_those_of_a_stream_within_the_period(tmp_path: Path):
    read = noted(
        tmp_path,
        ("delivered", 10, "beside-0", 1),
        ("delivered", 15, "beside-1", 1),
        ("delivered", 30, "beside-0", 4),
        ("delivered", 55, "beside-1", 1),
        ("delivered", 99, "beside-0", 1),
        ("delivered", 60, "alone-0", 1),
        ("delivered", 61, "alone-0", 1),
    )
    found = read.gaps("beside-", 10 * MS, 60 * MS)
    assert [gap.ms for gap in found] == [20, 40]


def test_a_gap_is_filled_by_what_overlaps_it(tmp_path: Path):
    read = noted(
        tmp_path,
        ("prefill", 0, 14 * MS),
        ("draft", 14, 20 * MS),
        ("collection", 15, 17 * MS),
        ("verify", 21, 40 * MS),
    )
    assert read.filled(Gap(10 * MS, 30 * MS)) == {
        "prefill": 4,
        "draft": 6,
        "verify": 9,
        "other": 1,
        "of these collecting": 2,
    }


@pytest.mark.parametrize(
    ("kinds", "longest"),
    [("pvpvp", 1), ("ppvp", 2), ("vpppvpp", 3), ("vv", 0)],
)
def test_chunks_in_a_row_have_no_round_between_them(tmp_path: Path, kinds: str, longest: int):
    names = {"p": "prefill", "v": "verify"}
    read = noted(tmp_path, *((names[k], i, (i + 1) * MS) for i, k in enumerate(kinds)))
    assert read.longest_run(0, 100 * MS) == longest


def test_every_part_runs_and_none_starts_late(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(state, "TURN_TOKENS", 320)
    folder, kept = save_shrunken(tmp_path), tmp_path / "rows.json"
    pair = [f"--geometry={folder / 'target'}", f"--geometry-draft={folder / 'dflash2'}"]
    small = ["--chunk=32", "--chunks=4", "--tokens=8", "--repeats=2", "--positions=100"]
    state.main([*pair, *small, f"--json={kept}"])
    rows = {row["row"]: row for row in json.loads(kept.read_text())["rows"]}
    assert rows["target: capture"]["mib"] > 0
    assert rows["second turn"]["cached_tokens"] == 320 + 31
    assert rows["second turn, nothing kept"]["cached_tokens"] == 0
    beside = rows["the same beside a prompt of 4 chunks of 32"]
    assert beside["chunks_in_a_row"] == 1
    assert beside["largest_gap_ms"] >= beside["median_gap_ms"] > 0
    assert rows["rejected drafts, c=8"]["pairs"] == 2
    assert {"auto_over_plain", "cpu_plain_over_auto"} <= rows["rejected drafts, c=8"].keys()
    capsys.readouterr()
    state.main([*pair, *small, "--seconds=-1"])
    told = capsys.readouterr().out
    assert [f"{part}: no time left" in told for part in state.PARTS] == [True] * 4
