"""What each all-to-all backend can serve, and why not: facts and limits, without torch and without importing any
library.

Sources: the libraries' own checks, as of DeepEP 2.1.0, pplx-kernels 2bd6e30, FlashInfer 0.7.2, nvshmem4py 0.4.1.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

HOST_NAMES = ("local", "shm", "shm_padded", "gloo", "mailbox")
DEVICE_NAMES = (
    "deepep_high_throughput", "deepep_low_latency", "deepep_v2", "flashinfer_nvlink_one_sided", "pplx", "nvshmem",
    "nvshmem_low_latency", "nccl",
)  # fmt: skip
NAMES = (*HOST_NAMES, *DEVICE_NAMES)
PADDED = (
    "shm_padded",
    "deepep_low_latency",
    "pplx",
    "nvshmem_low_latency",
)  # give experts padded rows, the others ragged ones

FEW_TOKENS = 256  # of a rank in one exchange, unless said otherwise
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
LOW_LATENCY_TOKENS = 511  # of a rank: NVSHMEM's default queue depth, 1024, is at least twice one more
LOW_LATENCY_TOP_K = 11
LOW_LATENCY_RANKS = 8
LOW_LATENCY_PARTS = 2  # of a step: its buffer has place for two results
INTRANODE_RANKS = (2, 4, 8)
INTERNODE_RANKS = (16, 24, 32, 48, 64, 96, 128, 144, 160)
NVLINK_RANKS = 64  # of FlashInfer's rank mask
NVLINK_TOP_K = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)  # for which its kernels are compiled
FP8_BLOCK = 128
PUT_TOP_K = 16  # choices that a message of nvshmem_low_latency has room for (ep/backends/triton_put.py)
PUT_TOKENS = 512  # of a rank: it keeps room for as many rows per slot as all ranks together may bring

_INSTALL = {
    "deep_ep": "pip install 'moesaic[deepep]'",
    "flashinfer": "pip install 'moesaic[flashinfer]'",
    "pplx_kernels": "not on PyPI: pip install git+https://github.com/perplexityai/pplx-kernels",
    "nvshmem": "pip install 'moesaic[nvshmem]'",
    "torch_nvshmem": "torch's Triton functions of NVSHMEM: pip install 'torch>=2.11' triton, torch for CUDA",
}
_MODULES = {
    "deepep_high_throughput": ("deep_ep",),
    "deepep_low_latency": ("deep_ep",),
    "deepep_v2": ("deep_ep",),
    "flashinfer_nvlink_one_sided": ("flashinfer",),
    "pplx": ("pplx_kernels",),
    "nvshmem": ("nvshmem",),
    "nvshmem_low_latency": ("nvshmem", "torch_nvshmem"),
}
_TORCH_NVSHMEM = "distributed/_symmetric_memory/_nvshmem_triton.py"  # in torch's folder
_HOST_WAITS = "the host waits for the number of rows that arrive, so a CUDA graph cannot hold it"


def is_installed(module: str) -> bool:
    """Nothing is imported for it: torch takes seconds."""
    if module == "torch_nvshmem":
        torch = importlib.util.find_spec("torch")
        here = (
            torch is not None
            and torch.origin is not None
            and Path(torch.origin).parent.joinpath(_TORCH_NVSHMEM).is_file()
        )
        return here and is_installed("triton")
    return module in sys.modules or importlib.util.find_spec(module) is not None


class Situation(Struct, frozen=True):
    """What a backend is to serve. 0 and "" mean that it is not known, and nothing is refused for it."""

    ranks: int
    device: str = "cpu"
    ranks_per_node: int = 0  # 0: all ranks are on one machine
    shared_memory: str = ""  # why the ranks cannot share memory (ep/transport/shm_futex.py)
    dtype: str = "bfloat16"
    hidden_size: int = 0
    top_k: int = 0
    max_tokens: int = 0  # of a rank in one exchange
    rows: str = "plain"  # how they travel to the experts (ep/rows.py)
    num_ubatches: int = 0  # of a step that is split
    one_process: bool = False  # ranks take turns in one thread
    no_rdma: str = ""  # why the machine has no InfiniBand (configs/gpu.py)
    no_ibgda: str = ""  # why its GPUs cannot write to InfiniBand's queues themselves
    installed: Callable[[str], bool] = is_installed

    @property
    def one_node(self) -> bool:
        return self.ranks_per_node == 0 or self.ranks <= self.ranks_per_node


def split_pair(name: str) -> tuple[str, str]:
    """ "a+b" -> (for steps with many tokens, for steps with few); one name serves both."""
    large, plus, small = name.partition("+")
    return large, small if plus else large


def refusal(name: str, situation: Situation) -> str:
    """Why this backend, or pair of backends, cannot serve: "" when it can. Its library is another question
    (`missing`)."""
    large, small = split_pair(name)
    if large != small:
        if family(large) != family(small):
            return f"{large} and {small} join their ranks in different ways"
        return refusal(large, situation) or refusal(small, replace(situation, max_tokens=0))
    if name in DEVICE_NAMES:
        return _refusal_on_devices(name, situation)
    ranks = situation.ranks
    if name == "local":
        return "" if ranks == 1 else f"serves one rank; there are {ranks}"
    if name == "mailbox":
        return "" if situation.one_process else "ranks inside one process, for tests"
    if ranks == 1:
        return "one rank has no other to exchange with"
    if situation.device != "cpu":
        return "its memory is the host's; the tokens are on GPUs"
    if not situation.one_node:
        return "its ranks are on one machine"
    return situation.shared_memory if name in ("shm", "shm_padded") else ""


def missing(name: str, situation: Situation) -> str:
    """What must be installed first, and how; "" when nothing is missing here."""
    modules = {module for part in split_pair(name) for module in _MODULES.get(part, ())}
    return "; ".join(
        f"{module} is not installed ({_INSTALL[module]})"
        for module in sorted(modules)
        if not situation.installed(module)
    )


def family(name: str) -> str:
    """Backends of one family can exchange in the same group, and so be a pair."""
    if name in DEVICE_NAMES:
        return "device"
    return "shm" if name == "shm_padded" else name


def not_captured(name: str) -> str:
    """Why a CUDA graph cannot hold this backend's exchanges of few tokens; "" when it can."""
    if name in ("local", "deepep_v2", "flashinfer_nvlink_one_sided") or (name in PADDED and name in DEVICE_NAMES):
        return ""
    return _HOST_WAITS if name in DEVICE_NAMES else "it exchanges through the host"


