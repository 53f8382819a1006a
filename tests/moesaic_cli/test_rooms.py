"""Files of the user's that have the names of our packages: they are neither imported nor run in the place of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.rooms import ROOMS, ROOT, check_rooms


def test_the_rooms_are_those_that_are_installed() -> None:
    assert set(ROOMS) == {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"moesaic"}
    check_rooms()


def moesaic(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "moesaic", *words]
    environment = {**os.environ, "MOESAIC_RUNTIME_DIR": str(folder), **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120, env=environment)


@pytest.mark.parametrize("name", ["configs.py", "engine/__init__.py"])
def test_a_file_in_the_place_of_a_room_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("print('mine')\n")
    done = moesaic(tmp_path, "explain", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and "mine" not in done.stdout
    assert f"{tmp_path / name} would be imported in the place of Moesaic's package" in done.stderr
    code = "import moesaic\ntry:\n    moesaic.LLM\nexcept ImportError as error:\n    print(error)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert str(tmp_path / name) in done.stdout and "mine" not in done.stdout


def test_children_do_not_look_into_the_working_directory(tmp_path: Path) -> None:
    for name in ("server.py", "configs.py", "engine.py", "models.py"):
        (tmp_path / name).write_text("raise SystemExit('mine')\n")
    done = moesaic(tmp_path, "generate", "-p", "Once", "--max-tokens", "2", "-dp", "2")
    assert done.returncode == 0 and "mine" not in done.stderr, done.stderr


def test_ctrl_c_before_the_command_line_is_there(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name == 'moesaic.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts)\n"
        "from moesaic.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "ranks"], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 130 and done.stderr == "moesaic: ended by SIGINT\n", done.stderr
