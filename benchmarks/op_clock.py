"""What bench_ops.py measures with: an operation beside the limits of the machine, in turn, in one run."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from native import Isa, function, isa, library, limit_isa

Run = Callable[[int], object]  # number of the call: so that each call can take other data

_BLOCK_SECONDS = 0.02
_READ_BYTES = 256 << 20  # far more than any cache


@dataclass(frozen=True)
class Op:
    """bytes: what must come from memory in one call; flops: products and sums in one call. reference: the torch path, or None.
    pairs: bfloat16 products."""

    name: str
    shape: str
    bytes: float
    flops: float
    run: Run
    reference: Run | None = None
    pairs: bool = True


@dataclass
class Machine:
    """Bytes and operations a second, the best seen so far."""

    threads: int
    read: float = 0.0
    products: dict[bool, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kernels = library()
        if kernels is None:
            raise SystemExit("bench_ops needs the native kernels, which probe the limits")
        self._products = kernels["probe_products"]
        self._products.argtypes, self._products.restype = (ctypes.c_int, ctypes.c_int64, ctypes.c_int), ctypes.c_int64
        self._read = function("probe_read", ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
        self._memory = torch.empty(_READ_BYTES, dtype=torch.uint8)
        function("native_use_large_pages", ctypes.c_void_p, ctypes.c_int64)(self._memory.data_ptr(), _READ_BYTES)
        self._memory.fill_(1)

    def clock(self) -> float:
        """One thread: the time it ran, whoever else did; several: the wall's."""
        return time.thread_time() if self.threads == 1 else time.perf_counter()

    def probe(self) -> None:
        """A few milliseconds of each limit."""
        part = _READ_BYTES // 8
        for i in range(8):
            began = self.clock()
            self._read(self._memory.data_ptr() + i * part, part, self.threads)
            self.read = max(self.read, part / (self.clock() - began))
        for pairs in (False, True):
            for _ in range(3):
                began = self.clock()
                done = self._products(int(pairs), 100_000, self.threads)
                self.products[pairs] = max(self.products.get(pairs, 0.0), done / (self.clock() - began))

    def limit(self, op: Op) -> tuple[float, str]:
        """(seconds, what takes them)."""
        memory, products = op.bytes / self.read, op.flops / self.products[op.pairs]
        return (memory, "memory") if memory > products else (products, "products")


@dataclass(frozen=True)
class Timed:
    """isa_seconds: of the lesser instruction sets that were asked for."""

    seconds: float
    reference_seconds: float | None
    isa_seconds: dict[Isa, float]


def _with(level: Isa, run: Run) -> Run:
    def limited(call: int) -> object:
        before = isa()
        limit_isa(level)
        result = run(call)
        limit_isa(before)
        return result

    return limited


def measure(op: Op, machine: Machine, seconds: float, levels: Sequence[Isa] = ()) -> Timed:
    """The fastest call of each, taken in turns with the probes; with lesser instruction sets too."""
    best: dict[str, float] = {}
    runs = {"ours": op.run} | ({"reference": op.reference} if op.reference else {})
    runs |= {level.name: _with(level, op.run) for level in levels}
    counts = dict.fromkeys(runs, 0)
    stop = time.perf_counter() + seconds
    rounds = 0
    while rounds < 2 or time.perf_counter() < stop:
        machine.probe()
        first = rounds % len(runs)  # what comes right after the probes finds least in the caches
        for name, run in [*runs.items()][first:] + [*runs.items()][:first]:
            until = time.perf_counter() + _BLOCK_SECONDS
            for _ in range(2 if rounds == 0 else 1_000_000):  # the first calls warm up
                began = machine.clock()
                run(counts[name])
                took = machine.clock() - began
                counts[name] += 1
                if rounds:
                    best[name] = min(best.get(name, took), took)
                if time.perf_counter() > until:
                    break
        rounds += 1
    return Timed(best["ours"], best.get("reference"), {level: best[level.name] for level in levels})


def be_preferred() -> None:
    """Run before others, where that is allowed: a call that is interrupted says nothing."""
    try:
        os.nice(-15)
    except OSError:
        return
