"""A few layers of one step of each trace as an SVG: what each lane of each rank does, and what is in flight meanwhile.

    .venv/bin/moesaic bench dbo MODEL -dp 2 --trace-dir .
    .venv/bin/python benchmarks/trace_picture.py off.json on.json --out dbo.svg [--step N] [--layers 2] [--ranks 0,1]

Without --step: of the steps that have the most lanes and tokens the one of middle length. All traces have the same scale. Prints the figures of those
steps (front/trace_figures.py).
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from front.trace_figures import StepFigures, figures

Slice = dict[str, Any]

COLOURS = {
    "attention": "#4477aa",
    "dispatch": "#ccbb44",
    "experts": "#228833",
    "combine": "#ee8866",
    "wait": "#cc3311",
    "in flight": "#bbbbbb",
}
WIDTH, LEFT, HEAD, TITLE, ROW, BAR, FLIGHT = 1000, 110, 28, 22, 40, 22, 5


class Lane(NamedTuple):
    name: str
    slices: list[Slice]  # in order of time


def read(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    trace: dict[str, Any] = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    return trace


def lanes_by_step(trace: dict[str, Any], ranks: list[int] | None) -> dict[int, list[Lane]]:
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    found: dict[int, dict[int, list[Slice]]] = defaultdict(lambda: defaultdict(list))
    for event in trace["traceEvents"]:
        wanted = event["ph"] == "X" and event["cat"] == "lane"
        if wanted and (ranks is None or int(names[event["tid"]].split()[1]) in ranks):
            found[event["args"]["step"]][event["tid"]].append(event)
    return {step: [Lane(names[tid], items) for tid, items in sorted(lanes.items())] for step, lanes in found.items()}


def weight(lanes: list[Lane]) -> tuple[int, int]:
    tokens = sum(item["args"]["tokens"] for lane in lanes for item in lane.slices if item["name"] == "dispatch")
    return len(lanes), tokens


def typical(steps: dict[int, list[Lane]]) -> int:
    most = max(map(weight, steps.values()))
    alike = [step for step, lanes in steps.items() if weight(lanes) == most]
    return sorted(alike, key=lambda step: _end(steps[step]) - _begin(steps[step]))[len(alike) // 2]


def window(lanes: list[Lane], num_layers: int) -> list[Lane]:
    """The slices of some layers from the middle of the step."""
    layers = sorted({item["args"]["layer"] for lane in lanes for item in lane.slices})
    first = max(0, (len(layers) - num_layers) // 2)
    chosen = set(layers[first : first + num_layers])
    return [Lane(lane.name, [item for item in lane.slices if item["args"]["layer"] in chosen]) for lane in lanes]


def flights(lane: Lane) -> Iterator[tuple[float, float]]:
    """From the end of every dispatch or combine to the end of the wait for it."""
    for sent, waited in zip(lane.slices, lane.slices[1:], strict=False):
        if waited["name"] == "wait":
            yield sent["ts"] + sent["dur"], waited["ts"] + waited["dur"]


def picture(panels: dict[str, list[Lane]]) -> str:
    """panels: title -> lanes, one below the other."""
    longest = max(_end(lanes) - _begin(lanes) for lanes in panels.values())
    scale = (WIDTH - LEFT - 10) / longest
    height = HEAD + sum(TITLE + ROW * len(lanes) for lanes in panels.values()) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for place, name in enumerate(COLOURS):
        x = LEFT + 120 * place
        parts.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 17}" y="18">{name}</text>')
    y = HEAD
    for title, lanes in panels.items():
        parts.append(f'<text x="6" y="{y + 14}" font-weight="bold">{escape(title)}</text>')
        parts += drawn(lanes, y + TITLE, scale)
        y += TITLE + ROW * len(lanes)
    parts += axis(longest / 1000, scale, y)
    return "\n".join([*parts, "</svg>", ""])


def drawn(lanes: list[Lane], top: int, scale: float) -> Iterator[str]:
    begin = _begin(lanes)

    def rectangle(start: float, stop: float, y: float, tall: int, name: str, note: str) -> str:
        x, wide = LEFT + (start - begin) * scale, max(0.3, (stop - start) * scale)
        return (
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall}" fill="{COLOURS[name]}">'
            f"<title>{escape(note)}</title></rect>"
        )

    for row, lane in enumerate(lanes):
        y = top + ROW * row
        yield f'<text x="6" y="{y + 16}">{escape(lane.name)}</text>'
        for item in lane.slices:
            note = f"{item['name']}, layer {item['args']['layer']}, {item['dur'] / 1000:.3f} ms"
            yield rectangle(item["ts"], item["ts"] + item["dur"], y, BAR, item["name"], note)
        for start, stop in flights(lane):
            note = f"in flight {(stop - start) / 1000:.3f} ms"
            yield rectangle(start, stop, y + BAR + 3, FLIGHT, "in flight", note)


def _begin(lanes: list[Lane]) -> float:
    return min(item["ts"] for lane in lanes for item in lane.slices)


def _end(lanes: list[Lane]) -> float:
    return max(item["ts"] + item["dur"] for lane in lanes for item in lane.slices)


def axis(milliseconds: float, scale: float, y: int) -> Iterator[str]:
    sizes = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9)
    tick = next(size for size in sizes if milliseconds / size <= 12)
    for number in range(int(milliseconds / tick) + 1):
        x = LEFT + number * tick * 1000 * scale
        yield f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 6}" stroke="black"/>'
        yield f'<text x="{x:.1f}" y="{y + 19}" text-anchor="middle">{number * tick:g}{" ms" if number == 0 else ""}</text>'


def row(path: Path, of_step: StepFigures) -> dict[str, Any]:
    milliseconds = {name: round(getattr(of_step, name), 1) for name in ("forward", "computed", "travelled")}
    hidden = round(1 - of_step.waited / of_step.flight, 3) if of_step.flight else None
    return {"trace": path.name, "step": of_step.step, "lanes": of_step.lanes, **milliseconds, "hidden": hidden}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--step", type=int)
    parser.add_argument("--layers", type=int, default=2, help="how many, from the middle of the model")
    parser.add_argument("--ranks", help="which, separated by commas; default: all")
    options = parser.parse_args()
    ranks = None if options.ranks is None else [int(word) for word in options.ranks.split(",")]
    panels, rows = {}, []
    for path in options.traces:
        trace = read(path)
        steps = lanes_by_step(trace, ranks)
        if not steps or (options.step is not None and options.step not in steps):
            parser.error(f"{path} has no exchanges{f' of step {options.step}' if steps else ''}")
        step = typical(steps) if options.step is None else options.step
        panels[f"{path.name.split('.')[0]}, step {step}"] = window(steps[step], options.layers)
        rows += [row(path, one) for one in figures(trace) if one.step == step]
    options.out.write_text(picture(panels))
    for one in rows:
        print(json.dumps(one))


if __name__ == "__main__":
    main()
