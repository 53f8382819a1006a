"""Turns a run's log into ``loss.csv`` and ``loss.svg``: ``python -m models.tiny.training.curve --run-dir RUN``."""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

COLUMNS = [
    "step", "tokens", "seconds", "loss", "mtp_loss", "val_loss", "val_mtp_loss", "load_max_over_mean", "lr_factor",
    "tokens_per_second",
]  # fmt: skip
WIDTH, HEIGHT, MARGIN = 720, 360, 48
TOP_LOSS, LOW_LOSS = 5.0, 1.0

Record = dict[str, float]


def read_log(run_dir: Path) -> list[Record]:
    """The log's records, oldest first."""
    lines = (run_dir / "log.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def thin(records: list[Record], keep: int) -> list[Record]:
    """About ``keep`` records: every n-th, plus all that carry a held-out loss."""
    stride = max(1, len(records) // keep)
    return [record for index, record in enumerate(records) if index % stride == 0 or "val_loss" in record]


def write_csv(path: Path, records: list[Record]) -> None:
    """One row per record; a column that a record lacks stays empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def polyline(points: list[tuple[float, float]], last_token: float, colour: str) -> str:
    """An SVG line through (tokens, loss) points; losses outside the frame are clamped to it."""
    places = []
    for tokens, loss in points:
        x = MARGIN + (WIDTH - 2 * MARGIN) * tokens / last_token
        height = (min(max(loss, LOW_LOSS), TOP_LOSS) - LOW_LOSS) / (TOP_LOSS - LOW_LOSS)
        places.append(f"{x:.1f},{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * height:.1f}")
    return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{" ".join(places)}"/>'


def write_svg(path: Path, records: list[Record]) -> None:
    """Training, MTP and held-out loss over tokens."""
    last = max(record["tokens"] for record in records)
    series = {"loss": "#4477aa", "mtp_loss": "#bbbbbb", "val_loss": "#cc3311"}
    names = {"loss": "training", "mtp_loss": "training, MTP layer", "val_loss": "held-out"}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in range(int(LOW_LOSS), int(TOP_LOSS) + 1):
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (tick - LOW_LOSS) / (TOP_LOSS - LOW_LOSS)
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{MARGIN - 8}" y="{y + 4:.1f}" text-anchor="end">{tick}</text>')
    parts.append(f'<text x="{MARGIN}" y="{HEIGHT - 16}">0</text>')
    label = f"{last / 1e6:.1f} M tokens"
    parts.append(f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 16}" text-anchor="end">{label}</text>')
    parts.append(f'<text x="{MARGIN}" y="24">cross-entropy per token (nats)</text>')
    for index, (key, colour) in enumerate(series.items()):
        parts.append(polyline([(r["tokens"], r[key]) for r in records if key in r], last, colour))
        parts.append(f'<text x="{WIDTH - 200}" y="{60 + 18 * index}" fill="{colour}">{names[key]}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def main() -> None:
    """Write both files next to this module, unless told otherwise."""
    parser = argparse.ArgumentParser(description="Write loss.csv and loss.svg from a training log.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    arguments = parser.parse_args()
    records = thin(read_log(arguments.run_dir), keep=200)
    write_csv(arguments.out / "loss.csv", records)
    write_svg(arguments.out / "loss.svg", records)


if __name__ == "__main__":
    main()
