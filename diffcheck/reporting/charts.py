"""Line charts as geometry: what a template needs to draw them as SVG, with the numbers beside them as a table.

A chart is WIDTH x HEIGHT units; a line is a path in them. Up to seven lines differ in colour, more also in
their dashes, and each is named in the legend and in the table, so no line is told by its colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 480, 274
LEFT, RIGHT, TOP, BOTTOM = 42, 18, 24, 40
COLOURS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: its path as SVG writes it, and which colour and dashes it has."""

    label: str
    path: str
    colour: int
    dash: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A vertical line at x, or a shaded range from x on, with a few words."""

    x: float
    width: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart, ready to draw; `columns` and `rows` (label, cells) are the same numbers as a table."""

    name: str
    title: str
    words: str
    x_label: str
    y_label: str
    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    marks: list[Mark] = field(default_factory=list)
    shades: list[Mark] = field(default_factory=list)
    columns: list[str]
    rows: list[tuple[str, list[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Maps values between `low` and `high` to units between `start` and `end`; logarithmic where asked for."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The place of a value, kept inside the axis."""
        if self.log:
            low, high, value = math.log(self.low), math.log(self.high), math.log(max(value, self.low))
        else:
            low, high = self.low, self.high
        part = (value - low) / (high - low) if high > low else 0.0
        return self.start + min(max(part, 0.0), 1.0) * (self.end - self.start)


def x_axis(low: float, high: float, *, log: bool = False) -> Axis:
    """The horizontal axis of a chart."""
    return Axis(low=low, high=high, start=LEFT, end=WIDTH - RIGHT, log=log)


def y_axis(high: float = 1.0) -> Axis:
    """The vertical axis of a chart, from 0 up."""
    return Axis(low=0.0, high=high, start=HEIGHT - BOTTOM, end=TOP)


def shares(high: float = 1.0) -> list[tuple[float, str]]:
    """Ticks of a vertical axis of shares."""
    y = y_axis(high)
    steps = [0.0, 0.25, 0.5, 0.75, 1.0] if high == 1 else [0.0, high / 2, high]
    return [(y(step), f"{step:.2g}") for step in steps]


def ticks(axis: Axis, values: Sequence[float], text: Callable[[float], str]) -> list[tuple[float, str]]:
    """Ticks at values inside the axis, left out where they would come too close to the one before."""
    found: list[tuple[float, str]] = []
    for value in values:
        if axis.low <= value <= axis.high and (not found or axis(value) - found[-1][0] >= 42):
            found.append((axis(value), text(value)))
    return found


def line(number: int, label: str, places: Sequence[tuple[float, float]]) -> Line:
    """A line through places (in chart units); its number decides how it looks."""
    path = "M" + "L".join(f"{_unit(x)} {_unit(y)}" for x, y in places)
    return Line(label=label, path=path, colour=number % COLOURS, dash=number // COLOURS % 3)


def outline(number: int, label: str, edges: Sequence[float], heights: Sequence[float]) -> Line:
    """The outline of a histogram: `heights` (in chart units) between neighbouring edges."""
    steps = "".join(f"V{_unit(y)}H{_unit(end)}" for y, end in zip(heights, edges[1:], strict=True))
    path = f"M{_unit(edges[0])} {_unit(heights[0])}{steps}"
    return Line(label=label, path=path, colour=number % COLOURS, dash=number // COLOURS % 3)


def _unit(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def mark(axis: Axis, value: float, words: str) -> Mark:
    """A vertical line at a value."""
    return Mark(x=axis(value), width=0.0, words=words)


def shade(axis: Axis, low: float, high: float, words: str) -> Mark:
    """A shaded range between two values."""
    return Mark(x=axis(low), width=axis(high) - axis(low), words=words)


def tokens(value: float) -> str:
    """A number of tokens or ranks, short: 4096 is 4k."""
    if value >= 1 << 20:
        return f"{value / (1 << 20):.3g}M"
    return f"{value / 1024:.3g}k" if value >= 1024 else f"{value:g}"
