"""A fake of a device's memory (store/handles.py): files in memory of the holder's process, mapped by address."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path

from store.handles import Region


class FakeHolder:
    """Implements store.handles.Holder."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, Region]] = {}

    def allocate(self, name: str, device: int, num_bytes: int) -> Region:
        if name in self._held:
            raise ValueError(f"{name}: there is memory of this name")
        file = os.memfd_create(f"device-{device}-{name}", os.MFD_CLOEXEC)
        os.ftruncate(file, num_bytes)
        region = Region(f"/proc/{os.getpid()}/fd/{file}".encode(), num_bytes, device)
        self._held[name] = file, region
        return region

    def regions(self) -> Mapping[str, Region]:
        return {name: region for name, (_, region) in self._held.items()}

    def free(self, name: str) -> None:
        os.close(self._held.pop(name)[0])


class FakeOpener:
    """Implements store.handles.Opener."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._sizes: dict[int, int] = {}

    def open(self, region: Region, writable: bool) -> int:
        file = os.open(region.handle.decode(), os.O_RDWR if writable else os.O_RDONLY)
        rights = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        address = self._libc.mmap(None, region.num_bytes, rights, mmap.MAP_SHARED, file, 0)
        os.close(file)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "cannot be mapped")
        self._sizes[address] = region.num_bytes
        return int(address)

    def close(self, address: int) -> None:
        self._libc.munmap(address, self._sizes.pop(address))


def show(regions: Mapping[str, Region], file: Path) -> None:
    """As a holder tells ranks what there is."""
    file.write_text(json.dumps({name: [r.handle.decode(), r.num_bytes, r.device] for name, r in regions.items()}))


def shown(file: Path) -> dict[str, Region]:
    found = json.loads(file.read_text())
    return {name: Region(handle.encode(), size, device) for name, (handle, size, device) in found.items()}
