"""Model folders: what is read, and how each kind of damage is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider import checkpoint as checkpoint_module
from outrider.checkpoint import (
    Checkpoint,
    CheckpointError,
    Fields,
    TensorFile,
    bundled,
    chat_template,
    known_token_ids,
    load_tokenizer,
    stop_ids,
)

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(4, 3),
    "b.weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "c": torch.ones(5, dtype=torch.float16),
}
SHAPES = {"a.weight": (4, 3), "b.weight": (2, 3), "c": (5,)}


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "config.json", {"hidden_size": 3})
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write(tmp_path, "config.json", {})
    save_file({"a.weight": TENSORS["a.weight"]}, tmp_path / "one.safetensors")
    save_file({n: TENSORS[n] for n in ("b.weight", "c")}, tmp_path / "two.safetensors")
    weight_map = {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}
    index = {"metadata": {}, "weight_map": weight_map | {"c": "two.safetensors"}}
    write(tmp_path, "model.safetensors.index.json", index)
    return tmp_path


@pytest.mark.parametrize("layout", ["folder", "sharded"])
def test_tensors_are_read_as_stored(layout: str, request: pytest.FixtureRequest):
    with Checkpoint(request.getfixturevalue(layout)) as checkpoint:
        assert checkpoint.names == set(TENSORS)
        assert {name: checkpoint.shape(name) for name in SHAPES} == SHAPES
        assert [checkpoint.dtype(name) for name in TENSORS] == ["F32", "BF16", "F16"]
        for name, expected in TENSORS.items():
            actual = checkpoint.tensor(name)
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)
        assert torch.equal(checkpoint.rows("a.weight", 1, 3), TENSORS["a.weight"][1:3])
        checkpoint.expect(SHAPES)


def test_a_tensor_outlives_the_checkpoint(folder: Path):
    with Checkpoint(folder) as checkpoint:
        tensor = checkpoint.tensor("a.weight")
    assert torch.equal(tensor, TENSORS["a.weight"])


def test_configs_are_read_and_absent_ones_are_empty(folder: Path):
    write(folder, "generation_config.json", {"eos_token_id": 3})
    checkpoint = Checkpoint(folder)
    assert checkpoint.config == {"hidden_size": 3}
    assert checkpoint.generation_config == {"eos_token_id": 3}
    assert checkpoint.tokenizer_config == {}


@pytest.mark.parametrize("rows", [(-1, 2), (3, 2), (0, 5)], ids=str)
def test_rows_outside_the_tensor_are_refused(folder: Path, rows: tuple[int, int]):
    with pytest.raises(CheckpointError, match=r"a\.weight: expected rows within \[0, 4\)"):
        Checkpoint(folder).rows("a.weight", *rows)


def test_a_config_alone_will_do_until_a_tensor_is_asked_for(tmp_path: Path):
    write(tmp_path, "config.json", {})
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or .*, got neither"):
        _ = checkpoint.names


def test_no_folder_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"absent: expected a model folder, got nothing"):
        Checkpoint(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file: expected a model folder, got a file"):
        Checkpoint(tmp_path / "file")


def test_no_config_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\udcff"], ids=["empty", "cut", "list", "bytes"])
def test_a_broken_config_is_named(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json: expected"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 60, -1], ids=["nothing", "size", "header", "data"])
def test_a_truncated_file_is_named(folder: Path, kept: int):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: expected a complete safetensors file"
    ):
        Checkpoint(folder).expect(SHAPES)


def test_a_file_of_another_kind_is_named(folder: Path):
    (folder / "model.safetensors").write_bytes(b"\x89PNG" * 100)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected a complete"):
        Checkpoint(folder).expect(SHAPES)


def test_an_unknown_tensor_file_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"heads\.safetensors: no such file"):
        TensorFile(tmp_path / "heads.safetensors")


def test_a_missing_shard_is_named(sharded: Path):
    (sharded / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"two\.safetensors: no such file"):
        _ = Checkpoint(sharded).names


def test_a_shard_outside_the_folder_is_refused(sharded: Path):
    write(sharded, "model.safetensors.index.json", {"weight_map": {"a": "../one.safetensors"}})
    with pytest.raises(CheckpointError, match=r"expected a file name, got '\.\./one"):
        _ = Checkpoint(sharded).names


@pytest.mark.parametrize("index", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}], ids=str)
def test_a_broken_index_is_named(sharded: Path, index: dict):
    write(sharded, "model.safetensors.index.json", index)
    with pytest.raises(CheckpointError, match=r"index\.json: expected weight_map"):
        _ = Checkpoint(sharded).names


def test_a_tensor_that_its_shard_lacks_is_named(sharded: Path):
    weight_map = {"a.weight": "two.safetensors", "c": "two.safetensors"}
    write(sharded, "model.safetensors.index.json", {"weight_map": weight_map})
    with pytest.raises(CheckpointError, match=r"a\.weight: expected in two\.safetensors"):
        _ = Checkpoint(sharded).names


def test_a_tensor_in_two_shards_is_named(sharded: Path):
    save_file(TENSORS, sharded / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.weight: already in one\.safetensors"):
        _ = Checkpoint(sharded).names


def test_missing_extra_misshaped_and_quantized_tensors_are_all_named(folder: Path):
    quantized = {"q.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn), "mtp.x": torch.ones(1)}
    save_file({**TENSORS, **quantized}, folder / "model.safetensors")
    expected = {"a.weight": (4, 4), "d.weight": (7,), "c": (5,), "q.weight": (2, 2)}
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder).expect(expected, unused=("mtp.", "model.visual."))
    message = str(caught.value)
    assert "a.weight: expected [4, 4], got [4, 3]" in message
    assert "d.weight: expected [7], got no such tensor" in message
    assert "b.weight: expected no such tensor, got [2, 3]" in message
    assert "q.weight: expected one of F32, BF16, F16, got F8_E4M3" in message
    assert "mtp" not in message
    assert "; c:" not in message


def test_many_problems_are_counted(folder: Path):
    with pytest.raises(CheckpointError, match=r"and 91 more"):
        Checkpoint(folder).expect({f"layer.{i}": (1,) for i in range(100)})


def tokenizer_folder(folder: Path, decoder: dict | None = None, **config: object) -> Path:
    """A byte-level tokenizer of 256 bytes whose own file adds <a> 256 and <b> 257."""
    tokenizer = Tokenizer(
        models.BPE({c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<a>", "<b>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": decoder or {}, **config})
    write(folder, "config.json", {"vocab_size": 300})
    return folder


MORE = {
    "256": {"content": "<a>", "special": True},
    "258": {"content": "<c>", "special": True},
    "259": {"content": "<d>", "special": False},
}


def test_added_tokens_of_the_config_are_merged(tmp_path: Path):
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path, MORE))
    assert tokenizer.encode("x<c><d>y", add_special_tokens=False).ids[1:3] == [258, 259]
    assert tokenizer.decode([258, 259], skip_special_tokens=True) == "<d>"
    known = known_token_ids(Checkpoint(tmp_path))
    assert max(known) == 259
    assert known[256] == "<a>"


@pytest.mark.parametrize(
    "entry",
    [
        {"258": {"content": "<a>"}},
        {"257": {"content": "<c>"}},
        {"300": {"content": "<c>"}},
    ],
    ids=["known content elsewhere", "known id otherwise", "gap"],
)
def test_added_tokens_that_disagree_are_refused(tmp_path: Path, entry: dict):
    with pytest.raises(CheckpointError, match=r"added token \d+: expected"):
        load_tokenizer(tokenizer_folder(tmp_path, entry))


@pytest.mark.parametrize("entry", [{"x": {"content": "<c>"}}, {"258": "<c>"}, {"258": {}}, ["<c>"]])
def test_broken_added_tokens_are_refused(tmp_path: Path, entry: object):
    with pytest.raises(CheckpointError, match=r"added_tokens_decoder: expected ids to tokens"):
        load_tokenizer(tokenizer_folder(tmp_path, entry))


def test_a_broken_tokenizer_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path)
    write(tmp_path, "tokenizer.json", {"model": {}})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "tokenizer",
    [{}, {"model": {"vocab": 3}}, {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}],
    ids=["empty", "vocab", "added"],
)
def test_ids_of_a_broken_tokenizer_are_not_guessed(folder: Path, tokenizer: dict):
    write(folder, "tokenizer.json", tokenizer)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected model\.vocab and added"):
        known_token_ids(Checkpoint(folder))


def test_stop_ids_are_the_union_of_three_sources(tmp_path: Path):
    tokenizer_folder(tmp_path, eos_token="<b>")
    write(tmp_path, "config.json", {"text_config": {"eos_token_id": 7}})
    assert stop_ids(Checkpoint(tmp_path)) == {257, 7}
    write(tmp_path, "generation_config.json", {"eos_token_id": [256, 9]})
    assert stop_ids(Checkpoint(tmp_path)) == {257, 7, 256, 9}


def test_no_source_means_no_stop_ids(folder: Path):
    assert stop_ids(Checkpoint(folder)) == frozenset()


@pytest.mark.parametrize("value", ["</s>", [1, "x"], -1, True, 1.5], ids=repr)
def test_stop_ids_that_are_none_are_refused(folder: Path, value: object):
    write(folder, "generation_config.json", {"eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"eos_token_id: expected token ids"):
        stop_ids(Checkpoint(folder))


def test_an_eos_token_that_the_tokenizer_lacks_is_refused(tmp_path: Path):
    tokenizer_folder(tmp_path, eos_token={"content": "<nowhere>"})
    with pytest.raises(CheckpointError, match=r"eos_token: expected .* got '<nowhere>'"):
        stop_ids(Checkpoint(tmp_path))


def test_the_chat_template_file_comes_first(folder: Path):
    assert chat_template(folder) is None
    write(folder, "tokenizer_config.json", {"chat_template": "inner"})
    assert chat_template(folder) == "inner"
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert chat_template(folder) == "d"
    (folder / "chat_template.jinja").write_text("outer")
    assert chat_template(folder) == "outer"


def test_bundled_folders_are_found_by_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTRIDER_MODELS", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"bundled checkpoint target: .*OUTRIDER_MODELS"):
        bundled("target")
    (tmp_path / "bundled" / "target").mkdir(parents=True)
    write(tmp_path / "bundled" / "target", "config.json", {})
    assert bundled("target") == tmp_path / "bundled" / "target"


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ('{{"url": "{checkout}", "dir_info": {{}}}}', True),
        ('{{"url": "https://example.org/outrider.whl"}}', False),
        ("not JSON", False),
        (None, False),
    ],
    ids=["a folder", "elsewhere", "garbage", "nothing"],
)
def test_bundled_folders_are_found_where_the_package_was_installed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str | None, found: bool
):
    """`pip install .` copies the package away from its models, and records from where."""
    checkout, installed = tmp_path / "check out", tmp_path / "site-packages" / "outrider"
    (checkout / "models" / "bundled" / "target").mkdir(parents=True)
    write(checkout / "models" / "bundled" / "target", "config.json", {})
    monkeypatch.delenv("OUTRIDER_MODELS", raising=False)
    monkeypatch.setattr(checkpoint_module, "__file__", str(installed / "checkpoint.py"))
    text = None if record is None else record.format(checkout=checkout.as_uri())

    class Distribution:
        def read_text(self, name: str) -> str | None:
            return text if name == "direct_url.json" else None

    monkeypatch.setattr(checkpoint_module, "distribution", lambda name: Distribution())
    if found:
        assert bundled("target") == checkout / "models" / "bundled" / "target"
    else:
        with pytest.raises(CheckpointError, match="bundled checkpoint target: expected"):
            bundled("target")


@pytest.mark.parametrize(
    ("read", "value"),
    [
        (Fields.integer, "8"),
        (Fields.integer, True),
        (Fields.integer, 8.0),
        (Fields.integer, 0),
        (Fields.integer, None),
        (Fields.number, "1e7"),
        (Fields.number, float("nan")),
        (Fields.number, float("inf")),
        (Fields.number, 0),
        (Fields.number, False),
        (Fields.flag, 1),
        (Fields.integers, 3),
        (Fields.integers, [1, -1]),
        (Fields.integers, [True]),
    ],
    ids=lambda v: getattr(v, "__name__", repr(v)),
)
def test_fields_of_another_type_or_range_are_named(read, value: object):
    with pytest.raises(CheckpointError, match=r"config: size: expected .*, got"):
        read(Fields({"size": value}, "config"), "size")


def test_fields_that_are_absent_take_the_default():
    fields = Fields({"size": None}, "config")
    assert fields.integer("size", 4) == 4
    assert fields.number("other", 0.5) == 0.5
    with pytest.raises(CheckpointError, match=r"other: expected an integer .*, got nothing"):
        fields.integer("other")


def test_importing_the_reader_needs_no_torch():
    code = (
        "import sys, outrider.checkpoint, outrider.pair; "
        "sys.exit(bool({'torch', 'tokenizers', 'safetensors', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
