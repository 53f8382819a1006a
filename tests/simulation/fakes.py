"""What the supervisor starts, watches, writes and reads, without processes and without a disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from launch.processes import Child, Children
from tests.simulation.world import World


class FakePopen:
    """subprocess.Popen, as far as Children and RankMonitor use it."""

    def __init__(self, pid: int, kill: Callable[[], None]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.exit_code: int | None = None  # it has ended, and nobody has asked yet
        self.kill = kill


class SimChildren(Children):
    """Fake time passes where the supervisor waits for its children."""

    def __init__(self, world: World, start: Callable[[int, list[str]], FakePopen]) -> None:
        super().__init__()
        self._world = world
        self._start = start

    def start(self, name: str, rank: int, module: str, arguments: list[str], environment: dict[str, str]) -> Child:
        child = Child(name, rank, cast(Any, self._start(rank, arguments)), -1)
        self.all.append(child)
        return child

    def exited(self, timeout: float) -> list[Child]:
        self._world.run(self._world.now + timeout)
        dead = [child for child in self.all if _popen(child).exit_code is not None and child.process.returncode is None]
        for child in dead:
            child.process.returncode = _popen(child).exit_code
        return dead

    def forget(self, child: Child) -> None:
        self.all.remove(child)

    def wait_for(self, child: Child, timeout: float) -> None:
        deadline = self._world.now + timeout
        while child.process.returncode is None and self._world.now < deadline:
            self.exited(deadline - self._world.now)

    def end(self, grace: float) -> None:
        self.all.clear()


def _popen(child: Child) -> FakePopen:
    return cast(FakePopen, child.process)


class FakeFile:
    """A file of the runtime directory: what somebody reads there, or None. A stand-in for a Path."""

    def __init__(self, read: Callable[[], bytes | None]) -> None:
        self._read = read

    def exists(self) -> bool:
        return self._read() is not None

    def read_bytes(self) -> bytes:
        content = self._read()
        if content is None:
            raise FileNotFoundError
        return content


class FakeRuntime:
    """launch.processes.RuntimeDir without a disk."""

    def __init__(self, files: Callable[[str], FakeFile]) -> None:
        self._files = files
        self.options = ["--runtime-dir", "runtime"]
        self.written: dict[str, Any] = {}

    def write(self, name: str, value: object) -> Path:
        self.written[name] = value
        return Path(name)

    def file(self, name: str) -> FakeFile:
        return self._files(name)

    def read(self, name: str) -> str:
        file = self._files(name)
        return file.read_bytes().decode() if file.exists() else ""

    def clear(self, name: str) -> None:
        """What a process wrote is gone with it."""

    def add_cache(self, rank: int) -> None:
        """Its memory is its own: what a lost rank had computed is computed again."""

    def show_ready(self, address: str) -> None:
        """To nobody."""

    def close(self) -> None:
        """Nothing is held."""


class FakeNumbers:
    """front.wire.Numbers without a disk."""

    def __init__(self) -> None:
        self._counts: list[int] = []

    def write(self, count: int) -> None:
        self._counts.append(count)

    def read(self) -> list[int]:
        counts, self._counts = self._counts, []
        return counts
