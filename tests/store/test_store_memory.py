"""The file of a store: claims that die with their process, seals, and who may open it."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from store.memory import HEADER_BYTES, Store, StoreError, await_parts, complete_key, make_store

pytestmark = pytest.mark.store

ROOM = 64 << 20
# Claims part 0 of the store at argv[1], says so, and waits to be killed.
CLAIMS = """
import sys
from pathlib import Path
from store.memory import Store
store = Store(Path(sys.argv[1]), "key", 64 << 20)
store.begin(2)
assert store.claim(0)
store.write(store.room(0, 5), b"half.")
print("claimed", flush=True)
sys.stdin.read()
"""
# Tries to open it as another user.
OPENS = """
import os, sys
os.setgid(65534)
os.setuid(65534)
for flags in (os.O_RDONLY, os.O_RDWR):
    try:
        os.open(sys.argv[1], flags)
        print("opened")
    except PermissionError:
        print("refused")
"""


@pytest.fixture
def file() -> Iterator[int]:
    file = make_store("test")
    yield file
    os.close(file)


def path_of(file: int) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{file}")


def open_store(file: int, key: str = "key") -> Store:
    return Store(path_of(file), key, ROOM)


def fill_both(store: Store) -> None:
    for part, data in enumerate((b"first", b"second")):
        assert store.claim(part)
        store.write(store.room(part, len(data)), data)
        store.fill(part)


def test_one_claim_per_part(file: int) -> None:
    one, other = open_store(file), open_store(file)
    one.begin(2)
    other.begin(2)
    assert one.claim(0) and not other.claim(0) and other.claim(1)
    one.release(0)
    assert other.claim(0)
    other.fill(0)
    assert not one.claim(0), "it is full"
    assert one.full_parts() == b"\x01\x00"
    one.close()
    other.close()


def test_a_part_has_one_place_for_all(file: int) -> None:
    one, other = open_store(file), open_store(file)
    one.begin(2)
    other.begin(2)
    assert one.room(1, 3 << 20) == other.room(1, 3 << 20)
    assert one.room(0, 10) != other.room(1, 3 << 20)
    with pytest.raises(StoreError, match="reserved"):
        open_and_begin = open_store(make_store("small"))
        open_and_begin.begin(1)
        open_and_begin.room(0, 2 * ROOM)
    one.close()
    other.close()


def test_a_killed_process_gives_its_claim_up(file: int) -> None:
    command = [sys.executable, "-c", CLAIMS, str(path_of(file))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "claimed\n"
        store = open_store(file)
        store.begin(2)
        assert not store.claim(0)
        process.send_signal(signal.SIGKILL)
    fill_both(store)
    store.finish()
    assert store.read(store.offset(0), 5) == b"first"
    store.close()


def test_a_rank_that_ends_before_it_counts_what_it_has_filled(file: int) -> None:
    """Parts are marked as full one by one, and counted in the header after that."""
    one, other = open_store(file), open_store(file)
    one.begin(1)
    other.begin(1)
    assert one.claim(0)
    one.write(one.room(0, 5), b"first")
    os.pwrite(file, b"\x01", HEADER_BYTES + 8)  # all that `fill` has come to
    one.close()
    assert other.full_parts() == b"\x01" and not complete_key(file)
    other.finish()
    assert complete_key(file) == "key" and other.read(other.offset(0), 5) == b"first"
    other.close()


def test_one_that_comes_as_another_seals(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small store may be filled and sealed between this rank's look at it and its mapping for writing."""
    filling = open_store(file)
    filling.begin(2)
    really_open = os.open

    def open_late(path: Path, flags: int) -> int:
        if flags & os.O_RDWR and not filling.complete:
            fill_both(filling)
            filling.finish()
        return really_open(path, flags)

    monkeypatch.setattr(os, "open", open_late)
    late = open_store(file)
    assert late.complete and late.read(late.offset(1), 6) == b"second"
    late.finish()
    late.close()
    filling.close()
    with pytest.raises(StoreError, match="cannot be mapped"):
        open_store(file, "another key")


def test_nobody_writes_to_a_full_store(file: int) -> None:
    filling, waiting = open_store(file), open_store(file)
    filling.begin(2)
    waiting.begin(2)
    address = filling.address
    fill_both(filling)
    filling.finish()  # the other one still maps it for writing
    waiting.finish()
    assert (filling.address, filling.complete) == (address, True)
    assert filling.read(filling.offset(1), 6) == waiting.read(waiting.offset(1), 6) == b"second"
    writer = os.open(path_of(file), os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(writer, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(writer, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(writer, 4096)
    os.close(writer)
    late = open_store(file)
    assert late.complete and late.read(late.offset(0), 5) == b"first"
    for store in (filling, waiting, late):
        store.close()


def test_other_weights_are_refused(file: int) -> None:
    store = open_store(file)
    store.begin(2)
    with pytest.raises(StoreError, match="another model"):
        open_store(file, "other").begin(2)
    with pytest.raises(StoreError, match="another model"):
        open_store(file).begin(3)
    assert complete_key(file) == ""
    fill_both(store)
    assert complete_key(file) == "key"
    store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_it(file: int) -> None:
    command = [sys.executable, "-c", OPENS, str(path_of(file))]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert said == "refused\nrefused\n"


def test_a_store_that_is_gone() -> None:
    with pytest.raises(StoreError, match="cannot be opened: No such file"):
        Store(Path("/proc/self/fd/9999"), "key", ROOM)


def test_waits_are_bounded() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(StoreError, match="within 3 s"):
        await_parts(lambda: True, 3.0, lambda: now[0], sleep)


def test_a_full_store_is_mapped_ahead(file: int) -> None:
    """All of its pages are in this process's tables then, and hold what was written."""
    store = open_store(file)
    store.begin(1)
    assert store.claim(0)
    size = 8 << 20
    start = store.room(0, size)
    store.write(start, b"\7" * size)
    store.fill(0)
    store.finish()
    reader = open_store(file)
    assert reader.complete
    reader.map_ahead()
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14):
        assert resident(reader.address) >= size
    assert reader.read(start, size) == b"\7" * size
    reader.close()
    store.close()


def resident(address: int) -> int:
    """Bytes of the mapping at this address that are in this process's page tables."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            return next(1024 * int(found.split()[1]) for found in lines if found.startswith("Rss:"))
    raise AssertionError("nothing is mapped there")
