"""A described cluster: what its GPUs and links can do at best. Data sheets of the vendors; what is reached of them
is in eplb/offline/cost.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from eplb.offline.shapes import read_object


class Gpu(Struct, frozen=True):
    """Peaks of one GPU: dense TFLOP/s by type (0: the type is not supported), HBM GB/s and GB, and GB/s of one
    direction of its NVLink and of its network card. reach: the part of the peak that matrix kernels get in a whole
    model (a GPU with little arithmetic gets more of it). link_domain: how many GPUs share the NVLink (8: one server,
    72: a rack)."""

    name: str
    bf16_tflops: float
    fp8_tflops: float
    nvfp4_tflops: float
    hbm_gbps: float
    hbm_gb: float
    nvlink_gbps: float
    rdma_gbps: float
    reach: float
    link_domain: int = 8

    def tflops(self, dtype: str) -> float:
        """Peak of `dtype`; a type that the GPU lacks runs as the next wider one that it has."""
        wider = {"nvfp4": (self.nvfp4_tflops, self.fp8_tflops, self.bf16_tflops)}
        for peak in wider.get(dtype, (self.fp8_tflops, self.bf16_tflops) if dtype == "fp8" else (self.bf16_tflops,)):
            if peak > 0:
                return peak
        raise ValueError(f"GPU {self.name} has no peak for {dtype}")


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h20", 148, 296, 0, 4000, 96, 450, 25, 0.85),
        Gpu("h800", 989, 1979, 0, 3350, 80, 200, 50, 0.52),
        Gpu("h100", 989, 1979, 0, 3350, 80, 450, 50, 0.52),
        Gpu("h200", 989, 1979, 0, 4800, 141, 450, 50, 0.52),
        Gpu("b200", 2250, 4500, 9000, 8000, 180, 900, 50, 0.42),
        Gpu("gb200", 2500, 5000, 10000, 8000, 186, 900, 50, 0.42, 72),
    )
}


class Cluster(Struct, frozen=True):
    """num_gpus GPUs of one kind, gpus_per_node to a server (a failure domain). Ranks are GPUs, in order of the servers.

    NVLink joins `gpu.link_domain` GPUs in a row (never fewer than a server's, on a rack-scale machine more); the
    rest of the traffic takes the network.
    """

    gpu: Gpu
    num_gpus: int
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ValueError(f"--gpus is {self.num_gpus}; it must be 1 or more")
        if self.gpus_per_node < 1:
            raise ValueError(f"--gpus-per-node is {self.gpus_per_node}; it must be 1 or more")

    @property
    def link_domain(self) -> int:
        """GPUs that reach each other over NVLink."""
        if self.gpu.link_domain > 8:
            return min(self.num_gpus, max(self.gpu.link_domain, self.gpus_per_node))
        return min(self.num_gpus, self.gpus_per_node)

    @property
    def num_domains(self) -> int:
        """NVLink domains that the ranks span."""
        return -(-self.num_gpus // self.link_domain)

    def describe(self) -> str:
        gpu = self.gpu
        return (
            f"{self.num_gpus} x {gpu.name}, {self.gpus_per_node} to a node, NVLink of {self.link_domain} at "
            f"{gpu.nvlink_gbps:g} GB/s, network {gpu.rdma_gbps:g} GB/s per GPU"
        )


def make_cluster(
    gpu: str,
    num_gpus: int,
    gpus_per_node: int = 8,
    nvlink_gbps: float | None = None,
    rdma_gbps: float | None = None,
) -> Cluster:
    """A cluster of a named GPU. The link speeds are GB/s of one direction of one GPU, in place of the table's.

    Raises ValueError for a GPU not known and for numbers out of range.
    """
    if gpu not in GPUS:
        raise ValueError(f"--gpu is {gpu!r}; known are {', '.join(GPUS)} (or describe one with --cluster FILE)")
    chosen = GPUS[gpu]
    for flag, name, value in (
        ("--nvlink-gbps", "nvlink_gbps", nvlink_gbps),
        ("--rdma-gbps", "rdma_gbps", rdma_gbps),
    ):
        if value is None:
            continue
        if not value > 0:
            raise ValueError(f"{flag} is {value}; it must be above 0")
        change: dict[str, Any] = {name: value}
        chosen = structs.replace(chosen, **change)
    return Cluster(chosen, num_gpus, gpus_per_node)


def load_cluster(path: Path) -> Cluster:
    """Read `{"gpu": "h800", "gpus": 32, "gpus_per_node": 8, ...}`; any field of Gpu may be given and wins over the
    table.

    Without "gpu", or with a name that the table lacks, all fields of Gpu but link_domain must be there.
    Raises ValueError naming the file and the key.
    """
    data = read_object(path)
    fields = {field.name for field in structs.fields(Gpu)} - {"name"}
    known = fields | {"gpu", "gpus", "gpus_per_node"}
    unknown = sorted(set(data) - known)
    if unknown:
        raise ValueError(f"{path}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
    for key in known - {"gpu"}:
        _check_number(path, key, data.get(key))
    if "gpus" not in data:
        raise ValueError(f"{path}: has no key 'gpus' (how many there are)")
    name = str(data.get("gpu", "described"))
    given: dict[str, Any] = {key: data[key] for key in fields if key in data}
    if name in GPUS:
        gpu = structs.replace(GPUS[name], **given)
    else:
        missing = sorted(fields - set(given) - {"link_domain"})
        if missing:
            raise ValueError(f"{path}: GPU {name!r} is not in the table, so {missing[0]!r} must be given")
        gpu = Gpu(name=name, **given)
    return Cluster(gpu, int(data["gpus"]), int(data.get("gpus_per_node", 8)))


def _check_number(path: Path, key: str, value: Any) -> None:
    """Counts are whole numbers, the rest positive numbers (a peak may be 0: the type is not supported)."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ValueError(f"{path}: {key} is {value!r}; it must be a number, 0 or more")
    if key in ("gpus", "gpus_per_node", "link_domain") and (value != int(value) or value < 1):
        raise ValueError(f"{path}: {key} is {value!r}; it must be a whole number, 1 or more")
    if key in ("hbm_gbps", "hbm_gb", "nvlink_gbps", "rdma_gbps", "bf16_tflops", "reach") and value <= 0:
        raise ValueError(f"{path}: {key} is {value!r}; it must be above 0")
