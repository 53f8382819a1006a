"""What a choice depends on: the machine, and the sizes of the model. Without torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from msgspec import Struct

from cache.spec import CacheSpec
from configs.engine import Dtype
from configs.gpu import Exchange, Gpu
from configs.versions import __version__


class Machine(Struct, frozen=True):
    """What this machine offers. memory in bytes, free when asked."""

    device: Literal["cpu", "cuda"]
    cores: int
    free_memory: int
    fast_bfloat16: bool
    shared_memory: bool  # its ranks can exchange through it (ep/transport/shm_futex.py)
    native_kernels: str = "none"  # the instruction set that the CPU kernels may use
    native_reason: str = "native kernels have not been looked for"
    native_choice: str = ""  # which of their ways are taken (native/choice.py)
    choice_reason: str = "not measured"
    restricted: bool = False  # this process may not run on all cores that there are
    gpu: Gpu | None = None  # with device "cuda"; free_memory is then that of the GPUs of all ranks
    exchange: Exchange | None = None  # between them
    device_reason: str = "a GPU has not been looked for"
    # On how many machines like this one the ranks are, each with memory that its own ranks share; cores and memory are
    # then those of all.
    machines: int = 1

    @property
    def reasons(self) -> dict[str, str]:
        """Field of a Plan -> why, of those that the machine alone decides."""
        return {
            "device": self.device_reason,
            "native_kernels": self.native_reason,
            "native_choice": self.choice_reason,
        }


class ModelNumbers(Struct, frozen=True):
    """What a choice needs to know of a model. cache_spec(dtype, fp8): as models/facts.py has it."""

    path: str
    name: str  # what the server calls it unless told otherwise
    architecture: str
    max_position_embeddings: int
    num_experts: int
    num_moe_layers: int
    cache_spec: Callable[[str, bool], CacheSpec]
    weight_bytes: int
    expert_bytes: int  # part of weight_bytes that the ranks share among them
    dtype: Dtype
    fp8_experts: bool = False  # the checkpoint has them in FP8; expert_bytes counts them widened
    half_experts: str = (
        ""  # "mxfp4" or "int4": it has them in 4 bits; "mixed": expert_bytes counts them as they are kept
    )
    linear_bytes: int = 0  # another part, of linear layers
    in_bfloat16: bool = False  # most of the checkpoint is; of GGUF it is not asked
    hidden_size: int = 0
    num_layers: int = 0
    context_limit: int = 0  # the most tokens of a sequence; 0: max_position_embeddings
    context_reason: str = "max_position_embeddings"
    tokenizer_path: str = ""  # of another tokenizer; "": the model's own

    @property
    def usual_len(self) -> int:
        """max_model_len unless told otherwise."""
        return min(self.max_position_embeddings, self.context_limit or self.max_position_embeddings)

    @property
    def usual_reason(self) -> str:
        limit = self.context_limit or self.max_position_embeddings
        if limit < self.max_position_embeddings:
            return f"the model's {self.context_reason}"
        more = f"; up to {limit} may be asked for ({self.context_reason})"
        return f"the model's max_position_embeddings{more if limit > self.max_position_embeddings else ''}"


def this_machine() -> Machine:
    """Reads /proc; the cores are those that this process may run on."""
    flags = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            flags = line
            break
    fast = "avx512_bf16" in flags or "amx_bf16" in flags
    system = os.uname()
    shared = system.sysname == "Linux" and system.machine == "x86_64"
    cores = len(os.sched_getaffinity(0))
    return Machine("cpu", cores, free_memory(), fast, shared, restricted=cores < (os.cpu_count() or cores))


def measured_here() -> dict[str, str | int]:
    """What tells times that were measured by this release on this machine from those of others that may remember theirs
    in the same directory."""
    names = ("vendor_id", "cpu family", "model", "model name", "stepping")
    first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    cpu = " ".join(value.strip() for name, _, value in pairs if name.strip() in names)
    return {"version": __version__, "cpu": cpu, "cores": len(os.sched_getaffinity(0))}


def free_memory() -> int:
    """Bytes that processes can still have; 0 where /proc does not say."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
