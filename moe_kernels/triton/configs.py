"""How the Triton kernels of experts are cut, by chip and by shape.

What benchmarks/tune_triton.py measured is in moe_kernels/triton/tuned.py. Elsewhere the values here are taken: chosen
by counting registers and shared memory.

Legend: M rows of a tile, N output features of a tile, K input features of a step.
"""

from __future__ import annotations

from msgspec import Struct

from layers.triton.configs import ANY, Tuned, nearest
from moe_kernels.triton.tuned import TUNED


class GemmConfig(Struct, frozen=True):
    """band: tiles of rows that run side by side over all outputs, so that weights are found in the cache again. tma:
    tiles are fetched by the copy engine (moe_kernels/triton/tma_gemm.py) where it can."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    band: int = 4
    tma: int = 0


# chip -> (most rows per slot for which it is meant, config), ascending; the last one has no limit.
Table = dict[str, tuple[tuple[int, GemmConfig], ...]]

# Rows and weights in 16 bits. A tile of the first matrix has both gate and up: block_n of each.
GATE_UP: Table = {
    "sm_90": (
        (16, GemmConfig(16, 64, 128, 4, 4)),
        (64, GemmConfig(64, 64, 64, 4, 4)),
        (ANY, GemmConfig(128, 128, 64, 8, 3)),
    ),
}
DOWN: Table = {
    "sm_90": (
        (16, GemmConfig(16, 128, 128, 4, 4)),
        (64, GemmConfig(64, 128, 64, 4, 4)),
        (ANY, GemmConfig(128, 256, 64, 8, 3)),
    ),
}
# Rows and weights in FP8: a tile of the first matrix has the 128 outputs that share a scale, a step the 128 inputs.
GATE_UP_FP8: Table = {
    "sm_90": ((16, GemmConfig(16, 128, 128, 4, 4)), (ANY, GemmConfig(64, 128, 128, 8, 4))),
}
DOWN_FP8: Table = {
    "sm_90": ((16, GemmConfig(16, 128, 128, 4, 4)), (ANY, GemmConfig(64, 128, 128, 4, 4))),
}


TABLES = {"gate_up": GATE_UP, "down": DOWN, "gate_up_fp8": GATE_UP_FP8, "down_fp8": DOWN_FP8}


def choose(
    kernel: str, chip: str, num_inputs: int, num_outputs: int, rows_per_slot: int, tuned: Tuned = TUNED
) -> GemmConfig:
    """kernel: a key of TABLES. chip: "sm_90"; one that is not in the table gets what sm_90 has. tuned: what was
    measured, of which the nearest shape counts if it is near."""
    fields = nearest(tuned, kernel, chip, (num_inputs, num_outputs, max(1, rows_per_slot)))
    if fields is not None:
        return GemmConfig(*fields)
    table = TABLES[kernel]
    return next(config for most, config in table.get(chip, table["sm_90"]) if rows_per_slot <= most)
