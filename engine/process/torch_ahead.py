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
import sys
import threading
from collections.abc import Callable

from configs.versions import torch_home, torch_says, torch_version
from engine.process.deferred import Deferral, defer

OF_ANY = ("torch._meta_registrations",)
OF_VERSION = {
    "2.13": (
        *OF_ANY,
        "torch._higher_order_ops",
        "torch._library.infer_schema",
        "torch._lobpcg",
        "torch._native",
        "torch._size_docs",
        "torch._storage_docs",
        "torch._tensor_docs",
        "torch._torch_docs",
        "torch.ao",
        "torch.autograd.gradcheck",
        "torch.compiler",
        "torch.distributed._meta_registrations",
        "torch.distributions",
        "torch.export",
        "torch.fft",
        "torch.func",
        "torch.fx",
        "torch.fx.experimental",
        "torch.fx.traceback",
        "torch.jit",
        "torch.jit._builtins",
        "torch.linalg",
        "torch.masked",
        "torch.mtia",
        "torch.nested",
        "torch.nn",
        "torch.nn.attention",
        "torch.nn.functional",
        "torch.nn.intrinsic",
        "torch.nn.modules",
        "torch.nn.qat",
        "torch.nn.quantizable",
        "torch.nn.quantized",
        "torch.optim",
        "torch.package",
        "torch.profiler",
        "torch.quantization",
        "torch.signal",
        "torch.signal.windows",
        "torch.sparse",
        "torch.special",
        "torch.testing",
        "torch.utils.data",
        "torch.xpu",
        "torchgen.model",
    )
}
# These are imported without those that were met before them.
APART = {"2.13": ("torch.distributed", "torch.distributed.config", "torch.distributed.rpc")}
# Of other libraries: what few requests ask for, or none; and numpy and zmq, of which a part comes before the whole.
OF_OTHERS = (
    "llguidance",
    "numpy",
    "numpy._core",
    "numpy._core._add_newdocs",
    "numpy._core._add_newdocs_scalars",
    "numpy.linalg",
    "tokenizers",
    "tqdm",
    "unittest",
    "unittest.mock",
    "urllib.request",
    "zmq",
)
# What can be had of them meanwhile: `Deferral` of engine/process/deferred.py.
FUNCTIONS = {
    "numpy.linalg": ("eigvals", "inv", "lstsq", "matrix_power"),
    "torch._higher_order_ops": ("cond", "while_loop"),
    "torch._library.infer_schema": ("infer_schema",),
    "torch._lobpcg": ("lobpcg",),
    "torch.autograd.gradcheck": ("gradcheck", "gradgradcheck"),
    "torch.func": ("vmap",),
    "tqdm": ("tqdm",),
    "urllib.request": ("Request", "urlopen"),
}
KEPT = {"torch.jit._builtins": ("_register_builtin",)}  # TorchScript is told of all operations that are looked up
ANSWERS = {"torch.distributed.rpc": {"is_available": False}}  # TorchScript asks, which no rank runs
PASSED_ON = {
    "torch.jit": {"Future": "torch._C"},
    "torch.nn": {
        "Module": "torch.nn.modules.module",
        "ModuleList": "torch.nn.modules.container",
        "Parameter": "torch.nn.parameter",
    },
    "torch.nn.functional": {"linear": "torch._C._nn", "pad": "torch._C._nn"},
}
ALONE = (
    "numpy.",
    "torch.distributed._meta_registrations",
    "torch.fx._compatibility",
    "torch.fx.experimental.sym_node",
    "torch.fx.operator_schemas",
    "torch.nn.modules.container",
    "torch.nn.modules.module",
    "torch.nn.parameter",
    "torch.package._mangling",
    "zmq.constants",
)
# What a rank or torch imports that needs no torch. The system loads one library at a time, and torch's take long: so
# those come first that MODULES load, and what loads others (ctypes also does) comes behind torch's.
LIBRARIES = (
    "msgspec",
    "_csv",
    "_heapq",
    "numpy._core._multiarray_umath",
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
    "engine.recovery",
    "numpy.typing",
    "cache.manager",
    "configs.hosts",
    "engine.schedule_builder",
    "engine.speculation.speculation",
    "engine.structured.guide",
    "eplb.balancer",
    "ep.recorder",
    "ep.requirements",
    "front.messages",
    "front.structured.xgrammar_backend",
    "front.text.chat_template",
    "dbo.steps",
    "layers.gguf.header",
    "models.registry",
    "store.memory",
    "store.numa",
    "concurrent.futures.thread",
    "email.parser",
    "multiprocessing.connection",
    "pkgutil",
    "tarfile",
    "zmq.constants",
)
_BEHIND = 10  # of nice(2)
# Lazily: of torch's functions few are called, and looking all of them up takes time.
_OF_TORCH = (("libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL), ("libtorch_python.so", os.RTLD_LAZY))


def deferred_modules() -> tuple[str, ...]:
    """Of the torch that is installed, those that come in order."""
    return OF_VERSION.get(_version(), OF_ANY)


def defer_modules() -> None:
    """Before they are imported."""
    defer(Deferral(deferred_modules(), FUNCTIONS, KEPT, ANSWERS, PASSED_ON, ALONE))
    apart = APART.get(_version(), ())
    defer(Deferral((*apart, *OF_OTHERS), FUNCTIONS, answers=ANSWERS, alone=ALONE, in_order=False))


def _version() -> str:
    """The first two numbers."""
    return ".".join(torch_version().split(".")[:2])


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
    """Behind torch's libraries, and behind what the parent imports, where cores are few: they take longer."""
    with contextlib.suppress(Exception):  # who needs it imports it, and is told
        if sys.platform == "linux":  # elsewhere it would be the whole process
            os.nice(_BEHIND)
        read()
        for name in MODULES:
            importlib.import_module(name)
        # What is installed is known when torch asks so.
        importlib.import_module("importlib.metadata").version("optree")


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
