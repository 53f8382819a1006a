from __future__ import annotations

import mmap
from pathlib import Path

import torch

from cache.memory import CacheMemory
from cache.residuals import no_residuals
from cache.spec import CacheGroup, CacheSizes, Field, bytes_per_token

SPEC = (CacheGroup("paged", (0, 1, 2), (Field("key", (4, 64), "bfloat16"), Field("value", (4, 64), "bfloat16"))),)
CPU = torch.device("cpu")


def resident(tensor: torch.Tensor) -> int:
    """Bytes in memory of the map that holds the middle of this tensor."""
    start, found = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(word, 16) for word in head.split("-"))
            found = low <= start < high
        elif found and head == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("no such map")


def test_what_is_brought_in_is_there_and_unchanged() -> None:
    kv = CacheMemory.allocate(
        SPEC, CacheSizes(16, 8192), CPU
    )  # tensors of 64 MiB: the allocator never has that from before
    keys = kv.layers[0][0]
    keys[5:9] = 3.0
    before = resident(keys)  # a large page may have come already
    steps = list(kv.prefault(48 << 20))
    assert sum(steps) >= 48 << 20 and max(steps) <= 128 << 10
    assert resident(keys) >= max(before, (48 << 20) // 6 - 4 * mmap.PAGESIZE)
    assert bool((keys[5:9] == 3.0).all()) and not keys[9:8192].any() and not keys[:5].any()


def test_no_more_than_asked_for_or_there_is() -> None:
    kv = CacheMemory.allocate(SPEC, CacheSizes(16, 8), CPU)
    assert list(kv.prefault(0)) == []
    assert sum(kv.prefault(1 << 40)) == 8 * 16 * bytes_per_token(SPEC)
    meta = CacheMemory(SPEC, CacheSizes(16, 8), ((torch.empty(128, 4, 64, device="meta"),),), no_residuals())
    assert list(meta.prefault(1 << 40)) == []
