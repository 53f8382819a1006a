"""How large the project is: `lines.py --json` prints lines of Python by what they are for, and the longest of everything."""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BESIDE = {"tests", "benchmarks"}  # neither is part of the product
# What the engine that serves does not need: the operator's tools and the training of the embedded model.
OFFLINE = ("eplb/offline/", "moesaic/eplb/", "models/tiny/training/")


def files() -> list[Path]:
    """Every Python file of the project, the rooms' first."""
    tops = [path for path in sorted(ROOT.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    return [path for top in tops if top.name != "build" for path in sorted(top.rglob("*.py"))]


def count() -> dict[str, object]:
    lines: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    longest_file, longest_function = (0, ""), (0, "")
    for path in files():
        name, text = str(path.relative_to(ROOT)), path.read_text()
        num_lines = text.count("\n")
        room = name.split("/")[0]
        if room in BESIDE:
            lines[room] += num_lines
            continue
        lines["product"] += num_lines
        lines["live"] += 0 if name.startswith(OFFLINE) else num_lines
        folders[str(path.parent.relative_to(ROOT))] += 1
        longest_file = max(longest_file, (num_lines, name))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                longest_function = max(longest_function, (length, f"{name}:{node.name}"))
    folder, most = folders.most_common(1)[0]
    return {
        "product": lines["product"],
        "live": lines["live"],
        "tests": lines["tests"],
        "benchmarks": lines["benchmarks"],
        "longest_file": {"lines": longest_file[0], "name": longest_file[1]},
        "longest_function": {"lines": longest_function[0], "name": longest_function[1]},
        "most_files_in_a_folder": {"files": most, "name": folder},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="How large the project is.")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    counted = count()
    if options.json:
        print(json.dumps(counted))
        return
    for name, value in counted.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
