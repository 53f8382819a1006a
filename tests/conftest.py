"""Options of the whole suite, and its last line: one JSON object with the counts."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from configs.env import read_env
from native import Isa, limit_isa

HERE = Path(__file__).resolve().parent
MAX_WORKERS = 8
LONG = (
    "ep/test_all_to_all.py",
    "spine/test_recurrent.py",
    "native/test_sanitized.py",
    "engine/test_balance.py",
    "launch/test_standby.py",
    "launch/test_forks.py",
    "store/test_served_store.py",
    "launch/test_surviving.py",
    "launch/test_monitor.py",
    "launch/test_serve.py",
    "store/test_taken_over.py",
    "launch/test_hosts.py",
    "models/test_varied_configs.py",
    "moesaic_cli/test_cli.py",
    "launch/test_storage_and_pipes.py",
    "engine/test_claimed_gpu.py",
    "models/test_quantized_checkpoints.py",
    "speculation/test_mtp.py",
    "ep/test_nvshmem_low_latency.py",
    "launch/test_eplb_serving.py",
    "engine/test_survival.py",
    "moesaic_cli/test_public.py",
    "ep/test_shm.py",
    "server/test_large_bodies.py",
    "models/test_deepseek_parity.py",
    "matrix/test_matrix.py",
    "models/test_gqa_parity.py",
)  # relative to tests/; each takes twelve seconds or more, beside two others on two cores
FEW = 20  # of 100 examples, in `make test` (amounts.py)
OUTCOMES = ("passed", "failed", "error", "skipped", "deselected")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real-weights", metavar="DIR", help="checkpoints made by benchmarks/real_weights.py (make real)")


class LastLine:
    """Printed after pytest's own summary. With workers (pytest-xdist) by their controller alone."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.deselected = 0  # by each worker, which all collect the same

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.deselected = max(self.deselected, getattr(node, "workeroutput", {}).get("deselected", 0))

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        counts = {outcome: len(reporter.stats.get(outcome, ())) for outcome in OUTCOMES}
        counts["deselected"] += self.deselected
        print(json.dumps({**counts, "seconds": round(time.monotonic() - self.began, 1)}), flush=True)


class OfWorker:
    """Tells the controller what only a worker knows."""

    def __init__(self, output: dict[str, Any]) -> None:
        self.output = output

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.output["deselected"] = self.output.get("deselected", 0) + len(items)


def pytest_configure(config: pytest.Config) -> None:
    limit_isa(Isa[read_env().isa.upper() or max(Isa).name])  # MOESAIC_ISA=avx2 make test: a lesser machine
    if "not slow" in config.option.markexpr:
        settings.register_profile("few", settings.default, max_examples=FEW)
        settings.load_profile("few")
    cache = tempfile.TemporaryDirectory(prefix="moesaic-cache-")  # not the user's own
    os.environ["MOESAIC_CACHE_DIR"] = cache.name
    config.add_cleanup(cache.cleanup)
    torch.set_num_threads(1)  # the cores are shared with the processes that tests start
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(OfWorker(config.workeroutput), "of-worker")
    else:
        # Read when a worker starts: its threads must not spin on a core that another worker has.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        config.pluginmanager.register(LastLine(), "last-line")


def pytest_sessionstart() -> None:
    gc.disable()  # what is collected lives to the end


def pytest_collection_finish() -> None:
    """No collection looks again at thousands of tests and at libraries."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: one more than the cores that this process may use, because some test waits for a process most of the
    time; but no more than the longest files keep busy."""
    return min(len(os.sched_getaffinity(0)) + 1, MAX_WORKERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: a worker that began one last would be waited for."""
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.relative_to(HERE).as_posix(), len(order)))
