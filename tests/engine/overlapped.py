"""What the tests of split steps share."""

from __future__ import annotations

from configs.dbo import DboPlan

SPLIT = DboPlan(decode_tokens=1, prefill_tokens=1)  # every step, in two
THREE = DboPlan(num_ubatches=3, decode_tokens=1, prefill_tokens=2)
SOMETIMES = DboPlan(decode_tokens=3, prefill_tokens=6)  # to and fro, and ranks that differ in what they wish
EACH = [SPLIT, THREE, SOMETIMES]
OFTEN: list[DboPlan | None] = [None, *EACH]
