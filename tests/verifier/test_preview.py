"""Stops, budget and held-back text: what one sample keeps of a licensed prefix, and shows."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from verifier.preview import OutputSession, StopStrings
from verifier.request import (
    Delta,
    FinishReason,
    Request,
    RoundTrace,
    Sampling,
    TokenLogprobs,
    TokenOrigin,
)
from verifier.text import Text

ORIGINS = list(TokenOrigin)


def request(
    *,
    max_tokens: int = 1000,
    min_tokens: int = 0,
    stop: tuple[str, ...] = (),
    stop_token_ids: frozenset[int] = frozenset(),
    logprobs: int | None = 1,
    return_rounds: bool = False,
) -> Request:
    return Request(
        request_id="r",
        sample_index=0,
        prompt_ids=(0,),
        sampling=Sampling(),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop,
        stop_token_ids=stop_token_ids,
        logprobs=logprobs,
        draft_tokens=7,
        return_rounds=return_rounds,
        arrival_ns=0,
        deadline_ns=None,
    )


class Scripted(Text):
    """Ids with bytes of our choosing."""

    def __init__(self, pieces: list[str | bytes]) -> None:
        super().__init__(None)
        self._pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def shown_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


def logprob(position: int) -> TokenLogprobs:
    return TokenLogprobs(-float(position), (position,), (-float(position),))


@dataclass
class Run:
    """All that a session published over some blocks."""

    session: OutputSession
    deltas: list[Delta] = field(default_factory=list)
    reason: FinishReason | None = None
    matched: int | str | None = None
    counts: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, text: Text, wanted: Request, blocks: list[list[int]]) -> Run:
        run = cls(OutputSession(text, wanted))
        for block in blocks:
            if run.reason is not None:
                break
            run.round(block)
        return run

    def round(self, block: list[int], trace: RoundTrace | None = None) -> Delta | None:
        before = self.session.output_count
        preview = self.session.preview(block)
        assert preview == self.session.preview(block), "a preview changes nothing"
        assert 0 <= preview.count <= len(block) == preview.licensed
        assert preview.token_ids == tuple(block[: preview.count])
        positions = range(before, before + len(block))
        delta = self.session.commit(
            preview,
            [ORIGINS[i % 4] for i in positions],
            [logprob(i) for i in positions],
            trace,
        )
        assert self.session.output_count == before + preview.count
        self.counts.append(preview.count)
        self.reason, self.matched = preview.reason, preview.matched
        if delta is not None:
            self.deltas.append(delta)
        return delta

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [i for delta in self.deltas for i in delta.token_ids]

    @property
    def character_ends(self) -> list[int]:
        """Where each token's text ends in the whole text, in characters."""
        ends, base = [], 0
        for delta in self.deltas:
            written = delta.text.encode()
            ends += [base + len(written[:end].decode()) for end in delta.text_ends]
            base += len(delta.text)
        return ends

    def check_parallel(self) -> None:
        """Ids, origins, logprobs and ends go together and in order."""
        position = 0
        for delta in self.deltas:
            count = len(delta.token_ids)
            assert count > 0
            assert len(delta.origins) == len(delta.text_ends) == len(delta.logprobs) == count
            for i in range(count):
                assert delta.origins[i] is ORIGINS[(position + i) % 4]
                assert delta.logprobs[i] == logprob(position + i)
            position += count
            ends = (0, *delta.text_ends)
            assert all(a <= b for a, b in itertools.pairwise(ends))
            written = delta.text.encode()
            assert ends[-1] == len(written)
            for a, b in itertools.pairwise(ends):
                written[a:b].decode()  # whole characters


# --- the rules, one by one


STOP, EOS = 3, 4
WORDS = Scripted(["a", "b", "c", "STOP", "EOS", "d", "e"])


def test_the_length_cap_does_not_hide_an_earlier_stop():
    run = Run.of(WORDS, request(max_tokens=5, stop_token_ids=frozenset({STOP})), [[0, 1, 3, 5, 6]])
    assert (run.token_ids, run.reason, run.matched) == ([0, 1, 3], FinishReason.STOP, STOP)
    assert run.text == "ab"


