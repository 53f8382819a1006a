"""What is decided about GPUs: whether to use them, how tokens travel between them, and which steps are captured as
graphs. Without torch; `resolve` calls it, and nothing here looks at the machine but `find_gpus` and
`find_rdma`.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from configs.chips import Chip
from configs.engine import EngineConfig, ExpertFormat, GraphMode, Plan
from configs.versions import torch_version

MEBI = 1 << 20
GPU_MEMORY_PART = 0.9  # of a GPU's memory, unless told otherwise: activations, graphs and libraries take the rest
LOOK_SECONDS = 10.0

GRAPH_MODES: tuple[GraphMode, ...] = ("none", "piecewise", "full_decode_only", "full_and_piecewise")
MAX_CAPTURED = 512


class Gpu(Struct, frozen=True):
    """One kind, `count` of them in this machine, or in each of a cluster's. memory in bytes: what a rank may count
    on."""

    name: str
    arch: str
    memory: int
    count: int

    @staticmethod
    def of(chip: Chip) -> Gpu:
        return Gpu(chip.name, chip.arch, chip.memory, chip.per_machine)


class Exchange(Struct, frozen=True):
    """How tokens travel between GPUs: a name of ep/table.py, and why. not_captured: "", or why a CUDA graph cannot hold
    the exchanges of decode steps. padded_tokens: of a rank, for which every expert slot has room for rows in those; 0:
    it has not."""

    name: str
    why: str
    not_captured: str = ""
    padded_tokens: int = 0


def find_gpus(visible: str | None) -> tuple[Gpu | None, str]:
    """The GPUs of this machine as `nvidia-smi` sees them, or None; and why. visible: CUDA_VISIBLE_DEVICES.

    torch is not asked: the processes that decide never import it.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None, "there is no nvidia-smi on this machine"
    version = torch_version()
    if not version:
        return None, "torch is not installed"
    if "+cpu" in version:
        return None, f"torch {version} is a build without CUDA"
    query = [tool, "--query-gpu=index,uuid,name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=LOOK_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"nvidia-smi failed ({type(error).__name__})"
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 4]
    if visible is not None:
        wanted = [part.strip() for part in visible.split(",") if part.strip()]
        rows = [row for row in rows if row[0] in wanted or any(row[1].startswith(name) for name in wanted)]
    if not rows:
        return None, "nvidia-smi lists no GPU that this process may use"
    memory = min(int(float(row[4])) for row in rows) * MEBI
    return Gpu(rows[0][2], "sm_" + rows[0][3].replace(".", ""), memory, len(rows)), "nvidia-smi found it"


def find_rdma(root: Path = Path("/")) -> tuple[str, str]:
    """Why this machine has no InfiniBand, and why its GPUs cannot write to InfiniBand's queues themselves (IBGDA): ""
    and "" where they can. root: of the file system."""
    states = []
    for path in root.glob("sys/class/infiniband/*/ports/*/state"):
        with contextlib.suppress(OSError):
            states.append(path.read_text())
    if not any("ACTIVE" in state for state in states):
        found = f"none of {len(states)} ports is active" if states else "there is no port"
        no_rdma = f"{found} under /sys/class/infiniband"
        return no_rdma, no_rdma
    if (root / "sys/module/gdrdrv").exists():
        return "", ""
    try:
        driver = (root / "proc/driver/nvidia/params").read_text()
    except OSError:
        driver = ""
    if re.search(r"EnableStreamMemOPs: *1", driver) and "PeerMappingOverride=1" in driver:
        return "", ""
    return "", "the driver has neither gdrdrv nor NVreg_EnableStreamMemOPs=1 with PeerMappingOverride=1"


def chosen_device(asked: str, gpu: Gpu | None, reason: str) -> tuple[Literal["cpu", "cuda"], str]:
    """Raises ValueError when a GPU is asked for and there is none."""
    if asked == "cpu":
        return "cpu", "as asked"
    if gpu is None:
        if asked == "cuda":
            raise ValueError(f"device cuda: {reason}; explain --gpu h200 prints a plan for a cluster of those")
        return "cpu", reason
    return "cuda", "as asked" if asked == "cuda" else f"{gpu.count} {gpu.name}"


