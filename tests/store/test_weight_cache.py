"""Packed weights on disk: found only whole and when they can be trusted, bounded, and mapped at the next start."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import threading
from pathlib import Path

import pytest
import streams
from served import served, until
from streams import wave
from test_losing_all import copied, ranks_of

from store.cache import CHUNK, WeightCache
from store.key import weights_key
from store.memory import Store, make_store

pytestmark = pytest.mark.store

KEY = "k" * 64
FILES = {"model.safetensors": (1, 2, 3, "digest")}


def full_store(key: str, text: bytes) -> int:
    file = make_store("test")
    store = Store(Path(f"/proc/{os.getpid()}/fd/{file}"), key, 64 << 20)
    store.begin(1)
    assert store.claim(0)
    store.write(store.room(0, len(text)), text)
    store.fill(0)
    store.finish()
    store.close()
    return file


def test_what_is_written_is_found(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "cache")
    assert cache.find(KEY) is None
    assert cache.write(full_store(KEY, b"weights"), KEY)
    assert cache.find("other") is None
    found = cache.find(KEY)
    assert found is not None
    store = Store(Path(f"/proc/{os.getpid()}/fd/{found}"), KEY, 0)
    assert store.complete and store.read(store.offset(0), 7) == b"weights"
    assert [path.name for path in cache.directory.iterdir()] == [f"{KEY}.weights"]
    with pytest.raises(OSError):
        os.write(found, b"x")
    store.close()


def test_what_cannot_be_trusted_is_not_found(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "cache")
    cache.write(full_store(KEY, b"weights"), KEY)
    path = cache.directory / f"{KEY}.weights"
    path.chmod(0o666)
    assert cache.find(KEY) is None, "others may write to it"
    path.chmod(0o600)
    assert cache.find(KEY) is not None
    cache.directory.chmod(0o777)
    assert cache.find(KEY) is None, "others may replace it"
    with pytest.raises(PermissionError, match="others may write to it"):
        cache.write(full_store(KEY, b"weights"), KEY)
    cache.directory.chmod(0o700)
    path.rename(cache.directory / f"{'x' * 64}.weights")
    assert cache.find("x" * 64) is None, "it says itself what it is"
    os.truncate(cache.directory / f"{'x' * 64}.weights", 5000)
    (cache.directory / f"{'x' * 64}.weights").rename(path)
    assert cache.find(KEY) is None, "it was cut"


def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used go first; what is too large is not written."""
    free = 10 << 20

    def disk_usage(path: Path) -> object:
        used = sum(file.stat().st_size for file in path.iterdir())
        return shutil._ntuple_diskusage(free, used, free - used)  # type: ignore[attr-defined]

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    cache = WeightCache(tmp_path)
    size = os.fstat(full_store("a", b"1")).st_size
    assert size == 4 << 20
    for index, key in enumerate("ab"):
        assert cache.write(full_store(key, b"1"), key)
        if cache.find(key) is not None:
            os.utime(tmp_path / f"{key}.weights", (index, index))
    assert [path.name for path in tmp_path.iterdir()] == ["b.weights"]
    free = 6 << 20
    assert not cache.write(full_store("c", b"1"), "c")


def test_drafts_of_the_dead_are_removed(tmp_path: Path) -> None:
    for name in (f"{KEY}-1.draft", f"{KEY}-2.draft", "other-1.draft"):
        (tmp_path / name).write_bytes(b"half")
    assert WeightCache(tmp_path).write(full_store(KEY, b"weights"), KEY)
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.weights"]


