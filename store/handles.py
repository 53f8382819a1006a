"""Memory of a device that a process beside the ranks holds, so that it outlives them: what a store of weights on GPUs
is to be made of (docs/memory.md). A protocol; there is no implementation for a device yet, only the tests' fake.

CUDA offers two ways, and both fit: a handle of 64 bytes for an allocation (cudaIpcGetMemHandle,
cudaIpcOpenMemHandle), or physical memory of its own (cuMemCreate) that is exported as a file descriptor
(cuMemExportToShareableHandle) and mapped by whoever has it (cuMemMap). In both the memory lives as long as the process
that made it, or a process that has mapped it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol


class Region(NamedTuple):
    """handle: what another process of the same user opens it by. device: its number on this machine."""

    handle: bytes
    num_bytes: int
    device: int


class Holder(Protocol):
    """In the process that holds the memory, one for all devices of a machine. It starts before the ranks, as the
    memory of the dead cannot be opened."""

    def allocate(self, name: str, device: int, num_bytes: int) -> Region:
        """New memory under this name, filled with nothing in particular. Raises MemoryError, ValueError for a name
        that is taken."""
        ...

    def regions(self) -> Mapping[str, Region]:
        """All that is held."""
        ...

    def free(self, name: str) -> None:
        """Hold it no longer: it goes with the last process that has it open."""
        ...


class Opener(Protocol):
    """In a rank's process."""

    def open(self, region: Region, writable: bool) -> int:
        """The address at which it is mapped here. Raises OSError when it is no longer held, or another user's. CUDA
        forbids no writing: `writable` says what this rank means to do, and where the system can, it is held to it."""
        ...

    def close(self, address: int) -> None:
        """Nothing that lies there may be used after this."""
        ...
