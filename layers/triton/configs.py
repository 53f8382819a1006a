"""How the Triton attention of layers is cut, by chip and head size.

What benchmarks/tune_triton.py measured is in layers/triton/tuned.py. Elsewhere the values here are taken: chosen by
counting registers and shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct

from layers.triton.tuned import TUNED

# Kernel -> chip -> sizes -> the fields of a config, in their order.
Tuned = Mapping[str, Mapping[str, Mapping[tuple[int, ...], tuple[int, ...]]]]


class AttentionConfig(Struct, frozen=True):
    """A program takes block_m rows (query heads of one key head, of as many queries as fit) and reads block_s keys at a
    time. Keys of decodes are cut until there are about `programs` of them, but not below `keys` each."""

    block_m: int
    block_s: int
    num_warps: int
    num_stages: int
    programs: int = 264
    keys: int = 256


# chip -> (largest head size for which it is meant, config), ascending.
Table = dict[str, tuple[tuple[int, AttentionConfig], ...]]
ANY = 1 << 62

DECODE: Table = {
    "sm_90": ((128, AttentionConfig(16, 64, 4, 3)), (ANY, AttentionConfig(16, 32, 4, 3))),
}
PREFILL: Table = {
    "sm_90": ((128, AttentionConfig(128, 64, 8, 3)), (ANY, AttentionConfig(64, 32, 8, 2))),
}


TABLES = {"attention_decode": DECODE, "attention_prefill": PREFILL}
NEAR = 2.0  # measured shapes whose sizes differ by no more than this many doublings, all together


def nearest(tuned: Tuned, kernel: str, chip: str, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """What was measured for the most similar shape; None where there is none that is near."""
    measured = tuned.get(kernel, {}).get(chip, {})
    best, least = None, NEAR
    for shape, fields in measured.items():
        doublings = sum(abs(math.log2(a / b)) for a, b in zip(shape, sizes, strict=True))
        if doublings <= least:
            best, least = fields, doublings
    return best


def choose(kernel: str, chip: str, head_dim: int, group: int, tuned: Tuned = TUNED) -> AttentionConfig:
    """kernel: a key of TABLES. chip: "sm_90"; one that is not in the table gets what sm_90 has. group: query heads of a
    key head."""
    fields = nearest(tuned, kernel, chip, (head_dim, group))
    if fields is not None:
        return AttentionConfig(*fields)
    table = TABLES[kernel]
    return next(config for most, config in table.get(chip, table["sm_90"]) if head_dim <= most)
