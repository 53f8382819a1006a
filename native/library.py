"""The shared library of CPU kernels, opened once per process.

It is linked without an OpenMP runtime and takes the one that torch brings: two of them in one process would have twice
the threads, spinning against each other.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

# A checksum of how functions are declared (native/src/interface.h): a library of other declarations would read other
# arguments than it is given.
INTERFACE = 0x00591098
_RUNTIMES = ("libgomp", "libiomp5", "libomp")  # they offer the same entry points


class _Opened(Struct, frozen=True):
    library: ctypes.CDLL | None
    why_absent: str


def library() -> ctypes.CDLL | None:
    """The kernels, or None: then the torch reference does everything. ImportError: they are older than the code."""
    return _open().library


def why_absent() -> str:
    """One line; empty when the library is there."""
    return _open().why_absent


def library_path() -> str:
    """Its file; "" without one."""
    kernels = library()
    return "" if kernels is None else kernels._name


def function(name: str, *argument_types: type) -> Callable[..., None]:
    """A kernel that returns nothing, by its name in the library. It may be called only where `isa()` is not NONE."""
    return returning(None, name, *argument_types)


def returning(result_type: type | None, name: str, *argument_types: type) -> Callable[..., Any]:
    """The same of one that returns something."""
    kernels = library()
    if kernels is None:
        return _absent
    try:
        found = kernels[name]
    except AttributeError:
        raise older(f"no {name}") from None
    found.argtypes, found.restype = argument_types, result_type
    return found


def older(sign: str) -> ImportError:
    """To be raised where the library does not do what the code asks for. sign: by what that is seen."""
    kernels = library()
    assert kernels is not None
    return _older(kernels, sign)


def _older(kernels: ctypes.CDLL, sign: str) -> ImportError:
    return ImportError(f"{kernels._name}: {sign}: it is older than the code; run `make native`")


def check_interface(kernels: ctypes.CDLL, expected: int = INTERFACE) -> None:
    """ImportError: it was built from other declarations."""
    number = getattr(kernels, "native_interface", None)
    if number is None:
        raise _older(kernels, "interface without a number")
    number.restype = ctypes.c_int64
    if number() != expected:
        raise _older(kernels, f"interface {number():#x}, not {expected:#x}")


def _absent(*_arguments: object) -> None:
    raise AssertionError(why_absent())


@functools.cache
def _open() -> _Opened:
    found = sorted(Path(__file__).parent.glob("_kernels*.so"))
    if not found:
        return _Opened(None, "the native kernels were not built: no C++ compiler was found when this was installed")
    try:
        runtime = openmp_runtime()
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        kernels = ctypes.CDLL(str(found[0]))
    except OSError as error:
        return _Opened(None, f"the native kernels cannot be loaded: {error}")
    check_interface(kernels)
    return _Opened(kernels, "")


def openmp_runtime() -> str:
    """The one this process has already, else torch's own, else the system's."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.rpartition("/")[2]
        if name.startswith(_RUNTIMES):
            return line[line.index("/") :]
    torch = importlib.util.find_spec("torch")
    for place in (torch.submodule_search_locations or ()) if torch is not None else ():
        for folder in (Path(place) / "lib", Path(place).parent / "torch.libs"):
            for name in _RUNTIMES:
                for path in sorted(folder.glob(f"{name}*.so*")):
                    return str(path)
    return "libgomp.so.1"
