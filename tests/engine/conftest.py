"""Makes tests/models/hf_tiny.py importable for the tests that need a checkpoint, and the fakes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
sys.path.insert(0, str(Path(__file__).parent.parent / "fakes" / "fake_parts"))
