"""The pairs and servers of the system tests, and a pair whose ids have text and an end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.conftest import dense, mixture, oracle, serve  # noqa: F401  (fixtures)
from tests.tiny_pair import save_pair
from tests.tiny_target import TEXT, Variant

EOS = 5
# ids with text of several characters, so that stop strings begin and end inside tokens
PIECES = {7: "seven", 9: "nine", 20: "x", 21: "EN", 22: "D y", 23: " z"}


@pytest.fixture(scope="session")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with a byte-level tokenizer over ids of our choosing, and an end-of-text id."""
    folder = save_pair(
        tmp_path_factory.mktemp("worded"), Variant("worded", text=(("eos_token_id", EOS),))
    )
    # U+0120 is how byte-level vocabularies write a blank
    words = {i: PIECES.get(i, f"<{i}>") for i in range(TEXT["vocab_size"]) if i != EOS}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": EOS,
                "content": "<|im_end|>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text.replace(" ", "\u0120"): i for i, text in words.items()},
            "merges": [],
        },
    }
    (folder / "target" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder
