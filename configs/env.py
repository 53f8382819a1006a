"""The only file that reads environment variables: at most eight that are ours, and those by which other systems tell
a process of theirs which one it is. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Env(NamedTuple):
    """MOESAIC_API_KEY, MOESAIC_ADMIN_KEY: keys (comma-separated) that must not show in `ps`; VLLM_API_KEY, one more of
    the first kind, so that a script of vLLM's does not leave the server open. MOESAIC_RUNTIME_DIR: where
    sockets and stores of a running server live (default: the temporary directory). MOESAIC_URL: the server that `chat`,
    `ranks` and `bench serve` talk to. MOESAIC_CACHE_DIR: where measurements are remembered (default: moesaic in the
    user's cache directory). MOESAIC_ISA: the most that native CPU kernels may use: none, avx2, avx512, avx512_bf16,
    amx (default: all that the CPU has). CUDA_VISIBLE_DEVICES: the GPUs that this process may use, as CUDA reads it.
    """

    api_keys: tuple[str, ...]
    admin_keys: tuple[str, ...]
    runtime_root: Path
    cache_root: Path
    url: str
    isa: str
    visible_gpus: str | None = None


def read_env() -> Env:
    return Env(
        api_keys=_api_keys(),
        admin_keys=_split(os.environ.get("MOESAIC_ADMIN_KEY", "")),
        runtime_root=Path(os.environ.get("MOESAIC_RUNTIME_DIR") or os.environ.get("TMPDIR") or "/tmp"),
        cache_root=Path(os.environ.get("MOESAIC_CACHE_DIR") or _user_cache() / "moesaic"),
        url=os.environ.get("MOESAIC_URL") or "http://127.0.0.1:8000",
        isa=os.environ.get("MOESAIC_ISA", ""),
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _api_keys() -> tuple[str, ...]:
    one = os.environ.get("VLLM_API_KEY")
    return (*_split(os.environ.get("MOESAIC_API_KEY", "")), *([one] if one else []))


# Of LeaderWorkerSet, torchrun, Slurm and MPI; launch/launchers/place.py says what they mean.
_LAUNCHERS = ("LWS_", "SLURM_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "TORCHELASTIC_")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MPI_LOCALNRANKS")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")


def launcher_variables() -> dict[str, str]:
    """What a system that starts processes has told this one."""
    return {name: text for name, text in os.environ.items() if name in _TORCHRUN or name.startswith(_LAUNCHERS)}


def interface_variables() -> dict[str, str]:
    """By which libraries are told to take an interface; those that are set."""
    return {name: os.environ[name] for name in _INTERFACES if os.environ.get(name)}


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


# No rank computes with numpy, and a process with threads is not forked; nor with devices that other packages bring,
# which torch would look for among all that are installed.
OF_RANKS = {"OPENBLAS_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
_SPINS = "10000"  # about 100 microseconds: from one operation to the next, and nothing while a rank is idle
# What libraries read of an environment when they are loaded, in a process that does not know of its plan yet: as most
# ranks have it that have several threads; with one it does not matter.
BEFORE_PLAN = {**OF_RANKS, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": _SPINS}


def child_environment(threads: int, spin: bool = False, gpus: bool = False) -> dict[str, str]:
    """The environment of a rank: every OpenMP-like library of it gets `threads` threads and sleeps when it waits,
    because ranks share the cores of one machine and a spinning one starves the others; numpy's gets one (`OF_RANKS`).
    spin: not before it has looked for work for a moment. gpus: ranks have GPUs, all of one machine: DeepEP is not to
    ask NCCL for InfiniBand, and NCCL's own watchdog is not to end a process whose peer is lost. Texts are tokenized in
    the thread that asks, as a waiting core has other work."""
    wanted = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    wanted |= {**OF_RANKS, "TOKENIZERS_PARALLELISM": "false"}
    if spin:
        wanted["GOMP_SPINCOUNT"] = _SPINS
    unless_set = {"EP_DISABLE_GIN": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"} if gpus else {}
    return {**unless_set, **os.environ, **wanted}


def fits_before_plan(environment: Mapping[str, str]) -> bool:
    """Whether a rank with the environment may have libraries that were loaded with `BEFORE_PLAN`."""
    return environment.get("OMP_NUM_THREADS") == "1" or environment.items() >= BEFORE_PLAN.items()


def set_variables(values: Mapping[str, str]) -> None:
    """Of this process, before it loads the libraries that read them."""
    os.environ.update(values)


def take_environment(values: Mapping[str, str]) -> None:
    """In the place of this process's own."""
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    set_variables(values)


def forget_no_columns() -> None:
    """COLUMNS=0 says that a terminal's width is not known; rich would draw into no columns, so nothing."""
    if os.environ.get("COLUMNS") == "0":
        del os.environ["COLUMNS"]


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
