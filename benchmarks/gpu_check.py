"""Everything that a GPU machine allows, in one command: `python benchmarks/gpu_check.py [--out FILE.jsonl] [--minutes 8]`.

Parts run one after another, each in a process of its own with a time limit: one that crashes or takes too long is a row, not the
end. Nothing is fetched; DeepGEMM, FlashInfer and NVSHMEM are used where they can be imported. The table is printed at the end, and
rows go to FILE.jsonl as they come. `--device cpu --tiny` runs the same parts on the CPU (Triton in its interpreter): that tests
this script, and measures nothing.

A row: part, name, ok (true, false, null: only measured), and numbers; `note` says what was left out or went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_parts.py"
GRACE_SECONDS = 5.0  # for a part to end by itself at its limit
LEAST_SECONDS = 8.0  # with less left a part is not begun


@dataclass(frozen=True)
class Part:
    """seconds: the most that it gets."""

    name: str
    seconds: float


# The most telling first: what the time does not reach is cut.
PARTS = (
    Part("limits", 40),
    Part("parity", 90),
    Part("graphs", 45),
    Part("qwen3", 75),
    Part("deepseek", 90),
    Part("kernels", 130),
    Part("engine", 60),
    Part("tests", 80),
    Part("deepgemm", 50),
    Part("nvshmem", 25),
    Part("flashinfer", 80),
)


def run_part(
    part: Part, device: str, tiny: bool, seconds: float, script: Path = SCRIPT, grace: float = GRACE_SECONDS
) -> Iterator[dict[str, Any]]:
    """Its rows, and one more if it ended badly."""
    command = [sys.executable, "-u", str(script), part.name, "--device", device, "--seconds", str(seconds)]
    command += ["--tiny"] if tiny else []
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    began = time.monotonic()
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    note = ""
    try:
        out, err = child.communicate(timeout=seconds + grace)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # and what it has started
        try:
            out, err = child.communicate(timeout=GRACE_SECONDS)  # what it had printed by then
        except subprocess.TimeoutExpired:  # somebody in a session of his own still holds the pipes
            out, err = "", ""
            for pipe in (child.stdout, child.stderr):
                if pipe is not None:
                    pipe.close()
        note = f"stopped after {seconds:.0f} s: its later rows are missing"
    for line in out.splitlines():
        if line.startswith("{"):
            yield {"part": part.name, **json.loads(line)}
        else:
            print(f"  {part.name}: {line}", file=sys.stderr)
    if not note and child.returncode:
        last = [line for line in err.splitlines() if line.strip()][-1:]
        note = f"exit code {child.returncode}: {last[0][:300] if last else 'it said nothing'}"
    if note:
        yield {"part": part.name, "name": "(the part itself)", "ok": False, "note": note}
    yield {"part": part.name, "name": "(seconds)", "ok": None, "seconds": round(time.monotonic() - began, 1)}


def run_all(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    deadline = time.monotonic() + 60 * options.minutes
    for part in PARTS:
        if options.only and part.name not in options.only:
            continue
        seconds = min(part.seconds, deadline - time.monotonic() - GRACE_SECONDS)
        if seconds < LEAST_SECONDS:
            yield {"part": part.name, "name": "(the part itself)", "ok": None, "note": "cut: no time was left"}
            continue
        yield from run_part(part, options.device, options.tiny, seconds)


def line_of(row: dict[str, Any]) -> str:
    mark = {True: "ok", False: "FAILED", None: "-"}[row.get("ok")]
    rest = [f"{key} {value}" for key, value in row.items() if key not in ("part", "name", "ok", "note")]
    return f"{row['part']:11} {mark:7} {row['name']:58} {'  '.join(rest)}{'  ' if rest else ''}{row.get('note', '')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="smallest sizes: only whether it runs")
    parser.add_argument("--minutes", type=float, default=8.0, help="of all parts together")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="these parts")
    parser.add_argument("--out", type=Path, help="where the rows go too, as JSON lines")
    options = parser.parse_args()
    rows = []
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("")
    for row in run_all(options):
        rows.append(row)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(f"  {row['part']}: {row['name']}", file=sys.stderr, flush=True)
    for row in rows:
        print(line_of(row))
    failed = [row for row in rows if row.get("ok") is False]
    print(f"{sum(row.get('ok') is True for row in rows)} ok, {len(failed)} failed, {len(rows)} rows")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
