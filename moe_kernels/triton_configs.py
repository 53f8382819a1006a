"""How the Triton kernels of experts are cut, by chip and by shape: data only.

Starting values, chosen by counting registers and shared memory; no GPU has measured them yet.
Legend: M rows of a tile, N output features of a tile, K input features of a step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """band: tiles of rows that run side by side over all outputs, so that weights are found in the cache again."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    band: int = 4


# chip -> (most rows per slot for which it is meant, config), ascending; the last one has no limit.
Table = dict[str, tuple[tuple[int, GemmConfig], ...]]
_ANY = 1 << 62

# Rows and weights in 16 bits. A tile of the first matrix has both gate and up: block_n of each.
GATE_UP: Table = {
    "sm_90": (
        (16, GemmConfig(16, 64, 128, 4, 4)),
        (64, GemmConfig(64, 64, 64, 4, 4)),
        (_ANY, GemmConfig(128, 128, 64, 8, 3)),
    ),
    "sm_100": (
        (16, GemmConfig(16, 64, 128, 4, 4)),
        (64, GemmConfig(64, 64, 64, 4, 4)),
        (_ANY, GemmConfig(128, 128, 64, 8, 3)),
    ),
}
DOWN: Table = {
    "sm_90": (
        (16, GemmConfig(16, 128, 128, 4, 4)),
        (64, GemmConfig(64, 128, 64, 4, 4)),
        (_ANY, GemmConfig(128, 256, 64, 8, 3)),
    ),
    "sm_100": (
        (16, GemmConfig(16, 128, 128, 4, 4)),
        (64, GemmConfig(64, 128, 64, 4, 4)),
        (_ANY, GemmConfig(128, 256, 64, 8, 3)),
    ),
}
# Rows and weights in FP8: a tile of the first matrix has the 128 outputs that share a scale, a step the 128 inputs.
GATE_UP_FP8: Table = {
    "sm_90": ((16, GemmConfig(16, 128, 128, 4, 4)), (_ANY, GemmConfig(64, 128, 128, 8, 4))),
    "sm_100": ((16, GemmConfig(16, 128, 128, 4, 4)), (_ANY, GemmConfig(64, 128, 128, 8, 4))),
}
DOWN_FP8: Table = {
    "sm_90": ((16, GemmConfig(16, 128, 128, 4, 4)), (_ANY, GemmConfig(64, 128, 128, 4, 4))),
    "sm_100": ((16, GemmConfig(16, 128, 128, 4, 4)), (_ANY, GemmConfig(64, 128, 128, 4, 4))),
}


def choose(table: Table, chip: str, rows_per_slot: int) -> GemmConfig:
    """chip: "sm_90"; one that is not in the table gets what sm_90 has."""
    return next(config for most, config in table.get(chip, table["sm_90"]) if rows_per_slot <= most)
