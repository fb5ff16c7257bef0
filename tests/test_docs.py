"""What the pages name exists: links, paths, commands, flags, faults, ops; and the snippet runs."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bench.invariance
import bench.ops
import bench.rounds
import bench.state
import bench.wire
import drafter.__main__
import models.shortlist
import models.train
import verifier.options
from outrider import cli
from outrider.checkpoint import bundled
from outrider.cli.demo import summary
from outrider.cli.generate import as_json
from outrider.client import Client, Completion, Usage
from outrider.faults import REASONS
from tests.tiny_pair import served

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# packages whose every file has its line in the README's tree
LISTED = ("", "kernels", "drafter", "verifier", "protos", "protos/outrider", "protos/outrider/cli")
UNLISTED = re.compile(r"(^|/)(\..*|__init__\.py|__main__\.py|py\.typed)$")
# how to ask what `python -m MODULE` takes
HELP: dict[str, Callable[[], object]] = {
    "drafter": lambda: drafter.__main__.parse(["--help"]),
    "verifier": lambda: verifier.options.parse(["--help"]),
    "bench.invariance": lambda: bench.invariance.main(["--help"]),
    "bench.ops": lambda: bench.ops.main(["--help"]),
    "bench.rounds": lambda: bench.rounds.main(["--help"]),
    "bench.state": lambda: bench.state.main(["--help"]),
    "bench.wire": lambda: bench.wire.main(["--help"]),
    "models.shortlist": lambda: models.shortlist.main(["--help"]),
    "models.train": lambda: models.train.parse(),
}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.M | re.S)


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def tree() -> list[str]:
    """Paths of the README's annotated tree."""
    (block,) = [b for b in blocks(README, "text") if b.startswith("README.md ")]
    paths: list[str] = []
    parents: list[str] = []
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, clause = line.strip().partition(" ")
        assert clause.strip(), f"no clause: {line}"
        parents[depth:] = [name]
        paths.append("".join(parents))
    return paths


def flags_of_verb(verb: str) -> set[str]:
    return {s for action in parser_of(verb)._actions for s in action.option_strings}


def parser_of(verb: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=verb, allow_abbrev=False, exit_on_error=False)
    importlib.import_module(cli.VERBS[verb].module).add_arguments(parser)
    return parser


def commands(page: Path) -> Iterator[list[str]]:
    """Words of each command in the page's shell blocks; of a pipeline, its last part."""
    for block in blocks(page, "sh"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if "|" in words:
                words = words[len(words) - words[::-1].index("|") :]
            if words:
                yield words


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path):
    for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), link
        assert there.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(there), link


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_paths_exist(page: Path):
    path_like = re.compile(r"[\w.-]+(/[\w.-]*)+|[\w.-]+\.(py|md|toml|txt|proto)")
    names = tracked()
    for span in filter(path_like.fullmatch, spans(page)):
        name = span.rstrip("/")
        beside = any((folder / name).exists() for folder in (ROOT, page.parent))
        assert beside or any(n.endswith(f"/{name}") for n in names), span


def test_the_tree_names_what_is_there_and_all_of_it():
    named = {path.rstrip("/") for path in tree()}
    for path in named:
        assert (ROOT / path).exists(), path
    for name in tracked():
        parts = Path(name).parts
        for depth in range(len(parts)):
            folder, child = "/".join(parts[:depth]), "/".join(parts[: depth + 1])
            if folder in LISTED and not UNLISTED.search(child):
                assert child in named, f"{child} has no line in the README's tree"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_parse(page: Path, monkeypatch, capsys):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for words in commands(page):
        program = Path(words[0]).name
        if program == "make":
            assert {w for w in words[1:] if "=" not in w} <= targets, words
        elif program == "outrider":
            parser_of(words[1]).parse_args(words[2:])
        else:
            assert words[:2] == [words[0], "-m"], words
            assert program == "python", words
            taken = help_of(words[2], monkeypatch, capsys)
            assert {w.partition("=")[0] for w in words if w.startswith("--")} <= taken, words


def help_of(module: str, monkeypatch, capsys) -> set[str]:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit):
        HELP[module]()
    return set(FLAG.findall(capsys.readouterr().out))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_flags_exist(page: Path, monkeypatch, capsys):
    known = set().union(*map(flags_of_verb, cli.VERBS))
    for module in HELP:
        known |= help_of(module, monkeypatch, capsys)
    known.add("--version")
    named = {flag for span in spans(page) for flag in FLAG.findall(span)}
    assert named <= known


def test_operations_explains_every_flag_of_the_services(monkeypatch, capsys):
    wanted = flags_of_verb("serve") | help_of("drafter", monkeypatch, capsys)
    wanted |= help_of("verifier", monkeypatch, capsys)
    named = {flag for span in spans(ROOT / "docs/operations.md") for flag in FLAG.findall(span)}
    assert {flag for flag in wanted if flag.startswith("--")} - {"--help"} <= named


def test_protocol_lists_every_fault_with_its_code():
    text = (ROOT / "docs/protocol.md").read_text()
    listed = dict(re.findall(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \|", text, re.M))
    assert listed == {reason: row.code.name for reason, row in REASONS.items()}


def test_math_names_every_op_and_no_other():
    named = set(re.findall(r"kernels/(\w+)", (ROOT / "docs/math.md").read_text()))
    ops = {path.parent.name for path in ROOT.glob("kernels/*/__init__.py")}
    assert ops <= named
    assert all((ROOT / f"kernels/{name}.py").exists() for name in named - ops)


def completion() -> Completion:
    usage = Usage(output_tokens=3, rounds=1, total_ns=3, ttft_ns=1, accepted_per_position=(1,))
    return Completion("", 0, (1, 2, 3), "", "length", None, usage, (), (), ())


def test_the_readme_shows_the_summary_that_demo_prints():
    def labels(text: str) -> list[str]:
        return re.findall(r"^([a-z][a-z ]+?) {2,}\S", text, re.M)

    (block,) = [b for b in blocks(README, "text") if "tokens per second" in b]
    expected = labels(summary([completion()], [completion()]))
    assert labels(block)[-len(expected) :] == expected


def test_the_readme_shows_the_object_that_json_prints():
    shown = json.loads(blocks(README, "json")[0])
    expected = as_json(completion())
    assert shown.keys() == expected.keys()
    assert shown["usage"].keys() == expected["usage"].keys()
    assert shown["rounds"][0].keys() == {"frontier", "proposed", "accepted", "committed"}


def test_the_readme_s_snippet_runs(capsys):
    (snippet,) = blocks(README, "python")
    assert "127.0.0.1:50051" in snippet
    with served(bundled("target"), bundled("dflash2")) as pair:
        exec(snippet.replace("127.0.0.1:50051", pair.address), {"__name__": "snippet"})
        shown = capsys.readouterr().out
        with Client(pair.address) as client:
            greedy = client.generate("def main():", max_tokens=32, temperature=0)
            seeded = client.generate("def main():", max_tokens=32, seed=7)
    assert shown.startswith(greedy.text)
    # the same request once through each client
    assert shown.endswith(seeded.text * 2)
