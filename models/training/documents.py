"""The packed documents, read back and checked against the manifest."""

import hashlib
import json
import lzma
from dataclasses import dataclass

from .places import DOCUMENTS, MANIFEST


@dataclass(frozen=True)
class Document:
    """One source file: where it came from, `code` or `plays`, and `train` or `held_out`."""

    source: str
    kind: str
    split: str
    text: str


def read_documents() -> list[Document]:
    """Returns all packed documents, in packed order."""
    packed = DOCUMENTS.read_bytes()
    expected = json.loads(MANIFEST.read_text())["files"][DOCUMENTS.name]["sha256"]
    actual = hashlib.sha256(packed).hexdigest()
    if actual != expected:
        raise ValueError(f"{DOCUMENTS.name}: expected sha256 {expected}, got {actual}")
    # a document may hold other line separators, so only a newline ends a record
    lines = lzma.decompress(packed).decode().removesuffix("\n").split("\n")
    return [Document(**json.loads(line)) for line in lines]
