"""How the Triton kernels of MLA are cut, by chip and number of heads: data only.

Starting values, chosen by counting registers and shared memory; no GPU has measured them yet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """A program takes block_h heads of a sequence and reads block_s keys at a time. Keys are cut until there are about
    `programs` of them, but not below `keys` each."""

    block_h: int
    block_s: int
    num_warps: int
    num_stages: int
    programs: int = 264
    keys: int = 256


# chip -> (most heads for which it is meant, config), ascending; the last one has no limit.
Table = dict[str, tuple[tuple[int, DecodeConfig], ...]]
_ANY = 1 << 62

DECODE: Table = {
    "sm_90": ((16, DecodeConfig(16, 32, 4, 2)), (_ANY, DecodeConfig(64, 64, 8, 2))),
    "sm_100": ((16, DecodeConfig(16, 32, 4, 2)), (_ANY, DecodeConfig(64, 32, 8, 2))),
}
# The cache in FP8; of the cuts for many heads all that were compiled spill, these about as little as any.
DECODE_FP8: Table = {
    "sm_90": ((16, DecodeConfig(16, 32, 4, 2)), (_ANY, DecodeConfig(64, 32, 8, 2))),
    "sm_100": ((16, DecodeConfig(16, 32, 8, 2)), (_ANY, DecodeConfig(64, 32, 8, 2))),
}
# float32 has no matrix unit: small tiles.
DECODE_F32: Table = {"sm_90": ((_ANY, DecodeConfig(16, 16, 8, 2)),)}


def choose(table: Table, chip: str, num_heads: int) -> DecodeConfig:
    """chip: "sm_90"; one that is not in the table gets what sm_90 has."""
    return next(config for most, config in table.get(chip, table["sm_90"]) if num_heads <= most)
