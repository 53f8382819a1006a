"""Kernels compiled by all cores at once before they are measured: one after another, a tuner's candidates take minutes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from layers import triton_attention, triton_merge
from mla import triton_decode, triton_prefill
from moe_kernels import triton_fp8_experts, triton_grouped_gemm, triton_quant, triton_tma_gemm

TUNED = (
    triton_attention, triton_merge, triton_decode, triton_prefill, triton_fp8_experts, triton_grouped_gemm, triton_quant,
    triton_tma_gemm,
)  # fmt: skip


class _Compiles:
    """Stands for a kernel: a launch compiles it, and that is all."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return functools.partial(self._kernel.warmup, grid=grid)


@contextlib.contextmanager
def _not_launched(modules: Sequence[ModuleType]) -> Iterator[None]:
    # Functions that kernels call must stay what they are: only what is launched from the host is replaced.
    kernels = [
        (module, name, kernel)
        for module in modules
        for name, kernel in vars(module).items()
        if isinstance(kernel, JITFunction) and name.endswith("_kernel")
    ]
    try:
        for module, name, kernel in kernels:
            setattr(module, name, _Compiles(kernel))
        yield
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


def compile_ahead(
    runs: Iterable[Callable[[], object]], num_threads: int, modules: Sequence[ModuleType] = TUNED
) -> None:
    """What these calls would launch; results are garbage. What cannot be compiled says so when it is launched."""
    with (
        ThreadPoolExecutor(num_threads) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
        _not_launched(modules),
    ):
        for run in runs:
            with contextlib.suppress(Exception):
                run()
