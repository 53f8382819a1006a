"""Device, and Buffer as a pair of address and size."""

from __future__ import annotations


class Device:
    def __init__(self, device_id: int | None = None) -> None:
        self.device_id = device_id or 0

    def set_current(self) -> None:
        """There is one."""


class Buffer:
    def __init__(self, handle: int, size: int) -> None:
        self.handle, self.size = handle, size

    @classmethod
    def from_handle(cls, ptr: int, size: int) -> Buffer:
        return cls(ptr, size)
