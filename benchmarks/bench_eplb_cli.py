"""Seconds and peak memory of every `moesaic eplb` verb on 58 layers x 256 experts x 1,000 windows of 100 steps.

    python benchmarks/bench_eplb_cli.py [--json] [--records 1000] [--verbs plan,replay,...]

The limit is 60 s and 2 GB for each. CPU seconds are printed beside wall seconds: others may be using the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT_S, LIMIT_GB = 60, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--verbs", help="only these (after sample and plan), comma-separated")
    parser.add_argument("--json", action="store_true", help="JSON lines only")
    arguments = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        cases = _cases(folder, arguments.records)
        wanted = ["sample", "plan", *arguments.verbs.split(",")] if arguments.verbs else list(cases)
        for name in dict.fromkeys(wanted):
            row = _measure(name, cases[name])
            failed |= row["exit"] != 0 or row["seconds"] > LIMIT_S or row["peak_gb"] > LIMIT_GB
            print(json.dumps(row) if arguments.json else _words(row), flush=True)
    sys.exit(failed)


def _cases(folder: Path, records: int) -> dict[str, list[str]]:
    load, plan = str(folder / "load.npz"), str(folder / "plan.json")
    shape = ["--model", "deepseek-v3", "--ranks", "32", "--records", str(records), "--steps-per-record", "100"]
    return {
        "sample": ["sample", *shape, "-o", load],
        "plan": ["plan", load, "--slots", "9", "--gpu", "h800", "-o", plan],
        "stats": ["stats", load, "--slots", "9", "--ranks", "32"],
        "explain": ["explain", load, "20", "--slots", "9"],
        "replay": ["replay", load, "--slots", "9", "--gpu", "h800"],
        "curve": ["curve", load, "--gpu", "h800"],
        "whatif": ["whatif", load, "--slots", "9", "--kill", "any-rank", "--kill", "k=2"],
        "check": ["check", plan, "--trace", load],
        "report": ["report", load, "--placement", plan, "-o", str(folder / "report.html")],
        "import": ["import", load, "-o", str(folder / "load.jsonl")],
        "export": ["export", load, "--format", "npy", "-o", str(folder / "load.npy")],
        "diff": ["diff", plan, plan],
        "cost": ["cost", "--check"],
    }


def _measure(name: str, options: list[str]) -> dict[str, Any]:
    began = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "moesaic", "eplb", *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert child.stderr is not None
    said = child.stderr.read().decode().strip()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    child.stderr.close()
    return {
        "verb": name,
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_gb": round(used.ru_maxrss * 1024 / 1e9, 3),
        "exit": child.returncode,
        "said": said.splitlines()[-1] if child.returncode and said else "",
    }


def _words(row: dict[str, Any]) -> str:
    return "{verb:8s} {seconds:7.2f} s ({cpu_seconds:.2f} s CPU), {peak_gb:.2f} GB, exit {exit} {said}".format(**row)


if __name__ == "__main__":
    main()
