"""The runtime directory: whose it is, what is left by owners that were killed, and files that no disk holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from served import until

from engine.process.heartbeat import Heartbeat, last_beat
from engine.process.places import FILE_BYTES, Places, write_small
from launch.processes import RuntimeDir

OWNER = """
import sys, time
from pathlib import Path
from launch.processes import RuntimeDir
print(RuntimeDir(Path(sys.argv[1])).path, flush=True)
time.sleep(60)
"""


@pytest.mark.attacks
def test_what_a_killed_owner_left_is_removed_by_the_next_start(tmp_path: Path) -> None:
    """And nothing else: not what lives, is older than locks, or is another program's."""
    owners = [subprocess.Popen([sys.executable, "-c", OWNER, tmp_path], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        paths = [Path((owner.stdout.readline() if owner.stdout else b"").decode().strip()) for owner in owners]
        for name in ("moesaic-bench-x", "moesaic-old"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "plan.json").touch()
        (tmp_path / "moesaic-link").symlink_to(paths[1])
        kept = {"moesaic-bench-x", "moesaic-old", "moesaic-link", paths[1].name}
        owners[0].send_signal(signal.SIGKILL)
        owners[0].wait()
        assert paths[0].exists()
        runtime = RuntimeDir(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {*kept, runtime.path.name}
        runtime.close()
        assert {path.name for path in tmp_path.iterdir()} == kept
    finally:
        for owner in owners:
            owner.kill()
            owner.communicate()


def test_files_of_a_server(tmp_path: Path) -> None:
    """Other processes find them by name, also those that were made later and when the directory is gone."""
    runtime = RuntimeDir(tmp_path)
    words = runtime.options
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert runtime.options == words
    places = Places(Path(options["--runtime-dir"]), Path(options["--memory"]))
    assert places.socket("front.ipc") == runtime.front == f"ipc://@{runtime.path.name}/front.ipc"
    runtime.path.joinpath(f"owner-{os.getpid()}").unlink()
    runtime.path.rmdir()
    write_small(places.file("ready"), "http://127.0.0.1:8000")
    assert runtime.read("ready") == "http://127.0.0.1:8000"
    runtime.show_ready("http://127.0.0.1:8000")  # nowhere, and without an error
    with pytest.raises(KeyError):
        places.file("beat-0")
    runtime.clear("beat-0")
    beats = Places(Path(), Path(runtime.options[-1])).file("beat-0")
    assert last_beat(beats) is None and beats.stat().st_size == FILE_BYTES
    heart = Heartbeat(beats)
    until(lambda: last_beat(beats), 5, "it beats")
    heart.close()
    runtime.clear("beat-0")
    assert last_beat(beats) is None
    assert runtime.write("plan.json", {"a": 1}) == runtime.write("plan.json", {"b": 2})
    assert runtime.file("plan.json").read_text() == '{"b":2}'
    runtime.close()
    with pytest.raises(ValueError, match="shared memory cannot be read"):
        Places(Path(), Path(words[-1]))


def test_where_no_directory_can_be_made(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no directory can be made in .*nowhere \(MOESAIC_RUNTIME_DIR\): No such file"
    ):
        RuntimeDir(tmp_path / "nowhere")
