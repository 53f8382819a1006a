"""Which implementations of latent attention can run here, and why others cannot: by what the device is, what is
installed, and the shape. The one place of this room where the device is asked for."""

from __future__ import annotations

import importlib.util

import torch
from msgspec import Struct

from layers import choice
from mla.protocol import MlaShape

NAMES = ("torch", "triton", "flashinfer", "flashmla")
_PACKAGES = {"triton": "triton", "flashinfer": "flashinfer", "flashmla": "flash_mla"}
PIP = {
    "triton": "pip install triton",
    "flashinfer": "pip install 'flashinfer-python>=0.6.18'",
    "flashmla": "pip install git+https://github.com/deepseek-ai/FlashMLA.git",
}
FLASHMLA_BLOCK = 64  # tokens of a block, which its kernels are written for


class MlaFacts(Struct, frozen=True):
    """What the choice depends on. capability: (9, 0) for Hopper, None without a GPU; installed: backends whose package
    is there; block_size: None while it is still open."""

    shape: MlaShape
    dtype: torch.dtype
    on_gpu: bool
    capability: tuple[int, int] | None
    installed: frozenset[str]
    fp8_cache: bool = False
    block_size: int | None = None


def facts_of(
    shape: MlaShape, dtype: torch.dtype, device: torch.device, fp8_cache: bool = False, block_size: int | None = None
) -> MlaFacts:
    """What is so on this machine. Imports nothing."""
    on_gpu = choice.on_gpu(device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    asked = {} if capability is None else _PACKAGES  # a search of folders for each; without a GPU none can run
    installed = frozenset(name for name, package in asked.items() if importlib.util.find_spec(package) is not None)
    return MlaFacts(shape, dtype, on_gpu, capability, installed, fp8_cache, block_size)


def explain_mla(facts: MlaFacts) -> dict[str, str]:
    """For each backend "ok", or why it cannot run."""
    return {
        "torch": "ok",
        "triton": "ok" if facts.on_gpu else "needs tensors on a GPU, and triton",
        "flashinfer": _library("flashinfer", facts) or _flashinfer(facts) or "ok",
        "flashmla": _library("flashmla", facts) or _flashmla(facts) or "ok",
    }


def _library(name: str, facts: MlaFacts) -> str:
    if facts.capability is None:
        return "needs an NVIDIA GPU"
    if facts.dtype != torch.bfloat16:
        return f"works in bfloat16, not {str(facts.dtype).removeprefix('torch.')}"
    if (facts.shape.latent_dim, facts.shape.qk_rope_head_dim) != (512, 64):
        widths = f"{facts.shape.latent_dim} and {facts.shape.qk_rope_head_dim}"
        return f"written for latents of 512 and keys of 64, not {widths}"
    if facts.fp8_cache:
        return "reads latents in bfloat16, not in FP8 rows with scales"
    return "" if name in facts.installed else f"not installed: {PIP[name]}"


def _flashinfer(facts: MlaFacts) -> str:
    return "" if facts.capability in ((9, 0), (10, 0), (10, 3)) else "its MLA kernels need Hopper or Blackwell"


def _flashmla(facts: MlaFacts) -> str:
    if facts.capability != (9, 0):
        return "its dense decode is written for Hopper"
    if facts.block_size not in (None, FLASHMLA_BLOCK):
        return (
            f"its cache has blocks of {FLASHMLA_BLOCK} tokens, not {facts.block_size} (--block-size {FLASHMLA_BLOCK})"
        )
    return ""


def choose_mla(name: str, facts: MlaFacts) -> str:
    """The backend: `name`, or with "auto" Triton's on a GPU and torch's elsewhere (others are taken when they are asked
    for: they have not been measured beside ours yet).

    Raises ValueError when there is no such backend, or it cannot run.
    """
    verdicts = explain_mla(facts)
    if name == "auto":
        return "triton" if verdicts["triton"] == "ok" else "torch"
    if name not in verdicts:
        raise ValueError(f"mla backend {name!r} is unknown; it must be auto, {', '.join(NAMES)}")
    if verdicts[name] != "ok":
        raise ValueError(f"mla backend {name!r}: {verdicts[name]}")
    return name
