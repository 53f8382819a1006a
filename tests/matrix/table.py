"""The table of docs/matrix.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.matrix.features import FEATURES, exclude
from tests.matrix.pairs import Cell

BEGIN, END = "<!-- table: python -m tests.matrix --write -->", "<!-- end -->"


def mark(found: Cell | None, excluded: bool) -> str:
    if excluded:
        return "-"
    if found is None:
        return " "
    return "=" if found.identical else "**no**"


def table(done: Sequence[Cell]) -> str:
    """Features are numbered; a cell below the diagonal has the pair's result."""
    by_pair = {frozenset(one.names): one for one in done}
    names = list(FEATURES)
    lines = ["| | " + " | ".join(str(number + 1) for number in range(len(names) - 1)) + " |"]
    lines.append("|---" * len(names) + "|")
    for row, name in enumerate(names):
        marks = [
            mark(by_pair.get(frozenset((name, other))), exclude(FEATURES[name], FEATURES[other]))
            for other in names[:row]
        ]
        lines.append(f"| {row + 1} {name} | " + " | ".join(marks + [""] * (len(names) - 1 - row)) + " |")
    return "\n".join(lines)


def write(document: Path, done: Sequence[Cell]) -> None:
    text = document.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    document.write_text(text[:start] + "\n" + table(done) + "\n" + text[end:])
