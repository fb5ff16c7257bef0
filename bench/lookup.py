"""Prompt lookup: a drafter without weights, the floor that a trained draft must beat."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_MATCH = 3


def proposal(tokens: Sequence[int], count: int) -> list[int]:
    """Copies what followed the latest earlier occurrence of the longest suffix of 3..1 tokens.

    The copy extends over itself, so that a loop is continued for as long as asked.
    """
    for length in range(min(LONGEST_MATCH, len(tokens) - 1), 0, -1):
        suffix = list(tokens[-length:])
        for start in range(len(tokens) - length - 1, -1, -1):
            if list(tokens[start : start + length]) == suffix:
                extended = list(tokens)
                for offset in range(count):
                    extended.append(extended[start + length + offset])
                return extended[len(tokens) :]
    return []


def tokens_per_round(prompt: Sequence[int], output: Sequence[int], draft_tokens: int) -> float:
    """Tokens a round that prompt lookup would have reached on a greedy output it cannot change.

    The first token comes from prefill, so that it belongs to no round.
    """
    rounds, done = 0, 1
    while done < len(output):
        live = min(draft_tokens, len(output) - done - 1)
        offered = proposal([*prompt, *output[:done]], live) if live else []
        accepted = 0
        while accepted < len(offered) and offered[accepted] == output[done + accepted]:
            accepted += 1
        done += accepted + 1
        rounds += 1
    return (len(output) - 1) / rounds if rounds else 0.0
