"""Written by benchmarks/tune_triton.py: what ran fastest, of what was measured. Kernel -> chip -> (inputs, outputs,
rows per slot) -> the fields of a GemmConfig."""

TUNED: dict[str, dict[str, dict[tuple[int, ...], tuple[int, ...]]]] = {}
