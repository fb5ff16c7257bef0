"""Choosing the rows of an indexed proposal head."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from drafter.weights import read_shortlist
from models.shortlist import choose, main


def test_ids_come_by_count_and_equal_counts_by_id():
    counts = torch.tensor([5, 9, 0, 9, 7, 0])
    assert choose(counts, [], 4).tolist() == [1, 3, 4, 0]
    assert choose(counts, [], 6).tolist() == [1, 3, 4, 0, 2, 5]
    assert choose(counts, [], 1).dtype == torch.int32


def test_forced_ids_are_in_whatever_their_count_and_keep_the_order():
    counts = torch.tensor([5, 9, 0, 9, 7, 0])
    assert choose(counts, [5, 2, 0], 4).tolist() == [1, 0, 2, 5]
    assert choose(counts, [5, 2, 0], 3).tolist() == [0, 2, 5]


def test_what_cannot_be_chosen_is_refused():
    counts = torch.zeros(6, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"rows: expected 2\.\.6, got 1"):
        choose(counts, [1, 2], 1)
    with pytest.raises(ValueError, match=r"rows: expected 1\.\.6, got 7"):
        choose(counts, [], 7)
    with pytest.raises(ValueError, match=r"forced: expected ids in \[0, 6\), got \[6\]"):
        choose(counts, [6], 3)


@pytest.fixture
def target(make_pair, tmp_path):
    """A target folder whose tokenizer splits at blanks and has two added tokens."""
    folder = tmp_path / "target"
    folder.mkdir()
    pair = make_pair("dflash", "ll", is_causal=False)
    for file in ("config.json", "model.safetensors"):
        (folder / file).symlink_to(pair.target / file)
    words = {
        word: token_id
        for token_id, word in enumerate(
            ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o"]
        )
    }
    tokenizer = Tokenizer(models.WordLevel({**words, "?": 15}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([AddedToken("<end>", special=True), AddedToken("<think>", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [16, 3]}))
    return folder


def test_text_is_counted_with_the_targets_tokenizer(target, tmp_path, capsys):
    (tmp_path / "one.txt").write_text("o o o b b <end>")
    (tmp_path / "two.txt").write_text("b n b")
    output = tmp_path / "shortlist.safetensors"
    files = [str(tmp_path / name) for name in ("one.txt", "two.txt")]
    main(["--target", str(target), "--rows", "6", "--output", str(output), "--text", *files])
    # b, o, n and the end token as counted; 3 (an end id) and 17 (added) although never seen
    token_ids = read_shortlist(output, public_vocab=18, least_rows=6)
    assert token_ids.tolist() == [1, 14, 13, 16, 3, 17]
    assert "6 of 18 ids, 100.00 %" in capsys.readouterr().out


def test_counts_may_be_given(target, tmp_path):
    output, counts = tmp_path / "shortlist.safetensors", tmp_path / "counts.json"
    arguments = ["--target", str(target), "--rows", "5", "--output", str(output)]
    arguments += ["--counts", str(counts)]
    counts.write_text(json.dumps({"4": 10, "17": 3, "0": 10}))
    main(arguments)
    assert read_shortlist(output, 18, 5).tolist() == [0, 4, 17, 3, 16]
    for wrong, message in (
        ({"18": 1}, r"expected ids in \[0, 18\), got '18'"),
        ({"x": 1}, "got 'x'"),
        ({"1": -1}, "count of 1: expected >= 0, got -1"),
        ({"1": 1.5}, "got 1.5"),
        ([1], "expected an object of counts by id, got list"),
    ):
        counts.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=message):
            main(arguments)


def test_a_drafter_proposes_from_a_built_shortlist(make_pair, load, features, target, tmp_path):
    output, counts = tmp_path / "shortlist.safetensors", tmp_path / "counts.json"
    counts.write_text(json.dumps({str(token_id): token_id for token_id in range(16)}))
    main(
        ["--target", str(target), "--rows", "16", "--output", str(output), "--counts", str(counts)]
    )
    pair = make_pair("dflash2", "ll", is_causal=False)
    drafting = load(pair, target=target, proposal_head=str(output))
    assert drafting.weights.head.rows.shape == (16, 64)
    assert torch.equal(drafting.weights.head.rows, pair.head[drafting.weights.head.token_ids])
