"""torch for processes of our own that compute on a CPU: less of it, and its libraries on a second core. Standard
library only.

`import torch` takes longer than anything else of a start. Of what it imports a rank on a CPU uses a part; what it
imports besides is deferred (engine/process/deferred.py). Which modules can be differs from version to version: those
of a version that the tests have not seen are imported as ever, but for one that has long been apart.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import sys
import threading
from collections.abc import Callable

from configs.versions import torch_home, torch_says, torch_version
from engine.process.deferred import defer

OF_ANY = ("torch._meta_registrations",)
OF_VERSION = {
    "2.13": (
        *OF_ANY,
        "torch._higher_order_ops",
        "torch._native",
        "torch.ao",
        "torch.autograd.gradcheck",
        "torch.compiler",
        "torch.distributed._meta_registrations",
        "torch.distributed.config",
        "torch.distributions",
        "torch.export",
        "torch.func",
        "torch.masked",
        "torch.mtia",
        "torch.nested",
        "torch.nn.attention",
        "torch.nn.intrinsic",
        "torch.nn.qat",
        "torch.nn.quantizable",
        "torch.nn.quantized",
        "torch.optim",
        "torch.profiler",
        "torch.quantization",
        "torch.sparse",
        "torch.utils.data",
        "torch.xpu",
        "torchgen.model",
    )
}
# Of other libraries, which few requests ask for, or none.
OF_OTHERS = (
    "llguidance",
    "numpy._core._add_newdocs",
    "numpy._core._add_newdocs_scalars",
    "pickletools",
    "tokenizers",
    "tqdm",
    "unittest",
    "unittest.mock",
    "urllib.request",
)
FUNCTIONS = {
    "torch._higher_order_ops": ("cond", "while_loop"),
    "torch.autograd.gradcheck": ("gradcheck", "gradgradcheck"),
    "torch.func": ("vmap",),
    "tqdm": ("tqdm",),
    "urllib.request": ("Request", "urlopen"),
}
# What a rank or torch imports that needs no torch. The system loads one library at a time, and torch's take long: so
# those come first that MODULES load, and what loads others comes behind torch's.
LIBRARIES = (
    "msgspec",
    "_csv",
    "_heapq",
    "_multiprocessing",
    "_pickle",
    "_posixsubprocess",
    "_queue",
    "binascii",
    "fcntl",
    "grp",
    "mmap",
)
MODULES = (
    "engine.process.progress",
    "engine.process.heartbeat",
    "engine.process.console",
    "engine.process.places",
    "engine.speculation.plan",
    "configs.hosts",
    "ep.recorder",
    "ep.requirements",
    "dbo.steps",
    "layers.gguf.header",
    "models.registry",
    "store.memory",
    "store.numa",
    "concurrent.futures.thread",
    "email.parser",
    "importlib.metadata",
    "multiprocessing.connection",
    "pkgutil",
    "tarfile",
)
# Lazily: of torch's functions few are called, and looking all of them up takes time.
_OF_TORCH = (("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL), ("libtorch_python.so", os.RTLD_LAZY))


def deferred_modules() -> tuple[str, ...]:
    """Of the torch that is installed."""
    version = re.match(r"\d+\.\d+", torch_version())
    return OF_VERSION.get(version[0], OF_ANY) if version else OF_ANY


def defer_modules() -> None:
    """Before they are imported."""
    defer(deferred_modules(), FUNCTIONS)
    defer(OF_OTHERS, FUNCTIONS, in_order=False)


def import_beside(read: Callable[[], None]) -> None:
    """Load torch's libraries, and on a thread meanwhile read(), and import what needs none; not the other way round, as
    what they ask for when they are loaded would then come from a thread's own arena of the allocator."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):  # this build of Python has it inside
            importlib.import_module(name)
    thread = threading.Thread(target=_import_modules, args=[read], name="importing")
    thread.start()
    load_libraries()
    thread.join()


def _import_modules(read: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):  # who needs it imports it, and is told
        read()
        for name in MODULES:
            importlib.import_module(name)


def load_libraries() -> None:
    """Those that torch loads first: it finds them there. Nothing if it is not a build for CPUs, which has more of them,
    in an order of its own; or if torch has been imported."""
    home = torch_home() if "torch" not in sys.modules else None
    if home is None or torch_says("cuda") or torch_says("hip"):
        return
    # The function itself, as ctypes holds Python's lock while it loads a library.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
    for name, mode in _OF_TORCH:
        if not dlopen(bytes(home / "lib" / name), mode):
            return
