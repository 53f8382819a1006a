"""Each Triton kernel beside the limit of the GPU: `python benchmarks/gpu_ops.py [--device cuda] [--models NAME ...] [--only TEXT]
[--json]`.

The limit is the longer of two times: what must be read and written at the speed of a large copy, and the products at the speed of
a large product, both measured in the same run. Caches are flushed before each call; calls are replayed from a graph, so the
host's part is not in them. The first row of each result says what the machine's limits were.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from gpu_cases import MODELS, Case, all_cases
from gpu_clock import GpuClock, Limits


def rows(
    cases: Iterable[Case], clock: Callable[[Callable[[], object]], float], limits: Limits, only: str = ""
) -> Iterator[dict[str, Any]]:
    """One per case. A case that fails says how; the others go on."""
    for case in cases:
        if only not in case.op:
            continue
        found: dict[str, Any] = {"op": case.op, "shape": case.shape}
        try:
            seconds = clock(lambda case=case: case.run(None))  # type: ignore[misc]
        except Exception as error:  # of any library: the table must be finished
            yield found | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            continue
        least, bound = limits.seconds(case.bytes, case.flops, case.kind)
        yield found | {
            "ms": round(seconds * 1e3, 4),
            "limit_ms": round(least * 1e3, 4),
            "pct_of_limit": round(100 * least / seconds, 1),
            "bound": bound,
            "gb_s": round(case.bytes / seconds / 1e9, 1),
            "tflop_s": round(case.flops / seconds / 1e12, 2),
        }


def line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['op']:22} {row['shape']:34} {row['error']}"
    return (
        f"{row['op']:22} {row['shape']:34} {row['ms']:9.4f} {row['pct_of_limit']:8.1f} {row['bound']:7} {row['gb_s']:8.1f} "
        f"{row['tflop_s']:8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--only", default="", help="only operations whose name contains this")
    parser.add_argument("--json", action="store_true", help="nothing but one JSON line per row")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise SystemExit(f"gpu_ops times kernels on a GPU; --device {options.device}: there is none here")
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    clock = GpuClock(device)
    limits = Limits.probe(clock, device)
    machine = {
        "device": torch.cuda.get_device_name(device),
        "copy_gb_s": round(limits.memory / 1e9),
        **{f"{kind}_tflop_s": round(speed / 1e12) for kind, speed in limits.products.items()},
    }
    print(json.dumps(machine), flush=True)
    if not options.json:
        print(f"{'op':22} {'shape':34} {'ms':>9} {'% limit':>8} {'bound':7} {'GB/s':>8} {'TFLOP/s':>8}")
    for row in rows(all_cases(device, options.models), clock, limits, options.only):
        print(json.dumps(row) if options.json else line(row), flush=True)


if __name__ == "__main__":
    main()
