"""What a request may ask: every field is checked here, and becomes a `Request` the engine trusts.

Fields arrive as plain values, None where the client left them out; 0 is a value. Each refusal is a
FaultError that names the field, what was expected and what came.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NoReturn

from outrider.checkpoint import CheckpointError
from outrider.faults import FaultError
from outrider.serving import MESSAGE_LIMIT
from outrider.tracing import NO_TRAIL, Trail
from verifier.request import Request, Sampling
from verifier.text import Text

MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_SAMPLES = 8
MAX_LOGPROBS = 20
MAX_REQUEST_ID_BYTES = 128
ROLES = ("system", "user", "assistant", "tool")

_U64 = (1 << 64) - 1


def default_prompt_bytes(max_context: int) -> int:
    """Largest prompt text by default, in bytes of UTF-8.

    Eight bytes a position leave room for any natural text that fits the context; the ceiling keeps
    the answer to Tokenize, at most four bytes a byte of text, within one message.
    """
    return min(max(1 << 20, 8 * max_context), MESSAGE_LIMIT // 4)


@dataclass(frozen=True)
class Limits:
    """What the loaded pair and the server allow."""

    vocab_size: int
    public_vocab: int
    max_context: int  # positions of prompt and output
    draft_tokens: int  # K
    eos_token_ids: frozenset[int]
    max_prompt_bytes: int
    defaults: Sampling = field(default_factory=Sampling)  # of absent sampling fields
    keeps_prefixes: bool = False  # whether it is worth knowing where the next turn may branch off


@dataclass(frozen=True)
class ChatTurn:
    """One message of a conversation."""

    role: str
    content: str
    reasoning_content: str = ""
    media_count: int = 0


@dataclass(frozen=True)
class Chat:
    """A conversation for the checkpoint's template."""

    turns: tuple[ChatTurn, ...]
    tools: tuple[str, ...] = ()  # JSON objects as text
    enable_thinking: bool | None = None
    add_generation_prompt: bool | None = None


Prompt = str | Sequence[int] | Chat | None