def test_the_length_cap_before_the_stop_ends_by_length():
    run = Run.of(WORDS, request(max_tokens=2, stop_token_ids=frozenset({STOP})), [[0, 1, 3, 5]])
    assert (run.token_ids, run.reason, run.matched) == ([0, 1], FinishReason.LENGTH, None)


def test_a_stop_at_the_last_token_of_the_budget_is_a_stop():
    run = Run.of(WORDS, request(max_tokens=3, stop_token_ids=frozenset({STOP})), [[0, 1, 3, 5]])
    assert (run.token_ids, run.reason) == ([0, 1, 3], FinishReason.STOP)


def test_eos_in_the_middle_of_a_block_keeps_it_and_nothing_after():
    run = Run.of(WORDS, request(stop_token_ids=frozenset({EOS})), [[0, EOS, 2, 2]])
    assert (run.counts, run.token_ids, run.text) == ([2], [0, EOS], "a")
    assert run.matched == EOS


def test_an_ignored_eos_is_a_token_like_any_other():
    run = Run.of(WORDS, request(), [[0, EOS, 2, 2]])
    assert (run.counts, run.reason, run.text) == ([4], None, "aEOScc")


@pytest.mark.parametrize(
    "blocks", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[0, 1], [2, 3]]], ids=["4", "1111", "22"]
)
def test_a_stop_string_across_tokens_ends_ids_and_logprobs_with_it_and_text_before_it(blocks):
    text = Scripted(["x", "EN", "D y", " z"])
    run = Run.of(text, request(stop=("END",)), blocks)
    assert (run.token_ids, run.text) == ([0, 1, 2], "x")
    assert (run.reason, run.matched) == (FinishReason.STOP, "END")
    assert [entry for delta in run.deltas for entry in delta.logprobs] == [
        logprob(0),
        logprob(1),
        logprob(2),
    ]
    run.check_parallel()


def test_text_that_may_begin_a_stop_string_waits_with_its_ids():
    run = Run.of(Scripted(["x", "EN", "!"]), request(stop=("END",)), [])
    assert run.round([0]).token_ids == (0,)
    assert run.round([1]) is None
    delta = run.round([2])
    assert (delta.token_ids, delta.text, delta.text_ends) == ((1, 2), "EN!", (2, 3))


def test_half_a_character_waits_with_its_ids():
    run = Run.of(Scripted([b"a\xe2", b"\x82", b"\xacb"]), request(), [])
    assert run.round([0]) is None
    assert run.round([1]) is None
    delta = run.round([2])
    # the character belongs to the token in which it begins
    assert (delta.text, delta.text_ends) == ("a€b", (4, 4, 5))
    run.check_parallel()


def test_tokens_that_never_align_with_characters_still_appear():
    # each token ends the last character and begins the next
    run = Run.of(Scripted([b"\xe2", b"\x82\xac\xe2"]), request(), [[0]])
    for _ in range(5):
        delta = run.round([1])
        assert (len(delta.token_ids), delta.text) == (1, "€")


def test_incomplete_bytes_at_the_end_become_one_replacement_character():
    run = Run.of(Scripted(["a", b"\xe2\x82"]), request(max_tokens=2), [[0, 1]])
    assert (run.text, run.deltas[0].text_ends) == ("a\ufffd", (1, 4))


def test_incomplete_bytes_before_a_stop_id_become_a_replacement_character():
    text = Scripted([b"\xe2\x82", "EOS"])
    run = Run.of(text, request(stop_token_ids=frozenset({1})), [[0], [1]])
    assert (run.text, run.deltas[0].text_ends, run.token_ids) == ("\ufffd", (3, 3), [0, 1])


def test_held_back_text_is_shown_when_the_budget_ends_the_sample():
    run = Run.of(Scripted(["x", "EN"]), request(stop=("END",), max_tokens=2), [[0, 1]])
    assert (run.text, run.reason) == ("xEN", FinishReason.LENGTH)


