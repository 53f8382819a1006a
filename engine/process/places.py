"""Where the processes of a server find what they share: small files, and the addresses of their sockets.

The files lie in memory that the server's first process holds (launch/processes.py), and the sockets have names without
files (unix(7), abstract): no disk that is full or cleaned up takes them away. Without that memory (tests, benchmarks)
both lie in the runtime directory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec

from configs.engine import Plan

STORE = "weights"  # the machine's store of weights (store/memory.py)
MOST_WIDENED = 4  # times: FP8 to float32
CACHE_FILES = struct.Struct("<ii")  # descriptors of the first process, of each rank's in the file `caches`
FILE_BYTES = 128  # of a file of fixed size: written in place, so never in need of more


def store_names(nodes: Sequence[int]) -> list[str]:
    """Of the machine's stores. nodes: as Plan.store_nodes has them."""
    return [f"{STORE}-{node}" for node in nodes] or [STORE]


def store_capacity(plan: Plan) -> int:
    """Bytes of addresses for a store of this checkpoint's weights, however they are kept."""
    return MOST_WIDENED * sum(size for size, *_ in plan.checkpoint.values()) + (1 << 30)


class Places:
    """Raises ValueError when the memory cannot be read: the first process has ended, or is another user's."""

    def __init__(self, directory: Path, memory: Path | None = None) -> None:
        """memory: a file with the path of each shared file by its name, as JSON; None: they are in `directory`."""
        self._directory = directory
        self._files: dict[str, str] | None = None
        if memory is not None:
            try:
                self._files = msgspec.json.decode(memory.read_bytes(), type=dict[str, str])
            except (OSError, msgspec.DecodeError) as error:
                raise ValueError(f"{memory}: the server's shared memory cannot be read: {error}") from None

    def file(self, name: str) -> Path:
        return self._directory / name if self._files is None else Path(self._files[name])

    @property
    def meetings(self) -> Path:
        """For ep/table.py: make_groups."""
        return self._directory if self._files is None else self.file("meetings")

    def caches(self, rank: int) -> list[Path]:
        """The files of a rank's cache; []: they are not on this machine."""
        if self._files is None:
            return []
        index = self.file("caches")
        with open(index, "rb", buffering=0) as file:
            raw = os.pread(file.fileno(), CACHE_FILES.size, rank * CACHE_FILES.size)
        numbers = CACHE_FILES.unpack(raw) if len(raw) == CACHE_FILES.size else ()
        return [index.with_name(str(number)) for number in numbers if number > 0]

    def socket(self, name: str) -> str:
        return socket_address(self._directory, name, in_memory=self._files is not None)


def socket_address(directory: Path, name: str, in_memory: bool) -> str:
    """For ZeroMQ. in_memory: a name that no file has; the directory's name keeps servers apart."""
    return f"ipc://@{directory.name}/{name}" if in_memory else f"ipc://{directory}/{name}"


def create(path: Path, size: int = FILE_BYTES) -> int:
    """A descriptor of the file, which has at least `size` bytes with their room on the disk: none is asked for
    later. OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(file).st_size < size:
            os.posix_fallocate(file, 0, size)
    except BaseException:
        os.close(file)
        raise
    return file


def write_small(path: Path, text: str) -> None:
    """At most FILE_BYTES; readers find the old text or the new one. OSError."""
    file = create(path)
    try:
        os.pwrite(file, text.encode().ljust(FILE_BYTES, b"\0"), 0)
    finally:
        os.close(file)
