"""The code of modules that is read before they are imported (engine/process/code_ahead.py). Each program has a process of
its own, as its imports stay."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from engine.process.code_ahead import CodeAhead
root = Path({root!r})
sys.path.insert(0, str(root))
ahead = CodeAhead(root / "cache")
with ahead.used():
    ahead.read()
    {between}
    import thing.part
{behind}
ahead.keep()
print(thing.said, thing.part.value)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "__init__.py").write_text("said = 'first'\n")
    (tmp_path / "thing" / "part.py").write_text("value = 1\n")
    return tmp_path


def run(root: Path, between: str = "pass", behind: str = "") -> str:
    program = PROGRAM.format(root=str(root), between=between, behind=behind)
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def list_of(root: Path) -> Path:
    (path,) = (root / "cache" / "imports").iterdir()
    return path


REWRITE = "(root / 'thing' / '__init__.py').write_text('said = \"second\"\\n')"


def test_what_one_process_imports_the_next_one_reads(root: Path) -> None:
    assert run(root) == "first 1"
    listed = json.loads(list_of(root).read_text())
    assert listed["thing"] == str(root / "thing" / "__init__.py") and "thing.part" in listed
    assert run(root, between=REWRITE) == "first 1", "it was read before"
    assert run(root) == "second 1", "what is read is what the file holds"


def test_nothing_is_taken_from_it_afterwards(root: Path) -> None:
    run(root)
    behind = "import importlib; (root / 'thing' / 'part.py').write_text('value = 22\\n'); importlib.reload(thing.part)"
    assert run(root, behind=behind) == "first 22"


def test_code_is_used_by_the_import_of_its_file(root: Path) -> None:
    """Also when another module has the name."""
    run(root)
    other = root / "other"
    (root / "thing").rename(other)
    list_of(root).write_text(list_of(root).read_text().replace(str(root / "thing"), str(other)))
    (root / "thing").mkdir()
    (root / "thing" / "__init__.py").write_text("said = 'new'\n")
    (root / "thing" / "part.py").write_text("value = 3\n")
    assert run(root) == "new 3"


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "7", '{"thing": 1}', '{"thing": null, "a": "b"}', '{"thing": "/nowhere/at/all.py"}']
)
def test_a_list_that_is_none_costs_nothing(root: Path, text: str) -> None:
    run(root)
    list_of(root).write_text(text)
    assert run(root) == "first 1"


def test_a_file_that_cannot_be_compiled_is_told_by_its_import(root: Path) -> None:
    run(root)
    (root / "thing" / "part.py").write_text("=\n")
    with pytest.raises(AssertionError, match="SyntaxError"):
        run(root)


def test_a_place_where_nothing_can_be_written(root: Path) -> None:
    (root / "cache").write_text("a file")
    assert run(root) == "first 1"


def test_modules_that_others_import_stay_listed(root: Path) -> None:
    (root / "thing" / "more.py").write_text("")
    run(root, between="import thing.more")
    run(root)
    assert {"thing.more", "thing.part"} <= json.loads(list_of(root).read_text()).keys()


def test_one_that_lies_elsewhere_now_is_listed_there(root: Path) -> None:
    run(root)
    (root / "thing" / "part.py").unlink()
    (root / "thing" / "part").mkdir()
    (root / "thing" / "part" / "__init__.py").write_text("value = 4\n")
    assert run(root) == "first 4"
    assert json.loads(list_of(root).read_text())["thing.part"] == str(root / "thing" / "part" / "__init__.py")
