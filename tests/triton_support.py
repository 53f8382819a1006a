"""Triton kernels without a GPU: run them in Triton's interpreter, and compile them for GPUs that are not here.

Both work on what the functions under test really launch: every kernel of a module is replaced, for the length of a
`with`, by its interpreted form or by something that compiles each launch instead of running it. Where there is a GPU the
tests that run kernels use it.

The interpreter (seen in triton 3.6 to 3.9; this file is run with 3.7) gives wrong numbers without an error in three places,
repaired here: tl.dot on bfloat16 multiplies bit patterns; casts to bfloat16 truncate; casts to 8-bit floats lose the carry
of the mantissa. Arithmetic on bfloat16 stays wrong: kernels convert to float32 right after a load.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.experimental.gluon  # else the first launch imports it, which fails while kernels are replaced
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import layers.choice
import moe_kernels.backends
import moe_kernels.choice
import moe_kernels.token_sums
from native import Isa, isa, limit_isa

ROOT = Path(__file__).resolve().parent.parent
_FLOATS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
_convert_of_triton = interpreter._convert_float
_dot_of_triton = interpreter.InterpreterBuilder.create_dot


def _convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """As the hardware does: to nearest even; casts to 8 bits saturate."""
    if source.name not in _FLOATS or target.name not in _FLOATS:
        return _convert_of_triton(data, source, target, rounding_mode)
    data = np.ascontiguousarray(data)
    x = torch.frombuffer(bytearray(data.tobytes()), dtype=_FLOATS[source.name])
    if target.name in _LARGEST:
        x = x.float().clamp(-_LARGEST[target.name], _LARGEST[target.name])
    raw = x.to(_FLOATS[target.name]).view(torch.uint8).numpy().tobytes()
    return np.frombuffer(raw, dtype=f"uint{target.primitive_bitwidth}").reshape(data.shape).copy()


def _create_dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, max_imprecise: Any) -> Any:
    if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
        return _dot_of_triton(self, a, b, acc, precision, max_imprecise)
    a32, b32 = (_convert_float(x.data, x.dtype.scalar, tl.float32, None).view(np.float32) for x in (a, b))
    return interpreter.TensorHandle(np.matmul(a32, b32).astype(acc.data.dtype) + acc.data, acc.dtype.scalar)


interpreter._convert_float = _convert_float
interpreter.InterpreterBuilder.create_dot = _create_dot


@contextmanager
def _replaced(modules: tuple[ModuleType, ...], make: Any) -> Iterator[None]:
    """Every kernel of the modules by make(kernel)."""
    kernels = [(m, name, k) for m in modules for name, k in vars(m).items() if isinstance(k, JITFunction)]
    assert kernels, "no kernel in these modules"
    try:
        for module, name, kernel in kernels:
            setattr(module, name, make(kernel))
        yield
    finally:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)


@contextmanager
def _language_kept() -> Iterator[None]:
    """The interpreter patches the language for every launch, and again wherever kernels call kernels, which takes as long as
    the kernels do and is not undone: here it is patched once, for all that runs in a `with`, and is as it was afterwards."""
    places: list[Any] = [tl, tl.core, tl.math, tl.standard, tl.tensor, tl.core.tensor_descriptor_base]
    kept = [dict(vars(place)) for place in places]
    patch = interpreter._patch_lang
    patched = patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    try:
        yield
    finally:
        interpreter._patch_lang = patch
        patched.restore()
        for place, names in zip(places, kept, strict=True):
            for name, now in list(vars(place).items()):
                if name in names and now is not names[name]:
                    setattr(place, name, names[name])
                elif name not in names and isinstance(place, type):
                    delattr(place, name)


@dataclass
class Moving:
    """Stands for a kernel: a launch takes its tensors to another device, runs there, and brings back what was written."""

    kernel: Any
    device: str

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            here: dict[int, torch.Tensor] = {}
            there: dict[int, torch.Tensor] = {}

            def moved(x: Any) -> Any:
                if isinstance(x, TensorDescriptor):
                    return TensorDescriptor(moved(x.base), x.shape, x.strides, x.block_shape)
                if not isinstance(x, torch.Tensor):
                    return x
                memory = x.untyped_storage()
                if memory.data_ptr() not in here:  # tensors that share memory share it there too
                    here[memory.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(memory)
                    there[memory.data_ptr()] = here[memory.data_ptr()].to(self.device, copy=True)
                copy = there[memory.data_ptr()].untyped_storage()
                new = torch.empty(0, dtype=x.dtype, device=self.device)
                return new.set_(copy, x.storage_offset(), x.shape, x.stride())

            self.kernel[grid](*(moved(x) for x in args), **kwargs)
            for place, memory in there.items():
                here[place].copy_(memory)

        return launch


@contextmanager
def running(*modules: ModuleType) -> Iterator[None]:
    """Kernels of these modules run on CPU tensors: on the GPU if one is here, else in the interpreter, one program after
    another."""
    if torch.cuda.is_available():
        with _replaced(modules, lambda kernel: Moving(kernel, "cuda") if _is_launched(kernel) else kernel):
            yield
        return
    with (
        np.errstate(all="ignore"),
        _language_kept(),
        _replaced((*modules, tl, tl.standard, tl.math), lambda kernel: interpreter.InterpretedFunction(kernel.fn)),
    ):
        yield


def kernel_modules() -> tuple[ModuleType, ...]:
    """Of the rooms, those with kernels."""
    modules = [
        importlib.import_module(f"{room}.triton.{path.stem}")
        for room in ("layers", "mla", "moe_kernels")
        for path in sorted((ROOT / room / "triton").glob("[a-z]*.py"))
    ]
    return tuple(m for m in modules if any(isinstance(k, JITFunction) for k in vars(m).values()))


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Every room takes its Triton forms, for tensors of the CPU; they run as in `running`. The native kernels rest."""
    with_kernels = kernel_modules()
    rooms: list[Any] = [layers.choice, moe_kernels.choice, moe_kernels.backends, moe_kernels.token_sums]
    asked = [(room, room.on_gpu) for room in rooms]
    before = isa()
    limit_isa(Isa.NONE)
    for room in rooms:
        room.on_gpu = lambda device: True
    try:
        with running(*with_kernels):
            yield
    finally:
        limit_isa(before)
        for room, ask in asked:
            room.on_gpu = ask