@dataclass(frozen=True)
class SamplingFields:
    """Sampling as it came."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True)
class RequestFields:
    """A request as it came, its prompt aside."""

    request_id: str = ""
    sampling: SamplingFields = field(default_factory=SamplingFields)
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int | None = None
    logprobs: int | None = None
    draft_tokens: int | None = None
    return_rounds: bool = False
    draft_trees: bool | None = None


@dataclass(frozen=True)
class Checked:
    """A request whose every field but the prompt has been checked and resolved."""

    request_id: str
    sampling: Sampling
    max_tokens: int | None  # None: what the context leaves
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    sample_count: int
    logprobs: int | None
    draft_tokens: int
    return_rounds: bool
    draft_trees: bool

    def requests(
        self,
        prompt_ids: tuple[int, ...],
        limits: Limits,
        *,
        arrival_ns: int,
        deadline_ns: int | None,
        trail: Trail = NO_TRAIL,
        boundary: int = 0,
    ) -> tuple[Request, ...]:
        """One Request a sample, each with its own seed.

        Args:
            prompt_ids: Checked ids that leave room for one token at least.
            limits: Of the loaded pair.
            arrival_ns: When the request came, time.monotonic_ns.
            deadline_ns: When it expires, likewise; None never.
            trail: What the call came with, to be found again.
            boundary: What `prompt_boundary` said.
        """
        room = limits.max_context - len(prompt_ids)
        wanted = self.max_tokens
        return tuple(
            Request(
                request_id=self.request_id,
                sample_index=index,
                prompt_ids=prompt_ids,
                sampling=replace(self.sampling, seed=sample_seed(self.sampling.seed, index)),
                max_tokens=room if wanted is None else min(wanted, room),
                min_tokens=self.min_tokens,
                stop=self.stop,
                stop_token_ids=self.stop_token_ids,
                logprobs=self.logprobs,
                draft_tokens=self.draft_tokens,
                return_rounds=self.return_rounds,
                draft_trees=self.draft_trees,
                arrival_ns=arrival_ns,
                deadline_ns=deadline_ns,
                trail=trail,
                boundary=boundary,
            )
            for index in range(self.sample_count)
        )


def sample_seed(seed: int, index: int) -> int:
    """Seed of sample ``index``: the request's own for 0, else a SplitMix64 step of seed + index."""
    if index == 0:
        return seed
    z = (seed + index + 0x9E3779B97F4A7C15) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def check(wanted: RequestFields, limits: Limits, *, has_tokenizer: bool = True) -> Checked:
    """Checks everything but the prompt. An absent seed is drawn here.

    Raises:
        FaultError: REQUEST_INVALID, SAMPLING_INVALID, STOP_INVALID or TOKEN_OUT_OF_RANGE.
    """
    name_bytes = len(wanted.request_id.encode())
    if not 0 < name_bytes <= MAX_REQUEST_ID_BYTES:
        _refuse("REQUEST_INVALID", "request_id", f"1..{MAX_REQUEST_ID_BYTES} bytes", name_bytes)
    max_tokens = wanted.max_tokens
    if max_tokens is not None and max_tokens < 1:
        _refuse("REQUEST_INVALID", "max_tokens", "at least 1", max_tokens)
    min_tokens = wanted.min_tokens or 0
    if min_tokens < 0 or (max_tokens is not None and min_tokens > max_tokens):
        upper = "" if max_tokens is None else f" and at most max_tokens {max_tokens}"
        _refuse("REQUEST_INVALID", "min_tokens", f"at least 0{upper}", min_tokens)
    if wanted.logprobs is not None:
        most = min(MAX_LOGPROBS, limits.public_vocab)
        _require_range("REQUEST_INVALID", "logprobs", wanted.logprobs, 0, most)
    sample_count = 1 if wanted.n is None else wanted.n
    _require_range("REQUEST_INVALID", "n", sample_count, 1, MAX_SAMPLES)
    draft_tokens = limits.draft_tokens if wanted.draft_tokens is None else wanted.draft_tokens
    _require_range("REQUEST_INVALID", "draft_tokens", draft_tokens, 0, limits.draft_tokens)
    _check_stops(wanted.stop, has_tokenizer)
    _check_ids("stop_token_ids", wanted.stop_token_ids, limits.vocab_size)
    eos_token_ids = frozenset() if wanted.ignore_eos else limits.eos_token_ids
    stop_token_ids = eos_token_ids | frozenset(wanted.stop_token_ids)
    # below min_tokens they cannot occur, and something must be able to
    public_stops = sum(token_id < limits.public_vocab for token_id in stop_token_ids)
    if min_tokens and public_stops == limits.public_vocab:
        _refuse(
            "STOP_INVALID",
            "stop_token_ids",
            f"fewer than all {limits.public_vocab} ids with min_tokens {min_tokens}",
            public_stops,
        )
    return Checked(
        request_id=wanted.request_id,
        sampling=_sampling(wanted.sampling, limits.defaults, limits.public_vocab),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=tuple(dict.fromkeys(wanted.stop)),
        stop_token_ids=stop_token_ids,
        sample_count=sample_count,
        logprobs=wanted.logprobs,
        draft_tokens=draft_tokens,
        return_rounds=wanted.return_rounds,
        draft_trees=wanted.draft_trees is not False,
    )


def prompt_ids(text: Text, prompt: Prompt, limits: Limits) -> tuple[int, ...]:
    """Token ids of a prompt: at least one, in the vocabulary, with room for an output token.

    May take a while for a long text; call it off the event loop.

    Raises:
        FaultError: PROMPT_EMPTY, PROMPT_TOO_LARGE, PROMPT_TOO_LONG, TOKEN_OUT_OF_RANGE,
            MEDIA_UNSUPPORTED, TEMPLATE_FAILED or REQUEST_INVALID.
    """
    if prompt is None or isinstance(prompt, str | Chat):
        ids: Sequence[int] = text.encode(
            prompt_text(text, prompt, limits), rendered=isinstance(prompt, Chat)
        )
    else:
        ids = prompt
    if len(ids) == 0:
        _refuse("PROMPT_EMPTY", "prompt", "at least one token", 0)
    most = limits.max_context - 1
    if len(ids) > most:
        _refuse("PROMPT_TOO_LONG", "prompt", f"at most {most} tokens", len(ids), limit=most)
    _check_ids("token_ids", ids, limits.vocab_size)
    return tuple(ids)


