"""Modules of a library that are imported when something is first taken of them, and else not at all. Standard library
only, and for our own processes: in a caller's, what an import does besides may be missed.

torch imports its operations on tensors without data (fake tensors, which torch.compile computes shapes with) together
with everything else, and they take long. A rank on a CPU has no such tensors, but for
empty ones of the device meta, which need none of that.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Collection, Sequence
from types import ModuleType

OF_TORCH = ("torch._meta_registrations",)


def defer(names: Collection[str]) -> None:
    """From now on, those that have not been imported yet."""
    sys.meta_path.insert(0, _Finder(frozenset(names)))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in self._names else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[_LOADER] = self._loader


class _Deferred(ModuleType):
    """What is not there yet is asked for here, once."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # which whoever looks through all modules asks for
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__dict__.pop(_LOADER).exec_module(self)
        return getattr(self, name)


_LOADER = "_deferred_loader"
