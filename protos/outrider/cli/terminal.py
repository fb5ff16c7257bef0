"""How verbs print text: coloured by where each token came from on a terminal, plain elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from outrider.client import ClientError, Delta, InvalidRequestError, UnsupportedError, Usage

# rich styles by token origin; what the target chose alone keeps the terminal's own colour
STYLES = {"accepted": "green", "correction": "red", "bonus": "cyan"}


class Printer:
    """Writes text to standard output as it arrives."""

    def __init__(self) -> None:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")
        self._console = _console()
        self._at_line_start = True

    @property
    def coloured(self) -> bool:
        """Whether origins are told apart by colour."""
        return self._console is not None

    def delta(self, delta: Delta) -> None:
        """Writes one delta's text."""
        if self._console is None:
            self._write(delta.text)
            return
        for _, origin, text in delta.pieces():
            self._console.print(
                _harmless(text),
                style=STYLES.get(origin, ""),
                end="",
                markup=False,
                highlight=False,
                emoji=False,
                soft_wrap=True,
            )
        self._remember(delta.text)
        sys.stdout.flush()

    def legend(self) -> None:
        """Says what the colours mean; nothing where there are none."""
        if self._console is not None:
            words = (f"[{style}]{origin}[/]" for origin, style in STYLES.items())
            self._console.print(f"[dim]({', '.join(words)}, plain: the target alone)[/]")

    def end_line(self) -> None:
        """Ends the line unless the text did."""
        if not self._at_line_start:
            print(flush=True)
            self._at_line_start = True

    def _write(self, text: str) -> None:
        sys.stdout.write(_harmless(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()
        self._remember(text)

    def _remember(self, text: str) -> None:
        if text:
            self._at_line_start = text.endswith("\n")


def explain(error: ClientError) -> tuple[str, int]:
    """What went wrong and what to do about it, for people, and the exit code that says which."""
    hint = f" ({error.action})" if error.action else ""
    if error.retry_after is not None:
        hint += f" (retry after {error.retry_after:g} s)"
    wrong_request = isinstance(error, (InvalidRequestError, UnsupportedError))
    return f"{error}{hint}", 2 if wrong_request else 1


def tokens_per_round(usage: Usage) -> float:
    """Accept length: tokens published by rounds, for each round. Prefill publishes the first."""
    return max(0, usage.output_tokens - 1) / usage.rounds if usage.rounds else 0.0


def _console() -> Any:
    """A rich console when standard output is a terminal and rich is there."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError:  # the base install does without
        return None
    return Console(file=sys.stdout)


def _harmless(text: str) -> str:
    """Text whose control characters cannot steer a terminal."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )
