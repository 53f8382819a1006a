"""Makes the helpers of tests/launch and benchmarks/hosts.py importable for the tests beside it."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "launch"), str(HERE.parent.parent / "benchmarks")]
