"""Modules of a library that are imported when something is first taken of them, and else not at all. Standard library
only, and for our own processes: in a caller's, what an import does besides may be missed.

torch imports much together with everything else that a rank on a CPU never asks for: its operations on tensors without
data (fake tensors, which torch.compile computes shapes with), graphs of Python functions, exporting, optimizers,
distributions, layers of its own (`OF_TORCH` of engine/process/torch_ahead.py).
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType


def defer(
    names: Collection[str], functions: Mapping[str, Collection[str]] | None = None, in_order: bool = True
) -> None:
    """From now on, those that have not been imported yet. functions: by the name of such a module functions of it that
    are taken of it and not called: what is given out in their place imports it when it is called. in_order: modules
    that import each other and only work in some orders: those that were met before one that is asked for come first."""
    sys.meta_path.insert(0, _Finder(frozenset(names), functions or {}, in_order))


def load_deferred(last: ModuleType | None = None) -> None:
    """Import those that have been deferred until now, in the order in which they were met. last: the one to end with;
    None: all."""
    with _loading:
        for module in list(sys.modules.values()):
            if isinstance(module, _Deferred) and (last is None or module.__dict__.get(_IN_ORDER)):
                module._load()
            if module is last:
                return


def _load_one(module: ModuleType) -> None:
    """What is asked for; other threads wait for the one that does it, and what asks while it does finds what is
    there."""
    if module.__dict__.get(_IN_ORDER):
        load_deferred(module)
    with _loading:
        if isinstance(module, _Deferred):
            module._load()


class _Finder:
    def __init__(self, names: frozenset[str], functions: Mapping[str, Collection[str]], in_order: bool) -> None:
        self._names, self._functions, self._in_order = names, functions, in_order

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Whoever imports a module of a package has imported the package: so that is done here, if it was deferred and
        the module is not."""
        if name in self._names:
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                functions = self._functions.get(name, ())
                spec.loader = _Loader(spec.loader, functions, self._in_order)  # type: ignore[assignment]
            return spec
        package = sys.modules.get(name.rpartition(".")[0])
        if isinstance(package, _Deferred):
            _load_one(package)
            if name in sys.modules:  # the package has imported it; were it left there, it would be imported again
                return importlib.machinery.ModuleSpec(name, _Imported(sys.modules.pop(name)))  # type: ignore[arg-type]
        return None


class _Imported:
    """A loader of a module that is there."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        with contextlib.suppress(AttributeError):  # a module of a class of its own may not take it, nor another one
            module.__spec__ = self._spec


class _Loader:
    def __init__(self, loader: object, functions: Collection[str], in_order: bool) -> None:
        self._kept = {_LOADER: loader, _FUNCTIONS: functions, _IN_ORDER: in_order}

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self._kept)


class _Deferred(ModuleType):
    """What is not there yet is asked for here, once."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__all__":  # which whoever looks through all modules asks for
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in self.__dict__.get(_FUNCTIONS, ()):
            return _later(self, name)
        _load_one(self)
        return ModuleType.__getattribute__(self, name) if type(self) is _Deferred else getattr(self, name)

    def _load(self) -> None:
        loader = self.__dict__.pop(_LOADER, None)
        if loader is None:
            return
        functions = self.__dict__.pop(_FUNCTIONS)
        try:
            loader.exec_module(self)
        except BaseException:
            self.__dict__.update({_LOADER: loader, _FUNCTIONS: functions})
            raise
        if type(self) is _Deferred:  # it may have taken a class of its own
            self.__class__ = ModuleType  # type: ignore[assignment]


def _later(module: ModuleType, name: str) -> Callable[..., object]:
    def function(*arguments: object, **named: object) -> object:
        _load_one(module)
        return getattr(module, name)(*arguments, **named)

    function.__name__ = function.__qualname__ = name
    return function


_LOADER, _FUNCTIONS, _IN_ORDER = "_deferred_loader", "_deferred_functions", "_deferred_in_order"
_loading = threading.RLock()
