"""The one place of this room where an implementation is chosen: Triton's decode on a GPU where triton is installed."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from mla.attention import TorchMla
from mla.protocol import MlaBackend, MlaShape, PrefillMode


def make_backend(
    shape: MlaShape, scale: float, prefill: PrefillMode, dtype: torch.dtype, device: torch.device
) -> MlaBackend:
    """scale: what scores are multiplied by. Triton is imported only if it is chosen."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        backend: MlaBackend = importlib.import_module("mla.triton_mla").TritonMla(shape, scale, prefill, dtype)
        return backend
    return TorchMla(shape, scale, prefill, dtype)
