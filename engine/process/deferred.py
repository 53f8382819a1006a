"""Modules of a library that are imported when something is first taken of them, and else not at all. Standard library
only, and for our own processes: in a caller's, what an import does besides may be missed.

torch imports much together with everything else that a rank on a CPU never asks for: its operations on tensors without
data (fake tensors, which torch.compile computes shapes with), graphs of Python functions, TorchScript, exporting,
optimizers, distributions, layers of its own (`OF_VERSION` of engine/process/torch_ahead.py).
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple


class Deferral(NamedTuple):
    """What is deferred, and what can be had of it meanwhile. Mappings are by the name of a module."""

    names: Collection[str]
    # Functions that are taken and not called: what is given out in their place imports the module when it is called.
    functions: Mapping[str, Collection[str]] = {}
    # Functions that are told something and return nothing: the module hears of the calls when it is imported.
    kept: Mapping[str, Collection[str]] = {}
    # Functions, and what they return in this process in place of what they would, also when the module is there.
    answers: Mapping[str, Mapping[str, object]] = {}
    # What the module only passes on, and the name of the module that it has it from.
    passed_on: Mapping[str, Mapping[str, str]] = {}
    # What the names of modules begin with that are imported without their package, if that is deferred.
    alone: tuple[str, ...] = ()
    # They import each other, and only work in some orders: those that were met before one that is asked for come first.
    in_order: bool = True


def defer(deferral: Deferral) -> None:
    """From now on, those that have not been imported yet."""
    sys.meta_path.insert(0, _Finder(deferral))


def load_deferred(last: ModuleType | None = None) -> None:
    """Import those that have been deferred until now, in the order in which they were met. last: the one to end with;
    None: all."""
    with _loading:
        for module in list(sys.modules.values()):
            if isinstance(module, _Deferred) and (last is None or _in_order(module)):
                module._load()
            if module is last:
                return


def _load_one(module: ModuleType) -> None:
    """What is asked for; other threads wait for the one that does it, and what asks while it does finds what is
    there."""
    with _loading:
        if _in_order(module) and not _under_way:
            load_deferred(module)
        if isinstance(module, _Deferred):
            module._load()


class _Finder:
    def __init__(self, deferral: Deferral) -> None:
        self.deferral = deferral

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Whoever imports a module of a package has imported the package: so that is done here, if it was deferred and
        the module is not."""
        if name in self.deferral.names:
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self.deferral)  # type: ignore[assignment]
            return spec
        package = sys.modules.get(name.rpartition(".")[0])
        if not isinstance(package, _Deferred) or _of(package) is not self.deferral:
            return None
        if not name.startswith(self.deferral.alone):
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
    def __init__(self, loader: object, deferral: Deferral) -> None:
        self._loader, self._deferral = loader, deferral

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update({_LOADER: self._loader, _DEFERRAL: self._deferral, _CALLS: []})


class _Deferred(ModuleType):
    """What is not there yet is asked for here, once."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__all__":  # which whoever looks through all modules asks for
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        deferral = _of(self)
        if deferral is not None:
            if name in deferral.functions.get(self.__name__, ()):
                return _later(self, name)
            if name in deferral.kept.get(self.__name__, ()):
                return _kept(self, name)
            if name in deferral.answers.get(self.__name__, ()):
                return _answering(deferral.answers[self.__name__][name])
            if name in deferral.passed_on.get(self.__name__, ()):
                value = getattr(importlib.import_module(deferral.passed_on[self.__name__][name]), name)
                self.__dict__[name] = value  # it is asked for in every step
                return value
            if f"{self.__name__}.{name}" in deferral.names:
                return importlib.import_module(f"{self.__name__}.{name}")
        _load_one(self)
        return ModuleType.__getattribute__(self, name) if type(self) is _Deferred else getattr(self, name)

    def _load(self) -> None:
        kept = {name: self.__dict__.pop(name, None) for name in (_LOADER, _DEFERRAL, _CALLS)}
        if kept[_LOADER] is None:
            return
        _under_way.append(self)
        try:
            kept[_LOADER].exec_module(self)
        except BaseException:
            self.__dict__.update(kept)
            raise
        finally:
            _under_way.pop()
        if type(self) is _Deferred:  # it may have taken a class of its own
            self.__class__ = ModuleType  # type: ignore[assignment]
        for name, answer in kept[_DEFERRAL].answers.get(self.__name__, {}).items():
            setattr(self, name, _answering(answer))
        for name, arguments in kept[_CALLS]:
            getattr(self, name)(*arguments)


def _of(module: ModuleType) -> Deferral | None:
    """None: it is there, or on its way."""
    return module.__dict__.get(_DEFERRAL)


def _in_order(module: ModuleType) -> bool:
    deferral = _of(module)
    return deferral is not None and deferral.in_order


def _later(module: ModuleType, name: str) -> Callable[..., object]:
    def function(*arguments: object, **named: object) -> object:
        _load_one(module)
        return getattr(module, name)(*arguments, **named)

    function.__name__ = function.__qualname__ = name
    return function


def _answering(answer: object) -> Callable[..., object]:
    return lambda *arguments, **named: answer


def _kept(module: ModuleType, name: str) -> Callable[..., None]:
    def function(*arguments: object) -> None:
        with _loading:
            calls = module.__dict__.get(_CALLS)
            if calls is None:  # it has been imported meanwhile
                getattr(module, name)(*arguments)
            else:
                calls.append((name, arguments))

    return function


_LOADER, _DEFERRAL, _CALLS = "_deferred_loader", "_deferral", "_deferred_calls"
_loading = threading.RLock()
_under_way: list[ModuleType] = []  # what these ask for comes as it would without deferring
