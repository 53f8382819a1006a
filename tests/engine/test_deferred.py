"""Modules that are imported when something is first taken of them (engine/process/deferred.py)."""

from __future__ import annotations

import subprocess
import sys

TORCH = """
import sys
from engine.process.deferred import OF_TORCH, defer
defer(OF_TORCH)
import torch
from engine.process.rank_process import import_loop
import_loop("Qwen3MoeForCausalLM")
deferred, = (sys.modules[name] for name in OF_TORCH)
import inspect
inspect.getmodule(torch.Tensor.add, "?")  # looks through all modules
assert type(deferred).__name__ == "_Deferred" and "torch._prims" not in sys.modules
assert torch.empty(2, 3, device="meta").view(3, 2).shape == (3, 2)
assert callable(deferred.register_meta)
assert type(deferred) is type(sys) and torch._meta_registrations is deferred and "torch._prims" in sys.modules
assert torch.compile is not None
try:
    deferred.nothing
except AttributeError:
    print("good")
"""


def test_what_a_rank_imports_leaves_them_out_and_they_are_there_when_asked_for() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", TORCH], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "good", done.stderr
