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

from layers.triton import attention as triton_attention
from layers.triton import merge as triton_merge
from mla.triton import decode as triton_decode
from mla.triton import prefill as triton_prefill
from moe_kernels.triton import fp8_experts as triton_fp8_experts
from moe_kernels.triton import grouped_gemm as triton_grouped_gemm
from moe_kernels.triton import quant as triton_quant
from moe_kernels.triton import tma_gemm as triton_tma_gemm

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
def not_launched(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Launches of their kernels compile, and that is all."""
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
        not_launched(modules),
    ):
        for run in runs:
            with contextlib.suppress(Exception):
                run()
