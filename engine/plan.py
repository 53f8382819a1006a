"""From a model directory and a user's wishes to a Plan. Reads config.json and safetensors headers; no torch here."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from configs.engine import Dtype, EngineConfig, Plan
from configs.env import read_env
from configs.resolve import Machine, ModelNumbers, resolve, this_machine
from models.facts import ModelFacts
from models.registry import read_config
from models.tiny import CHECKPOINT
from native import Isa, best_isa, why_absent

EMBEDDED_NAME = "moesaic-tiny"
ITEM_SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I8": 1, "U8": 1}


def make_plan(config: EngineConfig, machine: Machine | None = None) -> Plan:
    """Raises ValueError, one line that names the file or the field, for whatever cannot be served."""
    path = Path(config.model) if config.model else CHECKPOINT
    if not path.is_dir():
        raise ValueError(f"model {config.model!r} is not a directory (models are read from disk; there is no download)")
    name = config.model or EMBEDDED_NAME
    return resolve(config, model_numbers(path, name, read_config(path)), machine or _with_kernels(this_machine()))


def _with_kernels(machine: Machine) -> Machine:
    """What the native kernels find on this machine, or may use of it."""
    best, asked = best_isa(), read_env().isa.upper()
    if asked and asked not in Isa.__members__:
        names = ", ".join(level.name.lower() for level in Isa)
        raise ValueError(f"MOESAIC_ISA {read_env().isa!r} is unknown; one of {names}")
    used = min(best, Isa[asked]) if asked else best
    reason = why_absent() or ("the best that this CPU has" if used == best else f"MOESAIC_ISA={asked.lower()}")
    return replace(
        machine,
        native_kernels=used.name.lower(),
        native_reason=reason,
        fast_bfloat16=machine.fast_bfloat16 and (used == best or used == Isa.AVX512_BF16),
    )


def model_numbers(path: Path, name: str, facts: ModelFacts) -> ModelNumbers:
    """Weights are counted from the headers of the safetensors files: their own sizes, nothing estimated."""
    total = experts = fp8_experts = 0
    by_dtype: dict[str, int] = {}
    for file in sorted(path.glob("*.safetensors")):
        for key, dtype, size in _tensors(file):
            total += size
            experts += size if ".mlp.experts." in key else 0
            fp8_experts += size if ".mlp.experts." in key and dtype == "F8_E4M3" else 0
            by_dtype[dtype] = by_dtype.get(dtype, 0) + size
    if not by_dtype:
        raise ValueError(f"{path}: no *.safetensors file with tensors in it")
    common = max(by_dtype, key=lambda dtype: by_dtype[dtype])
    widened = (
        2 if common.startswith("F8") else 1
    )  # FP8 blocks are widened to bfloat16 at load, unless kept (configs/resolve.py)
    held: Dtype = "float32" if common == "F32" else "bfloat16"
    return ModelNumbers(
        path=str(path),
        name=name,
        architecture=facts.architecture,
        max_position_embeddings=facts.max_position_embeddings,
        num_experts=facts.num_experts,
        num_moe_layers=facts.num_moe_layers,
        kv_numbers_per_token=facts.kv_bytes_per_token(1),
        weight_bytes=total * widened,
        expert_bytes=experts * widened,
        dtype=held,
        fp8_experts=fp8_experts > experts // 2,
    )


def _tensors(file: Path) -> list[tuple[str, str, int]]:
    """(key, dtype name, bytes) of every tensor of one safetensors file."""
    found = []
    try:
        with safe_open(file, framework="np") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a mapping)
                piece = tensors.get_slice(key)
                dtype = str(piece.get_dtype())
                if dtype not in ITEM_SIZES:
                    raise ValueError(f"{file}: tensor {key} has dtype {dtype}, which is not supported")
                found.append((key, dtype, math.prod(piece.get_shape()) * ITEM_SIZES[dtype]))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a readable safetensors file ({error})") from None
    return found
