"""Which files a checkpoint consisted of at the start, so that other weights are never mixed in later. No torch here.

A file is the same as long as its size, its time of change and its inode are, and the digest of what tells it from
others: the header and a sample of the weights. On another machine only size and digest can be compared.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

SAMPLE_BYTES = 1 << 16  # at both ends of a file of weights
MAX_HEADER_BYTES = 100 << 20  # the safetensors format's own limit
DRAFTER_FILES = "eagle3."  # what names of files and tensors begin with that are of a drafter (models/eagle3)
GGUF_INDEX = "gguf.json"  # what a GGUF file's weights are called (layers/gguf/file.py)
WHOLE = ("config.json", "model.safetensors.index.json", GGUF_INDEX)  # these are digested whole

# Plan.checkpoint (configs/engine.py): file -> the fields of a FileIdentity.
Identities = Mapping[str, tuple[int, int, int, str]]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: one line with the file or key, and what is wrong."""


class FileIdentity(NamedTuple):
    size: int
    mtime_ns: int
    inode: int
    digest: str


def identify(directory: str | Path) -> dict[str, tuple[int, int, int, str]]:
    """Of config.json, the index and every *.safetensors and *.gguf, by name. Reads 128 KiB and the header of each.

    Raises CheckpointError for a file that cannot be read."""
    found: dict[str, tuple[int, int, int, str]] = {}
    for path in _files(Path(directory)):
        with opened(path) as descriptor:
            found[path.name] = _identity(descriptor, path)
    return found


def check(directory: str | Path, known: Identities) -> None:
    """Raise CheckpointError, which names the file and what differs, unless all files are those that are known."""
    directory = Path(directory)
    for name, identity in known.items():
        with opened(directory / name) as descriptor:
            check_open(descriptor, directory / name, identity)
            digest = _digest(descriptor, directory / name)
        if digest != identity[3]:
            raise CheckpointError(f"{directory / name}: changed since the start: its header or weights are others")
    for path in _files(directory):
        if path.name not in known:
            raise CheckpointError(f"{path}: changed since the start: this file was not there")


def check_open(descriptor: int, path: Path, known: tuple[int, int, int, str]) -> None:
    """The same of an open file, without reading: size, time of change and inode."""
    with _errors(path):
        now = os.fstat(descriptor)
    pairs = zip(("size", "mtime_ns", "inode"), known, (now.st_size, now.st_mtime_ns, now.st_ino), strict=False)
    unlike = [f"{field} is {is_now}, was {was}" for field, was, is_now in pairs if was != is_now]
    if unlike:
        raise CheckpointError(f"{path}: changed since the start: {', '.join(unlike)}")


def read_at(descriptor: int, path: Path, start: int, count: int) -> bytearray:
    """`count` bytes from `start`. A file that is too short is an error here, where a mapped one would end the
    process."""
    data = bytearray(count)
    view = memoryview(data)
    done = 0
    with _errors(path):
        while done < count:
            got = os.preadv(descriptor, [view[done:]], start + done)
            if not got:
                raise CheckpointError(f"{path}: cut short ({start + done} bytes, {start + count} needed)")
            done += got
    return data


@contextmanager
def opened(path: Path) -> Iterator[int]:
    with _errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _files(directory: Path) -> list[Path]:
    with _errors(directory):
        names = os.listdir(directory)
    return [directory / name for name in sorted(names) if name in WHOLE or name.endswith((".safetensors", ".gguf"))]


def _identity(descriptor: int, path: Path) -> FileIdentity:
    with _errors(path):
        now = os.fstat(descriptor)
    return FileIdentity(now.st_size, now.st_mtime_ns, now.st_ino, _digest(descriptor, path))


def _digest(descriptor: int, path: Path) -> str:
    with _errors(path):
        size = os.fstat(descriptor).st_size
    digest = hashlib.sha256()
    if path.name in WHOLE:
        digest.update(read_at(descriptor, path, 0, size))
    else:
        length = int.from_bytes(read_at(descriptor, path, 0, min(8, size)), "little")
        header = 8 + length if length <= MAX_HEADER_BYTES else 0  # a broken one is found when it is parsed
        digest.update(read_at(descriptor, path, 0, min(size, header + SAMPLE_BYTES)))
        digest.update(read_at(descriptor, path, max(0, size - SAMPLE_BYTES), min(size, SAMPLE_BYTES)))
    return digest.hexdigest()[:16]


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
