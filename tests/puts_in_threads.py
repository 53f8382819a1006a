"""Ranks that are threads and run Triton kernels which put into each other's memory: in Triton's interpreter, over the fakes of
nvshmem4py and of torch's functions of NVSHMEM for a device.

The interpreter has one place for what it works on, so one kernel runs at a time; but a kernel that looks at memory which
others write (a volatile load) lets them go on. Memory that nobody has written holds NaN.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import fake_cuda_graph
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton_support import _language_kept, _replaced
from use_fakes import use_fakes

import ep.backends.triton_put
from ep.backends.nvshmem_ll import FUNCTIONS

_TURN = threading.Lock()
_load = interpreter.InterpreterBuilder.create_masked_load


class InTurn(interpreter.InterpretedFunction):  # type: ignore[misc]
    """A kernel or a function of one, interpreted; launches wait for their turn. While a graph is captured nothing runs, as on
    a GPU: the peers must not be sent anything that no replay has sent."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        graph = fake_cuda_graph._CAPTURING.graph
        if graph is not None:
            graph.calls.append((self._run, args, kwargs, None))
        else:
            self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> None:
        with _TURN:
            super().run(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)  # the language is patched already, which takes longer than most calls


def _let_others(builder: Any) -> None:
    place = builder.grid_idx, builder.grid_dim
    _TURN.release()
    time.sleep(1e-4)
    _TURN.acquire()
    builder.grid_idx, builder.grid_dim = place


@contextmanager
def putting() -> Iterator[None]:
    """The fakes, and nvshmem_low_latency's kernels over them."""
    with use_fakes(), np.errstate(all="ignore"), _language_kept():
        fake = importlib.import_module("fake_nvshmem_triton")

        def create_masked_load(self: Any, *args: Any) -> Any:
            volatile = args[-1]
            if volatile and not fake.deliver():
                _let_others(self)
            return _load(self, *args)

        kept = sys.modules.get(FUNCTIONS)
        sys.modules[FUNCTIONS] = fake
        interpreter.InterpreterBuilder.create_masked_load = create_masked_load
        torch.use_deterministic_algorithms(True)
        try:
            with _replaced((ep.backends.triton_put, tl, tl.standard, tl.math), lambda kernel: InTurn(kernel.fn)):
                seeing = ep.backends.triton_put.send_rows_kernel, tl.standard.zeros  # the language by its two names
                scopes = [interpreter._patch_lang(function.fn) for function in seeing]  # until all are done
                try:
                    yield
                finally:
                    for scope in reversed(scopes):
                        scope.restore()
        finally:
            torch.use_deterministic_algorithms(False)
            interpreter.InterpreterBuilder.create_masked_load = _load
            del sys.modules[FUNCTIONS], sys.modules[fake.__name__]  # it holds on to this fake of nvshmem4py
            if kept is not None:
                sys.modules[FUNCTIONS] = kept


def fakes_for(backend: str) -> AbstractContextManager[None]:
    """What stands for the libraries of an all-to-all backend."""
    return putting() if "nvshmem_low_latency" in backend else use_fakes()