def test_held_back_text_is_shown_when_a_stop_id_ends_the_sample():
    wanted = request(stop=("END",), stop_token_ids=frozenset({1}))
    run = Run.of(Scripted(["xE", "EOS"]), wanted, [[0], [1]])
    assert (run.text, run.matched) == ("xE", 1)


def test_flush_shows_what_was_held_back_once():
    run = Run.of(Scripted(["x", "EN", b"\xe2"]), request(stop=("END",)), [[0], [1, 2]])
    delta = run.session.flush()
    assert (delta.token_ids, delta.text, delta.text_ends) == ((1, 2), "EN\ufffd", (2, 5))
    assert run.session.flush() is None


def test_stop_ids_do_not_stop_before_min_tokens():
    wanted = request(min_tokens=2, stop_token_ids=frozenset({EOS}))
    run = Run.of(WORDS, wanted, [[EOS, EOS, EOS, 0]])
    assert (run.counts, run.matched) == ([3], EOS)


def test_stop_strings_do_not_stop_before_min_tokens():
    text = Scripted(["END", "x"])
    run = Run.of(text, request(stop=("END",), min_tokens=2), [[0, 1], [0, 0]])
    assert (run.token_ids, run.text, run.matched) == ([0, 1, 0], "ENDx", "END")


def test_a_stop_string_begun_below_min_tokens_and_ended_above_stops():
    run = Run.of(Scripted(["E", "N", "D"]), request(stop=("END",), min_tokens=2), [[0, 1], [2]])
    assert (run.text, run.matched) == ("", "END")


def test_a_stop_string_that_could_not_stop_is_not_held_back():
    run = Run.of(Scripted(["END"]), request(stop=("END",), min_tokens=2), [])
    assert run.round([0]).text == "END"


def test_the_stop_string_that_ends_first_wins_and_of_these_the_longest():
    text = Scripted(["abcd"])
    assert Run.of(text, request(stop=("bcd", "bc", "abc", "c")), [[0]]).matched == "abc"
    assert Run.of(text, request(stop=("abcd", "b")), [[0]]).matched == "b"


def test_a_stop_id_shows_no_text_and_so_completes_no_stop_string():
    wanted = request(stop=("aEOS",), stop_token_ids=frozenset({EOS}))
    run = Run.of(WORDS, wanted, [[0, EOS]])
    assert (run.text, run.matched) == ("a", EOS)


def test_repeated_beginnings_of_a_stop_string_are_found():
    run = Run.of(Scripted(["a", "b"]), request(stop=("aab",)), [[0, 0, 0, 1]])
    assert (run.text, run.matched) == ("a", "aab")


def test_rounds_wait_for_the_message_that_publishes():
    wanted = request(stop=("END",), return_rounds=True)
    run = Run.of(Scripted(["x", "EN", "!"]), wanted, [])
    traces = [RoundTrace(i, (), 0, 1) for i in range(3)]
    assert run.round([0], traces[0]).rounds == (traces[0],)
    assert run.round([1], traces[1]) is None
    assert run.round([2], traces[2]).rounds == (traces[1], traces[2])


def test_rounds_and_logprobs_are_absent_unless_wanted():
    run = Run.of(WORDS, request(logprobs=None), [])
    delta = run.round([0], RoundTrace(0, (), 0, 1))
    assert delta.rounds == () and delta.logprobs == ()


def test_nothing_licensed_changes_nothing():
    run = Run.of(WORDS, request(), [[]])
    assert (run.counts, run.deltas, run.session.budget) == ([0], [], 1000)


def test_a_preview_is_committed_once_and_in_order():
    session = OutputSession(WORDS, request(logprobs=None))
    preview = session.preview([0, 1])
    session.commit(preview, ORIGINS)
    with pytest.raises(ValueError, match="expected one at output token 2, got 0"):
        session.commit(preview, ORIGINS)


def test_nothing_follows_the_end():
    run = Run.of(WORDS, request(max_tokens=1), [[0]])
    with pytest.raises(ValueError, match="expected none after the end"):
        run.session.preview([1])


