"""Builds a proposal head's shortlist: `python -m models.shortlist --rows N --output FILE`.

A drafter that proposes from the most frequent tokens alone reads fewer rows of the head a round;
what it never proposes costs acceptance, never correctness. The file lists
public ids, most frequent first, so that a tie between logits goes to the more frequent token.
Tokens that text does not show but that replies need (ends, roles, tools, thinking) are always in.

Counts come from the packed corpus, from text files, or from a JSON object of counts by id.
"""

import argparse
import json
import lzma
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.checkpoint import Checkpoint, bundled, load_tokenizer
from outrider.pair import TargetFacts

from .training.places import DOCUMENTS


def choose(counts: Tensor, forced: Iterable[int], rows: int) -> Tensor:
    """Chooses a shortlist.

    Args:
        counts: [public vocabulary] int64, how often each id occurred.
        forced: Ids that are in whatever their count.
        rows: How many ids to choose.

    Returns:
        [rows] int32 ids by descending count, equal counts by ascending id.

    Raises:
        ValueError: A forced id outside the vocabulary, or a number of rows that cannot be chosen.
    """
    required = torch.tensor(sorted(set(forced)), dtype=torch.int64)
    if len(required) and not 0 <= int(required[0]) <= int(required[-1]) < len(counts):
        outside = [int(i) for i in required if not 0 <= i < len(counts)]
        raise ValueError(f"forced: expected ids in [0, {len(counts)}), got {outside}")
    least = max(1, len(required))
    if not least <= rows <= len(counts):
        raise ValueError(f"rows: expected {least}..{len(counts)}, got {rows}")
    # forced ids come first for the choice, and take the place of their count in the order
    priority = counts.clone()
    priority[required] = torch.iinfo(torch.int64).max
    chosen = priority.argsort(descending=True, stable=True)[:rows].sort().values
    return chosen[counts[chosen].argsort(descending=True, stable=True)].int()


def forced_ids(target: Checkpoint, facts: TargetFacts) -> set[int]:
    """Every added token of the target, and what ends its texts and turns."""
    tokenizer = load_tokenizer(target.folder)
    return set(tokenizer.get_added_tokens_decoder()) | facts.stop_ids


def read_counts(path: Path, public_vocab: int) -> Tensor:
    """Reads a JSON object of counts by id.

    Raises:
        ValueError: Another kind of file, an id that is not public, or a negative count.
    """
    entries = json.loads(path.read_text())
    if not isinstance(entries, dict):
        raise ValueError(
            f"{path}: expected an object of counts by id, got {type(entries).__name__}"
        )
    counts = torch.zeros(public_vocab, dtype=torch.int64)
    for token_id, count in entries.items():
        if not token_id.isdecimal() or int(token_id) >= public_vocab:
            raise ValueError(f"{path}: expected ids in [0, {public_vocab}), got {token_id!r}")
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"{path}: count of {token_id}: expected >= 0, got {count!r}")
        counts[int(token_id)] = count
    return counts


def count_tokens(texts: Iterable[str], folder: Path, public_vocab: int) -> Tensor:
    """Counts how often the target's tokenizer yields each id."""
    tokenizer, seen = load_tokenizer(folder), Counter[int]()
    for text in texts:
        seen.update(tokenizer.encode(text, add_special_tokens=False).ids)
    counts = torch.zeros(public_vocab, dtype=torch.int64)
    counts[torch.tensor(list(seen), dtype=torch.int64)] = torch.tensor(list(seen.values()))
    return counts


def corpus_texts() -> Iterator[str]:
    """Yields the training documents of the packed corpus."""
    with lzma.open(DOCUMENTS, "rt", encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            if document["split"] == "train":
                yield document["text"]


def build(options: argparse.Namespace) -> Tensor:
    """Counts, chooses and writes; returns what was written."""
    with Checkpoint(options.target or bundled("target")) as target:
        facts = TargetFacts.read(target)
        if options.counts:
            counts = read_counts(options.counts, facts.public_vocab)
        else:
            texts = (path.read_text(encoding="utf-8") for path in options.text or ())
            texts = texts if options.text else corpus_texts()
            counts = count_tokens(texts, target.folder, facts.public_vocab)
        token_ids = choose(counts, forced_ids(target, facts), options.rows)
    save_file({"token_ids": token_ids}, options.output)
    covered = counts[token_ids.long()].sum() / counts.sum().clamp(min=1)
    print(
        f"{len(token_ids):,} of {facts.public_vocab:,} ids, "
        f"{100 * covered:.2f} % of the counted tokens: {options.output}"
    )
    return token_ids


def main(argv: list[str] | None = None) -> None:
    """Parses the command line and builds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, help="folder of the target (default: bundled)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--counts", type=Path, help="JSON object of counts by id")
    source.add_argument("--text", type=Path, nargs="+", help="UTF-8 files to count tokens in")
    parser.add_argument("--rows", type=int, required=True, help="ids to choose")
    parser.add_argument("--output", type=Path, required=True, help="safetensors file to write")
    build(parser.parse_args(argv))


if __name__ == "__main__":
    main()
