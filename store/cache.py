"""Packed weights on disk: files of full stores (store/memory.py), by their key. The next server maps such a file
instead of reading and packing a checkpoint.

A file appears under its name when it is whole (rename(2)), is never written to again, and is used only when it and its
directory are this user's and nobody else may write to them. What a process that ended earlier had written the next one
compares and goes on from there, if it lives so long. All files together take at most half of what would be free without
them: the least recently used ones make room.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from store.memory import complete_key
from store.pages import brought_in

SUFFIX = ".weights"
DRAFT = ".draft"
CHUNK = 8 << 20


class WeightCache:
    """The cache in `directory`, which is made when something is written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find(self, key: str) -> int | None:
        """A descriptor of the whole file with this key, for reading; None: there is none that can be trusted. It counts
        as used now, and the system begins to bring it into memory."""
        path = self._path(key)
        try:
            if not _is_ours(self.directory.stat()):
                return None
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        if not _is_ours(os.fstat(file)) or complete_key(file) != key:
            os.close(file)
            return None
        with contextlib.suppress(OSError):  # a disk that cannot be written to
            os.utime(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
        return file

    def write(self, source: int, key: str) -> bool:
        """Copy a full store. False: it is larger than the cache may be. Raises OSError, also where others may write to
        the directory: `find` would not trust it."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(self.directory.stat()):
            raise PermissionError(errno.EPERM, "the directory is another user's, or others may write to it")
        assert complete_key(source) == key
        size = os.fstat(source).st_size
        draft, file = self._left(key) or self._begun(key)
        try:
            self._sweep()
            if not self._make_room(size, os.fstat(file).st_size):
                draft.unlink()
                return False
            _copy(source, file, size)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # what was written lies in small pages
            with brought_in(file):
                os.fchmod(file, 0o400)
                draft.replace(self._path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
        finally:
            os.close(file)
        return True

    def _left(self, key: str) -> tuple[Path, int] | None:
        """The draft of a process that has ended, locked; None: there is none."""
        for draft in self.directory.glob(f"{key}-*{DRAFT}"):
            with contextlib.suppress(OSError):
                file = os.open(draft, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                if _is_ours(os.fstat(file)) and _locked(file):
                    return draft, file
                os.close(file)
        return None

    def _begun(self, key: str) -> tuple[Path, int]:
        """A new draft, locked as long as this process lives: others leave it alone. Its name is chance, as processes of
        two containers may have one number."""
        while True:
            draft = self.directory / f"{key}-{secrets.token_hex(8)}{DRAFT}"
            file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if _locked(file):
                return draft, file
            os.close(file)

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{SUFFIX}"

    def _sweep(self) -> None:
        """Remove the drafts of processes that have ended."""
        for draft in self.directory.glob(f"*{DRAFT}"):
            with contextlib.suppress(OSError), _opened(draft) as file:
                if _locked(file):
                    draft.unlink()

    def _make_room(self, size: int, drafted: int) -> bool:
        """Whether there is room, after the least recently used files have gone. drafted: bytes of it that are
        there already."""
        found = []
        for path in self.directory.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        own = sum(freed for _, freed, _ in found)
        most = (shutil.disk_usage(self.directory).free + drafted + own) // 2
        if size > most:
            return False
        for _, freed, path in sorted(found):
            if own + size <= most:
                break
            path.unlink(missing_ok=True)
            own -= freed
        return True


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o022


def _locked(file: int) -> bool:
    """Whether this process has it alone, and nobody has removed it before."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another process writes it
        return False
    return os.fstat(file).st_nlink > 0


def _copy(source: int, file: int, size: int) -> None:
    """What is there already and equal is left: a machine that lost its power may have kept other bytes of it."""
    done, begun = 0, min(os.fstat(file).st_size, size)
    os.ftruncate(file, begun)
    while done < size:
        count = min(CHUNK, size - done)
        if done + count <= begun and os.pread(file, count, done) == os.pread(source, count, done):
            done += count
        else:
            os.lseek(file, done, os.SEEK_SET)
            done += os.sendfile(file, source, done, count)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield file
    finally:
        os.close(file)