@pytest.mark.parametrize(
    ("origins", "logprobs", "message"),
    [(1, 2, "origins: expected at least 2, got 1"), (2, 1, "logprobs: expected at least 2, got 1")],
    ids=["origins", "logprobs"],
)
def test_commit_refuses_fewer_rows_than_tokens(origins, logprobs, message):
    session = OutputSession(WORDS, request())
    with pytest.raises(ValueError, match=message):
        session.commit(
            session.preview([0, 1]), ORIGINS[:origins], [logprob(i) for i in range(logprobs)]
        )
    assert session.output_count == 0


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=4, unique=True),
    st.text("abc", max_size=12),
)
def test_the_automaton_knows_every_ending_and_every_beginning(stops, written):
    automaton, state = StopStrings(tuple(stops)), 0
    for length in range(1, len(written) + 1):
        state = automaton.step(state, written[length - 1])
        shown = written[:length]
        ending = [stop for stop in stops if shown.endswith(stop)]
        assert automaton.found[state] == max(ending, key=len, default=None)
        begun = [k for stop in stops for k in range(1, len(stop)) if shown.endswith(stop[:k])]
        assert automaton.hold[state] == max(begun, default=0)


# --- the whole, against an oracle that sees everything at once


def whole_characters(data: bytes) -> int:
    """Characters of data that no further byte can change, by trying what may follow."""
    count = len(data.decode("utf-8", "replace"))
    for tail in range(1, min(3, len(data)) + 1):
        for length in (1, 2, 3):
            for more in itertools.product((0x80, 0x90, 0xA0, 0xBF), repeat=length):
                try:
                    if len((data[-tail:] + bytes(more)).decode()) == 1:
                        return count - 1
                except UnicodeDecodeError:
                    continue
    return count


@dataclass(frozen=True)
class Expected:
    token_ids: list[int]
    text: str
    reason: FinishReason | None
    matched: int | str | None


def one_shot(tokenizer: Tokenizer, text: Text, wanted: Request, ids: list[int]) -> Expected:
    """The outcome, from prefixes decoded by the tokenizer itself."""
    seen = 0
    for count, token_id in enumerate(ids, 1):
        may_stop = count > wanted.min_tokens
        if may_stop and token_id in wanted.stop_token_ids:
            shown = tokenizer.decode(ids[: count - 1])
            return Expected(ids[:count], shown, FinishReason.STOP, token_id)
        shown = tokenizer.decode(ids[:count])
        whole = whole_characters(b"".join(text.shown_bytes(i) for i in ids[:count]))
        for end in range(seen + 1, whole + 1) if may_stop else ():
            endings = [stop for stop in wanted.stop if shown[:end].endswith(stop)]
            if endings:
                stop = max(endings, key=len)
                return Expected(ids[:count], shown[: end - len(stop)], FinishReason.STOP, stop)
        seen = whole
        if count == wanted.max_tokens:
            return Expected(ids[:count], shown, FinishReason.LENGTH, None)
    return Expected(ids, tokenizer.decode(ids), None, None)


@st.composite
def outputs(draw, tokenizer: Tokenizer) -> tuple[list[int], Request]:
    """Ids of real and of arbitrary text, and stops that are likely to occur in it."""
    size = tokenizer.get_vocab_size()
    parts = st.one_of(
        st.integers(0, size - 1).map(lambda i: [i]),
        st.sampled_from(["the END of", "ENDING", "中文字", "🙂🚀", "<think>", "é", "EN", "D"]).map(
            lambda written: tokenizer.encode(written).ids
        ),
    )
    ids = [i for part in draw(st.lists(parts, max_size=14)) for i in part]
    shown = tokenizer.decode(ids).replace("\ufffd", "")
    cuts = st.tuples(st.integers(0, max(0, len(shown) - 1)), st.integers(1, 5))
    pieces = cuts.map(lambda cut: shown[cut[0] : cut[0] + cut[1]])
    stops = draw(
        st.lists(st.one_of(pieces, st.sampled_from(["END", "文", "ENDING", "e"])), max_size=3)
    )
    stop_ids = draw(st.lists(st.sampled_from(ids), max_size=1)) if ids else []
    return ids, request(
        stop=tuple(stop for stop in dict.fromkeys(stops) if stop),
        stop_token_ids=frozenset(stop_ids),
        min_tokens=draw(st.sampled_from([0, 0, 1, 3, 8])),
        max_tokens=draw(st.sampled_from([1, 2, 5, 1000, 1000, 1000])),
    )


