"""A cache in memory that outlives its rank, and who reads it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from cache.memory import CacheMemory
from cache.rows import stay_of
from cache.shared import FormerCache, Layout, SharedCache, can_outlive
from cache.spec import CacheGroup, CacheSizes, Field

FIELDS = (Field("key", (2, 8), "bfloat16"), Field("scale", (1,), "float32", layers=(1,)))
SPEC = (CacheGroup("paged", (0, 1), FIELDS), CacheGroup("paged", (2,), (Field("latent", (6,), "float8_e4m3fn"),)))
LAYOUT = Layout(SPEC, CacheSizes(4, 10), num_rows=3, columns=5)
CPU = torch.device("cpu")
ENDED, ALIVE = 1, 2


def files_of(folder: Path) -> list[Path]:
    files = [folder / "one", folder / "two"]
    for file in files:
        file.touch()
    return files


def reader(files: list[Path], layout: Layout = LAYOUT) -> FormerCache:
    return FormerCache(lambda rank: files if rank == 7 else [], layout, lambda process: process == ALIVE)


def numbered(cache: SharedCache) -> CacheMemory:
    """A memory in which every row tells its place."""
    memory = CacheMemory.allocate(SPEC, LAYOUT.sizes, CPU, cache.fields)
    for layer, fields in enumerate(memory.layers):
        for number, field in enumerate(fields):
            rows = torch.arange(1, len(field) + 1, dtype=torch.float32) + 50 * layer + 25 * number
            field.copy_(rows.view(-1, *[1] * (field.dim() - 1)).expand(field.shape))
    return memory


def place(cache: SharedCache, row: int, sequence_id: int, blocks: list[int], computed: int = 0) -> None:
    rows = cache.rows
    rows.stays[row] = rows.placed[row] = stay_of(sequence_id, 0)
    rows.num_blocks[row], rows.computed[row] = len(blocks), computed
    for table in rows.tables:
        table[row, : len(blocks)] = blocks


def test_what_was_computed_is_found_and_read(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    shared = SharedCache(files, LAYOUT, ENDED)
    there = numbered(shared)
    place(shared, 1, 11, [3, 4, 9])
    found = reader(files).find(7, 11, num_released=10)
    assert found is not None and (found.row, found.num_tokens) == (1, 10)
    here = CacheMemory.allocate(SPEC, LAYOUT.sizes, CPU)
    assert reader(files).read(found, [[5, 6, 0], [2, -1, 8]], here)
    moved = {0: [(3, 5), (4, 6), (9, 0)], 1: [(3, 5), (4, 6), (9, 0)], 2: [(3, 2), (9, 8)]}
    for layer, fields in enumerate(here.layers):
        for old, new in zip(there.layers[layer], fields, strict=True):
            expected = torch.zeros_like(new)
            for source, target in moved[layer]:
                expected[4 * target : 4 * target + 4] = old[4 * source : 4 * source + 4]
            assert torch.equal(new.view(torch.uint8), expected.view(torch.uint8))


def test_only_as_far_as_it_is_known(tmp_path: Path) -> None:
    """Tokens that came of them were released, or an earlier step has computed them; and the sequence has blocks for them."""
    files = files_of(tmp_path)
    shared = SharedCache(files, LAYOUT, ENDED)
    place(shared, 0, 11, [3, 4], computed=5)
    former = reader(files)

    def length(sequence_id: int, num_released: int, rank: int = 7) -> int:
        found = former.find(rank, sequence_id, num_released)
        return 0 if found is None else found.num_tokens

    assert [length(11, count) for count in (0, 3, 7, 30)] == [5, 5, 7, 8]
    assert length(12, 7) == length(11, 7, rank=6) == 0
    shared.rows.stated[0] = 7  # it had released six tokens before it came here again
    assert [length(11, count) for count in (6, 7)] == [5, 7]
    shared.rows.stays[0] = 0  # preempted: its blocks may be others' by now
    assert length(11, 7) == 0
    shared.rows.stays[0] = stay_of(11, 1)  # it is let in again, and whoever runs the steps has not heard of that
    assert length(11, 7) == 0


def test_who_is_alive_or_other_is_not_read(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    place(SharedCache(files, LAYOUT, ALIVE), 0, 11, [3])
    assert reader(files).find(7, 11, 3) is None
    files = files_of(tmp_path)
    place(SharedCache(files, LAYOUT, ENDED), 0, 12, [3])
    assert reader(files, LAYOUT._replace(num_rows=4)).find(7, 12, 3) is None
    assert reader(files).find(7, 12, 3) is not None
    assert reader([tmp_path / "none"]).find(7, 12, 3) is None


def test_a_rank_leaves_what_its_last_process_had(tmp_path: Path) -> None:
    """Until it is told that nobody wants it; and the one before that is gone."""
    files = files_of(tmp_path)
    for sequence_id in (1, 2, 3):
        shared = SharedCache(files, LAYOUT, ENDED)
        place(shared, 0, sequence_id, [3])
    former = reader(files)
    assert [former.find(7, sequence_id, 2) is not None for sequence_id in (1, 2, 3)] == [False, True, True]
    found = former.find(7, 2, 2)
    assert found is not None
    shared.forget_former()
    assert former.find(7, 2, 2) is None and former.find(7, 3, 2) is not None
    assert sorted(file.stat().st_size > 0 for file in files) == [False, True]
    assert not former.read(found, [[0], [0]], CacheMemory.allocate(SPEC, LAYOUT.sizes, CPU))


def test_a_file_that_is_another_s_by_the_end_of_reading_does_not_count(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    place(SharedCache(files, LAYOUT, ENDED), 0, 1, [3])
    found = reader(files).find(7, 1, 2)
    assert found is not None
    SharedCache(files, LAYOUT, ENDED)
    SharedCache(files, LAYOUT, ENDED)  # takes the same file again
    memory = CacheMemory.allocate(SPEC, LAYOUT.sizes, CPU)
    assert not reader(files).read(found, [[0], [0]], memory)
    os.truncate(found.path, 5000)
    assert not reader(files).read(found, [[0], [0]], memory)


@pytest.mark.parametrize("kind, holds", [("paged", True), ("window", False), ("state", False)])
def test_which_caches_outlive(kind: str, holds: bool) -> None:
    group = CacheGroup(kind, (3,), (Field("x", (1,), "float32"),), window=8 * (kind == "window"))  # type: ignore[arg-type]
    assert can_outlive((*SPEC, group)) is holds
