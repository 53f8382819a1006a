"""Written by benchmarks/tune_triton.py: what ran fastest, of what was measured. Kernel -> chip -> (heads,) -> the
fields of a DecodeConfig or a PrefillConfig."""

TUNED: dict[str, dict[str, dict[tuple[int, ...], tuple[int, ...]]]] = {}
