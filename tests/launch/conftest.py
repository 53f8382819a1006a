"""Makes `served`, helpers of tests/models and tests/engine, and benchmarks/hosts.py importable for the tests beside it."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE),
    str(HERE.parent / "models"),
    str(HERE.parent / "engine"),
    str(HERE.parent.parent / "benchmarks"),
]
