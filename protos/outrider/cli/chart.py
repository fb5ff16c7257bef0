"""Line charts as SVG: panels side by side, written without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

PANEL_WIDTH, PANEL_HEIGHT = 340, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 34, 46  # margins of a panel's plot
HEADING = 34
TICKS = 4


@dataclass(frozen=True)
class Line:
    """One line of a panel; None leaves a gap."""

    name: str
    values: Sequence[float | None]
    colour: str
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Lines over common, evenly spaced places on the x axis; y begins at 0."""

    title: str
    x_title: str
    x_labels: Sequence[str]
    lines: Sequence[Line]


def svg(heading: str, rows: Sequence[Sequence[Panel]]) -> str:
    """A whole SVG document: rows of panels below a heading."""
    width = PANEL_WIDTH * max(len(row) for row in rows)
    height = HEADING + PANEL_HEIGHT * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(width / 2, 22, heading, anchor="middle", size=14),
    ]
    for down, row in enumerate(rows):
        for across, panel in enumerate(row):
            x, y = PANEL_WIDTH * across, HEADING + PANEL_HEIGHT * down
            parts.append(f'<g transform="translate({x} {y})">')
            parts.extend(_panel(panel))
            parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> Iterator[str]:
    top = _round_up(max((v for line in panel.lines for v in line.values if v), default=1.0))
    x_first, x_last = LEFT, PANEL_WIDTH - RIGHT
    y_first, y_last = PANEL_HEIGHT - BOTTOM, TOP
    places = len(panel.x_labels)

    def x_of(place: int) -> float:
        return x_first + (x_last - x_first) * (place + 0.5) / places

    def y_of(value: float) -> float:
        return y_first + (y_last - y_first) * value / top

    yield _text((x_first + x_last) / 2, 14, panel.title, anchor="middle", size=12)
    for tick in range(TICKS + 1):
        value = top * tick / TICKS
        y = y_of(value)
        yield f'<path d="M{x_first} {y:.1f}H{x_last}" stroke="#ddd" fill="none"/>'
        yield _text(x_first - 6, y + 4, f"{value:g}", anchor="end")
    for place, label in enumerate(panel.x_labels):
        yield _text(x_of(place), y_first + 16, label, anchor="middle")
    yield _text((x_first + x_last) / 2, y_first + 34, panel.x_title, anchor="middle")
    for number, line in enumerate(panel.lines):
        dash = ' stroke-dasharray="5 3"' if line.dashed else ""
        points = [(x_of(i), y_of(v)) for i, v in enumerate(line.values) if v is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{path}" fill="none" stroke="{line.colour}"{dash}/>'
        for x, y in points:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{line.colour}"/>'
        legend = TOP + 4 + 13 * number
        yield (f'<path d="M{x_first + 8} {legend}h18" stroke="{line.colour}" fill="none"{dash}/>')
        yield _text(x_first + 30, legend + 4, line.name)


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 6, 8, 10 times a power of ten, so that ticks are short numbers."""
    scale: float = 10 ** math.floor(math.log10(value))
    return next(step * scale for step in (1, 2, 4, 6, 8, 10, 20) if step * scale >= value)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(text)}</text>"
    )
