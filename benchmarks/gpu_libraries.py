"""The parts of gpu_check.py that set other libraries beside our kernels, where they can be imported."""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch
from gpu_rows import Options, relative, row

from ep.experts import WeightFormat


def _has(module: str) -> bool:
    if importlib.util.find_spec(module) is not None:
        return True
    row(module, None, note="not installed: left out")
    return False


def deepgemm(options: Options) -> None:
    """Beside our kernels on the same experts: results and times."""
    if not _has("deep_gemm") or not options.on_gpu:
        return
    weights = importlib.import_module("moe_kernels.weights")
    layout = importlib.import_module("moe_kernels.layout")
    clock = options.clock()
    for name, slots, hidden, width in (("deepseek-v3", 32, 7168, 2048), ("qwen3-30b-a3b", 128, 2048, 768)):
        for form in (WeightFormat.FP8, WeightFormat.PLAIN):
            made = {
                backend: weights.expert_weights(slots, hidden, width, torch.bfloat16, options.device, form, backend)
                for backend in ("triton", "deepgemm")
            }
            shapes = ((width, hidden), (width, hidden), (hidden, width))
            for slot in range(slots):
                matrices = [torch.randn(shape, device=options.device) * shape[1] ** -0.5 for shape in shapes]
                for one in made.values():
                    one.fill(slot, *matrices)
            for rows in (64, 4096):
                rows_S = torch.full((slots,), max(1, rows // slots), dtype=torch.int32, device=options.device)
                x = torch.randn(int(rows_S.sum()), hidden, device=options.device).bfloat16()
                batch = layout.ExpertBatch(layout.Layout.RAGGED, x, rows_S)
                error = relative(made["deepgemm"].run_rows(batch), made["triton"].run_rows(batch))
                times = {f"{key}_ms": 1e3 * clock(functools.partial(one.run_rows, batch)) for key, one in made.items()}
                row(f"{name} {form.value} {rows} rows", error < 0.05, error=error, **times)


def flashinfer(options: Options) -> None:
    """MLA decode beside ours."""
    if not _has("flashinfer") or not options.on_gpu:
        return
    make, shape = importlib.import_module("mla.backend").make_backend, importlib.import_module("mla.protocol").MlaShape
    latent, make_step = shape(128, 128, 64, 512, 128), importlib.import_module("gpu_cases").make_step
    clock = options.clock()
    for count, length in ((1, 4096), (32, 4096), (8, 32768)):
        step = make_step(count, 1, length, options.device)
        cache = torch.randn(count * length, 576, device=options.device).bfloat16()
        queries = [torch.randn(count, 128, width, device=options.device).bfloat16() for width in (128, 64)]
        weights = [torch.randn(128, 128, 512, device=options.device).bfloat16() * 0.05 for _ in range(2)]
        outs, times = {}, {}
        for name in ("triton", "flashinfer"):
            attend = make(latent, 192**-0.5, "auto", torch.bfloat16, options.device, name).prepare(step)
            run = functools.partial(attend, *queries, cache, *weights)
            outs[name], times[f"{name}_ms"] = run(), 1e3 * clock(run)
        error = relative(outs["flashinfer"], outs["triton"])
        row(f"MLA decode {count} x {length}", error < 0.02, error=error, **times)


def nvshmem(options: Options) -> None:
    """One PE: a symmetric tensor, put to itself, and waited for."""
    if not _has("nvshmem") or not options.on_gpu:
        return
    core, device_of = importlib.import_module("nvshmem.core"), importlib.import_module("cuda.core.experimental").Device
    here = device_of(0)
    here.set_current()
    core.init(device=here, uid=core.get_unique_id(), rank=0, nranks=1, initializer_method="uid")
    source, target = (core.tensor((1024,), dtype=torch.float32) for _ in range(2))
    source.normal_()
    target.zero_()
    stream = here.create_stream()
    torch.cuda.synchronize()
    core.put(target, source, remote_pe=0, stream=stream)
    core.quiet(stream=stream)
    stream.sync()
    row("put to itself", bool(torch.equal(source, target)), numbers=1024)
    for tensor in (source, target):
        core.free_tensor(tensor)
    core.finalize()
