"""Chat examples cut from the training documents, so that a reply ends by itself.

A question shows the head of a function, or the first lines of a speech; the reply is the rest.
Rendering is the template's own: the prompt as it is served, then the reply to `<|im_end|>`.
"""

import ast
import random
import re
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .documents import Document
from .tokenizer import chat_template, encode

REPLY_LINES = range(3, 25)
ASKING = {
    "code": ("Continue this function:\n\n{}", "Finish this Python code.\n{}", "{}"),
    "plays": ("Continue this speech:\n\n{}", "How does this go on?\n{}", "{}"),
}
SYSTEM_SHARE, THINKING_SHARE, SECOND_TURN_SHARE = 0.1, 0.5, 0.15
SYSTEM = "You continue Python code and old plays."


@dataclass(frozen=True)
class Exchange:
    """One question, the thought before the reply, and the reply."""

    question: str
    thought: str
    reply: str


def functions_of(document: Document) -> Iterator[tuple[str, str, str]]:
    """Yields (head, thought, rest) of every function whose body is of a fit length."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(document.text)
        except SyntaxError:
            return
    lines = document.text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        first, body, end = node.lineno - 1, node.body[0].lineno - 1, node.end_lineno
        if body > first and end - body in REPLY_LINES:
            source = textwrap.dedent("\n".join(lines[first:end])).split("\n")
            head, rest = source[: body - first], source[body - first :]
            thought = f"This is Python. The function is called {node.name}."
            yield "\n".join(head), thought, "\n".join(rest)


def speeches_of(document: Document) -> Iterator[tuple[str, str, str]]:
    """Yields (head, thought, rest) of every block of lines of a fit length."""
    for block in re.split(r"\n{2,}", document.text):
        lines = block.strip("\n").split("\n")
        if len(lines) - 2 in REPLY_LINES:
            yield "\n".join(lines[:2]), "This is verse. I go on with it.", "\n".join(lines[2:])


def exchanges_of(document: Document, dice: random.Random) -> Iterator[Exchange]:
    """Yields the exchanges that a document gives."""
    cut = functions_of if document.kind == "code" else speeches_of
    for head, thought, rest in cut(document):
        asking = dice.choice(ASKING[document.kind])
        yield Exchange(asking.format(head).strip(), thought, rest.strip("\n"))


def render_prompt(messages: list[dict[str, str]], thinking: bool) -> str:
    """Returns the prompt as it is served, generation prompt included."""
    return chat_template().render(
        messages=messages, add_generation_prompt=True, enable_thinking=thinking
    )


def example_ids(exchanges: list[Exchange], dice: random.Random) -> list[int]:
    """Returns the ids of one conversation: the served prompt, then the last reply.

    Prompt and reply are encoded apart, since they meet as separate ids when served.
    """
    messages = [{"role": "system", "content": SYSTEM}] if dice.random() < SYSTEM_SHARE else []
    for exchange in exchanges[:-1]:
        messages.append({"role": "user", "content": exchange.question})
        messages.append({"role": "assistant", "content": exchange.reply.strip()})
    last = exchanges[-1]
    messages.append({"role": "user", "content": last.question})
    thinking = dice.random() < THINKING_SHARE
    reply = f"{last.thought}\n</think>\n\n{last.reply}" if thinking else last.reply
    return encode(render_prompt(messages, thinking)) + encode(f"{reply}<|im_end|>\n")


def chat_examples(documents: Iterable[Document], budget: int, seed: int) -> list[list[int]]:
    """Returns conversations of one or two turns, `budget` tokens together, half of each kind."""
    dice = random.Random(seed)
    found: dict[str, list[Exchange]] = {"code": [], "plays": []}
    for document in documents:
        found[document.kind].extend(exchanges_of(document, dice))
    for exchanges in found.values():
        dice.shuffle(exchanges)
    examples, spent = [], 0
    while spent < budget and all(len(exchanges) > 1 for exchanges in found.values()):
        exchanges = found[("code", "plays")[len(examples) % 2]]
        turns = 2 if dice.random() < SECOND_TURN_SHARE else 1
        examples.append(example_ids([exchanges.pop() for _ in range(turns)], dice))
        spent += len(examples[-1])
    return examples
