"""How the Triton attention of layers is cut, by chip and head size: data only.

Starting values, chosen by counting registers and shared memory; no GPU has measured them yet.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionConfig:
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
_ANY = 1 << 62

DECODE: Table = {
    "sm_90": ((128, AttentionConfig(16, 64, 4, 3)), (_ANY, AttentionConfig(16, 32, 4, 3))),
    "sm_100": ((128, AttentionConfig(16, 64, 4, 3)), (_ANY, AttentionConfig(16, 32, 4, 3))),
}
PREFILL: Table = {
    "sm_90": ((128, AttentionConfig(128, 64, 8, 3)), (_ANY, AttentionConfig(64, 32, 8, 2))),
    "sm_100": ((128, AttentionConfig(128, 64, 8, 3)), (_ANY, AttentionConfig(64, 32, 8, 2))),
}


def choose(table: Table, chip: str, head_dim: int) -> AttentionConfig:
    """chip: "sm_90"; one that is not in the table gets what sm_90 has."""
    return next(config for most, config in table.get(chip, table["sm_90"]) if head_dim <= most)
