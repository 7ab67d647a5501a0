"""Figures as inline SVG, in the colours of the page, so that they are light and dark as it is.

Labels are escaped. A figure is as wide as its place and as high as it needs to be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from hcsim.report.page import COLOURS, text_of

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640, 300, 84, 42, 12, 34
_BAR, _GAP, _LABEL, _LETTER = 20, 12, 150, 8
_LONGEST_LABEL = 22
_MOST_POINTS = 600
"""Of a line: more would be on the same places."""


class Line(msgspec.Struct, frozen=True):
    """A curve."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False
    is_faint: bool = False


class Axis(msgspec.Struct, frozen=True):
    """How an axis is divided and labelled."""

    title: str = ""
    label: Callable[[float], str] = "{:g}".format
    log: bool = False
    from_zero: bool = False


class BarPart(msgspec.Struct, frozen=True):
    """A part of a bar."""

    name: str
    length: float
    colour: str
    """A name of the palette: "compute"."""
    words: str = ""
    """The length, as a reader sees it."""


def colour_of(number: int) -> str:
    """Return the colour of a line by its number."""
    return f"var(--c{number % COLOURS})"


def lines(title: str, curves: Sequence[Line], x: Axis, y: Axis) -> str:
    """Return curves over two axes, with a key; nothing if there is nothing to draw."""
    curves = [msgspec.structs.replace(each, points=_thinned(_drawable(each.points, x, y))) for each in curves]
    points = [point for curve in curves for point in curve.points]
    if not points:
        return ""
    xs, ys = zip(*points, strict=True)
    across, up = _Scale(xs, x, _LEFT, _WIDTH - _RIGHT), _Scale(ys, y, _HEIGHT - _BOTTOM, _TOP)
    drawn = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
        f'<text class="soft" x="{_LEFT - 6}" y="{up(tick) + 4:.1f}" text-anchor="end">{text_of(y.label(tick))}</text>'
        for tick in up.ticks
    ]
    drawn += [
        f'<text class="soft" x="{across(tick):.1f}" y="{_HEIGHT - 24}" text-anchor="middle">'
        f"{text_of(x.label(tick))}</text>"
        for tick in across.ticks
    ]
    if x.title:
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        drawn.append(
            f'<text class="soft" x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{text_of(x.title)}</text>'
        )
    for number, curve in enumerate(curves):
        if curve.points:
            drawn.append(_curve(curve, number, across, up))
    picture = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text_of(title)}">{"".join(drawn)}</svg>'
    named = [(number, curve) for number, curve in enumerate(curves) if curve.points and curve.name]
    key = "".join(
        f'<span><i{" class=dashed" if curve.dashed else ""} style="color: {colour_of(number)}"></i>'
        f"{text_of(curve.name)}</span>"
        for number, curve in named
    )
    return picture + (f'<div class="key">{key}</div>' if key else "")


def bars(title: str, rows: Sequence[tuple[str, Sequence[BarPart]]], whole: str = "", full: float = 0.0) -> str:
    """Return a bar for each row, of parts one after the other; `whole` says what the longest bar is, or one of length
    `full`, if that is longer."""
    longest = max((sum(part.length for part in parts) for _, parts in rows), default=0.0)
    longest = max(longest, full)
    if longest <= 0.0:
        return ""
    left = max([_LABEL, *(_LETTER * (len(_shortened(label)) + 1) for label, _ in rows)])
    width = _WIDTH - left - 10
    height = len(rows) * (_BAR + _GAP) + (18 if whole else 0)
    drawn = []
    if full:
        ends = f'y1="0" y2="{len(rows) * (_BAR + _GAP)}"'
        drawn += [f'<line class="grid" x1="{at}" x2="{at}" {ends}/>' for at in (left, _WIDTH - 10)]
    for number, (label, parts) in enumerate(rows):
        y, at = number * (_BAR + _GAP) + 2, float(left)
        drawn.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{text_of(_shortened(label))}</text>')
        for part in parts:
            wide = width * part.length / longest
            if wide > 0.0:
                words = text_of(f"{label}: {part.name} {part.words}")
                drawn.append(
                    f'<rect x="{at:.1f}" y="{y}" width="{wide:.1f}" height="{_BAR}" fill="var(--{part.colour})">'
                    f"<title>{words}</title></rect>"
                )
            at += wide
    if whole:
        drawn.append(f'<text class="soft" x="{_WIDTH - 10}" y="{height - 4}" text-anchor="end">{text_of(whole)}</text>')
    kinds = {part.name: part.colour for _, parts in rows for part in parts if part.length > 0.0}
    key = "".join(
        f'<span><i class=block style="background: var(--{colour})"></i>{text_of(name)}</span>'
        for name, colour in kinds.items()
    )
    picture = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{text_of(title)}">{"".join(drawn)}</svg>'
    return picture + (f'<div class="key">{key}</div>' if len(kinds) > 1 else "")


def power_label(unit: str) -> Callable[[float], str]:
    """Return labels for powers of ten: "10 MB"."""

    def label(value: float) -> str:
        power = round(math.log10(value))
        prefix = "kMGTP"[power // 3 - 1] if 3 <= power < 18 else ""
        return f"{10.0 ** (power % 3 if prefix else power):g} {prefix}{unit}"

    return label


class _Scale:
    """From values to places on an axis."""

    def __init__(self, values: Sequence[float], axis: Axis, begin: float, end: float) -> None:
        self._log, self._begin, self._end = axis.log, begin, end
        if axis.log:
            first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
            last = max(last, first + 1)
            self.ticks = [10.0**power for power in range(first, last + 1, max(1, (last - first) // 6))]
            self._low, self._high = float(first), float(last)
            return
        low, high = min(values), max(values)
        if axis.from_zero:
            low, high = min(0.0, low), max(0.0, high)
        if low == high:
            low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
        self.ticks = _round_ticks(low, high)
        self._low, self._high = min(low, self.ticks[0]), max(high, self.ticks[-1])

    def __call__(self, value: float) -> float:
        at = math.log10(value) if self._log else value
        return self._begin + (at - self._low) / (self._high - self._low) * (self._end - self._begin)


def _round_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)] or [low]


def _drawable(points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> tuple[tuple[float, float], ...]:
    """Return the points that have a place: finite ones, and positive ones on a logarithmic axis."""
    return tuple(
        (a, b) for a, b in points
        if math.isfinite(a) and math.isfinite(b) and not (x.log and a <= 0) and not (y.log and b <= 0)
    )  # fmt: skip


def _thinned(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    stride = -(-len(points) // _MOST_POINTS) or 1
    return points if stride == 1 else (*points[:-1:stride], points[-1])


def _curve(curve: Line, number: int, across: _Scale, up: _Scale) -> str:
    places = [(across(x), up(y)) for x, y in curve.points]
    colour, faint = colour_of(number), ' opacity="0.4"' if curve.is_faint else ""
    if len(places) == 1:
        return f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3.5" fill="{colour}"{faint}/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashes = ' stroke-dasharray="6 4"' if curve.dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}{faint}/>'


def _shortened(label: str) -> str:
    return label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…"
