"""The child processes of a server: one per rank and one front, started, watched and ended as one.

No child outlives its parent: each asks the kernel to be killed when the parent dies (engine/process/orphan.py), and
`end` kills whatever has not left in time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType

import msgspec
from msgspec import Struct

from engine.process.child import child_command
from engine.process.fork_process import Told
from engine.process.orphan import adopt_orphans
from engine.process.places import CACHE_FILES, FILE_BYTES, socket_address
from launch.early import Source, start_source, take_source
from launch.forks import NAME as FORKS
from launch.forks import Forked, Forks
from launch.lasting import popen

RANK_MODULE = "engine.process.rank_process"
PREFIX = "moesaic-"  # of runtime directories
OWNER = "owner-"  # and a process id: an empty file in each, which tells them from what other programs leave
_FAULTS = {-number for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)}
KILLED_SECONDS = 10.0  # until a killed process has ended; longer only in a system call that cannot be broken off


def hear_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Of those that end a server. They are unblocked: whoever has started this process may have kept them from its own
    threads (Ray does), and a child gets that with the rest."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))


class RuntimeDir:
    """What the processes of a server share: files in memory (engine/process/places.py), which neither a full disk nor
    a cleaner of directories can take away, and a private directory, where people and scripts find `ready`.

    The directory is locked for the life of this process, however that ends, and removed on close. One whose owner was
    killed is removed by the next start in the same place. ValueError when there can be none.
    """

    def __init__(self, root: Path) -> None:
        self._files: dict[str, int] = {}
        self._index = self._num_indexed = 0
        try:
            sweep(root)
            self.path, self._lock = _own_directory(root)
        except OSError as error:
            raise ValueError(f"no directory can be made in {root} (MOESAIC_RUNTIME_DIR): {error.strerror}") from None
        self.clear("ready")
        for name in ("resizes", "fences", "meetings", "caches"):
            self._file(name)

    @property
    def options(self) -> list[str]:
        """For the command line of each process: it may use what has been made by now."""
        if self._num_indexed < len(self._files):  # a new index, as processes that start may just be reading the old one
            self._num_indexed = len(self._files)
            paths = {name: str(_path_of(file)) for name, file in self._files.items()}
            self._index = self._file(f"index-{self._num_indexed}")
            os.pwrite(self._index, msgspec.json.encode(paths), 0)
            self._num_indexed = len(self._files)
        return ["--runtime-dir", str(self.path), "--memory", str(_path_of(self._index))]

    @property
    def front(self) -> str:
        """The address of the front's socket."""
        return socket_address(self.path, "front.ipc", in_memory=True)

    def file(self, name: str) -> Path:
        """As every process of this machine finds it."""
        return _path_of(self._files[name])

    def keep(self, name: str, file: int) -> None:
        """A descriptor of this process that the others find under this name; closed with the rest."""
        self._files[name] = file

    def kept(self, name: str) -> int | None:
        """The descriptor under this name, if there is one."""
        return self._files.get(name)

    def add_cache(self, rank: int) -> None:
        """Files for its cache and for that of the process before it (cache/shared.py), which are to outlive it."""
        files = [self._file(f"cache-{rank}-{number}") for number in (0, 1)]
        os.pwrite(self._file("caches"), CACHE_FILES.pack(*files), rank * CACHE_FILES.size)

    def clear(self, name: str) -> None:
        """A file of fixed size with nothing but zeros."""
        os.pwrite(self._file(name), bytes(FILE_BYTES), 0)

    def read(self, name: str) -> str:
        """The text in such a file."""
        return os.pread(self._file(name), FILE_BYTES, 0).rstrip(b"\0").decode()

    def write(self, name: str, value: object) -> Path:
        """As JSON; not while another process may be reading what was there before."""
        file = self._file(name)
        os.ftruncate(file, 0)
        os.pwrite(file, msgspec.json.encode(value), 0)
        return _path_of(file)

    def show_ready(self, address: str) -> None:
        """The file `ready` in the directory, with the address; gone when that is "". Without a word where the disk
        is full."""
        shown = self.path / "ready"
        with contextlib.suppress(OSError):
            if address:
                draft = shown.with_suffix(".draft")
                draft.write_text(address)
                draft.replace(shown)
            else:
                shown.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        for file in (self._lock, *self._files.values()):
            os.close(file)
        self._files.clear()

    def _file(self, name: str) -> int:
        if name not in self._files:
            self._files[name] = os.memfd_create(f"{PREFIX}{name}", os.MFD_CLOEXEC)
        return self._files[name]


def _path_of(file: int) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{file}")


def _own_directory(root: Path) -> tuple[Path, int]:
    """A new directory and the descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        with contextlib.suppress(FileNotFoundError):  # swept by another start before it was locked
            lock = _locked(path)
            if lock is not None:
                (path / f"{OWNER}{os.getpid()}").touch()
                return path, lock


def _locked(path: Path) -> int | None:
    """The descriptor of the directory with its lock; None: another process has it. The kernel gives it back with the
    process, so this holds between containers too, where process ids say nothing."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(directory).st_ino == path.stat(follow_symlinks=False).st_ino:
            return directory
    except BlockingIOError:
        pass
    except BaseException:
        os.close(directory)
        raise
    os.close(directory)
    return None


