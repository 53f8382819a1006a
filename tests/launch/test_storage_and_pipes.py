"""Disks that are full or cleaned up, logs that cannot be written, readers that leave or stop reading: a server goes on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Server, served, starting, until
from streams import mode, undisturbed, wave

pytestmark = pytest.mark.attacks


def lose_a_rank(server: Server) -> None:
    """Streams go on over a kill, and the rank comes back."""
    expected = undisturbed(server)
    victim = server.children()["rank 1"]
    assert asyncio.run(wave(server, lambda: os.kill(victim, signal.SIGKILL))) == expected
    until(
        lambda: mode(server) == "full" and server.children().get("rank 1") not in (None, victim), 60, "rank 1 is back"
    )
    assert server.process.poll() is None


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 512 KiB and 64 files."""
    path = Path(tempfile.mkdtemp(prefix="moe-"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k,nr_inodes=64", "moesaic-test", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        path.rmdir()
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)
    path.rmdir()


def fill(path: Path) -> None:
    """No byte and no file more."""
    with contextlib.suppress(OSError), (path / "filling").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    with pytest.raises(OSError) as full:
        for number in range(100):
            (path / f"filling-{number}").touch()
    assert full.value.errno == errno.ENOSPC


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_full_disk_with_runtime_directory_and_log(tmp_path: Path, small_disk: Path, backend: str) -> None:
    """And then one that somebody has emptied."""
    arguments = ("-dp", "2", "--all2all-backend", backend)
    with (small_disk / "log").open("w") as said, served(tmp_path, *arguments, said=said, runtime=small_disk) as server:
        fill(small_disk)
        lose_a_rank(server)
        for path in small_disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        lose_a_rank(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def test_a_disk_that_is_full_from_the_start_is_named(tmp_path: Path, small_disk: Path) -> None:
    fill(small_disk)
    with starting(tmp_path, runtime=small_disk) as server:
        assert server.wait(60) == 2
    assert f"no directory can be made in {small_disk}" in (tmp_path / "server.log").read_text()


@pytest.mark.parametrize("reader", ["left", pytest.param("idle", marks=pytest.mark.slow)])
def test_a_pipe_that_is_not_read(tmp_path: Path, reader: str) -> None:
    """As in `moesaic serve 2>&1 | tee log`, when tee is gone or stopped before the server is ready."""
    read, write = os.pipe()
    try:
        if reader == "left":
            os.close(read)
        else:
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
            os.write(write, bytes(4096))
        with served(tmp_path, "-dp", "2", said=write) as server:
            lose_a_rank(server)
            server.process.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
    finally:
        os.close(write)
        if reader != "left":
            os.close(read)
