"""Token streams for training, held-out losses and held-out prompts."""

import json
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from .chat import chat_examples, exchanges_of, render_prompt
from .documents import Document, read_documents
from .places import PROMPTS
from .tokenizer import END_OF_TEXT, encode, load_tokenizer

SEED = 20261130
PROMPT_TOKENS = 96
PROMPTS_PER_KIND = 56
CHAT_PROMPTS = 16
CHAT_SHARE = 0.13


@dataclass(frozen=True)
class Streams:
    """Token ids, int64, one dimension: the training text and each kind's held-out text."""

    train: Tensor
    held_out: dict[str, Tensor]


def encode_all(documents: list[Document]) -> list[list[int]]:
    """Returns the ids of each document, in parallel where cores allow."""
    texts = [document.text for document in documents]
    return [encoding.ids for encoding in load_tokenizer().encode_batch(texts)]


def join(pieces: list[list[int]]) -> list[int]:
    """Returns the pieces one after the other, each closed by the end-of-text token."""
    return [id_ for piece in pieces for id_ in (*piece, END_OF_TEXT)]


@cache
def load_streams() -> Streams:
    """Encodes the packed documents and the chat examples; the order is shuffled once."""
    documents = read_documents()
    train = [document for document in documents if document.split == "train"]
    pieces = encode_all(train)
    budget = int(CHAT_SHARE * sum(len(piece) for piece in pieces))
    pieces += chat_examples(train, budget, SEED)
    random.Random(SEED).shuffle(pieces)
    held_out = {}
    for kind in ("code", "plays"):
        aside = [item for item in documents if item.split == "held_out" and item.kind == kind]
        held_out[kind] = torch.tensor(join(encode_all(aside)))
    return Streams(torch.tensor(join(pieces)), held_out)


def cut_prompts(documents: list[Document], dice: random.Random) -> list[dict[str, object]]:
    """Returns prompts of equal length that begin at line starts, spread evenly over the works."""
    prompts: list[dict[str, object]] = []
    while len(prompts) < PROMPTS_PER_KIND:
        document = documents[len(prompts) % len(documents)]
        lines = document.text.split("\n")
        first = dice.randrange(20, len(lines) - 60)
        text = "\n".join(lines[first : first + 60]).lstrip("\n")
        ids = encode(text)[:PROMPT_TOKENS]
        # a token cut inside a character would not survive the way through text
        decoded = load_tokenizer().decode(ids, skip_special_tokens=False)
        if len(ids) == PROMPT_TOKENS and encode(decoded) == ids:
            origin = {"kind": document.kind, "source": document.source}
            prompts.append({**origin, "text": decoded, "token_ids": ids})
    return prompts


def write_prompts(path: Path = PROMPTS) -> None:
    """Writes the held-out prompts, and a few chat prompts, as committed JSON."""
    dice = random.Random(SEED)
    documents = [item for item in read_documents() if item.split == "held_out"]
    prompts, chats = [], []
    for kind in ("code", "plays"):
        aside = [document for document in documents if document.kind == kind]
        prompts += cut_prompts(aside, dice)
        exchanges = [item for document in aside for item in exchanges_of(document, dice)]
        for exchange in dice.sample(exchanges, CHAT_PROMPTS // 2):
            messages = [{"role": "user", "content": exchange.question}]
            text = render_prompt(messages, thinking=False)
            chats.append({"kind": kind, "messages": messages, "token_ids": encode(text)})
    written = {"prompt_tokens": PROMPT_TOKENS, "prompts": prompts, "chat": chats}
    lines = json.dumps(written, ensure_ascii=False, indent=1)
    path.write_text(re.sub(r"\[[\d,\s]+\]", on_one_line, lines) + "\n", encoding="utf-8")


def on_one_line(ids: re.Match[str]) -> str:
    """Returns a list of numbers of indented JSON on one line."""
    return "[" + ", ".join(re.findall(r"\d+", ids[0])) + "]"
