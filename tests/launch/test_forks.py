"""Ranks and the processes that wait, forked from one that has imported for them: real processes, really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import command_line, descendants, served, until

from configs.env import child_environment
from engine.process.heartbeat import last_beat
from engine.process.torch_ahead import LIBRARIES, MODULES
from launch.forks import NAME
from launch.processes import Child, Children, RuntimeDir

pytestmark = pytest.mark.store
SECONDS = 30.0  # for imports


class Forking:
    """Processes that run beating_rank.py, or another module."""

    def __init__(self, runtime: RuntimeDir, module: str = "beating_rank", threads: int = 1, spin: bool = False) -> None:
        self.runtime = runtime
        self.children = Children()
        self.plan = runtime.write("plan.json", {"data_parallel_size": 1})
        self.module = module
        self.children.fork_from(module, [], "", child_environment(threads, spin), SECONDS)

    def start(self, rank: int) -> Child:
        self.runtime.clear(f"beat-{rank}")
        words = ["--plan", str(self.plan), "--rank", str(rank), *self.runtime.options]
        return self.children.start(f"rank {rank}", rank, self.module, words, {**os.environ})

    def wait_beat(self, rank: int) -> None:
        until(lambda: last_beat(self.runtime.file(f"beat-{rank}")) is not None, 30.0, "it beats")

    @property
    def source(self) -> Child:
        """What they are forked from."""
        return next(child for child in self.children.all if child.name == NAME)


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forking]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    runtime = RuntimeDir(Path(tempfile.gettempdir()))
    one = Forking(runtime)
    yield one
    one.children.end(grace=0.0)
    runtime.close()


def was_forked(child: Child) -> bool:
    return not hasattr(child.process, "args")


def test_a_fork_is_a_child_like_any_other(forking: Forking) -> None:
    child = forking.start(3)
    forking.wait_beat(3)
    pid = child.process.pid
    words = [word for word in command_line(pid) if word]
    assert was_forked(child) and os.getpgid(pid) == pid
    assert words[:4] == [sys.executable, "-P", "-m", "beating_rank"] and words[-2:] == ["--parent", str(os.getpid())]
    assert f"\nPPid:\t{os.getpid()}\n" in Path(f"/proc/{pid}/status").read_text()
    os.kill(pid, signal.SIGKILL)
    assert forking.children.exited(10.0) == [child] and child.exit_text() == "killed by SIGKILL"
    forking.children.forget(child)


def test_its_exit_code_is_seen(forking: Forking) -> None:
    (forking.runtime.path / "refuse-0").write_text("5")
    child = forking.start(0)
    assert forking.children.exited(10.0) == [child] and child.exit_text() == "exit code 5"
    forking.children.forget(child)


def test_the_end_of_the_source_costs_nothing(forking: Forking) -> None:
    """Those that it has forked go on, the next one is started as it would be without, and then there is another one."""
    first = forking.start(0)
    forking.wait_beat(0)
    before = forking.source
    os.kill(before.process.pid, signal.SIGKILL)
    assert forking.children.exited(10.0) == [before]
    plain = forking.start(1)
    forking.wait_beat(1)
    assert not was_forked(plain) and first.process.returncode is None
    forks = forking.children._forks
    assert forks is not None
    until(forks._is_ready, 30.0, "another source has imported")
    assert was_forked(forking.start(2))
    assert forking.source.process.pid != before.process.pid


def test_one_that_stands_still_costs_seconds(forking: Forking, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it forks too late does not begin."""
    forking.start(0)
    forking.wait_beat(0)
    os.kill(forking.source.process.pid, signal.SIGSTOP)
    with monkeypatch.context() as impatient:
        impatient.setattr("launch.forks.ANSWER_SECONDS", 0.2)
        plain = forking.start(1)
    forking.wait_beat(1)
    os.kill(forking.source.process.pid, signal.SIGCONT)
    assert not was_forked(plain) and was_forked(forking.start(2))
    forking.wait_beat(2)
    forked = [pid for pid in pids_of("beating_rank", "--rank", "1") if pid != plain.process.pid]
    until(lambda: not any(command_line(pid) for pid in forked), 10.0, "it has ended")


@pytest.mark.parametrize(("threads", "spin"), [(1, False), (2, True), (2, False)])
def test_what_libraries_read_when_they_are_loaded(threads: int, spin: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are loaded before the plan is known, for ranks whose threads spin: where they are not to, the process begins
    anew. With one thread nothing spins."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    runtime = RuntimeDir(Path(tempfile.gettempdir()))
    forking = Forking(runtime, threads=threads, spin=spin)
    child = forking.start(0)
    forking.wait_beat(0)
    began = Path(f"/proc/{forking.source.process.pid}/environ").read_text().split("\0")  # of its last program
    anew = "--told" in command_line(forking.source.process.pid)
    assert was_forked(child) and anew == (threads > 1 and not spin)
    assert not any(word.startswith("GOMP_SPINCOUNT=") for word in began)
    assert not anew or "OMP_NUM_THREADS=2" in began
    forking.children.end(grace=0.0)
    runtime.close()


def test_what_cannot_be_imported_in_less_time_is_imported_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "picky_rank.py").write_text(PICKY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parent}")
    runtime = RuntimeDir(Path(tempfile.gettempdir()))
    forking = Forking(runtime, "picky_rank")
    child = forking.start(0)
    forking.wait_beat(0)
    assert was_forked(child) and capfd.readouterr().err.count("event=imports_begin_anew") == 1
    forking.children.end(grace=0.0)
    runtime.close()


PICKY = """
import sys
from beating_rank import get_ready, main

def import_loop(architecture=""):
    if any(type(finder).__module__ == "engine.process.deferred" for finder in sys.meta_path):
        raise ImportError("cannot import name 'a' from partially initialized module 'b'")
"""


def pids_of(*words: str) -> list[int]:
    found = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in found if {*words} <= {*command_line(pid)}]


def test_a_server_imports_once(tmp_path: Path) -> None:
    """Its ranks, and those that wait, have torch where the process has it that they were forked from."""
    with served(tmp_path, "-dp", "2") as server:
        until(lambda: len(server.standby()) == 2, 60.0, "two wait")
        ranks = [pid for name, pid in server.children().items() if name.startswith("rank")]
        (source,) = (
            pid for pid in descendants(server.process.pid) if "engine.process.fork_process" in command_line(pid)
        )
        assert len(ranks) == 2
        for pid in (*ranks, *server.standby()):
            assert torch_at(pid) == torch_at(source)
            assert f"\nPPid:\t{server.process.pid}\n" in Path(f"/proc/{pid}/status").read_text()


def torch_at(pid: int) -> str:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(line.split("-")[0] for line in maps if line.endswith("libtorch_cpu.so"))


def test_what_is_imported_before_torch_needs_none() -> None:
    """Else torch would be imported whole, and on one core. Nor does any of it wait for torch's libraries, as one that loads
    a library itself would."""
    program = f"""
import contextlib, importlib, sys
from importlib.machinery import ExtensionFileLoader
import engine.process.fork_process
from engine.process.torch_ahead import defer_modules
defer_modules()
for name in {LIBRARIES!r}:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
there = set(sys.modules)
for name in {MODULES!r}:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
new = [name for name in sys.modules if name not in there]
loaded = [name for name in new if isinstance(getattr(sys.modules[name], "__loader__", None), ExtensionFileLoader)]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True)
