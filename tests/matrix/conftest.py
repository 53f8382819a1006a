"""Makes `tests.matrix` importable whatever the directory is that pytest was started in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
