"""Filling the store of weights from the system's page cache: how fast one rank with all cores reads and packs, and how fast the same bytes are copied.

    python benchmarks/bench_filling.py --model DIR [--formats plain,int8,int4] [--repeats 3] [--threads N] [--json]

Rows {"case": "copy", "threads", "gb_s"}: so many threads copy the checkpoint's bytes into a new file in memory by preadv(2) and pwrite(2), which is
all that a store of plain bytes could be. Rows {"case": format, "gb_s", "written_gb_s", "of_copy"}: the store is filled by one rank; gigabytes of the checkpoint per second,
of the store per second, and the ratio to the copy. The fastest of the repetitions; the file is read once before. What is
in the page cache is the caller's business where the memory does not hold checkpoint and store.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.engine import EngineConfig
from engine.build import build_rank
from engine.plan import make_plan
from engine.process.malloc import tune_malloc
from engine.process.places import store_capacity
from store.memory import Store, make_store

PIECE = 4 << 20
GIGA = 1e9


def pieces(path: Path) -> Iterator[tuple[Path, int]]:
    for file in sorted(path.glob("*.safetensors")):
        for offset in range(0, file.stat().st_size, PIECE):
            yield file, offset


def copied(path: Path, threads: int, write: bool) -> float:
    """Bytes per second. write: into a file in memory; without, they are only read."""
    work = iter(list(pieces(path)))
    target, lock, done = make_store("copy"), threading.Lock(), [0]

    def run() -> None:
        buffer, files = bytearray(PIECE), dict[Path, int]()
        while True:
            with lock:
                file, offset = next(work, (None, 0))
            if file is None:
                break
            if file not in files:
                files[file] = os.open(file, os.O_RDONLY)
            count = os.preadv(files[file], [buffer], offset)
            if write:
                os.pwrite(target, memoryview(buffer)[:count], place[file] + offset)
            with lock:
                done[0] += count
        for descriptor in files.values():
            os.close(descriptor)

    place, end = {}, 0
    for file in sorted(path.glob("*.safetensors")):
        place[file] = end
        end += file.stat().st_size
    os.ftruncate(target, end)
    began = time.perf_counter()
    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - began
    os.close(target)
    return done[0] / seconds


def filled(model: str, form: str, threads: int | None) -> tuple[float, float, float]:
    """Seconds, bytes read and bytes written of one rank that fills a store alone."""
    options: dict[str, Any] = {} if form == "plain" else {"quantization": form}
    plan = make_plan(
        EngineConfig(
            model=model, max_model_len=256, max_num_seqs=4, weight_cache="off", threads_per_rank=threads, **options
        )
    )
    assert plan.weight_store, plan.reasons["weight_store"]
    file = make_store("filling")
    store = Store(Path(f"/proc/{os.getpid()}/fd/{file}"), plan.weight_key, store_capacity(plan))
    rank = build_rank(plan, store=store)
    written = store.used
    seconds, num_bytes = rank.ready.load_seconds, rank.ready.bytes_read
    rank.close()
    store.close()
    os.close(file)
    return seconds, num_bytes, written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint's directory")
    parser.add_argument("--formats", default="plain,int8,int4", help="names with commas between them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true", help="nothing but the JSON lines")
    arguments = parser.parse_args()
    path = Path(arguments.model)
    tune_malloc()  # as a rank does
    copied(path, 1, write=False)
    copy = 0.0
    for threads in sorted({1, arguments.threads}):
        copy = max(copied(path, threads, write=True) for _ in range(arguments.repeats))
        print(json.dumps({"case": "copy", "threads": threads, "gb_s": round(copy / GIGA, 2)}), flush=True)
    for form in arguments.formats.split(","):
        runs = [filled(arguments.model, form, arguments.threads) for _ in range(arguments.repeats)]
        seconds, num_bytes, written = min(runs)
        row = {"case": form, "gb_s": round(num_bytes / seconds / GIGA, 2)}
        row |= {"written_gb_s": round(written / seconds / GIGA, 2), "of_copy": round(num_bytes / seconds / copy, 2)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
