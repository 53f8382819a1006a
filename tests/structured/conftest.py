"""Makes what tests of engine and server share importable."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [
    str(HERE),
    str(HERE.parent / "engine"),
    str(HERE.parent / "models"),
    str(HERE.parent / "fakes" / "fake_parts"),
    str(HERE.parent / "server"),
    str(HERE.parent / "launch"),
]