@dataclass(frozen=True)
class Compiled:
    """What one launch compiles to. spills: bytes of local memory per thread, where registers go that do not fit; shared: bytes
    per program; matrix_unit: the instruction that multiplies matrices ("wgmma", "tcgen05.mma", "mma.sync"), "" where none does."""

    kernel: str
    arch: str
    registers: int
    spills: int
    shared: int
    matrix_unit: str


@dataclass
class _Elsewhere:
    """The driver of a GPU that is not here: enough for a kernel to be compiled for it."""

    capability: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # kernels are cached per device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass
class _Recorder:
    """Stands for a kernel: a launch compiles it."""

    kernel: Any
    found: list[Compiled]
    capability: int
    seen: set[str] = field(default_factory=set)

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            compiled = self.kernel.warmup(*args, grid=grid, **kwargs)
            if compiled.hash not in self.seen:
                self.seen.add(compiled.hash)
                self.found.append(_measure(compiled, f"sm_{self.capability}a"))

        return launch


def _measure(compiled: Any, arch: str) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    assert f".target {arch}" in ptx
    unit = next((name for name in ("wgmma", "tcgen05.mma", "mma.sync") if name in ptx), "")
    return Compiled(metadata.name, arch, used["REG"], used["STACK"] + used["LOCAL"], metadata.shared, unit)


@contextmanager
def _tables_for(capability: int, modules: tuple[ModuleType, ...]) -> Iterator[None]:
    """The modules take their configurations from this chip's row."""
    asking = [(module, vars(module)["chip_of"]) for module in modules if "chip_of" in vars(module)]
    try:
        for module, _ in asking:
            vars(module)["chip_of"] = lambda device: f"sm_{capability}"
        yield
    finally:
        for module, before in asking:
            vars(module)["chip_of"] = before


@contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Triton takes a GPU of this compute capability for the one that is here."""
    before = driver._active
    driver.set_active(_Elsewhere(capability))
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def compiling(capability: int, *modules: ModuleType) -> Iterator[list[Compiled]]:
    """Launches of kernels of these modules, with tensors of any device ("meta" too), are compiled for an NVIDIA GPU of this
    compute capability (90, 100); the list fills with what came out, each variant once."""
    found: list[Compiled] = []
    # Kernels called by kernels must stay what they are: only what is launched from the host is replaced.
    with (
        compiling_for(capability),
        _tables_for(capability, modules),
        _replaced(modules, lambda kernel: _Recorder(kernel, found, capability) if _is_launched(kernel) else kernel),
    ):
        yield found


def _is_launched(kernel: JITFunction[Any]) -> bool:
    return kernel.__name__.endswith("_kernel")


def report(found: list[Compiled]) -> None:
    """Print one line per kernel (pytest -s shows them) and check them against the hardware's limits."""
    assert found
    for item in found:
        print(
            f"{item.arch} {item.kernel}: {item.registers} registers, {item.spills} B spilled, {item.shared} B shared, "
            f"{item.matrix_unit or 'no matrix unit'}"
        )
        assert item.shared <= 227 * 1024, item  # of a program, on both architectures