def prompt_boundary(text: Text, prompt: Prompt, prompt_ids: Sequence[int], limits: Limits) -> int:
    """Where the next turn's prompt may leave this one: before the beginning of the answer.

    A template may render an answer otherwise once it lies in the past, without its reasoning for
    one, so neither the prompt's end nor the answer's is sure to be a prefix of the next prompt.
    What comes before the answer is.

    Args:
        text: Renders and tokenizes.
        prompt: As it came.
        prompt_ids: Its checked ids.
        limits: Of the loaded pair.

    Returns:
        A position below the prompt's end; 0 where there is none or nobody wants to know.
    """
    wanted = limits.keeps_prefixes and isinstance(prompt, Chat)
    if not wanted or prompt.add_generation_prompt is False:  # type: ignore[union-attr]
        return 0
    assert isinstance(prompt, Chat)
    try:
        before = prompt_text(text, replace(prompt, add_generation_prompt=False), limits)
    except FaultError:
        return 0  # a template that insists on the beginning of an answer
    common = 0
    for ours, theirs in zip(text.encode(before, rendered=True), prompt_ids, strict=False):
        if ours != theirs:
            break
        common += 1
    return common if common < len(prompt_ids) else 0


def prompt_text(text: Text, prompt: str | Chat | None, limits: Limits) -> str:
    """The text of a prompt; a conversation is rendered.

    Raises:
        FaultError: PROMPT_EMPTY, PROMPT_TOO_LARGE, MEDIA_UNSUPPORTED, TEMPLATE_FAILED or
            REQUEST_INVALID.
    """
    if prompt is None:
        _refuse("REQUEST_INVALID", "prompt", "text, token_ids or chat", "none of them")
    if isinstance(prompt, str):
        if not prompt:
            _refuse("PROMPT_EMPTY", "text", "at least one character", 0)
        _require_size("text", [prompt], limits)
        return prompt
    messages = [_message(index, turn) for index, turn in enumerate(prompt.turns)]
    if not messages:
        _refuse("PROMPT_EMPTY", "chat.messages", "at least one", 0)
    _require_size(
        "chat",
        [part for turn in prompt.turns for part in (turn.content, turn.reasoning_content)]
        + list(prompt.tools),
        limits,
    )
    tools = [_tool(index, tool) for index, tool in enumerate(prompt.tools)]
    variables: dict[str, Any] = {}
    if prompt.enable_thinking is not None:
        variables["enable_thinking"] = prompt.enable_thinking
    rendered = text.render(
        messages,
        tools=tools or None,
        add_generation_prompt=prompt.add_generation_prompt is not False,
        **variables,
    )
    _require_size("chat", [rendered], limits)
    return rendered


def check_public_ids(name: str, ids: Sequence[int], limits: Limits) -> None:
    """Checks ids against the public vocabulary.

    Raises:
        FaultError: TOKEN_OUT_OF_RANGE.
    """
    _check_ids(name, ids, limits.public_vocab)


