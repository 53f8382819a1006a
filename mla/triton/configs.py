"""How the Triton kernels of MLA are cut, by chip and number of heads.

What benchmarks/tune_triton.py measured is in mla/triton/tuned.py. Elsewhere the values here are taken: chosen by
counting registers and shared memory.
"""

from __future__ import annotations

from msgspec import Struct

from layers.triton.configs import ANY, Tuned, nearest
from mla.triton.tuned import TUNED


class DecodeConfig(Struct, frozen=True):
    """A program takes block_h heads of a sequence and reads block_s keys at a time. Keys are cut until there are about
    `programs` of them, but not below `keys` each."""

    block_h: int
    block_s: int
    num_warps: int
    num_stages: int
    programs: int = 264
    keys: int = 256


class PrefillConfig(Struct, frozen=True):
    """A program takes block_m queries of a head and reads block_s keys at a time."""

    block_m: int
    block_s: int
    num_warps: int
    num_stages: int


# chip -> (most heads for which it is meant, config), ascending; the last one has no limit.
Table = dict[str, tuple[tuple[int, DecodeConfig], ...]]

DECODE: Table = {
    "sm_90": ((16, DecodeConfig(16, 32, 4, 2)), (ANY, DecodeConfig(64, 32, 8, 2))),
}
# The cache in FP8: with 64 heads a Hopper's registers do not hold everything.
DECODE_FP8: Table = {
    "sm_90": ((16, DecodeConfig(16, 32, 8, 2)), (ANY, DecodeConfig(32, 32, 8, 3))),
    "sm_100": ((16, DecodeConfig(16, 32, 8, 2)), (ANY, DecodeConfig(64, 32, 8, 2))),
}
# float32 has no matrix unit: small tiles.
DECODE_F32: Table = {"sm_90": ((ANY, DecodeConfig(16, 16, 8, 2)),)}
DECODES = {"mla_decode": DECODE, "mla_decode_fp8": DECODE_FP8, "mla_decode_f32": DECODE_F32}
PREFILLS = {
    "mla_prefill": {"sm_90": PrefillConfig(128, 64, 8, 2)},
    "mla_prefill_f32": {"sm_90": PrefillConfig(16, 16, 4, 2)},
}


def choose(kernel: str, chip: str, num_heads: int, tuned: Tuned = TUNED) -> DecodeConfig:
    """kernel: a key of DECODES. chip: "sm_90"; one that is not in the table gets what sm_90 has."""
    fields = nearest(tuned, kernel, chip, (num_heads,))
    if fields is not None:
        return DecodeConfig(*fields)
    table = DECODES[kernel]
    return next(config for most, config in table.get(chip, table["sm_90"]) if num_heads <= most)


def choose_prefill(kernel: str, chip: str, num_heads: int, tuned: Tuned = TUNED) -> PrefillConfig:
    """kernel: a key of PREFILLS; otherwise as `choose`."""
    fields = nearest(tuned, kernel, chip, (num_heads,))
    return PREFILLS[kernel].get(chip, PREFILLS[kernel]["sm_90"]) if fields is None else PrefillConfig(*fields)
