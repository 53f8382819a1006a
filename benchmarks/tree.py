"""The tree of the product with one remark per file, from the first line of its docstring: `tree.py --write` renews docs/tree.md.

tests/test_architecture.py holds the page against the code.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tree.md"
# From the bottom up, as docs/design.md has the floors.
ROOMS = (
    "configs", "native", "cache", "store", "dbo", "layers", "moe_kernels", "eplb", "mla", "ep", "models", "front", "engine", "server", "launch",
    "moesaic",
)  # fmt: skip
HEAD = """# The tree

One line per file, generated from the files' first docstring lines by `benchmarks/tree.py --write`; a test keeps it true. What the
rooms are for, and who may import whom, is in [design.md](design.md).
"""


def remark(path: Path) -> str:
    """The first paragraph's first sentence of the module's docstring; "" where there is none."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = " ".join(text.split("\n\n")[0].split())
    end = first.find(". ")
    return first if end < 0 else first[: end + 1]


def page() -> str:
    parts = [HEAD]
    for room in ROOMS:
        parts.append(f"\n## {room}\n\n")
        folder = ""
        for path in sorted((ROOT / room).rglob("*.py"), key=lambda path: (path.parent != ROOT / room, path)):
            name = str(path.relative_to(ROOT))
            if path.name == "__init__.py" and not remark(path):
                continue
            if str(path.parent.relative_to(ROOT)) != folder:
                folder = str(path.parent.relative_to(ROOT))
                parts.append(f"**{folder}/**\n\n" if folder == room else f"\n**{folder}/**\n\n")
            parts.append(f"- `{path.name}`: {remark(path)}\n" if remark(path) else f"- `{name}`\n")
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description="The tree of the product, a remark per file.")
    parser.add_argument("--write", action="store_true", help="renew docs/tree.md; else the page is printed")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        sys.stdout.write(page())


if __name__ == "__main__":
    main()
