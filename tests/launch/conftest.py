"""Makes `served`, and the makers of tiny checkpoints in tests/models, importable for the tests beside it."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "models")]
