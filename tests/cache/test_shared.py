"""A cache in memory that outlives its rank, and who reads it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from cache.manager import Holding
from cache.memory import CacheMemory
from cache.records import SequenceState
from cache.rows import stay_of
from cache.shared import FormerCache, Found, Layout, SharedCache
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


def find(former: FormerCache, sequence_id: int, num_released: int, rank: int = 7, most: int = 99) -> Found | None:
    return former.find(rank, sequence_id, num_released, most)


def holding(*tables: list[int], record: int | None = None) -> Holding:
    held = Holding()
    held.tables, held.state = [*tables], None if record is None else SequenceState(record)
    return held


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
    found = find(reader(files), 11, num_released=10)
    assert found is not None and (found.row, found.num_tokens) == (1, 10)
    here = CacheMemory.allocate(SPEC, LAYOUT.sizes, CPU)
    assert reader(files).read(found, holding([5, 6, 0], [2, 1, 8]), here) == []
    moved = {0: [(3, 5), (4, 6), (9, 0)], 1: [(3, 5), (4, 6), (9, 0)], 2: [(3, 2), (4, 1), (9, 8)]}
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
        found = find(former, sequence_id, num_released, rank)
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
    assert find(reader(files), 11, 3) is None
    files = files_of(tmp_path)
    place(SharedCache(files, LAYOUT, ENDED), 0, 12, [3])
    assert find(reader(files, LAYOUT._replace(num_rows=4)), 12, 3) is None
    assert find(reader(files), 12, 3) is not None
    assert find(reader([tmp_path / "none"]), 12, 3) is None


def test_a_rank_leaves_what_its_last_process_had(tmp_path: Path) -> None:
    """Until it is told that nobody wants it; and the one before that is gone."""
    files = files_of(tmp_path)
    for sequence_id in (1, 2, 3):
        shared = SharedCache(files, LAYOUT, ENDED)
        place(shared, 0, sequence_id, [3])
    former = reader(files)
    assert [find(former, sequence_id, 2) is not None for sequence_id in (1, 2, 3)] == [False, True, True]
    found = find(former, 2, 2)
    assert found is not None
    shared.forget_former()
    assert find(former, 2, 2) is None and find(former, 3, 2) is not None
    assert sorted(file.stat().st_size > 0 for file in files) == [False, True]
    assert former.read(found, holding([0], [0]), CacheMemory.allocate(SPEC, LAYOUT.sizes, CPU)) is None


def test_a_file_that_is_another_s_by_the_end_of_reading_does_not_count(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    place(SharedCache(files, LAYOUT, ENDED), 0, 1, [3])
    found = find(reader(files), 1, 2)
    assert found is not None
    SharedCache(files, LAYOUT, ENDED)
    SharedCache(files, LAYOUT, ENDED)  # takes the same file again
    memory = CacheMemory.allocate(SPEC, LAYOUT.sizes, CPU)
    assert reader(files).read(found, holding([0], [0]), memory) is None
    os.truncate(found.path, 5000)
    assert reader(files).read(found, holding([0], [0]), memory) is None


GROUPS = (
    CacheGroup("paged", (0,), (Field("key", (2,), "float32"),)),
    CacheGroup("window", (1,), (Field("key", (2,), "float32"),), window=5),
    CacheGroup("state", (2,), (Field("tail", (3,), "bfloat16"), Field("state", (2, 2), "float32"))),
)
HYBRID = Layout(GROUPS, CacheSizes(4, 10, 6, 5), num_rows=3, columns=5)


def hybrid(files: list[Path]) -> SharedCache:
    """Of a sequence of twelve tokens: the first block is behind the window, and states stand behind nine and ten."""
    shared = SharedCache(files, HYBRID, ENDED)
    place(shared, 1, 11, [3, 4, 5])
    shared.rows.tables[1][1, 0] = -1
    shared.rows.behind[1] = 9
    shared.rows.end_states([2, 3, 4], [stay_of(11, 0), stay_of(11, 0), stay_of(12, 0)], [10, 9, 11])
    return shared


def test_a_state_counts_while_no_step_writes_it(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    rows, former = hybrid(files).rows, reader(files, HYBRID)
    lengths = [getattr(find(former, 11, 12, most=most), "num_tokens", 0) for most in (12, 11, 10, 9, 8)]
    assert lengths == [10, 10, 10, 9, 0]
    rows.begin_states([2])
    assert getattr(find(former, 11, 12), "num_tokens", 0) == 9
    rows.begin_states([3])
    assert find(former, 11, 12) is None


def test_a_window_that_has_gone_on_is_not_taken(tmp_path: Path) -> None:
    """Behind twelve tokens a block may be another's that the token behind ten still sees."""
    files = files_of(tmp_path)
    rows, former = hybrid(files).rows, reader(files, HYBRID)
    for behind, length in [(11, 10), (12, 0), (13, 0)]:
        rows.behind[1] = behind
        assert getattr(find(former, 11, 12), "num_tokens", 0) == length


