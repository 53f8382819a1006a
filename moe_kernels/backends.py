"""What multiplies by the experts' weights: by what the device is, what is installed, and the shape.

Legend: D hidden size, F expert width.
"""

from __future__ import annotations

import importlib.util

import torch
from msgspec import Struct

from layers.choice import on_gpu
from moe_kernels.activation import GATED, ExpertKind
from moe_kernels.matrix import HALVES, WeightFormat
from moe_kernels.packed import can_pack
from moe_kernels.quant import BLOCK

NAMES = ("native", "torch", "triton", "deepgemm", "flashinfer")
PIP = {"deepgemm": "pip install sgl-deep-gemm", "flashinfer": "pip install 'flashinfer-python>=0.6.18'"}
_PACKAGES = {"deepgemm": "deep_gemm", "flashinfer": "flashinfer"}


class ExpertFacts(Struct, frozen=True):
    """What the choice depends on. native: the CPU kernels can run; on_gpu: Triton's can; capability: (9, 0) for Hopper,
    None without a GPU; installed: backends whose package is there."""

    hidden: int
    width: int
    dtype: torch.dtype
    form: WeightFormat
    native: bool
    on_gpu: bool
    capability: tuple[int, int] | None
    installed: frozenset[str]
    kind: ExpertKind = GATED


def facts_of(
    hidden: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    form: WeightFormat,
    kind: ExpertKind = GATED,
) -> ExpertFacts:
    """What is so on this machine. Imports nothing."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    asked = {} if capability is None else _PACKAGES  # a search of folders for each; without a GPU none can run
    installed = frozenset(name for name, package in asked.items() if importlib.util.find_spec(package) is not None)
    where = can_pack(dtype, device), on_gpu(device), capability, installed
    return ExpertFacts(hidden, width, dtype, form, *where, kind)


def explain_experts(facts: ExpertFacts) -> dict[str, str]:
    """For each backend "ok", or why it cannot run."""
    return {
        "native": "ok" if facts.native else "needs tensors on a CPU, in float32 or bfloat16, and the native kernels",
        "torch": "Triton's kernels run where they are" if facts.on_gpu else "ok",
        "triton": _triton(facts) or "ok",
        "deepgemm": _library("deepgemm", facts) or "ok",
        "flashinfer": _library("flashinfer", facts) or "ok",
    }


def _triton(facts: ExpertFacts) -> str:
    return "" if facts.on_gpu else "needs tensors on a GPU, and triton"


def _library(name: str, facts: ExpertFacts) -> str:
    if facts.capability is None:
        return "needs an NVIDIA GPU"
    if facts.capability not in ((9, 0), (10, 0), (10, 3)):
        return f"needs Hopper or Blackwell, not compute capability {facts.capability[0]}.{facts.capability[1]}"
    if facts.dtype != torch.bfloat16:
        return f"works in bfloat16, not {str(facts.dtype).removeprefix('torch.')}"
    if facts.kind != GATED:
        return "has neither biases nor another activation than silu(gate) * up"
    if facts.form in (WeightFormat.INT8, WeightFormat.INT4_INT8, *HALVES):
        return f"has no weights in {facts.form.name}"
    if name == "flashinfer" and facts.form is WeightFormat.FP8 and facts.capability != (9, 0):
        return "FP8 weights with block scales: on Hopper only"
    if facts.hidden % BLOCK or facts.width % BLOCK:
        return f"needs sizes that are multiples of {BLOCK}, not {facts.hidden} and {facts.width}"
    return "" if name in facts.installed else f"not installed: {PIP[name]}"


def choose_experts(name: str, facts: ExpertFacts) -> str:
    """The backend: `name`, or with "auto" the native kernels on a CPU that has them, DeepGEMM for FP8 weights where it
    is installed, Triton on other GPUs, torch elsewhere.

    Raises ValueError when there is no such backend, or it cannot run.
    """
    verdicts = explain_experts(facts)
    if name == "auto":
        order = (
            ("native", "deepgemm", "triton", "torch")
            if facts.form is WeightFormat.FP8
            else ("native", "triton", "torch")
        )
        return next(backend for backend in order if verdicts[backend] == "ok")
    if name not in verdicts:
        raise ValueError(f"experts backend {name!r} is unknown; it must be auto, {', '.join(NAMES)}")
    if verdicts[name] != "ok":
        raise ValueError(f"experts backend {name!r}: {verdicts[name]}")
    return name
