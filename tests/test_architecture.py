"""The layering of docs/design.md section 2, sizes, and the single environment file, enforced on the text of the code."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

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
    "front": {"configs", "dbo", "ep", "layers"},
    "engine": {"cache", "configs", "front", "models", "layers", "dbo", "ep", "eplb", "native", "store"},
    "server": {"configs", "front", "engine"},
    "launch": {"configs", "front", "server", "engine", "store"},
    "moesaic": {"configs", "front", "launch", "server", "engine", "eplb"},
}
ROOMS = sorted(room for room in ALLOWED if (ROOT / room).is_dir())
ONLY_PARTS = {
    "configs": {"cache": {"cache.spec"}},
    "front": {"ep": {"ep.recorder"}, "dbo": {"dbo.alive"}, "layers": {"layers.optional"}},
    "engine": {
        "front": {
            "front.messages",
            "front.params",
            "front.structured.vocabulary",
            "front.structured.xgrammar_backend",
            "front.text.tokenizer",
            "front.wire",
        }
    },
    "ep": {
        "eplb": {"eplb.placement", "eplb.load"},
        "dbo": {"dbo.alive", "dbo.steps"},
        "layers": {"layers.optional"},
        "native": {"native.exchange", "native.links", "native.tape"},
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


NAMES = {path: str(path.relative_to(ROOT)) for path in FILES}
MODULES = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): path for path, name in NAMES.items()}


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imported_modules(path: Path) -> list[str]:
    """Every module imported anywhere in the file, inside functions, under TYPE_CHECKING and by importlib too."""
    names: list[str] = []
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "import_module":
            names += [part.value for part in node.args if isinstance(part, ast.Constant)]
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.append(node.module)
    return names


def assert_none(wrong: Callable[[Path], Iterator[str]]) -> None:
    """Of all files at once: thousands of cases would cost more than what they look at."""
    found = [f"{NAMES[path]}{what}" for path in FILES for what in wrong(path)]
    assert not found, "\n".join(found)


def test_room_imports_only_what_it_may() -> None:
    def wrong(path: Path) -> Iterator[str]:
        room = path.relative_to(ROOT).parts[0]
        for name in imported_modules(path):
            other = name.split(".")[0]
            if other not in ALLOWED or other == room:
                continue
            parts = ONLY_PARTS.get(room, {}).get(other)
            if other not in ALLOWED[room]:
                yield f" imports {name}: {room} may not import {other}"
            elif parts is not None and name not in parts:
                yield f" imports {name}; allowed are {sorted(parts)}"

    assert_none(wrong)


def test_files_and_functions_stay_short() -> None:
    def wrong(path: Path) -> Iterator[str]:
        if (lines := path.read_text().count("\n")) > MAX_FILE_LINES:
            yield f" has {lines} lines"
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    yield f":{node.lineno} {node.name} has {length} lines"

    assert_none(wrong)


def test_lines_stay_short() -> None:
    """Docstrings and strings too."""

    def wrong(path: Path) -> Iterator[str]:
        for number, line in enumerate(path.read_text().split("\n"), 1):
            if len(line) > MAX_LINE_COLUMNS:
                yield f":{number} has {len(line)} columns"

    assert_none(wrong)


def test_folders_stay_small() -> None:
    folders = Counter(path.parent for path in FILES)
    large = {str(folder.relative_to(ROOT)): count for folder, count in folders.items() if count > MAX_FOLDER_FILES}
    assert not large, f"more than {MAX_FOLDER_FILES} files: {large}"


def test_every_room_is_installed_and_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert project["setuptools"]["packages"]["find"]["include"] == [f"{room}*" for room in ROOMS]
    assert project["mypy"]["files"] == ["benchmarks", *ROOMS]


def test_the_tree_is_told_as_it_is() -> None:
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "tree.py"], capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "docs" / "tree.md").read_text(), "run benchmarks/tree.py --write"


def test_habits() -> None:
    """One environment file; no probing with hasattr; no import inside a function; transformers nowhere at run time; no
    dataclasses, whose methods are compiled at every start."""

    def wrong(path: Path) -> Iterator[str]:
        for node in nodes(path):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("environ", "getenv")
                and isinstance(node.value, ast.Name)
                and node.value.id == "os"
                and NAMES[path] != "configs/env.py"
            ):
                yield f":{node.lineno} reads the environment"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
                yield f":{node.lineno} probes with hasattr"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = [sub for sub in ast.walk(node) if isinstance(sub, ast.Import | ast.ImportFrom)]
                yield from (f":{sub.lineno} imports inside {node.name}" for sub in inner)
        # The training folder's own check against the reference is the exception.
        if NAMES[path] != "models/tiny/training/verify.py" and "transformers" in {
            module.split(".")[0] for module in imported_modules(path)
        }:
            yield " imports transformers"
        if "dataclasses" in imported_modules(path):
            yield " imports dataclasses"

    assert_none(wrong)


# Where a room asks whether there is a GPU, and which; all else is told, or has tensors that are there.
ASKS_FOR_THE_DEVICE = {
    "engine/device.py", "engine/speculation/plan.py",
    "ep/device.py", "ep/transport/device_group.py",
    "layers/choice.py", "layers/triton/device.py",
    "mla/requirements.py",
    "moe_kernels/backends.py",
}  # fmt: skip


def test_few_files_ask_for_the_device() -> None:
    rooms = ("dbo", "engine", "ep", "eplb", "layers", "mla", "models", "moe_kernels")

    def wrong(path: Path) -> Iterator[str]:
        if NAMES[path] in ASKS_FOR_THE_DEVICE or NAMES[path].split("/")[0] not in rooms:
            return
        for node in nodes(path):
            cuda = isinstance(node, ast.Attribute) and node.attr == "cuda" and isinstance(node.value, ast.Name)
            is_cuda = isinstance(node, ast.Attribute) and node.attr == "is_cuda"
            compared = isinstance(node, ast.Compare) and any(
                isinstance(part, ast.Constant) and part.value == "cuda" for part in node.comparators
            )
            if cuda or is_cuda or compared:
                yield f":{node.lineno} asks for the device"

    assert_none(wrong)


def test_no_import_cycles() -> None:
    """Between our modules, whole files taken together (imports at the top only, which is all there are)."""
    graph = {
        name: [other for other in imported_modules(path) if other in MODULES and other != name]
        for name, path in MODULES.items()
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
    for start in [name for name in MODULES if name.split(".")[0] in WITHOUT_TORCH]:
        todo, seen = [start], {start}
        while todo:
            name = todo.pop()
            for other in imported_modules(MODULES[name]):
                assert other.split(".")[0] not in ("torch", "transformers"), f"{start} reaches {other} through {name}"
                if other in MODULES and other not in seen:
                    seen.add(other)
                    todo.append(other)


def test_top_level_is_as_agreed() -> None:
    hidden = {".git", ".venv", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".library"}
    present = {path.name for path in ROOT.iterdir()} - hidden
    extra = {name for name in present - TOP_LEVEL if not name.endswith(".egg-info") and name != "build"}
    assert not extra, f"unexpected at the top level: {sorted(extra)}"
