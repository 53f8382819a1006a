"""Packed weights in memory that outlives ranks: one store per machine, filled once by all its ranks together, mapped by
each of them (docs/memory.md). `memory.py`, `key.py` and `cache.py` need no torch."""
