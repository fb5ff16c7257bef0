"""Reads a model folder: config fields, tensors by name, tokenizer facts. The only opener of files.

Every way in which a folder can be wrong ends in `CheckpointError`, which names the file, what was
expected and what is there. torch, safetensors and tokenizers are imported only by the calls that
need them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit
from urllib.request import url2pathname

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# element types that load into an FP32 or BF16 model without a scale of their own
FLOAT_DTYPES = ("F32", "BF16", "F16")
# problems listed in one message; the rest is only counted
_LISTED_PROBLEMS = 12


class CheckpointError(ValueError):
    """A model folder that cannot be used; the message names file, expected and actual."""


class Fields:
    """A config section whose every read is checked; null counts as absent.

    Without a default a field is required.

    Raises:
        CheckpointError: naming the section, the field, what was expected and what is there.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(key) is not None

    def integer(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1
    ) -> int:
        """A whole number within [least, most]."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            bound = f"of at least {least}" if most == 2**31 - 1 else f"in {least}..{most}"
            raise self.error(key, f"an integer {bound}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number greater than `above`."""
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "a number")
        if not math.isfinite(value) or value <= above:
            raise self.error(key, f"a finite number above {above:g}")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def integers(self, key: str, *, least: int = 0, most: int = 2**31 - 1) -> tuple[int, ...]:
        """A list of whole numbers within [least, most]."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(
            isinstance(v, int) and not isinstance(v, bool) and least <= v <= most for v in value
        ):
            raise self.error(key, f"a list of integers in {least}..{most}")
        return tuple(value)

    def words(self, key: str, allowed: Sequence[str]) -> tuple[str, ...]:
        """A list of words, each one of `allowed`."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(word in allowed for word in value):
            raise self.error(key, f"a list of {' or '.join(allowed)}")
        return tuple(value)

    def only(self, key: str, *allowed: object) -> None:
        """Checks that the field, where it is there, has one of the values that are implemented."""
        if self.has(key) and self.values[key] not in allowed:
            expected = " or ".join(repr(value) for value in allowed)
            raise self.error(key, f"absent or {expected}" if allowed else "absent")

    def error(self, key: str, expected: str) -> CheckpointError:
        """The error that says what the field should have been."""
        actual = repr(self.values[key]) if key in self.values else "nothing"
        return CheckpointError(f"{self.where}: {key}: expected {expected}, got {actual}")


