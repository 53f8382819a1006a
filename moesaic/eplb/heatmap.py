"""A heatmap as SVG text: one path per colour, so that 58 layers x 256 experts take tens of kilobytes. Colours are CSS
classes of the page, so that they follow its theme."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_LEFT, _TOP, _WIDTH, _BOTTOM = 46, 6, 800, 34


def heatmap(
    values: npt.NDArray[np.floating[Any]],
    edges: Sequence[float],
    family: str,
    row_names: Sequence[int],
    x_name: str,
    label: str,
) -> str:
    """values [rows, columns]; a value below edges[0] has class `family`0, up to edges[1] `family`1, and so on.

    row_names: numbers of the rows, of which some are written; label: what the picture is, for readers who cannot see
    it.
    """
    rows, columns = values.shape
    high = max(4.0, min(14.0, 460 / rows))
    wide = _WIDTH / columns
    tall = rows * high
    class_RC = np.searchsorted(edges, values, side="right")
    out = [
        f'<svg viewBox="0 0 {_LEFT + _WIDTH + 4} {_TOP + tall + _BOTTOM:.0f}" role="img" '
        f'aria-label="{html.escape(label, quote=True)}">'
    ]
    for number in range(len(edges) + 1):
        path = _path(class_RC == number, wide, high)
        if path:
            out.append(f'<path class="{family}{number}" d="{path}"/>')
    every = max(1, -(-rows // 20))
    for index in range(0, rows, every):
        y = _TOP + (index + 0.5) * high + 3
        out.append(f'<text x="{_LEFT - 6}" y="{y:.1f}" text-anchor="end">{row_names[index]}</text>')
    every = max(1, 2 ** max(0, int(np.ceil(np.log2(columns / 16)))))
    for index in range(0, columns, every):
        x = _LEFT + (index + 0.5) * wide
        out.append(f'<text x="{x:.1f}" y="{_TOP + tall + 13:.1f}" text-anchor="middle">{index}</text>')
    middle = _LEFT + _WIDTH / 2
    out.append(f'<text x="{middle:.0f}" y="{_TOP + tall + 28:.1f}" text-anchor="middle">{html.escape(x_name)}</text>')
    return "".join([*out, "</svg>"])


def _path(mask_RC: npt.NDArray[np.bool_], wide: float, high: float) -> str:
    """Rectangles over runs of cells within a row."""
    parts = []
    edge = np.diff(np.pad(mask_RC.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    begins, ends = np.argwhere(edge == 1), np.argwhere(edge == -1)
    for (row, first), (_, last) in zip(begins.tolist(), ends.tolist(), strict=True):
        x, y, length = _LEFT + first * wide, _TOP + row * high, (last - first) * wide
        parts.append(f"M{x:.1f} {y:.1f}h{length:.1f}v{high:.1f}h-{length:.1f}z")
    return "".join(parts)


def key(edges: Sequence[float], family: str, unit: str) -> str:
    """What the colours mean: a line of swatches."""
    names = [f"&lt; {edges[0]:g}"]
    names += [f"{low:g} to {high:g}" for low, high in itertools.pairwise(edges)]
    names.append(f"&ge; {edges[-1]:g}")
    cells = "".join(f'<span><i class="{family}{number}"></i>{name}</span>' for number, name in enumerate(names))
    return f'<p class="key">{cells}<span>{html.escape(unit)}</span></p>'