def test_every_group_is_read(tmp_path: Path) -> None:
    files = files_of(tmp_path)
    shared = hybrid(files)
    there = CacheMemory.allocate(GROUPS, HYBRID.sizes, CPU, shared.fields)
    for layer, fields in enumerate(there.layers):
        for number, field in enumerate(fields):
            field.copy_((torch.arange(field.numel()) + 7 * layer + number).view(field.shape))
    here = CacheMemory.allocate(GROUPS, HYBRID.sizes, CPU)
    found = find(reader(files, HYBRID), 11, 12)
    assert found is not None
    assert reader(files, HYBRID).read(found, holding([1, 2, 3], [-1, 0, 2], record=4), here) == []
    for layer, moved in enumerate([[(3, 1), (4, 2), (5, 3)], [(4, 0), (5, 2)]]):
        for source, target in moved:
            old, new = there.layers[layer][0], here.layers[layer][0]
            assert torch.equal(old[4 * source : 4 * source + 4], new[4 * target : 4 * target + 4])
    for old, new in zip(there.layers[2], here.layers[2], strict=True):
        assert torch.equal(new[4], old[2]) and not new[:4].any()
    shared.rows.tables[1][1, 1] = -1
    assert reader(files, HYBRID).read(found, holding([1, 2, 3], [-1, 0, 2], record=4), here) is None


KEPT = LAYOUT._replace(kept_tokens=8, residual_bytes=4)


def test_a_step_under_way_is_found_and_read(tmp_path: Path) -> None:
    """Of a prompt whose first chunk it was computing, and of a sequence that it decoded."""
    files = files_of(tmp_path)
    shared = SharedCache(files, KEPT, ENDED)
    there = numbered(shared)
    place(shared, 0, 11, [3, 4], computed=5)
    place(shared, 1, 12, [9])
    former = reader(files, KEPT)
    assert find(former, 12, num_released=0) is None, "nothing of it is computed, and nothing is kept"
    shared.residuals.begin(shared.rows.placed[:2], np.array([5, 0]), np.array([1, 3]), [0, 1])
    for number, layer in enumerate((2, 3)):
        rows_TD, at = shared.residuals.place(number, torch.int32)
        rows_TD.copy_(torch.arange(8, dtype=torch.int32)[:, None] + 10 * layer)
        at.fill_(layer)
    found = find(former, 11, num_released=5)
    assert found is not None and (found.num_tokens, found.num_kept) == (5, 1)
    found = find(former, 11, num_released=6)
    assert found is not None and (found.num_tokens, found.num_kept) == (6, 0), "that token's step is over"
    found = find(former, 12, num_released=0)
    assert found is not None and (found.num_tokens, found.num_kept) == (0, 3)
    short = find(former, 12, num_released=0, most=1)
    assert short is not None and short.num_kept == 2, "no more tokens are known of it"
    here = CacheMemory.allocate(SPEC, LAYOUT.sizes, CPU)
    kept = former.read(found, holding([5], [2]), here)
    assert kept is not None and [one.layers for one in kept] == [(2, 3)] * 3
    assert [one.rows.reshape(-1).view(np.int32).tolist() for one in kept] == [[21, 31], [22, 32], [23, 33]]
    assert torch.equal(here.layers[0][0][20:24], there.layers[0][0][36:40]), "what the layers before have written"
    shared.residuals.layers[1] = -1  # it was being written
    assert (find(former, 12, 0) or found).kept_layers == (2, -1)
    shared.residuals.clear()
    assert find(former, 12, num_released=0) is None
