"""Written by benchmarks/tune_triton.py: what ran fastest, of what was measured. Kernel -> chip -> (head size, query
heads of a key head) -> the fields of an AttentionConfig."""

TUNED: dict[str, dict[str, dict[tuple[int, ...], tuple[int, ...]]]] = {}
