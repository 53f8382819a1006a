"""Times and limits of a GPU, for gpu_ops.py and tune_triton.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

FLUSH_BYTES = 256 << 20  # more than any second-level cache


class GpuClock:
    """Seconds of one call, without the caches' help and without the host's: the call is captured in a graph where it can be."""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, run: Callable[[], object], repeats: int = 20) -> float:
        """The median."""
        again = self._captured(run)
        times = []
        for _ in range(repeats):
            self._flush.zero_()
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            again()
            ended.record()
            times.append((began, ended))
        torch.cuda.synchronize()
        return sorted(began.elapsed_time(ended) for began, ended in times)[repeats // 2] / 1e3

    def _captured(self, run: Callable[[], object]) -> Callable[[], object]:
        for _ in range(2):  # compiles
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
        except RuntimeError:  # it copies from the host (plans of prompts): timed as it is
            torch.cuda.synchronize()
            return run
        return graph.replay


@dataclass
class Limits:
    """Bytes and operations a second, measured in this run by a copy and by products of large matrices."""

    memory: float
    products: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def probe(
        clock: Callable[[Callable[[], object]], float], device: torch.device, size: int = 8192, num_bytes: int = 1 << 30
    ) -> Limits:
        """FP8 counts as BF16 where torch does not multiply it on this chip."""
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        limits = Limits(2 * source.numel() / clock(lambda: target.copy_(source)))
        a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        limits.products["bf16"] = 2 * size**3 / clock(lambda: a @ b)
        a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T, torch.ones((), device=device)
        try:
            seconds = clock(lambda: torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
            limits.products["fp8"] = 2 * size**3 / seconds
        except (RuntimeError, ValueError):
            limits.products["fp8"] = limits.products["bf16"]
        return limits

    def seconds(self, num_bytes: float, flops: float, kind: str) -> tuple[float, str]:
        """(the least that it can take, what takes it)."""
        memory, products = num_bytes / self.memory, flops / self.products[kind]
        return (memory, "memory") if memory > products else (products, kind)
