"""What must be equal on all machines of a server: versions, checkpoint, and every choice but those of the machine itself."""

from __future__ import annotations

import dataclasses
import hashlib
from importlib.metadata import version
from pathlib import Path

from configs.engine import Plan

PACKAGES = ("moesaic", "torch")
SAMPLE_BYTES = 1 << 16
# Fields of a plan that a machine decides for itself.
OWN = frozenset(
    {
        "model_path",
        "served_model_names",
        "num_kv_blocks",
        "threads_per_rank",
        "native_kernels",
        "pin_ranks",
        "spin_threads",
        "rank_bytes",
        "max_ranks",
        "data_parallel_size_local",
        "reasons",
    }
)


def versions() -> dict[str, str]:
    return {package: version(package) for package in PACKAGES}


def model_digest(directory: str) -> str:
    """Of the configuration and of the weights' names, shapes and samples: a checkpoint of other weights has another one.

    Reads 128 KiB of each file."""
    digest = hashlib.sha256()
    for path in sorted(Path(directory).glob("*")):
        if path.name != "config.json" and path.suffix != ".safetensors":
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, size - SAMPLE_BYTES))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def differences(theirs: Plan, ours: Plan) -> list[str]:
    """A line for each field that must be equal and is not. theirs: of the machine that wants to join."""
    there, here = _shared(theirs), _shared(ours)
    return [
        f"{name} is {there[name]!r} there and {here[name]!r} on the head" for name in here if there[name] != here[name]
    ]


def _shared(plan: Plan) -> dict[str, object]:
    """Where a machine remembers what it has measured is its own business too."""
    dbo = None if plan.dbo is None else dataclasses.replace(plan.dbo, memory="")
    values = dataclasses.asdict(dataclasses.replace(plan, dbo=dbo))
    return {name: value for name, value in values.items() if name not in OWN}
