"""Chooses how much of a licensed prefix one sample keeps, and what of it may be shown.

Two steps, so that the choice can precede the commit: ``preview`` looks, ``commit`` advances. Both
cost the same whatever the length of the output. Only stop strings make the choice depend on text:
without any, tokens are decoded by ``commit``, which nothing waits for.

A character belongs to the token in which it begins. A token is published once all its characters
are known and none of them can begin a stop string; the ids, text, origins and log-probabilities of
a message always cover the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from verifier.request import (
    Delta,
    FinishReason,
    Request,
    RoundTrace,
    TokenLogprobs,
    TokenOrigin,
)
from verifier.text import REPLACEMENT, Text, decode_step


class StopStrings:
    """Finds stop strings in a stream of characters.

    An Aho-Corasick automaton. A state stands for the longest suffix of the text so far that begins
    a stop string, so a character costs the same whatever the number of stop strings.

    Args:
        stops: The strings; none empty.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        # by state: the longest stop string that ends there
        self.found: list[str | None] = [None]
        # by state: characters at the end of the text that may yet become a stop string
        self.hold = [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def step(self, state: int, character: str) -> int:
        """The state after one more character; 0 is the state before any."""
        while (following := self._next[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._fallback[state]
        return following

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._fallback.append(0)
                self.found.append(None)
                self.hold.append(0)
            state = following
        self.found[state] = stop

    def _link(self) -> None:
        # breadth first, so that a state's fallback, which is shallower, is complete before it
        queue = deque([(0, 0)])
        while queue:
            state, depth = queue.popleft()
            fallback = self._fallback[state]
            if self.found[state] is None:
                self.found[state] = self.found[fallback]
            self.hold[state] = depth if self._next[state] else self.hold[fallback]
            for character, following in self._next[state].items():
                self._fallback[following] = self.step(fallback, character) if state else 0
                queue.append((following, depth + 1))


@lru_cache(maxsize=64)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """The automaton of a request's stop strings; requests often bring the same ones."""
    return StopStrings(stops)


@dataclass(frozen=True)
class _Shown:
    """The text side of a session: what is decoded and not yet published."""

    text: str = ""  # whole characters
    pending: bytes = b""  # the beginning of a character
    state: int = 0  # of the stop strings, after text
    # by unpublished token: where its text ends; the last ones may wait for a character, without one
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Preview:
    """The first N of L licensed tokens, and why the sample ends there if it does."""

    licensed: int  # L
    token_ids: tuple[int, ...]
    reason: FinishReason | None
    matched: int | str | None  # the id or string that stopped it
    first_index: int  # output tokens before these
    shown: _Shown | None  # None where nothing was decoded to choose

    def __post_init__(self) -> None:
        if not 0 <= self.count <= self.licensed:
            raise ValueError(f"count: expected 0..{self.licensed}, got {self.count}")
        if self.reason is None and self.count < self.licensed:
            raise ValueError(f"count: expected {self.licensed} of a live row, got {self.count}")

    @property
    def count(self) -> int:
        """N."""
        return len(self.token_ids)


@dataclass(frozen=True)
class _Token:
    token_id: int
    origin: TokenOrigin
    logprobs: TokenLogprobs | None


class OutputSession:
    """The output of one sample: stops, budget, and text by whole characters.

    Args:
        text: Decodes ids.
        request: Its stops, budget and what it wants reported.
    """

    def __init__(self, text: Text, request: Request) -> None:
        self._text = text
        self._stop_token_ids = request.stop_token_ids
        self._stops = stop_strings(request.stop)
        self._min_tokens = request.min_tokens
        self._max_tokens = request.max_tokens
        self._wants_logprobs = request.logprobs is not None
        self._wants_rounds = request.return_rounds
        self._output_count = 0
        self._finished = False
        self._shown = _Shown()
        self._held: list[_Token] = []
        self._rounds: list[RoundTrace] = []

    @property
    def output_count(self) -> int:
        """Tokens committed so far."""
        return self._output_count

    @property
    def budget(self) -> int:
        """Tokens that may still be committed."""
        return self._max_tokens - self._output_count

    def preview(self, licensed: Sequence[int]) -> Preview:
        """Chooses N of the licensed tokens without changing anything.

        A stop id, a stop string or the budget ends the sample at the token that meets it; the
        earliest wins, and at one token a stop id, then a stop string, then the budget. Before
        min_tokens, ids and strings do not stop.

        Args:
            licensed: y_1..y_L, in order.

        Raises:
            ValueError: the sample has ended.
        """
        if self._finished:
            raise ValueError("licensed: expected none after the end of the sample")
        # only a stop string can make the choice depend on text
        scan = _Scan(self._shown, len(self._held), self._stops) if self._stops else None
        index = self._output_count
        count = len(licensed)
        reason: FinishReason | None = None
        matched: int | str | None = None
        for offset, token_id in enumerate(licensed):
            may_stop = index >= self._min_tokens
            index += 1
            if may_stop and token_id in self._stop_token_ids:
                reason, matched = FinishReason.STOP, token_id
            elif scan and (stop := scan.add(self._text.shown_bytes(token_id), may_stop)):
                reason, matched = FinishReason.STOP, stop
            elif index >= self._max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                count = offset + 1
                break
        if scan and reason is not None:
            scan.end()
        return Preview(
            licensed=len(licensed),
            token_ids=tuple(licensed[:count]),
            reason=reason,
            matched=matched,
            first_index=self._output_count,
            shown=scan.shown(len(self._held) + count) if scan else None,
        )

    def _decode(self, preview: Preview) -> _Shown:
        """The text after what a preview kept, none of which a stop string ended."""
        scan = _Scan(self._shown, len(self._held), self._stops)
        stopped = preview.reason is FinishReason.STOP  # by the last id, which is not shown
        for token_id in preview.token_ids[: preview.count - stopped]:
            scan.add(self._text.shown_bytes(token_id), may_stop=False)
        if preview.reason is not None:
            scan.end()
        return scan.shown(len(self._held) + preview.count)

    def commit(
        self,
        preview: Preview,
        origins: Sequence[TokenOrigin],
        logprobs: Sequence[TokenLogprobs] = (),
        round_trace: RoundTrace | None = None,
    ) -> Delta | None:
        """Advances by a preview and returns what may be published now.

        Args:
            preview: The latest preview of this session.
            origins: Where each licensed token came from; those beyond N are ignored.
            logprobs: Of each licensed token, likewise; ignored unless the request wants them.
            round_trace: What the round did; kept only if the request wants it.

        Returns:
            Tokens with their text; None when all of it is held back. At the sample's end nothing
            is held back.

        Raises:
            ValueError: an outdated preview, or fewer origins or logprobs than N.
        """
        count = preview.count
        if self._finished or preview.first_index != self._output_count:
            raise ValueError(
                f"preview: expected one at output token {self._output_count}, "
                f"got {preview.first_index}"
            )
        _require_rows("origins", origins, count)
        if self._wants_logprobs:
            _require_rows("logprobs", logprobs, count)
        shown = preview.shown if preview.shown is not None else self._decode(preview)
        self._held.extend(
            _Token(token_id, origins[i], logprobs[i] if self._wants_logprobs else None)
            for i, token_id in enumerate(preview.token_ids)
        )
        self._output_count += count
        self._shown = shown
        if self._wants_rounds and round_trace is not None:
            self._rounds.append(round_trace)
        if preview.reason is not None:
            self._finished = True
            return self._publish(len(self._held))
        safe = len(self._shown.text) - self._stops.hold[self._shown.state]
        return self._publish(_count_up_to(self._shown.ends, safe))

    def flush(self) -> Delta | None:
        """Ends the sample where it is and returns what was held back, if anything was."""
        if self._finished:
            return None
        self._finished = True
        scan = _Scan(self._shown, len(self._held), self._stops)
        scan.end()
        self._shown = scan.shown(len(self._held))
        return self._publish(len(self._held))

    def _publish(self, count: int) -> Delta | None:
        """Takes the first ``count`` held tokens out of the session."""
        if count == 0:
            return None
        tokens, self._held = self._held[:count], self._held[count:]
        shown, ends = self._shown, self._shown.ends[:count]
        cut = ends[-1]
        rounds, self._rounds = tuple(self._rounds), []
        self._shown = _Shown(
            text=shown.text[cut:],
            pending=shown.pending,
            state=shown.state,
            ends=tuple(end - cut for end in shown.ends[count:]),
        )
        return Delta(
            token_ids=tuple(token.token_id for token in tokens),
            text=shown.text[:cut],
            text_ends=_byte_ends(shown.text[:cut], ends),
            origins=tuple(token.origin for token in tokens),
            logprobs=tuple(token.logprobs for token in tokens if token.logprobs is not None),
            rounds=rounds,
        )


class _Scan:
    """Decodes licensed tokens onto a copy of a session's text, and looks for stop strings."""

    def __init__(self, shown: _Shown, held: int, stops: StopStrings) -> None:
        self._stops = stops
        self._text = [shown.text]
        self._characters = len(shown.text)
        self._pending = shown.pending
        self._state = shown.state
        self._ends = list(shown.ends)
        self._open = held - len(shown.ends)  # tokens that wait for the pending character

    def add(self, data: bytes, may_stop: bool) -> str | None:
        """Adds a token's bytes; returns the stop string that they complete, if any."""
        text, pending = decode_step(self._pending, data)
        if not text and self._pending:
            self._open += 1
            self._pending = pending
            return None
        begins = self._characters
        self._text.append(text)
        self._characters += len(text)
        if self._pending:
            self._close(begins + 1)
        self._pending = pending
        if pending:
            self._open = 1
        else:
            self._ends.append(self._characters)
        return self._search(text, begins, may_stop)

    def end(self) -> None:
        """Ends the text: a character that was only begun becomes U+FFFD."""
        if self._pending:
            self._text.append(REPLACEMENT)
            self._characters += 1
            self._close(self._characters)
            self._pending = b""

    def shown(self, tokens: int) -> _Shown:
        """The outcome, for a session that then holds ``tokens`` tokens."""
        text = "".join(self._text)[: self._characters]
        missing = tokens - len(self._ends) if not self._pending else 0
        ends = tuple(self._ends) + (self._characters,) * missing
        return _Shown(text, self._pending, self._state, ends)

    def _close(self, end: int) -> None:
        self._ends.extend([end] * self._open)
        self._open = 0

    def _search(self, text: str, begins: int, may_stop: bool) -> str | None:
        step, found, state = self._stops.step, self._stops.found, self._state
        for offset, character in enumerate(text, begins + 1):
            state = step(state, character)
            stop = found[state]
            if stop is not None and may_stop:
                self._cut(offset - len(stop))
                self._state = state
                return stop
        self._state = state
        return None

    def _cut(self, end: int) -> None:
        self._characters = end
        self._ends = [min(token_end, end) for token_end in self._ends]
        self._pending, self._open = b"", 0


def _count_up_to(ends: Sequence[int], limit: int) -> int:
    """How many of the ascending ``ends`` are at most ``limit``, looking no further than that."""
    for count, end in enumerate(ends):
        if end > limit:
            return count
    return len(ends)


def _byte_ends(text: str, ends: Sequence[int]) -> tuple[int, ...]:
    """Character positions as UTF-8 byte positions."""
    if text.isascii():
        return tuple(ends)
    return tuple(accumulate(len(text[a:b].encode()) for a, b in pairwise((0, *ends))))


def _require_rows(name: str, rows: Sequence[object], count: int) -> None:
    if len(rows) < count:
        raise ValueError(f"{name}: expected at least {count}, got {len(rows)}")