@pytest.mark.parametrize("more", [-5 << 20, 1 << 20])
def test_what_another_had_begun_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """Only what is not there or not the same is written, also where the draft is longer than the store."""
    source = full_store(KEY, os.urandom(4 * CHUNK + 1000))
    size = os.fstat(source).st_size
    whole = os.pread(source, size, 0)
    draft = tmp_path / f"{KEY}-1.draft"
    half = bytearray((whole + bytes(1 << 20))[: size + more])
    half[CHUNK + 77] ^= 1
    draft.write_bytes(half)
    number, places, send = draft.stat().st_ino, [], os.sendfile

    def sendfile(file: int, source: int, place: int, count: int) -> int:
        places.append(place)
        return send(file, source, place, count)

    monkeypatch.setattr(os, "sendfile", sendfile)
    assert WeightCache(tmp_path).write(source, KEY)
    (found,) = tmp_path.iterdir()
    assert (found.name, found.stat().st_ino) == (f"{KEY}.weights", number) and found.read_bytes() == whole
    assert CHUNK in places and not {0, 2 * CHUNK} & set(places)


def test_a_writer_that_is_killed_leaves_what_it_has_written(tmp_path: Path) -> None:
    source = full_store(KEY, os.urandom(6 * CHUNK))
    pid = os.fork()
    if not pid:  # killed while it waits for the second piece
        begun = iter([os.sendfile])
        os.sendfile = lambda *what: next(begun, lambda *_: os.kill(os.getpid(), 9))(*what)  # type: ignore[assignment]
        try:
            WeightCache(tmp_path).write(source, KEY)
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == 9
    (draft,) = tmp_path.iterdir()
    assert draft.stat().st_size == CHUNK and WeightCache(tmp_path).find(KEY) is None
    assert WeightCache(tmp_path).write(source, KEY)
    (found,) = tmp_path.iterdir()
    assert found.read_bytes() == os.pread(source, os.fstat(source).st_size, 0)


def test_two_that_write_at_once_do_not_share_a_draft(tmp_path: Path) -> None:
    """Also where both processes have one number, as those of two containers may."""
    other = tmp_path / f"{KEY}-{os.getpid()}.draft"
    other.write_bytes(b"of another")
    with other.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        written: list[bool] = []
        text = full_store(KEY, b"weights")
        writer = threading.Thread(target=lambda: written.append(WeightCache(tmp_path).write(text, KEY)), daemon=True)
        writer.start()
        writer.join(20.0)
        assert written == [True] and held.read() == b"of another" and other.exists()
    found = WeightCache(tmp_path).find(KEY)
    assert found is not None
    os.close(found)


def test_the_key_is_of_whatever_the_bytes_depend_on(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"kernels")
    first = weights_key(FILES, {"dtype": "float32"}, str(library))
    assert first == weights_key(dict(FILES), {"dtype": "float32"}, str(library)) and len(first) == 64
    others = [
        weights_key({"model.safetensors": (1, 2, 4, "digest")}, {"dtype": "float32"}, str(library)),
        weights_key(FILES, {"dtype": "bfloat16"}, str(library)),
        weights_key(FILES, {"dtype": "float32"}, ""),
    ]
    library.write_bytes(b"other kernels")
    others.append(weights_key(FILES, {"dtype": "float32"}, str(library)))
    assert len({first, *others}) == 5


def test_the_next_server_maps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "NUM_STREAMS", 4)
    monkeypatch.setattr(streams, "NUM_TOKENS", 60)
    copied(tmp_path)
    cache, words = tmp_path / "cache", ["-dp", "2", "--model", str(tmp_path / "model")]
    with served(tmp_path, *words, "--weight-cache", str(cache)) as server:
        expected = asyncio.run(wave(server))
        (file,) = until(lambda: list(cache.glob("*.weights")), 60, "it has been written")
    with served(tmp_path, *words, "--weight-cache", str(cache)) as server:
        assert asyncio.run(wave(server)) == expected
        for pid in ranks_of(server).values():
            lines = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if line.endswith(str(file))]
            assert [line.split()[1] for line in lines] == ["r--s"]
    log = (tmp_path / "server.log").read_text()
    assert "read 0.0 of" in log and "weight_cache_written" not in log
