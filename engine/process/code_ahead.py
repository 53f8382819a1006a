"""The code of modules, read before they are imported.

To import a module is to find it, to read its code, and to run that. What runs may have to wait for a library that
another core loads; what is read need not. Which modules a process is going to import it takes from the last one of its
kind, which has left a list of them in the cache directory. A list that is missing, or old, costs time and nothing else:
code is used by the import that asks for that very file, and no other.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from dbo.memory import file_of, read_json, write_json

MOST_MODULES = 4096


class CodeAhead:
    def __init__(self, cache_root: Path) -> None:
        key = {"version": sys.version, "prefix": sys.prefix}
        self._list = file_of(cache_root / "imports", key, "imports")
        self._listed: dict[str, str] = {}  # path by name
        self._codes: dict[str, CodeType] = {}  # by path
        self._there: set[str] = set()

    def read(self) -> None:
        """The code of the modules that are listed, and not there yet."""
        self._there = {*sys.modules}
        self._listed = _checked(read_json(self._list))
        for name, path in self._listed.items():
            if name not in self._there:
                with contextlib.suppress(OSError, ImportError, SyntaxError):  # who imports it will be told
                    code = SourceFileLoader(name, path).get_code(name)
                    if code is not None:
                        self._codes[path] = code

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """What is imported within has its code from here, as far as it has been read."""
        plain, codes = SourceFileLoader.get_code, self._codes

        def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
            code = codes.pop(loader.path, None)
            return plain(loader, name) if code is None else code

        SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            SourceFileLoader.get_code = plain  # type: ignore[method-assign]
            codes.clear()

    def keep(self) -> None:
        """The list, for the next process, with what has been imported since `read`."""
        now = self._listed | {name: path for name, path in _imported() if name not in self._there}
        if now != self._listed:
            with contextlib.suppress(OSError):  # a place where nothing can be written
                write_json(self._list, dict(list(now.items())[-MOST_MODULES:]))


def _checked(listed: object) -> dict[str, str]:
    """{}: it is none of texts."""
    if not isinstance(listed, dict) or not all(isinstance(path, str) for path in listed.values()):
        return {}
    return dict(list(listed.items())[:MOST_MODULES])


def _imported() -> Iterator[tuple[str, str]]:
    """The names of modules that were read from a file of source, and their files."""
    for name, module in list(sys.modules.items()):
        loader = getattr(getattr(module, "__spec__", None), "loader", None)
        if isinstance(loader, SourceFileLoader) and loader.name == name:
            yield name, loader.path
