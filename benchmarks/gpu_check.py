"""Everything that a GPU machine allows, in one command: `python3 benchmarks/gpu_check.py --out DIR [--seconds 540]`.

Any Python that has torch, numpy and msgspec runs it, from a copy of the repository: parts that want more say what is missing
(docs/gpu.md: how to bring it). Parts run one after another, the most telling first, each in a process of its own with a time limit: one that
crashes or takes too long is a row, not the end. Beside them, on the other cores, the Triton kernels that they will launch are compiled
(gpu_compile.py). Nothing is fetched; DeepGEMM, FlashInfer and NVSHMEM are used where they can be imported. A table is printed at the
end. In DIR: gpu_check.jsonl, a line as soon as a row is known; gpu_check.txt, the whole table; gpu_check.log, what the parts said besides;
and the tables of tuned configurations (*/triton/tuned.py), to be copied over those of the repository.
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
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from gpu_children import JOIN_SECONDS, ROOT, Child, Row

SCRIPT = ROOT / "benchmarks" / "gpu_parts.py"
COMPILE = ROOT / "benchmarks" / "gpu_compile.py"
GRACE_SECONDS = 3.0  # for a part to end by itself at its limit
START_SECONDS = 60.0  # for a part's process to import torch, from a disk that nothing has read yet
LEAST_SECONDS = 8.0  # with less left a part is not begun
LAST_SECONDS = 2 * JOIN_SECONDS + 1.0  # of the whole: for processes to end, and for the table
ROOM = 10_000  # characters of the printed table: whoever runs this elsewhere may see no more than the end of the output
NEEDED = ("torch", "numpy", "msgspec")
WANTED = ("triton", "safetensors", "zmq", "tokenizers", "jinja2", "pytest", "hypothesis", "transformers")


@dataclass(frozen=True)
class Part:
    """seconds: the most that it gets."""

    name: str
    seconds: float


# The most telling first: what the time does not reach is cut. Even if all before it take their whole time, `tune` has most of its own.
PARTS = (
    Part("limits", 25),
    Part("parity", 50),
    Part("graphs", 35),
    Part("qwen3", 45),
    Part("deepseek", 55),
    Part("profile", 40),
    Part("padded", 25),
    Part("kernels", 70),
    Part("torch", 45),
    Part("tune", 150),
    Part("engine", 60),
    Part("deepgemm", 50),
    Part("flashinfer", 60),
    Part("nvshmem", 45),
    Part("tests", 100),
)
AHEAD = "compile"  # what runs beside the parts
ITSELF = "(the part itself)"


@dataclass
class Check:
    """One run. seconds: of all parts together, until the last process has ended."""

    device: str
    tiny: bool
    seconds: float
    out: Path
    log: IO[str]
    only: Sequence[str] = ()
    cache: Path | None = None  # Triton's; None: a folder that goes with the run
    script: Path = SCRIPT
    grace: float = GRACE_SECONDS
    least: float = LEAST_SECONDS
    under_way: str = ""  # the part
    _children: list[tuple[str, Child]] = field(default_factory=list)

    def rows(self) -> Generator[Row, None, None]:
        """As they come."""
        deadline = time.monotonic() + self.seconds - LAST_SECONDS
        yield here()
        parts = [part for part in PARTS if not self.only or part.name in self.only]
        with contextlib.ExitStack() as stack:
            stack.callback(self._end_all)
            self._choose_cache(stack)
            compiling = self._compiling(deadline)
            ready = self.start(parts[0]) if parts else None
            for index, part in enumerate(parts):
                assert ready is not None
                if deadline - time.monotonic() - self.grace < self.least:
                    yield {"part": part.name, "name": ITSELF, "ok": None, "note": "cut: no time was left"}
                    continue
                child, ready = ready, None
                ready = self.start(parts[index + 1]) if index + 1 < len(parts) else None
                yield from self.run(part, child, deadline)
                if compiling is not None:
                    yield from ({"part": AHEAD, **row} for row in compiling.rows_by_now())
            if compiling is not None:
                yield from ({"part": AHEAD, **row} for row in compiling.rows_by_now())

    def _choose_cache(self, stack: contextlib.ExitStack) -> None:
        if self.cache is None:
            self.cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu_check-cache-")))
        self.cache.mkdir(parents=True, exist_ok=True)

    def _environment(self) -> dict[str, str]:
        """One cache of compiled kernels for all."""
        return dict(os.environ) if self.cache is None else {**os.environ, "TRITON_CACHE_DIR": str(self.cache)}

    def _compiling(self, deadline: float) -> Child | None:
        if (self.only and AHEAD not in self.only) or importlib.util.find_spec("triton") is None:
            return None
        seconds = deadline - time.monotonic()
        command = [str(COMPILE), "--device", self.device, "--seconds", str(seconds), *(["--tiny"] if self.tiny else [])]
        return self._keep(AHEAD, Child(command, self._environment()))

    def start(self, part: Part) -> Child:
        """Its process, which waits to be told to begin."""
        command = [str(self.script), part.name, "--device", self.device, "--out", str(self.out)]
        return self._keep(part.name, Child([*command, *(["--tiny"] if self.tiny else [])], self._environment()))

    def run(self, part: Part, child: Child, ends: float) -> Iterator[Row]:
        """Its rows as they come, and one more if it ended badly. ends: of the whole run (time.monotonic)."""
        self.under_way = part.name
        began = time.monotonic()
        begun = child.ready(min(began + START_SECONDS, ends))
        seconds = max(0.0, min(part.seconds, ends - time.monotonic() - self.grace)) if begun else 0.0
        deadline = min(time.monotonic() + seconds + self.grace, ends) if begun else time.monotonic()
        child.go(seconds)
        note = ""
        code: int | None = None
        try:
            for row in child.rows(deadline):
                yield {"part": part.name, **row}
            code = child.wait(deadline)
        except TimeoutError:
            pass
        if code is None:
            note = (
                f"stopped after {seconds:.0f} s: its later rows are missing" if begun else "stopped: it had not begun"
            )
        last = self._end(part.name, child)
        if code:
            note = f"exit code {code}: {last}"
        if note:
            yield {"part": part.name, "name": ITSELF, "ok": False, "note": note}
        yield {"part": part.name, "name": "(seconds)", "ok": None, "seconds": round(time.monotonic() - began, 1)}
        self.under_way = ""

    def _keep(self, name: str, child: Child) -> Child:
        self._children.append((name, child))
        return child

    def _end(self, name: str, child: Child) -> str:
        self._children.remove((name, child))
        return child.end(self.log, name)

    def _end_all(self) -> None:
        for name, child in list(self._children):
            self._end(name, child)


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


def write_rows(check: Check, rows: list[Row]) -> None:
    """Every row is on the disk before the next part of the work begins: whatever ends this process, it is there. SIGTERM ends the
    part under way, which is a row too."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    with (check.out / "gpu_check.jsonl").open("w") as lines, contextlib.closing(check.rows()) as coming:

        def write(row: Row) -> None:
            rows.append(row)
            print(json.dumps(row), file=lines, flush=True)
            os.fsync(lines.fileno())

        try:
            for row in coming:
                write(row)
                print(f"  {row['part']}: {row['name']}", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            write(
                {"part": check.under_way or "machine", "name": ITSELF, "ok": False, "note": "gpu_check was told to end"}
            )
        finally:
            signal.signal(signal.SIGTERM, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="smallest sizes: only whether it runs")
    parser.add_argument("--seconds", type=float, default=540.0, help="of all parts together; it takes no more")
    parser.add_argument(
        "--only", nargs="+", choices=[*(part.name for part in PARTS), AHEAD], default=[], help="these parts"
    )
    parser.add_argument("--out", type=Path, help="the directory where the results go too")
    parser.add_argument("--cache", type=Path, help="where compiled kernels are, and stay (else they go with the run)")
    options = parser.parse_args()
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            print(
                f"{sys.executable} has no {name}: run this with the Python that has it, or bring it as a wheel (docs/gpu.md)",
                file=sys.stderr,
            )
            return 2
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        out = options.out
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu_check-")))
        out.mkdir(parents=True, exist_ok=True)
        log = stack.enter_context((out / "gpu_check.log").open("w"))
        cache = None if options.cache is None else options.cache.resolve()
        write_rows(Check(options.device, options.tiny, options.seconds, out.resolve(), log, options.only, cache), rows)
        failed = sum(row.get("ok") is False for row in rows)
        summary = f"{sum(row.get('ok') is True for row in rows)} ok, {failed} failed, {len(rows)} rows"
        (out / "gpu_check.txt").write_text("\n".join([*map(line_of, rows), summary, ""]))
        print("\n".join([*short_table(rows), summary]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
