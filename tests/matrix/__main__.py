"""`python -m tests.matrix --json`: every pair of features runs the same seeded requests; results must be bit-equal.

`--write` puts the table into docs/matrix.md. `--only A,B` runs the pairs that have one of these.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tests.matrix.features import FEATURES
from tests.matrix.pairs import cells, pairs
from tests.matrix.table import write

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "matrix.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--only", help=f"names, with commas: {', '.join(FEATURES)}")
    parser.add_argument(
        "--without", action="store_true", help="without --deterministic: how much it is that differs then"
    )
    parser.add_argument("--workers", type=int, default=1, help="pairs that run at a time")
    parser.add_argument(
        "--json", action="store_true", help="nothing but the JSON line, and pairs that are not identical"
    )
    parser.add_argument("--write", action="store_true", help="the table, into docs/matrix.md")
    options = parser.parse_args()
    only = options.only.split(",") if options.only else list(FEATURES)
    unknown = [name for name in only if name not in FEATURES]
    if unknown:
        parser.error(f"--only: no feature {unknown[0]!r}; there are {', '.join(FEATURES)}")
    chosen = [pair for pair in pairs() if set(pair) & set(only)]
    began = time.monotonic()
    done = cells(chosen, not options.without, max(options.workers, 1), options.json)
    identical = sum(one.identical for one in done)
    if options.write:
        write(DOCUMENT, done)
    figures = {"pairs": len(done), "identical": identical, "differing_requests": sum(len(one.wrong) for one in done)}
    print(json.dumps({**figures, "seconds": round(time.monotonic() - began, 1)}))
    sys.exit(identical != len(done))


if __name__ == "__main__":
    main()