def model_defaults(generation_config: Mapping[str, Any]) -> Sampling:
    """Sampling that a checkpoint's generation_config suggests, for fields a request leaves out.

    Raises:
        CheckpointError: a suggestion outside its range.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given: dict[str, Any] = {name: generation_config.get(name) for name in names}
    if generation_config.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return replace(_sampling(SamplingFields(**given, seed=0), Sampling(), 0), seed_given=False)
    except (FaultError, TypeError) as error:
        raise CheckpointError(f"generation_config.json: {error}") from error


# closed intervals; an open end is handled where it occurs
_SAMPLING_RANGES: Mapping[str, tuple[float, float, str]] = {
    "temperature": (0.0, math.inf, "finite, at least 0"),
    "top_p": (0.0, 1.0, "in (0, 1]"),
    "top_k": (0, math.inf, "at least 0"),
    "min_p": (0.0, 1.0, "in [0, 1]"),
    "presence_penalty": (-2.0, 2.0, "in [-2, 2]"),
    "frequency_penalty": (-2.0, 2.0, "in [-2, 2]"),
    # beyond these a scaled logit may leave FP32
    "repetition_penalty": (1e-3, 1e3, "in [0.001, 1000]"),
}
_ABOVE_ZERO = frozenset({"top_p"})


def _sampling(wanted: SamplingFields, defaults: Sampling, public_vocab: int) -> Sampling:
    chosen: dict[str, Any] = {}
    for entry in fields(SamplingFields):
        name = entry.name
        value = getattr(wanted, name)
        if name not in _SAMPLING_RANGES or value is None:
            continue
        first, last, expected = _SAMPLING_RANGES[name]
        # written so that NaN fails
        inside = first <= value <= last and math.isfinite(value)
        if not inside or (name in _ABOVE_ZERO and value == 0):
            _refuse("SAMPLING_INVALID", name, expected, value)
        chosen[name] = value
    biases = tuple(sorted(wanted.logit_bias.items()))
    _check_ids("logit_bias", [token_id for token_id, _ in biases], public_vocab)
    for token_id, bias in biases:
        if not -100.0 <= bias <= 100.0:
            _refuse("SAMPLING_INVALID", "logit_bias", "in [-100, 100]", bias, token_id=token_id)
    seed = int.from_bytes(os.urandom(8), "little") if wanted.seed is None else wanted.seed
    return replace(
        defaults,
        logit_bias=biases,
        seed=seed,
        seed_given=wanted.seed is not None,
        **chosen,
    )


def _check_stops(stops: Sequence[str], has_tokenizer: bool) -> None:
    if len(stops) > MAX_STOPS:
        _refuse("STOP_INVALID", "stop", f"at most {MAX_STOPS} strings", len(stops))
    if stops and not has_tokenizer:
        _refuse("STOP_INVALID", "stop", "none, the checkpoint has no tokenizer", len(stops))
    for stop in stops:
        size = len(stop.encode())
        if not 0 < size <= MAX_STOP_BYTES:
            _refuse("STOP_INVALID", "stop", f"strings of 1..{MAX_STOP_BYTES} bytes", size)


def _check_ids(name: str, ids: Sequence[int], end: int) -> None:
    if len(ids) and not (min(ids) >= 0 and max(ids) < end):
        first = next(token_id for token_id in ids if not 0 <= token_id < end)
        _refuse("TOKEN_OUT_OF_RANGE", name, f"ids in [0, {end})", first)


def _message(index: int, turn: ChatTurn) -> dict[str, str]:
    if turn.media_count:
        _refuse("MEDIA_UNSUPPORTED", f"chat.messages[{index}].media", "none", turn.media_count)
    if turn.role not in ROLES:
        _refuse(
            "REQUEST_INVALID",
            f"chat.messages[{index}].role",
            "one of " + ", ".join(ROLES),
            repr(turn.role[:40]),
        )
    message = {"role": turn.role, "content": turn.content}
    # templates ask whether there is any, not whether it is empty
    if turn.reasoning_content:
        message["reasoning_content"] = turn.reasoning_content
    return message


def _tool(index: int, written: str) -> dict[str, Any]:
    try:
        tool = json.loads(written)
        # an escaped lone surrogate has no UTF-8, and so no tokens
        json.dumps(tool, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        tool = error
    if not isinstance(tool, dict):
        actual = str(tool) if isinstance(tool, Exception) else type(tool).__name__
        _refuse("REQUEST_INVALID", f"chat.tools_json[{index}]", "a JSON object", actual)
    return tool


def _require_size(name: str, parts: Sequence[str], limits: Limits) -> None:
    # a character is at least one byte, so most oversize texts need no encoding
    size = sum(map(len, parts))
    if size <= limits.max_prompt_bytes:
        size = sum(len(part.encode()) for part in parts)
    if size > limits.max_prompt_bytes:
        limit = limits.max_prompt_bytes
        _refuse("PROMPT_TOO_LARGE", name, f"at most {limit} bytes", size, limit=limit)


def _require_range(reason: str, name: str, value: int, first: int, last: int) -> None:
    if not first <= value <= last:
        _refuse(reason, name, f"{first}..{last}", value)


def _refuse(reason: str, name: str, expected: str, actual: object, **metadata: object) -> NoReturn:
    raise FaultError(
        reason,
        f"{name}: expected {expected}, got {actual}",
        field=name,
        expected=expected,
        actual=actual,
        **metadata,
    )
