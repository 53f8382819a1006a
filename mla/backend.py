"""Makes the implementation of latent attention that mla/requirements.py chooses."""

from __future__ import annotations

import torch

from layers import choice
from mla.attention import TorchMla
from mla.flashinfer import FlashInferMla
from mla.flashmla import FlashMla
from mla.protocol import MlaBackend, MlaShape, PrefillMode
from mla.requirements import choose_mla, facts_of


def make_backend(
    shape: MlaShape,
    scale: float,
    prefill: PrefillMode,
    dtype: torch.dtype,
    device: torch.device,
    name: str = "auto",
    fp8_cache: bool = False,
) -> MlaBackend:
    """scale: what scores are multiplied by. fp8_cache: cache rows are those of mla/latent_fp8.py. What is not chosen is
    not imported. Raises ValueError as `choose_mla`."""
    chosen = choose_mla(name, facts_of(shape, dtype, device, fp8_cache))
    if chosen == "torch":
        return TorchMla(shape, scale, prefill, dtype, fp8_cache=fp8_cache)
    backend: MlaBackend
    if chosen == "triton":
        backend = choice.triton_implementation("mla.triton.mla", "TritonMla")(shape, scale, prefill, dtype)
    elif chosen == "flashinfer":
        backend = FlashInferMla(shape, scale, dtype, device)
    else:
        backend = FlashMla(shape, scale, make_backend(shape, scale, prefill, dtype, device))
    return backend