def sweep(root: Path) -> None:
    """Remove what servers of this user that were killed have left in `root`: directories of theirs that no process
    holds."""
    for path in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another sweeps, it is another user's, ...
            if path.stat(follow_symlinks=False).st_uid != os.geteuid() or not any(path.glob(f"{OWNER}*")):
                continue
            lock = _locked(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


class Child(Struct):
    name: str
    rank: int  # -1 for what is no rank
    process: subprocess.Popen[bytes] | Forked
    pidfd: int
    link: socket.socket | None = None  # to one that waits, and has nothing to bring to an end

    def alive(self) -> bool:
        """It has not been seen to end."""
        return self.process.returncode is None

    def close(self) -> None:
        """It has ended."""
        os.close(self.pidfd)
        self.unlink()

    def unlink(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None

    @property
    def intact(self) -> bool:
        """It did not end for a fault in its own memory."""
        return self.process.returncode not in _FAULTS

    def exit_text(self) -> str:
        code = self.process.returncode
        if code is None:
            return "still running"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Children:
    """Starts and watches processes; a context manager that ends them all."""

    def __init__(self) -> None:
        self.all: list[Child] = []
        self._forks: Forks | None = None
        self._forked: set[str] = set()  # modules
        self._architectures: dict[str, str] = {}  # of modules that are begun early
        self._begun: list[Source] = []

    def fork_from(
        self, module: str, others: Sequence[str], architecture: str, environment: dict[str, str], seconds: float
    ) -> None:
        """From now on processes that run `module`, which ranks of this model do, or one of `others`, are forked
        (engine/process/fork_process.py), as far as they can be. They have this environment. seconds: how long the first
        of them may wait for the imports; later ones do not."""
        if self._forks is not None or not adopt_orphans():
            return

        def start() -> tuple[Source, Callable[[], bool]]:
            for child in [child for child in self.all if child.name == FORKS]:
                self.forget(child)
            source = take_source()
            return source, self._watch(FORKS, -1, source.process).alive

        self._forked = {module, *others}
        self._forks = Forks(start, Told(module, architecture, environment), seconds)

    def begin_early(self, module: str, architecture: str, source: Source | None) -> None:
        """From now on a process that runs `module`, which ranks of this model do, is one that has begun to import
        before it is told so, and imports less (engine/process/fork_process.py). source: what the first of them is."""
        self._architectures[module] = architecture
        self._begun += [] if source is None else [source]

    def start(
        self,
        name: str,
        rank: int,
        module: str,
        arguments: list[str],
        environment: dict[str, str],
        stdin: int = subprocess.DEVNULL,
    ) -> Child:
        if self._forks is not None and module in self._forked:
            forked = self._forks.fork(module, [*arguments, "--parent", str(os.getpid())], stdin)
            if forked is not None:
                return self._watch(name, rank, forked)
        if module in self._architectures:
            return self._watch(name, rank, self._become(module, arguments, environment))
        return self._popen(name, rank, module, arguments, environment, stdin)

    def _become(self, module: str, arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        source = self._begun.pop() if self._begun else start_source()
        words = [*arguments, "--parent", str(os.getpid())]
        with source.socket:
            source.tell(json.dumps(Told(module, self._architectures[module], environment, words)).encode())
        return source.process

    def _popen(
        self, name: str, rank: int, module: str, arguments: list[str], environment: dict[str, str], stdin: int
    ) -> Child:
        # A group of its own: Ctrl-C in the terminal reaches the supervisor only, which ends the others in order.
        command = child_command(module, arguments)
        return self._watch(name, rank, popen(command, env=environment, stdin=stdin, process_group=0))

    def _watch(self, name: str, rank: int, process: subprocess.Popen[bytes] | Forked) -> Child:
        child = Child(name, rank, process, os.pidfd_open(process.pid))
        self.all.append(child)
        return child

    def exited(self, timeout: float, wake: Sequence[int] = ()) -> list[Child]:
        """Children found dead within `timeout` seconds; each is reported once. wake: descriptors that end the waiting
        too, when there is something to read."""
        watched = {child.pidfd: child for child in self.all if child.process.returncode is None}
        if not watched and not wake:
            return []
        poller = select.poll()  # not select.select: a caller may have more files open than that can name
        for descriptor in (*watched, *wake):
            poller.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poller.poll(math.ceil(1000 * timeout))]
        dead = [watched[descriptor] for descriptor in ready if descriptor in watched]
        for child in dead:
            child.process.wait()
        return dead

    def forget(self, child: Child) -> None:
        """One that has ended, and was reported."""
        self.all.remove(child)
        child.close()

    def wait_for(self, child: Child, timeout: float) -> None:
        """Until `child` has left, at most `timeout` seconds; others may leave meanwhile."""
        deadline = time.monotonic() + timeout
        while child.process.returncode is None and (left := deadline - time.monotonic()) > 0:
            self.exited(left)

    def end(self, grace: float) -> None:
        """Wait up to `grace` seconds for the rest to leave by themselves, then kill what is left."""
        deadline = time.monotonic() + grace
        while self._begun:
            self._begun.pop().drop()
        for child in self.all:
            if child.link is not None or child.name == FORKS:
                child.process.kill()
        if self._forks is not None:
            self._forks.close()
            self._forks = None
            adopt_orphans(False)  # this may be the process of somebody who calls us
        while any(child.process.returncode is None for child in self.all):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self.exited(left)
        for child in self.all:
            if child.process.returncode is None:
                child.process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel: no more can be done
                    child.process.wait(KILLED_SECONDS)
        for child in self.all:
            child.close()
        self.all.clear()

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(grace=0.0)