def gpu_expert_format(asked: str | None, fp8_checkpoint: bool) -> tuple[ExpertFormat, str]:
    """How experts are kept in a GPU's memory, and why."""
    if asked not in (None, "fp8"):
        raise ValueError(f"quantization {asked}: the GPU kernels have weights in FP8 only")
    if asked == "fp8":
        return "fp8", "as asked; on a GPU all other matrices stay in the dtype of the model"
    return ("fp8", "as the checkpoint has them") if fp8_checkpoint else ("plain", "the dtype of the model")


def with_graphs(plan: Plan, config: EngineConfig, exchange: Exchange | None) -> Plan:
    """The same plan with the steps that are captured. exchange: between GPUs. Raises ValueError for what cannot be."""
    if plan.device != "cuda":
        return _with_cpu_graphs(plan, config)
    planned = plan.attention_backend == "flashinfer"
    mode, why = graph_mode(config.cudagraph_mode, exchange, plan.eplb is not None, planned)
    if plan.dbo is not None and mode != "none":
        split = "those of decodes alone, as one graph" if "full" in mode else "none is captured"
        why += f"; of steps that are split in {plan.dbo.num_ubatches}, {split}"
    sizes = capture_sizes(mode, config.cudagraph_capture_sizes, plan.max_num_seqs, plan.max_num_batched_tokens)
    reasons = {**plan.reasons, "cudagraph_mode": why}
    if sizes:
        reasons["cudagraph_capture_sizes"] = "steps are padded to the next of these"
    return replace(plan, cudagraph_mode=mode, cudagraph_capture_sizes=sizes, reasons=reasons)


def _with_cpu_graphs(plan: Plan, config: EngineConfig) -> Plan:
    """On a CPU: decode steps are captured and replayed (engine/capture.py) where native kernels compute them."""
    asked = config.cudagraph_mode
    if asked not in ("auto", "none", "full_decode_only"):
        raise ValueError(f"cudagraph_mode {asked} needs a GPU (--device cuda)")
    if config.cudagraph_capture_sizes:
        raise ValueError("cudagraph_capture_sizes needs a GPU (--device cuda): a CPU captures steps of every size")
    mode: GraphMode = "full_decode_only" if asked != "none" and plan.native_kernels != "none" else "none"
    why = "decode steps are captured once and replayed without Python"
    if mode == "none":
        why = "as asked" if asked == "none" else "there are no native kernels to record"
    return replace(plan, cudagraph_mode=mode, reasons={**plan.reasons, "cudagraph_mode": why})


def graph_mode(
    asked: str, exchange: Exchange | None, eplb: bool, planned_attention: bool = False
) -> tuple[GraphMode, str]:
    """Which steps are captured on a GPU, and why. asked: "auto" or a GraphMode; exchange: None where no tokens travel.

    full_decode_only: decode steps, whole; piecewise: all steps, without attention and, where they cannot be captured,
    experts. Raises ValueError for what cannot be.
    """
    if asked not in ("auto", *GRAPH_MODES):
        raise ValueError(f"cudagraph_mode {asked!r} is unknown; one of auto, {', '.join(GRAPH_MODES)}")
    against = f"{exchange.name}: {exchange.not_captured}" if exchange is not None and exchange.not_captured else ""
    if eplb and not against:
        against = "experts that are balanced count their tokens on the host"
    if planned_attention and not against:
        against = "FlashInfer plans its attention on the host"
    if asked == "auto":
        if against:
            return "piecewise", f"no full graphs of decode steps ({against}); experts run between the pieces"
        return "full_and_piecewise", "decode steps as one graph, others in pieces around attention"
    if asked.startswith("full") and against:
        raise ValueError(f"cudagraph_mode {asked}: {against} (piecewise can be)")
    return next(mode for mode in GRAPH_MODES if mode == asked), "as asked"


def capture_sizes(
    mode: GraphMode, asked: tuple[int, ...], max_num_seqs: int, max_num_batched_tokens: int
) -> tuple[int, ...]:
    """Rows of the graphs, ascending: padding takes at most half again, and little where a step is short."""
    if mode == "none":
        return ()
    most = max_num_batched_tokens if "piecewise" in mode else max_num_seqs
    if asked:
        if min(asked) < 1:
            raise ValueError(f"cudagraph_capture_sizes must be at least 1, not {min(asked)}")
        return tuple(sorted({min(size, most) for size in asked}))
    most = min(most, MAX_CAPTURED)
    sizes = {1, 2, 4, most}
    step = 8
    while step <= most:
        sizes |= {step, min(most, step + step // 2)}
        step *= 2
    return tuple(sorted(size for size in sizes if size <= most))
