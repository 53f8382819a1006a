"""A fake of engine.process.rank_process for the tests of the monitor: it only lives, and beats.

In the runtime directory, `refuse-R` makes the next process of rank R end at once with exit code 3 or the one that it holds, `silent-R` makes it load
for ever, `leave-R` makes it leave.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from engine.process.heartbeat import beat_once
from engine.process.orphan import die_with_parent
from engine.process.places import Places


def import_loop(architecture: str = "") -> None:
    """There is nothing to be imported."""


def get_ready(architecture: str, words: Sequence[str]) -> None:
    """There is nothing to be got ready."""


def begin(words: Sequence[str]) -> None:
    """There is nothing to be begun."""


def main(begun: None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", required=True)
    parser.add_argument("--runtime-dir", type=Path, required=True)
    parser.add_argument("--memory", type=Path)
    parser.add_argument("--plan")
    parser.add_argument("--parent", type=int)
    parser.add_argument("--join", action="store_true")
    options = parser.parse_args()
    die_with_parent(options.parent)
    directory, rank = options.runtime_dir, options.rank
    places = Places(directory, options.memory)
    num_ranks = json.loads(Path(options.plan).read_text())["data_parallel_size"]
    (directory / f"knows-{rank}").write_text(str(num_ranks))
    (directory / f"joined-{rank}").write_text(str(options.join))
    if (directory / f"refuse-{rank}").exists():
        raise SystemExit(int((directory / f"refuse-{rank}").read_text() or 3))
    while not (directory / f"leave-{rank}").exists():
        name = "loading" if (directory / f"silent-{rank}").exists() else "beat"
        beat_once(places.file(f"{name}-{rank}"))
        time.sleep(0.02)


if __name__ == "__main__":
    main()
