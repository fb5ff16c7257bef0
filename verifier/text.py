"""Text and token ids: the checkpoint's tokenizer, its chat template, and exact decoding by pieces.

A byte-level tokenizer maps every id to bytes, and the text of some ids is the decoding of their
bytes in a row. So decoding goes id by id without looking back: a character is known as soon as its
last byte is there, and bytes that cannot become one turn into U+FFFD exactly as in one go.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.checkpoint import Checkpoint, CheckpointError, chat_template, load_tokenizer
from outrider.faults import FaultError

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# names of tokenizer_config.json's special tokens, which templates may use as variables
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Text:
    """A checkpoint's way between text, messages and token ids. Safe to call from any thread.

    Args:
        tokenizer: Byte-level tokenizer; None where the checkpoint brings none: then ids have no
            text, and text has no ids.
        template: Jinja source of the chat template, or None.
        special_tokens: Template variables such as ``eos_token``.

    Raises:
        CheckpointError: the tokenizer is not byte-level, or the template does not compile.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens or {})
        self._bytes: dict[int, bytes] = {}
        self._special: frozenset[int] = frozenset()
        if tokenizer is not None:
            self._special = frozenset(
                token_id
                for token_id, token in tokenizer.get_added_tokens_decoder().items()
                if token.special
            )
            _require_byte_level(tokenizer)
        try:
            self._template = None if template is None else _environment().from_string(template)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"chat template: {error}") from error

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> Text:
        """Reads tokenizer and template of a target folder.

        Raises:
            CheckpointError: a tokenizer or template that cannot be used. Their absence is no error.
        """
        folder = checkpoint.folder
        has_tokenizer = (folder / "tokenizer.json").exists()
        special_tokens: dict[str, str] = {}
        for name in _SPECIAL_NAMES:
            token = checkpoint.tokenizer_config.get(name)
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str):
                special_tokens[name] = content
        return cls(
            load_tokenizer(folder) if has_tokenizer else None,
            chat_template(folder),
            special_tokens,
        )

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can become ids."""
        return self._tokenizer is not None

    @property
    def has_template(self) -> bool:
        """Whether messages can become text."""
        return self._template is not None

    def encode(self, text: str, *, rendered: bool = False) -> list[int]:
        """Token ids of a text; names of special tokens in it become those tokens.

        Args:
            text: Any text.
            rendered: Whether a template wrote it, and with it whatever belongs at its ends.

        Raises:
            FaultError: REQUEST_INVALID, the checkpoint has no tokenizer.
        """
        if self._tokenizer is None:
            raise FaultError(
                "REQUEST_INVALID", "text: expected token ids, the checkpoint has no tokenizer"
            )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=not rendered).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; undecodable bytes become U+FFFD, unknown ids nothing."""
        skipped = self._special if skip_special_tokens else frozenset()
        data = b"".join(self._all_bytes(i) for i in token_ids if i not in skipped)
        return data.decode("utf-8", "replace")

    def decoded_bytes(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> int:
        """How many bytes `decode` would join, without joining them; its text has no fewer."""
        skipped = self._special if skip_special_tokens else frozenset()
        counts = Counter(token_ids)
        return sum(len(self._all_bytes(i)) * n for i, n in counts.items() if i not in skipped)

    def shown_bytes(self, token_id: int) -> bytes:
        """The bytes that a generated token adds to the text: none for a special token."""
        return b"" if token_id in self._special else self._all_bytes(token_id)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: role, content and whatever else the template reads.
            tools: JSON objects, or None.
            add_generation_prompt: Whether the beginning of the answer is appended.
            **variables: Further template variables.

        Raises:
            FaultError: TEMPLATE_FAILED, there is no template or it refused the conversation.
        """
        if self._template is None:
            raise FaultError("TEMPLATE_FAILED", "chat: the checkpoint has no chat template")
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
                **variables,
            )
        except _TEMPLATE_ERRORS as error:
            raise FaultError("TEMPLATE_FAILED", f"chat template: {error}") from error

    def _all_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id) if self._tokenizer is not None else None
            known = b"" if token is None else _token_bytes(token)
            self._bytes[token_id] = known
        return known


def decode_step(pending: bytes, added: bytes) -> tuple[str, bytes]:
    """Decodes what ``added`` completes.

    Args:
        pending: The beginning of a character, as an earlier step left it; may be empty.
        added: The bytes that follow it.

    Returns:
        Whole characters, and the beginning of the next one. The first character is the one that
        ``pending`` began, if it began one.
    """
    data = pending + added
    if data.isascii():
        return data.decode("ascii"), b""
    tail = _incomplete_tail(data)
    whole = data[: len(data) - tail] if tail else data
    return whole.decode("utf-8", "replace"), data[len(whole) :]


def _incomplete_tail(data: bytes) -> int:
    """How many bytes at the end begin a character without ending it (Unicode 16, table 3-7)."""
    for count in range(1, min(3, len(data)) + 1):
        lead = data[-count]
        if lead & 0xC0 == 0x80:
            continue
        first_second, last_second, length = _LEADS.get(lead, (0, 0, 0))
        begun = count < length and (count == 1 or first_second <= data[1 - count] <= last_second)
        return count if begun else 0
    return 0


def _leads() -> dict[int, tuple[int, int, int]]:
    """Lead byte to the interval of its second byte and the length of its sequence."""
    leads = dict.fromkeys(range(0xC2, 0xE0), (0x80, 0xBF, 2))
    leads |= dict.fromkeys(range(0xE0, 0xF0), (0x80, 0xBF, 3))
    leads |= dict.fromkeys(range(0xF0, 0xF5), (0x80, 0xBF, 4))
    return leads | {
        0xE0: (0xA0, 0xBF, 3),
        0xED: (0x80, 0x9F, 3),
        0xF0: (0x90, 0xBF, 4),
        0xF4: (0x80, 0x8F, 4),
    }


_LEADS = _leads()


def _byte_characters() -> dict[str, int]:
    """The printable character by which a byte-level vocabulary writes each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_CHARACTER_BYTES = _byte_characters()


def _token_bytes(token: str) -> bytes:
    """Bytes of a vocabulary entry; one that is not written in byte characters stands for itself."""
    try:
        return bytes([_CHARACTER_BYTES[character] for character in token])
    except KeyError:
        return token.encode()


def _require_byte_level(tokenizer: Tokenizer) -> None:
    from tokenizers.decoders import ByteLevel

    if not isinstance(tokenizer.decoder, ByteLevel):
        raise CheckpointError(
            f"tokenizer.json: decoder: expected ByteLevel, got {type(tokenizer.decoder).__name__}"
        )


# what a template that refuses, or does not fit its data, can raise
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _Generation(Extension):
    """Renders ``{% generation %}`` blocks, a training mark, as their contents."""

    tags = {"generation"}  # noqa: RUF012 - as jinja declares it

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Replaces the block with its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that published templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # jinja's own filter escapes HTML, which would change the prompt
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    # local time, as templates expect
    return datetime.datetime.now().strftime(pattern)
