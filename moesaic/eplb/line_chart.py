"""A line chart as SVG text and as characters, without any library."""

from __future__ import annotations

import html
from collections.abc import Sequence

from msgspec import Struct
from rich.text import Text

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")
_MARKS = "ox+*#"
_X_LABELS, _MOST_DOTS = 12, 40  # what a chart has room for
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 760, 420, 70, 46, 190, 64


class Line(Struct, frozen=True):
    """ys go with the chart's xs; a missing value breaks the line. dashed: a limit rather than a result."""

    name: str
    ys: Sequence[float | None]
    dashed: bool = False


class Chart(Struct, frozen=True):
    """xs rise. second: labels under those of the x axis (say memory under slots)."""

    title: str
    x_name: str
    y_name: str
    xs: Sequence[float]
    lines: Sequence[Line]
    second: Sequence[str] = ()

    def y_range(self) -> tuple[float, float]:
        known = [y for line in self.lines for y in line.ys if y is not None]
        low, high = min(known, default=0.0), max(known, default=1.0)
        room = (high - low) * 0.08 or 0.05
        return low - room, high + room


def svg(chart: Chart) -> str:
    """A standing-alone <svg> element."""
    low, high = chart.y_range()
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    first, last = chart.xs[0], chart.xs[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        part = (x - first) / (last - first) if last > first else 0.5
        return _LEFT + part * wide, _TOP + (high - y) / (high - low) * tall

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _words(_LEFT, 24, chart.title, 'font-size="15"'),
        _words(
            14, _TOP + tall / 2, chart.y_name, f'text-anchor="middle" transform="rotate(-90 14 {_TOP + tall / 2:.0f})"'
        ),
        _words(_LEFT + wide / 2, _HEIGHT - 10, chart.x_name, 'text-anchor="middle"'),
    ]
    for step in range(6):
        y = low + (high - low) * step / 5
        _, y_at = at(first, y)
        out.append(f'<line x1="{_LEFT}" y1="{y_at:.1f}" x2="{_LEFT + wide}" y2="{y_at:.1f}" stroke="#ddd"/>')
        out.append(_words(_LEFT - 6, y_at + 4, f"{y:.3f}", 'text-anchor="end"'))
    every = -(-len(chart.xs) // _X_LABELS)
    for index, x in list(enumerate(chart.xs))[::every]:
        x_at, _ = at(x, low)
        out.append(_words(x_at, _TOP + tall + 16, f"{x:g}", 'text-anchor="middle"'))
        if chart.second:
            out.append(
                _words(x_at, _TOP + tall + 32, chart.second[index], 'text-anchor="middle" fill="#777" font-size="10"')
            )
    for index, line in enumerate(chart.lines):
        colour = _COLOURS[index % len(_COLOURS)]
        dash = ' stroke-dasharray="6 4"' if line.dashed else ""
        points = [at(x, y) for x, y in zip(chart.xs, line.ys, strict=True) if y is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if not line.dashed and len(points) <= _MOST_DOTS:
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        y_at = _TOP + 14 + index * 20
        out.append(f'<line x1="{_LEFT + wide + 14}" y1="{y_at}" x2="{_LEFT + wide + 40}" y2="{y_at}" stroke="{colour}" '
                   f'stroke-width="2"{dash}/>')  # fmt: skip
        out.append(_words(_LEFT + wide + 46, y_at + 4, line.name, ""))
    return "\n".join([*out, "</svg>"])


def _words(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{html.escape(text)}</text>'


def text(chart: Chart, width: int = 72) -> Text:
    """The same in characters: a mark per line and point, `-` for a dashed one."""
    height = 14
    low, high = chart.y_range()
    first, last = chart.xs[0], chart.xs[-1]
    cells = [[" "] * width for _ in range(height)]
    for index, line in reversed(list(enumerate(chart.lines))):
        for x, y in zip(chart.xs, line.ys, strict=True):
            if y is not None:
                column = round((x - first) / (last - first) * (width - 1)) if last > first else width // 2
                row = round((high - y) / (high - low) * (height - 1))
                cells[row][column] = "-" if line.dashed else _MARKS[index % len(_MARKS)]
    lines = [chart.title]
    for row, content in enumerate(cells):
        label = f"{high - (high - low) * row / (height - 1):8.3f} |" if row % 4 == 0 else " " * 9 + "|"
        lines.append(label + "".join(content))
    lines.append(" " * 9 + "+" + "-" * width)
    lines.append(f"{'':10}{first:<{width - 8}g}{last:>8g}  {chart.x_name}")
    legend = [f"{'-' if line.dashed else _MARKS[i % len(_MARKS)]} {line.name}" for i, line in enumerate(chart.lines)]
    return Text("\n".join([*lines, " " * 10 + "   ".join(legend)]))
