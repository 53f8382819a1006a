"""Everything that a GPU machine allows, in one command: `python3 benchmarks/gpu_check.py [--out DIR] [--minutes 8]`.

Any Python that has torch and numpy runs it, from a copy of the repository, without installing anything: parts that want more say
what is missing. Parts run one after another, each in a process of its own with a time limit: one that crashes or takes too long is
a row, not the end. Nothing is fetched; DeepGEMM, FlashInfer and NVSHMEM are used where they can be imported. A table is printed at the
end. In DIR: gpu_check.jsonl, a line as soon as a row is known; gpu_check.txt, the whole table; gpu_check.log, what the parts said besides.
`--device cpu --tiny` runs the same parts on the CPU (Triton in its interpreter): that tests this script, and measures nothing.

A row: part, name, ok (true, false, null: only measured), and numbers; `note` says what was left out or went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_parts.py"
GRACE_SECONDS = 5.0  # for a part to end by itself at its limit
LEAST_SECONDS = 8.0  # with less left a part is not begun
ROOM = 10_000  # characters of the printed table: whoever runs this elsewhere may see no more than the end of the output
NEEDED = ("torch", "numpy")
WANTED = ("triton", "safetensors", "msgspec", "zmq", "tokenizers", "jinja2", "pytest", "hypothesis", "transformers")


@dataclass(frozen=True)
class Part:
    """seconds: the most that it gets."""

    name: str
    seconds: float


# The most telling first: what the time does not reach is cut.
PARTS = (
    Part("limits", 60),
    Part("parity", 90),
    Part("graphs", 60),
    Part("qwen3", 75),
    Part("deepseek", 90),
    Part("kernels", 130),
    Part("engine", 90),
    Part("tests", 100),
    Part("deepgemm", 50),
    Part("nvshmem", 45),
    Part("flashinfer", 80),
)

Row = dict[str, Any]


def run_part(
    part: Part,
    device: str,
    tiny: bool,
    seconds: float,
    log: IO[str],
    script: Path = SCRIPT,
    grace: float = GRACE_SECONDS,
) -> Iterator[Row]:
    """Its rows as they come, and one more if it ended badly. log: gets what it says besides."""
    command = [sys.executable, "-u", str(script), part.name, "--device", device, "--seconds", str(seconds)]
    command += ["--tiny"] if tiny else []
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    print(f"==== {part.name}", file=log, flush=True)
    begins = log.tell()
    began = time.monotonic()
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, errors="replace", stdout=subprocess.PIPE, stderr=log,
        start_new_session=True,
    )  # fmt: skip
    note = ""
    printed = _Lines(child)
    try:
        for line in printed.until(began + seconds + grace):
            row = _row_of(line)
            if row is None:
                print(line, file=log, flush=True)
            else:
                yield {"part": part.name, **row}
        child.wait(max(0.1, began + seconds + grace - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired):
        note = f"stopped after {seconds:.0f} s: its later rows are missing"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # and what it has started
        child.wait()
        printed.close()
    if not note and child.returncode:
        note = f"exit code {child.returncode}: {_last_words(Path(log.name), begins)}"
    if note:
        yield {"part": part.name, "name": "(the part itself)", "ok": False, "note": note}
    yield {"part": part.name, "name": "(seconds)", "ok": None, "seconds": round(time.monotonic() - began, 1)}


class _Lines:
    """What a child prints, read by a thread, because somebody in a session of his own may hold the pipe when the child is gone."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._found: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(child.stdout,), daemon=True)
        self._thread.start()

    def _read(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self._found.put(line.rstrip("\n"))
        self._found.put(None)

    def until(self, deadline: float) -> Iterator[str]:
        """Until it closes its output. TimeoutError at the deadline (time.monotonic)."""
        while True:
            try:
                line = self._found.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None
            if line is None:
                return
            yield line

    def close(self) -> None:
        """After the child's end."""
        self._thread.join(GRACE_SECONDS)


def _row_of(line: str) -> Row | None:
    if not line.startswith("{"):
        return None
    try:
        row = json.loads(line)
    except ValueError:  # cut off where the part was stopped
        return None
    return row if "name" in row else None


def _last_words(log: Path, begins: int) -> str:
    """The last line that was written to the log from there on: of a traceback the error."""
    with log.open(errors="replace") as file:
        file.seek(begins)
        lines = [line.strip() for line in file if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def here() -> Row:
    """What this Python has."""
    missing = [name for name in (*NEEDED, *WANTED) if importlib.util.find_spec(name) is None]
    versions = {}
    for name in ("torch", "triton", "numpy", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    note = {"note": f"not here: {', '.join(missing)}"} if missing else {}
    python = ".".join(map(str, sys.version_info[:3]))
    return {"part": "machine", "name": f"Python {python}", "ok": None, "cores": os.cpu_count(), **versions, **note}


def run_all(options: argparse.Namespace, log: IO[str]) -> Iterator[Row]:
    deadline = time.monotonic() + 60 * options.minutes
    yield here()
    for part in PARTS:
        if options.only and part.name not in options.only:
            continue
        seconds = min(part.seconds, deadline - time.monotonic() - GRACE_SECONDS)
        if seconds < LEAST_SECONDS:
            yield {"part": part.name, "name": "(the part itself)", "ok": None, "note": "cut: no time was left"}
            continue
        yield from run_part(part, options.device, options.tiny, seconds, log)


def line_of(row: Row, brief: bool = False) -> str:
    """brief: without what can be worked out from the rest."""
    mark = {True: "ok", False: "FAILED", None: "-"}[row.get("ok")]
    left_out = (
        "part",
        "name",
        "ok",
        "note",
        *(("limit_ms", "gb_s", "tflop_s") if brief and "pct_of_limit" in row else ()),
    )
    rest = [f"{key} {value}" for key, value in row.items() if key not in left_out]
    name = row["name"] if brief else f"{row['name']:48}"
    return f"{row['part']:10} {mark:6} {name} {'  '.join(rest)}{'  ' if rest else ''}{row.get('note', '')}"


def short_table(rows: Sequence[Row], room: int = ROOM) -> list[str]:
    """What is printed: everything if there is room; else in brief, without the quickest of what was measured in the longest part, and
    the failures come again at the end."""
    if sum(len(line_of(row)) + 1 for row in rows) <= room:
        return [line_of(row) for row in rows]
    size = sum(len(line_of(row, brief=True)) + 1 for row in rows)
    lengths = {part: sum(row["part"] == part for row in rows) for part in {row["part"] for row in rows}}
    longest = max(lengths, key=lambda part: lengths[part])
    measured = [i for i, row in enumerate(rows) if row["part"] == longest and row.get("ok") is None]
    out = set()
    for i in sorted(measured, key=lambda i: rows[i].get("ms", 0.0)):
        if size <= room:
            break
        out.add(i)
        size -= len(line_of(rows[i], brief=True)) + 1
    lines = [line_of(row, brief=True) for i, row in enumerate(rows) if i not in out]
    lines.append(f"{len(out)} measured rows of part {longest} are in gpu_check.jsonl only")
    return [*lines, "failed:", *(line_of(row, brief=True) for row in rows if row.get("ok") is False)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="smallest sizes: only whether it runs")
    parser.add_argument("--minutes", type=float, default=8.0, help="of all parts together")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="these parts")
    parser.add_argument("--out", type=Path, help="the directory where the results go too")
    options = parser.parse_args()
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            print(f"{sys.executable} has no {name}: run this with the Python that has it", file=sys.stderr)
            return 2
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        out = options.out
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu_check-")))
        out.mkdir(parents=True, exist_ok=True)
        log = stack.enter_context((out / "gpu_check.log").open("w"))
        lines = stack.enter_context((out / "gpu_check.jsonl").open("w"))
        for row in run_all(options, log):
            rows.append(row)
            print(json.dumps(row), file=lines, flush=True)
            print(f"  {row['part']}: {row['name']}", file=sys.stderr, flush=True)
        failed = sum(row.get("ok") is False for row in rows)
        summary = f"{sum(row.get('ok') is True for row in rows)} ok, {failed} failed, {len(rows)} rows"
        (out / "gpu_check.txt").write_text("\n".join([*map(line_of, rows), summary, ""]))
        print("\n".join([*short_table(rows), summary]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