def partition(ids: list[int], sizes: list[int]) -> list[list[int]]:
    blocks, first = [], 0
    for size in itertools.cycle(sizes):
        if first >= len(ids):
            return blocks
        blocks.append(ids[first : first + size])
        first += size
    return blocks


def check_minimal_hold(run: Run, text: Text, wanted: Request, ids: list[int]) -> None:
    """Whatever is held back has a reason: its first token is unfinished, or may begin a stop."""
    done = ids[: run.session.output_count]
    published = len(run.token_ids)
    if run.reason is not None or published == len(done):
        return
    data = b"".join(text.shown_bytes(i) for i in done)
    whole = whole_characters(data)
    shown = data.decode("utf-8", "replace")[:whole]
    hold = max(
        (k for stop in wanted.stop for k in range(1, len(stop)) if shown.endswith(stop[:k])),
        default=0,
    )
    first_end = len(b"".join(text.shown_bytes(i) for i in done[: published + 1]))
    unfinished = first_end > len(data) - _pending_bytes(data)
    upto = data[:first_end]
    begun = len(upto.decode("utf-8", "replace"))
    assert unfinished or begun > len(shown) - hold


def _pending_bytes(data: bytes) -> int:
    whole = whole_characters(data)
    if whole == len(data.decode("utf-8", "replace")):
        return 0
    return next(k for k in (1, 2, 3) if len(data[:-k].decode("utf-8", "replace")) == whole)


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_any_partition_publishes_what_one_shot_gives(tokenizer: Tokenizer, text: Text, data):
    ids, wanted = data.draw(outputs(tokenizer))
    sizes = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    expected = one_shot(tokenizer, text, wanted, ids)

    run = Run(OutputSession(text, wanted))
    for block in partition(ids, sizes):
        if run.reason is not None:
            break
        run.round(block)
        check_minimal_hold(run, text, wanted, ids)
        assert expected.text.startswith(run.text) or run.text == expected.text
    if run.reason is None and (rest := run.session.flush()) is not None:
        run.deltas.append(rest)

    assert run.token_ids == expected.token_ids
    assert run.text == expected.text
    assert (run.reason, run.matched) == (expected.reason, expected.matched)
    run.check_parallel()
    # a character belongs to the token in which it begins, as far as text is shown at all
    shown_ends = [len(tokenizer.decode(ids[: i + 1])) for i in range(len(run.token_ids))]
    assert run.character_ends == [min(end, len(run.text)) for end in shown_ends]


@pytest.mark.parametrize("length", [0, 100_000])
def test_a_preview_of_eight_tokens_costs_the_same_whatever_the_output(
    tokenizer: Tokenizer, text: Text, length: int
):
    stops = tuple(f"{letter}END of the text" for letter in "abcdefghijklmnop")
    session = OutputSession(text, request(stop=stops, max_tokens=10**9, logprobs=None))
    ids = (tokenizer.encode("the END of the 中文字 🙂 café don't stop ").ids * 4)[:64]
    for _ in range(length // 64):
        session.commit(session.preview(ids), [TokenOrigin.BONUS] * 64)
    elapsed = []
    for first in range(0, 56, 8):
        for _ in range(20):
            start = time.perf_counter()
            preview = session.preview(ids[first : first + 8])
            elapsed.append(time.perf_counter() - start)
            assert preview.count == 8
    # the least of many, since the machine is shared
    assert min(elapsed) < 0.2e-3
    assert sorted(elapsed)[len(elapsed) // 2] < 0.4e-3