def best_on_devices(situation: Situation) -> str:
    """What "auto" takes between GPUs: the first that can serve and is installed. NCCL always is.

    Without DeepEP, kernels that put rows themselves carry the steps with few tokens, where launches and the host's wait
    for counts are what takes time. With many tokens bytes do: then one copy per rank is better than a put per token.
    """
    together = "deepep_high_throughput+deepep_low_latency"
    puts = "nvshmem+nvshmem_low_latency", "nvshmem", "nccl+nvshmem_low_latency"
    for name in (together, "deepep_v2", "deepep_high_throughput", *puts):
        if not refusal(name, situation) and not missing(name, situation):
            return name
    return "nccl"


def _refusal_on_devices(name: str, situation: Situation) -> str:
    s = situation
    if s.device == "cpu":
        return "it moves tokens between GPUs; there is no CUDA device"
    if s.ranks == 1:
        return "one rank has no other to exchange with"
    if name.startswith("deepep") or name in ("pplx", "flashinfer_nvlink_one_sided"):
        if s.dtype != "bfloat16":
            return f"rows are bfloat16; the model computes in {s.dtype}"
        if s.rows == "fp8" and s.hidden_size % (4 * FP8_BLOCK):
            return f"FP8 rows want a hidden size that is a multiple of {4 * FP8_BLOCK}, not {s.hidden_size}"
    if name == "deepep_high_throughput":
        return _refusal_high_throughput(s)
    if name == "deepep_low_latency":
        return _refusal_low_latency(s)
    if name == "nvshmem_low_latency":
        return _refusal_puts(s)
    if name == "deepep_v2" and s.hidden_size % 256:
        return f"the hidden size must be a multiple of 256, not {s.hidden_size}"
    if name == "deepep_v2" and s.top_k > 32:
        return f"a token has at most 32 experts, not {s.top_k}"
    if name == "deepep_v2" and not s.one_node and s.no_rdma:
        return f"between nodes NCCL writes through InfiniBand: {s.no_rdma}"
    if name == "flashinfer_nvlink_one_sided" and s.top_k and s.top_k not in NVLINK_TOP_K:
        return f"a token has one of {_listed(NVLINK_TOP_K)} experts, not {s.top_k}"
    if name == "flashinfer_nvlink_one_sided" and s.ranks > NVLINK_RANKS:
        return f"serves at most {NVLINK_RANKS} ranks; there are {s.ranks}"
    if name in ("flashinfer_nvlink_one_sided", "nvshmem") and not s.one_node:
        return f"its ranks reach each other's memory by NVLink; {s.ranks} ranks with {s.ranks_per_node} per node do not"
    return ""


def _refusal_high_throughput(s: Situation) -> str:
    if s.hidden_size % 8:
        return f"a row must be a multiple of 16 bytes; the hidden size is {s.hidden_size}"
    if s.one_node and s.ranks not in INTRANODE_RANKS:
        return f"on one node it serves {_listed(INTRANODE_RANKS)} ranks; there are {s.ranks}"
    if not s.one_node and (s.ranks not in INTERNODE_RANKS or s.ranks_per_node != 8):
        per_node = f"{s.ranks} with {s.ranks_per_node} per node"
        return f"over several nodes it serves {_listed(INTERNODE_RANKS)} ranks, 8 per node; there are {per_node}"
    return ""


def _refusal_low_latency(s: Situation) -> str:
    if s.hidden_size and s.hidden_size not in LOW_LATENCY_HIDDEN:
        return f"the hidden size must be one of {_listed(LOW_LATENCY_HIDDEN)}, not {s.hidden_size}"
    if s.top_k > LOW_LATENCY_TOP_K:
        return f"a token has at most {LOW_LATENCY_TOP_K} experts, not {s.top_k}"
    if s.ranks >= LOW_LATENCY_RANKS and s.ranks % LOW_LATENCY_RANKS:
        return f"it serves fewer than {LOW_LATENCY_RANKS} ranks or a multiple of them; there are {s.ranks}"
    if s.no_rdma or s.no_ibgda:
        return f"its kernels use InfiniBand's queues, also on one node (IBGDA): {s.no_rdma or s.no_ibgda}"
    if s.num_ubatches > LOW_LATENCY_PARTS:
        return (
            f"its buffer holds {LOW_LATENCY_PARTS} results at a time, and each of {s.num_ubatches} parts of "
            "a step has one under way"
        )
    if s.max_tokens > LOW_LATENCY_TOKENS:
        return (
            f"a rank brings at most {LOW_LATENCY_TOKENS} tokens to a step, not {s.max_tokens}; use it as "
            "the second of a pair"
        )
    return ""


def _refusal_puts(s: Situation) -> str:
    if s.top_k > PUT_TOP_K:
        return f"a token has at most {PUT_TOP_K} experts, not {s.top_k}"
    if s.max_tokens > PUT_TOKENS:
        return (
            f"a rank brings at most {PUT_TOKENS} tokens to a step, not {s.max_tokens}; use it as the second of a pair"
        )
    return ""


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
