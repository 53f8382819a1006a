"""The layering of docs/design.md section 2, sizes, and the single environment file, enforced on the text of the code."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_LINE_COLUMNS = 120
MAX_FOLDER_FILES = 25

# Room -> rooms it may import. A room may always import itself.
ALLOWED: dict[str, set[str]] = {
    "cache": set(),
    "configs": {"cache"},
    "native": set(),
    "dbo": set(),
    "eplb": {"native"},
    "moe_kernels": {"layers", "native"},
    "layers": {"native"},
    "mla": {"layers", "native"},
    "ep": {"moe_kernels", "eplb", "dbo", "layers", "native"},
    "store": set(),
    "models": {"cache", "configs", "mla", "ep", "layers", "dbo", "store"},
    "front": {"configs", "dbo", "ep"},
    "engine": {"cache", "configs", "front", "models", "layers", "dbo", "ep", "eplb", "native", "store"},
    "server": {"configs", "front", "engine"},
    "launch": {"configs", "front", "server", "engine", "store"},
    "moesaic": {"configs", "front", "launch", "server", "engine", "eplb"},
}
ROOMS = sorted(room for room in ALLOWED if (ROOT / room).is_dir())
ONLY_PARTS = {
    "configs": {"cache": {"cache.spec"}},
    "front": {"ep": {"ep.recorder"}, "dbo": {"dbo.alive"}},
    "engine": {
        "front": {
            "front.messages",
            "front.structured.grammar",
            "front.structured.vocabulary",
            "front.text",
            "front.wire",
        }
    },
    "ep": {
        "eplb": {"eplb.placement", "eplb.load"},
        "dbo": {"dbo.alive", "dbo.steps"},
        "layers": {"layers.optional"},
        "native": {"native.exchange", "native.tape"},
    },
    "moe_kernels": {"layers": {"layers.choice", "layers.optional", "layers.triton.configs", "layers.triton.device"}},
}

# Modules that must be importable without torch: the front process and the command line start in a moment.
WITHOUT_TORCH = ["configs", "front", "server", "launch"]
TOP_LEVEL = {
    "pyproject.toml", "cache", "store", "ep", "front", "eplb", "dbo", "moe_kernels", "mla", "layers", "native", "engine", "models", "server", "launch", "configs",
    "moesaic", "tests", "benchmarks", "docs", "README.md", "Makefile", "LICENSE", "CONTRIBUTING.md", "constraints-cpu.txt", ".ci",
    ".pre-commit-config.yaml", ".gitignore",
}  # fmt: skip
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def imported_modules(tree: ast.AST) -> list[str]:
    """Every module imported anywhere in the file, inside functions, under TYPE_CHECKING and by importlib too."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "import_module":
            names += [part.value for part in node.args if isinstance(part, ast.Constant)]
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.append(node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_room_imports_only_what_it_may(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    for name in imported_modules(ast.parse(path.read_text())):
        other = name.split(".")[0]
        if other not in ALLOWED or other == room:
            continue
        assert other in ALLOWED[room], f"{path.relative_to(ROOT)} imports {name}: {room} may not import {other}"
        parts = ONLY_PARTS.get(room, {}).get(other)
        assert parts is None or name in parts, (
            f"{path.relative_to(ROOT)} imports {name}; allowed are {sorted(parts or ())}"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES, f"{path.relative_to(ROOT)} has {text.count(chr(10))} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, (
                f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_stay_short(path: Path) -> None:
    """Docstrings and strings too."""
    for number, line in enumerate(path.read_text().split("\n"), 1):
        assert len(line) <= MAX_LINE_COLUMNS, f"{path.relative_to(ROOT)}:{number} has {len(line)} columns"


def test_folders_stay_small() -> None:
    folders = Counter(path.parent for path in FILES)
    large = {str(folder.relative_to(ROOT)): count for folder, count in folders.items() if count > MAX_FOLDER_FILES}
    assert not large, f"more than {MAX_FOLDER_FILES} files: {large}"


def test_every_room_is_installed_and_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert project["setuptools"]["packages"]["find"]["include"] == [f"{room}*" for room in ROOMS]
    assert project["mypy"]["files"] == ROOMS


def test_the_tree_is_told_as_it_is() -> None:
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "tree.py"], capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "docs" / "tree.md").read_text(), "run benchmarks/tree.py --write"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_habits(path: Path) -> None:
    """One environment file; no probing with hasattr; no import inside a function; transformers nowhere at run time."""
    tree = ast.parse(path.read_text())
    name = str(path.relative_to(ROOT))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and name != "configs/env.py":
            assert not (isinstance(node.value, ast.Name) and node.value.id == "os"), (
                f"{name}:{node.lineno} reads the environment"
            )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
            raise AssertionError(f"{name}:{node.lineno} probes with hasattr")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [sub for sub in ast.walk(node) if isinstance(sub, ast.Import | ast.ImportFrom)]
            assert not inner, f"{name}:{inner[0].lineno} imports inside {node.name}"
    if name != "models/tiny/training/verify.py":  # the training folder's own check against the reference
        assert not any(module.split(".")[0] == "transformers" for module in imported_modules(tree)), (
            f"{name} imports transformers"
        )


# Where a room asks whether there is a GPU, and which; all else is told, or has tensors that are there.
ASKS_FOR_THE_DEVICE = {
    "engine/device.py", "engine/speculation/plan.py",
    "ep/device.py", "ep/transport/device_group.py",
    "layers/choice.py", "layers/triton/device.py",
    "mla/requirements.py",
    "moe_kernels/backends.py",
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_few_files_ask_for_the_device(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    if name in ASKS_FOR_THE_DEVICE or name.split("/")[0] not in (
        "dbo",
        "engine",
        "ep",
        "eplb",
        "layers",
        "mla",
        "models",
        "moe_kernels",
    ):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        cuda = isinstance(node, ast.Attribute) and node.attr == "cuda" and isinstance(node.value, ast.Name)
        is_cuda = isinstance(node, ast.Attribute) and node.attr == "is_cuda"
        compared = isinstance(node, ast.Compare) and any(
            isinstance(part, ast.Constant) and part.value == "cuda" for part in node.comparators
        )
        assert not (cuda or is_cuda or compared), f"{name}:{node.lineno} asks for the device"


def test_no_import_cycles() -> None:
    """Between our modules, whole files taken together (imports at the top only, which is all there are)."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    graph = {
        name: [other for other in imported_modules(ast.parse(path.read_text())) if other in modules and other != name]
        for name, path in modules.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join([*trail[trail.index(name) :], name])}"
        if name not in done:
            for other in graph[name]:
                visit(other, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def test_torch_stays_out_of_the_front() -> None:
    """No module of the front process or the launcher reaches torch, however indirectly."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
    for start in [name for name in modules if name.split(".")[0] in WITHOUT_TORCH]:
        todo, seen = [start], {start}
        while todo:
            name = todo.pop()
            for other in imported_modules(ast.parse(modules[name].read_text())):
                assert other.split(".")[0] not in ("torch", "transformers"), f"{start} reaches {other} through {name}"
                if other in modules and other not in seen:
                    seen.add(other)
                    todo.append(other)


def test_top_level_is_as_agreed() -> None:
    hidden = {".git", ".venv", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".library"}
    present = {path.name for path in ROOT.iterdir()} - hidden
    extra = {name for name in present - TOP_LEVEL if not name.endswith(".egg-info") and name != "build"}
    assert not extra, f"unexpected at the top level: {sorted(extra)}"
