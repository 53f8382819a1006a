"""GPUs as data: what a plan for a cluster, and a roofline, need to know of a chip. Without torch.

Rates are the vendor's datasheets', dense (without sparsity): leads, not measurements; benchmarks/gpu_check.py measures.
"""

from __future__ import annotations

from msgspec import Struct

GIGA = 10**9
TERA = 10**12


class Chip(Struct, frozen=True):
    """memory in bytes, bandwidth of it and of NVLink (both directions together) in bytes/s, rates in operations/s."""

    name: str
    arch: str
    memory: int
    bandwidth: float
    bf16: float
    fp8: float
    nvlink: float
    per_machine: int = 8

    @property
    def capability(self) -> tuple[int, int]:
        """("sm_90" -> (9, 0))."""
        digits = self.arch.removeprefix("sm_")
        return int(digits[:-1]), int(digits[-1])


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("h100", "sm_90", 80 * GIGA, 3.35 * TERA, 989 * TERA, 1979 * TERA, 900 * GIGA),
        Chip("h200", "sm_90", 141 * GIGA, 4.8 * TERA, 989 * TERA, 1979 * TERA, 900 * GIGA),
        Chip("b200", "sm_100", 180 * GIGA, 7.7 * TERA, 2250 * TERA, 4500 * TERA, 1800 * GIGA),
    )
}
