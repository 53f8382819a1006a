"""Large pages of a file in memory (store/pages.py). A kernel may refuse them: then nothing is different."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.memory import Store, make_store
from store.pages import LARGE_PAGE, MOST_SLOW_PAGES, brought_in

PAGES = 4


@pytest.fixture
def store() -> Iterator[Store]:
    file = make_store("pages")
    store = Store(Path(f"/proc/{os.getpid()}/fd/{file}"), "key", (PAGES + 2) * LARGE_PAGE)
    store.begin(1)
    assert store.claim(0)
    yield store
    store.close()
    os.close(file)


def noise(num_bytes: int, seed: int) -> ctypes.Array[ctypes.c_uint8]:
    data = os.urandom(64) * (num_bytes // 64 + 1)
    return (ctypes.c_uint8 * num_bytes).from_buffer_copy(bytes([seed]) + data[: num_bytes - 1])


@pytest.mark.parametrize("ahead", [True, False])
def test_what_is_written_to_them_is_there(store: Store, ahead: bool) -> None:
    """In pieces that do not end with pages, in any order, some where nothing was prepared."""
    offset = store.room(0, PAGES * LARGE_PAGE)
    step = LARGE_PAGE * 3 // 4
    pieces = [
        (start, noise(min(step, PAGES * LARGE_PAGE - start), start % 251))
        for start in range(0, PAGES * LARGE_PAGE, step)
    ]
    for start, data in reversed(pieces):
        if ahead:
            store.pages.prepare(offset + start, len(data))
        store.write(offset + start, data)
    store.pages.enlarge(offset, PAGES * LARGE_PAGE)
    assert [store.read(offset + start, len(data)) for start, data in pieces] == [bytes(data) for _, data in pieces]
    store.fill(0)
    store.finish()
    assert [store.read(offset + start, len(data)) for start, data in pieces] == [bytes(data) for _, data in pieces]


def test_only_those_that_begin_in_the_bytes_are_prepared(store: Store) -> None:
    offset = store.room(0, PAGES * LARGE_PAGE)
    store.write(offset, noise(LARGE_PAGE, 7))
    before = store.read(offset, LARGE_PAGE)
    store.pages.prepare(offset + 1, LARGE_PAGE)
    assert store.read(offset, LARGE_PAGE) == before and not store.pages.prepared(offset, 1)


def test_a_kernel_that_refuses_is_not_asked_for_ever(store: Store) -> None:
    offset = store.room(0, PAGES * LARGE_PAGE)
    beyond = offset + (PAGES + 1) * LARGE_PAGE  # of the file: no page is there, nor can be
    for _ in range(MOST_SLOW_PAGES):
        store.pages.enlarge(beyond, LARGE_PAGE)
    store.pages.prepare(offset, PAGES * LARGE_PAGE)
    assert not store.pages.prepared(offset, 1)
    data = noise(100, 3)
    store.write(offset, data)
    assert store.read(offset, 100) == bytes(data)


def test_what_is_brought_in_for_others_is_not_kept_in_memory(tmp_path: Path) -> None:
    """The writer of a cache of weights has as much in memory already; if that were locked, the kernel would kill
    ranks."""
    (tmp_path / "file").write_bytes(bytes(4 << 20))
    with (tmp_path / "file").open("rb") as file, brought_in(file.fileno()):
        assert re.search(r"VmLck:\s+0 kB", Path("/proc/self/status").read_text())
