"""The parts of gpu_check.py that set other libraries beside our kernels, where they can be imported."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import time

import torch
from gpu_rows import Options, relative, row

from ep.backends.nvshmem import start
from ep.backends.nvshmem_ll import NvshmemLowLatency, PutKernels
from ep.device import CurrentStream
from ep.experts import WeightFormat
from ep.protocol import Routing
from ep.transport.device_group import DeviceGroup
from ep.transport.group import LocalGroup
from moe_kernels import ExpertBatch, dequantize_rows

_LOOKS = 1_000_000


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
    """One PE: a symmetric tensor, put to itself, and waited for; and the kernels that put rows."""
    if not _has("nvshmem") or not options.on_gpu:
        return
    group = DeviceGroup(LocalGroup(), options.device, 5.0)
    core = start(group)
    source, target = (core.tensor((1024,), dtype=torch.float32) for _ in range(2))
    source.normal_()
    target.zero_()
    core.put(target, source, remote_pe=0, stream=CurrentStream())
    core.quiet(stream=CurrentStream())
    torch.cuda.synchronize()
    row("put to itself", bool(torch.equal(source, target)), numbers=1024)
    for tensor in (source, target):
        core.free_tensor(tensor)
    try:
        shared = PutKernels(group)
    except ValueError as error:
        row("nvshmem_low_latency", None, note=str(error))
    else:
        for fp8 in (False, True):
            _put_rows(options, shared, fp8)
    group.close()


def _put_rows(options: Options, shared: PutKernels, fp8: bool) -> None:
    """One rank's exchange with itself, as written and in a graph; and how long a wait is that nobody ends."""
    slots, hidden, tokens, top_k = 32, 7168, 64, 8
    name = f"nvshmem_low_latency {tokens} tokens {'FP8' if fp8 else 'BF16'}"
    lane = NvshmemLowLatency(shared, slots, hidden, torch.bfloat16, 256, fp8)
    x_TD = torch.randn(tokens, hidden, device=options.device).bfloat16()
    scores = torch.rand(tokens, slots, device=options.device)
    routing = Routing(scores.topk(top_k).indices, torch.rand(tokens, top_k, device=options.device))
    out_TD, twin_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    y = torch.empty(slots, 256, hidden, dtype=torch.bfloat16, device=options.device)

    def exchange() -> None:
        arrived = lane.dispatch(x_TD, routing).wait()
        lane.combine(y, arrived.ticket, out_TD).wait()

    def whole(into_TD: torch.Tensor) -> None:
        """With experts that give back what they get."""
        arrived = lane.dispatch(x_TD, routing).wait()
        batch = arrived.batch
        assert isinstance(batch, ExpertBatch)
        rows = batch.x if batch.scale is None else dequantize_rows(batch.x, batch.scale, torch.bfloat16)
        lane.combine(rows, arrived.ticket, into_TD).wait()

    whole(twin_TD)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        whole(out_TD)
    for into, run in ((twin_TD, lambda: whole(twin_TD)), (out_TD, graph.replay)):
        x_TD.normal_()
        into.zero_()
        run()
        error = relative(into, x_TD.float() * routing.weight_TK.sum(1, keepdim=True))
        row(f"{name}{', in a graph' if into is out_TD else ''}", error < (0.05 if fp8 else 0.01), error=error)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        exchange()
    clock = options.clock()
    row(f"{name}, times", None, written_us=1e6 * clock(exchange), captured_us=1e6 * clock(captured.replay))
    torch.cuda.synchronize()
    shared.looks, looks = _LOOKS, shared.looks
    lane._turn += 1  # of a turn in which nobody sends
    began = time.monotonic()
    lane.receive(torch.zeros(slots, dtype=torch.int32, device=options.device), routing.slot_TK)
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    row(
        f"{name}, a wait that nobody ends",
        shared.lost_G.tolist() == [1],
        seconds=seconds,
        us_per_look=1e6 * seconds / _LOOKS,
    )
    shared.lost_G.zero_()
    shared.looks = looks