class TensorFile:
    """One safetensors file, memory-mapped: tensors are read when asked for.

    Raises:
        CheckpointError: the file is missing, truncated or no safetensors file.
    """

    def __init__(self, path: str | Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = Path(path)
        try:
            self._file = _untyped(safe_open(self.path, framework="pt", device="cpu"))
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}: no such file") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path}: expected a complete safetensors file, got one that does not open "
                f"({error}; {_size(self.path)})"
            ) from error
        self.names: tuple[str, ...] = tuple(self._file.keys())
        self._known = frozenset(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Extents of a tensor, slowest first."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Stored element type in safetensors' spelling: "F32", "BF16", "F8_E4M3", ..."""
        return str(self._slice(name).get_dtype())

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor as stored, on the CPU. It may share the file's mapping: do not write."""
        self._slice(name)
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def rows(self, name: str, first: int, end: int) -> torch.Tensor:
        """Rows [first, end) of dimension 0, as stored, on the CPU."""
        shape = self.shape(name)
        if not shape or not 0 <= first <= end <= shape[0]:
            raise CheckpointError(
                f"{self.path}: {name}: expected rows within [0, {shape[0] if shape else 0}), "
                f"got [{first}, {end})"
            )
        rows: torch.Tensor = self._slice(name)[first:end]
        return rows

    def close(self) -> None:
        """Gives the mapping back. Tensors already read stay valid."""
        self._known = frozenset()
        del self._file

    def _slice(self, name: str) -> Any:
        if name not in self._known:
            raise CheckpointError(f"{self.path}: no tensor named {name}")
        return self._file.get_slice(name)


class Checkpoint:
    """A Hugging Face model folder: config.json and its kin, and the tensors of one or more shards.

    The JSON files are read at once, the tensor files when a tensor is first asked about; so a
    folder of which only the config is needed may lack them.

    Raises:
        CheckpointError: no such folder, no config.json, or JSON that is not an object.
    """

    is_random = False  # whether the tensors are drawn instead of read

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            state = "a file" if self.folder.exists() else "nothing there"
            raise CheckpointError(f"{self.folder}: expected a model folder, got {state}")
        config = _read_object(self.folder / "config.json")
        if config is None:
            raise CheckpointError(f"{self.folder / 'config.json'}: no such file")
        self.config: dict[str, Any] = config
        self.generation_config = _read_object(self.folder / "generation_config.json") or {}
        self.tokenizer_config = _read_object(self.folder / "tokenizer_config.json") or {}

    def has_file(self, name: str) -> bool:
        """Whether the folder holds a file of this name."""
        return (self.folder / name).is_file()

    def file_bytes(self, name: str) -> bytes:
        """Contents of a small file of the folder; empty when there is none."""
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise CheckpointError(f"{self.folder / name}: expected a file, got {error}") from error

    @cached_property
    def _files(self) -> dict[str, TensorFile]:
        """Which open file holds each tensor."""
        if (self.folder / SINGLE_FILE).is_file():
            single = TensorFile(self.folder / SINGLE_FILE)
            return dict.fromkeys(single.names, single)
        index_path = self.folder / INDEX_FILE
        index = _read_object(index_path)
        if index is None:
            raise CheckpointError(
                f"{self.folder}: expected {SINGLE_FILE} or {INDEX_FILE}, got neither"
            )
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(shard, str) for shard in weight_map.values()
        ):
            raise CheckpointError(f"{index_path}: expected weight_map of tensor names to files")
        holders: dict[str, TensorFile] = {}
        for shard_name in sorted(set(weight_map.values())):
            # a shard may not lead out of the folder
            if Path(shard_name).name != shard_name:
                raise CheckpointError(f"{index_path}: expected a file name, got {shard_name!r}")
            shard = TensorFile(self.folder / shard_name)
            for name in shard.names:
                if name in holders:
                    raise CheckpointError(
                        f"{shard.path}: {name}: already in {holders[name].path.name}"
                    )
                holders[name] = shard
        for name, shard_name in weight_map.items():
            if name not in holders or holders[name].path.name != shard_name:
                raise CheckpointError(f"{index_path}: {name}: expected in {shard_name}, not there")
        return holders

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Extents of a tensor, slowest first."""
        return self._file(name).shape(name)

    def dtype(self, name: str) -> str:
        """Stored element type in safetensors' spelling."""
        return self._file(name).dtype(name)

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor as stored, on the CPU. It may share the file's mapping: do not write."""
        return self._file(name).tensor(name)

    def rows(self, name: str, first: int, end: int) -> torch.Tensor:
        """Rows [first, end) of dimension 0, as stored, on the CPU."""
        return self._file(name).rows(name, first, end)

    def copy_into(self, destination: torch.Tensor, name: str) -> None:
        """Copies a tensor over `destination`, which has as many elements, in the same order.

        Of host memory it needs no more than the file's mapping, of the device none beside
        `destination`, or as much again where that is not contiguous.
        """
        destination.copy_(self.tensor(name).view(destination.shape))

    def expect(self, shapes: Mapping[str, tuple[int, ...]], *, unused: Iterable[str] = ()) -> None:
        """Checks that the folder holds exactly these float tensors.

        Args:
            shapes: every name that will be read, with its extents.
            unused: beginnings of names that may be present without being read.

        Raises:
            CheckpointError: lists missing, extra, misshaped and non-float tensors.
        """
        ignored = tuple(unused)
        present = self.names
        problems: list[str] = []
        for name, expected in shapes.items():
            if name not in present:
                problems.append(f"{name}: expected {_extents(expected)}, got no such tensor")
                continue
            actual = self.shape(name)
            if actual != tuple(expected):
                problems.append(f"{name}: expected {_extents(expected)}, got {_extents(actual)}")
            if self.dtype(name) not in FLOAT_DTYPES:
                problems.append(
                    f"{name}: expected one of {', '.join(FLOAT_DTYPES)}, got {self.dtype(name)}"
                )
        for name in sorted(present - shapes.keys()):
            if not name.startswith(ignored):
                problems.append(
                    f"{name}: expected no such tensor, got {_extents(self.shape(name))}"
                )
        if problems:
            listed = "; ".join(problems[:_LISTED_PROBLEMS])
            rest = len(problems) - _LISTED_PROBLEMS
            raise CheckpointError(
                f"{self.folder}: {listed}" + (f"; and {rest} more" if rest > 0 else "")
            )

    def close(self) -> None:
        """Closes the tensor files. Tensors already read stay valid."""
        for file in set(self.__dict__.pop("_files", {}).values()):
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _file(self, name: str) -> TensorFile:
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self.folder}: no tensor named {name}")
        return file


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The folder's tokenizer with every added token of tokenizer_config.json.

    tokenizer.json alone may be short of the last added tokens; those come from
    added_tokens_decoder, whose ids and contents must agree with tokenizer.json where both speak.

    Raises:
        CheckpointError: no tokenizer.json, a broken one, or disagreement.
    """
    from tokenizers import AddedToken, Tokenizer

    path = Path(folder) / "tokenizer.json"
    text = _read_text(path)
    if text is None:
        raise CheckpointError(f"{path}: no such file")
    _parse_object(path, text)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:
        raise CheckpointError(f"{path}: expected a tokenizer, got {error}") from error
    config_path = Path(folder) / "tokenizer_config.json"
    for token_id, entry in _added_tokens(config_path, _read_object(config_path) or {}):
        content = entry["content"]
        known_id, known_content = tokenizer.token_to_id(content), tokenizer.id_to_token(token_id)
        if known_id is None and known_content is None:
            options = {
                name: bool(entry.get(name, False))
                for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
            }
            tokenizer.add_tokens([AddedToken(content, **options)])
            known_id, known_content = tokenizer.token_to_id(content), content
        if known_id != token_id or known_content != content:
            raise CheckpointError(
                f"{config_path}: added token {token_id}: expected {content!r} at {token_id}, "
                f"got {known_content!r} there and {content!r} at {known_id}"
            )
    return tokenizer


def known_token_ids(checkpoint: Checkpoint) -> dict[int, str]:
    """Every id that tokenizer.json and added_tokens_decoder know, with its content.

    Needs no tokenizer library. Empty when the folder has no tokenizer.json.
    """
    path = checkpoint.folder / "tokenizer.json"
    tokenizer = _read_object(path)
    if tokenizer is None:
        return {}
    try:
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, dict):
            known = {int(token_id): content for content, token_id in vocabulary.items()}
        else:
            known = {token_id: entry[0] for token_id, entry in enumerate(vocabulary)}
        known |= {int(entry["id"]): entry["content"] for entry in tokenizer["added_tokens"] or []}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: expected model.vocab and added_tokens, got a {type(error).__name__}: {error}"
        ) from error
    config_path = checkpoint.folder / "tokenizer_config.json"
    for token_id, entry in _added_tokens(config_path, checkpoint.tokenizer_config):
        if known.setdefault(token_id, entry["content"]) != entry["content"]:
            raise CheckpointError(
                f"{config_path}: added token {token_id}: expected {known[token_id]!r} as in "
                f"{path.name}, got {entry['content']!r}"
            )
    return known


def stop_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """Ids that end a generation: the union of what generation, tokenizer and text config name.

    Some releases ship no generation config, and the text config names only the end of a text and
    not the end of a turn; so each source is taken where it exists.

    Raises:
        CheckpointError: an id that is none, or a tokenizer EOS that the tokenizer does not know.
    """
    text = checkpoint.config.get("text_config", checkpoint.config)
    stops: set[int] = set()
    for file, value in (
        ("generation_config.json", checkpoint.generation_config.get("eos_token_id")),
        ("config.json", text.get("eos_token_id") if isinstance(text, dict) else None),
    ):
        values = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in values:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise CheckpointError(
                    f"{checkpoint.folder / file}: eos_token_id: expected token ids, got {value!r}"
                )
            stops.add(token_id)
    eos = checkpoint.tokenizer_config.get("eos_token")
    content = eos.get("content") if isinstance(eos, dict) else eos
    if content is not None:
        ids = [i for i, known in known_token_ids(checkpoint).items() if known == content]
        if not ids:
            raise CheckpointError(
                f"{checkpoint.folder / 'tokenizer_config.json'}: eos_token: expected a token of "
                f"the tokenizer, got {content!r}"
            )
        stops.update(ids)
    return frozenset(stops)


def chat_template(folder: str | Path) -> str | None:
    """The folder's chat template (Jinja source), or None when it ships none.

    chat_template.jinja comes first; then tokenizer_config.json's chat_template, whose list form
    means the entry named "default".
    """
    text = _read_text(Path(folder) / "chat_template.jinja")
    if text is not None:
        return text
    path = Path(folder) / "tokenizer_config.json"
    template = (_read_object(path) or {}).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path}: chat_template: expected text, got {template!r}")
    return template


def tokenizer_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """What another process needs to tokenize and render as this one does, by file name.

    tokenizer.json holds every added token, and tokenizer_config.json the chat template, wherever
    the folder keeps them. Empty when the folder has no tokenizer.json.

    Raises:
        CheckpointError: as `load_tokenizer` and `chat_template`.
    """
    folder = checkpoint.folder
    if not (folder / "tokenizer.json").exists():
        return {}
    config = dict(checkpoint.tokenizer_config)
    template = chat_template(folder)
    if template is not None:
        config["chat_template"] = template
    return {
        "tokenizer.json": load_tokenizer(folder).to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "config.json": json.dumps(checkpoint.config).encode(),
    }


def bundled(name: str) -> Path:
    """Folder of a bundled checkpoint: "target", "dflash2" or "dflash".

    The models folder lies where OUTRIDER_MODELS says, or else in the checkout that this package is
    part of, or was installed from.

    Raises:
        CheckpointError: it is at none of these places.
    """
    chosen = os.environ.get("OUTRIDER_MODELS")
    models = Path(chosen) if chosen else Path(__file__).resolve().parents[2] / "models"
    folder = models / "bundled" / name
    if not (folder / "config.json").is_file() and not chosen:
        source = _installed_from()
        folder = folder if source is None else source / "models" / "bundled" / name
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"bundled checkpoint {name}: expected {folder / 'config.json'}, got nothing there; run "
            "from a checkout, set OUTRIDER_MODELS to its models folder, or name folders with "
            "--target and --draft"
        )
    return folder


def _installed_from() -> Path | None:
    """The folder that this package was installed from; None where it was none or is not known."""
    try:
        recorded = distribution("outrider").read_text("direct_url.json")
        url = urlsplit(json.loads(recorded or "{}").get("url", ""))
    except (PackageNotFoundError, ValueError):
        return None
    return Path(url2pathname(url.path)) if url.scheme == "file" else None


def _added_tokens(path: Path, config: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Entries of added_tokens_decoder by ascending id."""
    entries = config.get("added_tokens_decoder") or {}
    try:
        pairs = sorted((int(token_id), entry) for token_id, entry in entries.items())
        contents = [entry["content"] for _, entry in pairs]
    except (AttributeError, KeyError, TypeError, ValueError):
        contents = [None]
    if not all(isinstance(content, str) for content in contents):
        raise CheckpointError(f"{path}: added_tokens_decoder: expected ids to tokens with content")
    yield from pairs


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: expected UTF-8 text, got {error}") from error


def _parse_object(path: Path, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_object(path: Path) -> dict[str, Any] | None:
    text = _read_text(path)
    return None if text is None else _parse_object(path, text)


def _untyped(value: Any) -> Any:
    """The value, for a library whose annotations leave its methods untyped."""
    return value


def _extents(shape: Iterable[int]) -> str:
    return "[" + ", ".join(str(extent) for extent in shape) + "]"


def _size(path: Path) -> str:
    try:
        return f"{path.stat().st_size} bytes"
    except OSError as error:
        return str(error)
