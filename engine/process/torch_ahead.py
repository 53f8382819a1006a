"""torch for processes of our own that compute on a CPU: less of it, and its libraries on a second core. Standard
library only.

`import torch` takes longer than anything else of a start. Of what it imports a rank on a CPU uses a part; what it
imports besides is deferred (engine/process/deferred.py). Which modules can be differs from version to version: those
of a version that the tests have not seen are imported as ever, but for one that has long been apart.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import sys
import threading
from pathlib import Path

from engine.process.deferred import defer

OF_ANY = ("torch._meta_registrations",)
OF_VERSION = {
    "2.13": (
        *OF_ANY,
        "torch._higher_order_ops",
        "torch._native",
        "torch.ao",
        "torch.compiler",
        "torch.distributed._meta_registrations",
        "torch.distributions",
        "torch.export",
        "torch.func",
        "torch.masked",
        "torch.nested",
        "torch.nn.intrinsic",
        "torch.nn.qat",
        "torch.nn.quantizable",
        "torch.nn.quantized",
        "torch.optim",
        "torch.profiler",
        "torch.quantization",
        "torch.utils.data",
        "torchgen.model",
    )
}
FUNCTIONS = {"torch._higher_order_ops": ("cond", "while_loop"), "torch.func": ("vmap",)}
# What a rank imports, and torch does, that needs no torch. First what loads libraries of its own, as the system loads
# one at a time, and torch's take long.
LIBRARIES = (
    "numpy",
    "front.wire",
    "front.text",
    "eplb.balancer",
    "multiprocessing.reduction",
    "ssl",
    "mmap",
    "fcntl",
    "heapq",
    "queue",
    "csv",
    "asyncio",
    "subprocess",
    "llguidance",
)
MODULES = (
    "engine.process.progress",
    "engine.process.heartbeat",
    "engine.scheduler",
    "engine.speculation.speculation",
    "engine.speculation.plan",
    "engine.process.console",
    "models.registry",
    "store.memory",
    "configs.hosts",
    "ep.requirements",
    "eplb.planner",
    "eplb.offline.placement_file",
    "concurrent.futures.thread",
    "importlib.metadata",
    "unittest",
)
_OF_TORCH = (("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL), ("libtorch_python.so", os.RTLD_NOW))


def deferred_modules() -> tuple[str, ...]:
    """Of the torch that is installed."""
    version = re.match(r"\d+\.\d+", _said("__version__"))
    return OF_VERSION.get(version[0], OF_ANY) if version else OF_ANY


def defer_modules() -> None:
    """Before torch is imported."""
    defer(deferred_modules(), FUNCTIONS)


def import_libraries() -> None:
    """What is to be there before `import_beside`."""
    for name in LIBRARIES:
        importlib.import_module(name)


def import_beside() -> None:
    """Modules that need no torch, while another core loads torch's libraries."""
    loading = load_libraries()
    for name in MODULES:
        importlib.import_module(name)
    if loading is not None:
        loading.join()


def load_libraries() -> threading.Thread | None:
    """Begin to load those that torch loads first, on a thread: the interpreter imports modules meanwhile. torch finds
    them there. None: it is not a build for CPUs, which has more of them, in an order of its own; or torch has been
    imported."""
    home = _home() if "torch" not in sys.modules else None
    if home is None or _said("cuda") or _said("hip"):
        return None
    thread = threading.Thread(target=_load, args=[home / "lib"], name="loading torch")
    thread.start()
    return thread


def _load(folder: Path) -> None:
    """By the function itself, as ctypes holds Python's lock while it loads a library."""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
    for name, mode in _OF_TORCH:
        if not dlopen(bytes(folder / name), mode):
            return


def _home() -> Path | None:
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _said(name: str) -> str:
    """What its version.py says; "": nothing."""
    home = _home()
    text = (home / "version.py").read_text() if home is not None and (home / "version.py").exists() else ""
    found = re.search(rf"^{name}\b[^=\n]*= *'([^']*)'", text, re.MULTILINE)
    return found[1] if found else ""
