"""Options of the whole suite, and its last line: one JSON object with the counts."""

from __future__ import annotations

import json
import os
import tempfile
import time

import pytest
import torch

from configs.env import read_env
from native import Isa, limit_isa

OUTCOMES = ("passed", "failed", "error", "skipped", "deselected")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real-weights", metavar="DIR", help="checkpoints made by benchmarks/real_weights.py (make real)")


class LastLine:
    """Printed after pytest's own summary."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        counts = {outcome: len(reporter.stats.get(outcome, ())) for outcome in OUTCOMES}
        print(json.dumps({**counts, "seconds": round(time.monotonic() - self.began, 1)}), flush=True)


def pytest_configure(config: pytest.Config) -> None:
    limit_isa(Isa[read_env().isa.upper() or "AVX512_BF16"])  # MOESAIC_ISA=avx2 make test: a lesser machine
    cache = tempfile.TemporaryDirectory(prefix="moesaic-cache-")  # not the user's own
    os.environ["MOESAIC_CACHE_DIR"] = cache.name
    config.add_cleanup(cache.cleanup)
    torch.set_num_threads(1)  # the cores are shared with the processes that tests start
    config.pluginmanager.register(LastLine(), "last-line")
