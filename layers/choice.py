"""Where layers, mla and moe_kernels ask for the device: Triton's kernels for tensors on a GPU where triton is
installed.

Triton is imported when the first tensor on a GPU arrives.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from layers.optional import load


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def on_gpu(device: torch.device) -> bool:
    """Whether Triton's kernels run on tensors of this device."""
    return device.type == "cuda" and has_triton()


@functools.cache
def triton_implementation(module: str, name: str) -> Any:
    """What has this name in <module>, such as "layers.triton.norm"."""
    return vars(load(module, "pip install triton"))[name]
