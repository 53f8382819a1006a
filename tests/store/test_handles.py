"""Memory that a process beside the ranks holds: a rank is killed, and the next one finds what the first has written."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_device import FakeHolder, FakeOpener, show, shown

from store.handles import Holder, Opener

pytestmark = pytest.mark.store

HOLDER = """
import sys
from pathlib import Path
from fake_device import FakeHolder, show
holder = FakeHolder()
for layer in range(2):
    holder.allocate(f"layer {layer}", layer, 1 << 16)
show(holder.regions(), Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""
RANK = """
import ctypes, sys
from pathlib import Path
from fake_device import FakeOpener, shown
opener = FakeOpener()
address = opener.open(shown(Path(sys.argv[1]))["layer 1"], True)
ctypes.memmove(address, b"weights", 7)
print("written", flush=True)
sys.stdin.read()
"""


def process(script: str, file: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, str(file)]
    paths = {"PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[2]}"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=paths)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    file = tmp_path / "regions"
    with process(HOLDER, file) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        yield holder, file
        holder.kill()


def test_it_outlives_a_rank(told: tuple[subprocess.Popen[str], Path]) -> None:
    _, file = told
    with process(RANK, file) as rank:
        assert rank.stdout is not None and rank.stdout.readline() == "written\n"
        rank.kill()
    opener: Opener = FakeOpener()
    region = shown(file)["layer 1"]
    assert (region.num_bytes, region.device) == (1 << 16, 1)
    address = opener.open(region, False)
    assert ctypes.string_at(address, 7) == b"weights"
    opener.close(address)


def test_it_is_gone_with_its_holder(told: tuple[subprocess.Popen[str], Path]) -> None:
    """For those that come later; one that has it open keeps it."""
    holder, file = told
    opener: Opener = FakeOpener()
    region = shown(file)["layer 0"]
    address = opener.open(region, True)
    holder.kill()
    holder.wait()
    ctypes.memmove(address, b"still", 5)
    with pytest.raises(OSError):
        opener.open(region, False)
    opener.close(address)


def test_names(tmp_path: Path) -> None:
    holder: Holder = FakeHolder()
    region = holder.allocate("head", 0, 4096)
    with pytest.raises(ValueError, match="head"):
        holder.allocate("head", 0, 4096)
    assert holder.regions() == {"head": region}
    show(holder.regions(), tmp_path / "regions")
    assert shown(tmp_path / "regions") == {"head": region}
    holder.free("head")
    assert not holder.regions()
