"""Memory that is kept for captured graphs when the size of a GPU's cache is decided. Without torch.

Graphs are captured after the cache has been allocated, so what they take must have been left for them. It is an
estimate, in three parts: what the driver keeps for every kernel of every graph; the rows of one step, which the largest
graph takes and the smaller ones share; and, where the exchange gives experts padded rows, the room of those. A rank
says at the start what its graphs really took.
"""

from __future__ import annotations

from msgspec.structs import replace

from configs.cache import block_bytes
from configs.engine import EngineConfig, Plan
from configs.gpu import GPU_MEMORY_PART, Exchange
from configs.machine import Machine, ModelNumbers

MEBI = 1 << 20
KERNEL_BYTES = 32 << 10  # of each kernel in a graph
KERNELS_PER_LAYER = 24
ROW_VECTORS = 64  # hidden states' worth of memory that a row of a step takes: its own, and those of its experts
PADDED_VECTORS = 3  # of a padded row: what arrives, what is between the experts' two products, what they give back


def graph_bytes(plan: Plan, model: ModelNumbers, exchange: Exchange | None) -> int:
    """Of one rank; 0 when nothing is captured."""
    sizes = plan.cudagraph_capture_sizes
    if not sizes or plan.cudagraph_mode == "none":
        return 0
    num_forms = ("full" in plan.cudagraph_mode) + ("piecewise" in plan.cudagraph_mode)
    kernels = len(sizes) * num_forms * model.num_layers * KERNELS_PER_LAYER
    vector = model.hidden_size * (4 if plan.dtype == "float32" else 2)
    rows = ROW_VECTORS * vector * max(sizes)
    if exchange is not None and "full" in plan.cudagraph_mode:
        tokens = min(exchange.padded_tokens, plan.max_num_seqs)
        parts = 1 if plan.dbo is None else plan.dbo.num_ubatches  # each has rows of its own under way
        rows += parts * PADDED_VECTORS * vector * plan.slots_per_rank * plan.data_parallel_size * tokens
    return kernels * KERNEL_BYTES + rows


def with_graph_memory(plan: Plan, config: EngineConfig, model: ModelNumbers, machine: Machine) -> Plan:
    """The same plan with what its graphs take left free below the limit: fewer KV blocks, unless those were asked for.

    Raises ValueError when no cache, or not the asked max_model_len, fits beside them."""
    kept = graph_bytes(plan, model, machine.exchange)
    if machine.gpu is None or not kept:
        return plan
    why = dict(plan.reasons)
    why["graph_bytes"] = f"an estimate for {len(plan.cudagraph_capture_sizes)} size(s); a rank says what it really was"
    plan = replace(plan, graph_bytes=kept, reasons=why)
    limit = int(machine.gpu.memory * (config.gpu_memory_utilization or GPU_MEMORY_PART))
    missing = plan.rank_bytes + kept - limit
    if missing <= 0 or config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None:
        return plan
    bytes_per_block = block_bytes(model.cache_spec(plan.dtype, plan.kv_cache_dtype == "fp8"), plan.block_size)
    blocks = plan.num_kv_blocks - -(-missing // bytes_per_block)
    needed = -(-(config.max_model_len or 1) // plan.block_size)
    if blocks < needed:
        raise ValueError(
            f"{max(0, blocks)} KV blocks are left beside {kept // MEBI} MiB kept for graphs, {needed} are needed; set "
            "gpu_memory_utilization, fewer cudagraph_capture_sizes, or cudagraph_mode none"
        )
    why["num_kv_blocks"] += f"; {plan.num_kv_blocks - blocks} fewer, for {kept // MEBI} MiB of graphs"
    length = min(plan.max_model_len, blocks * plan.block_size)
    if length < plan.max_model_len:
        why["max_model_len"] = f"all that {blocks} KV blocks hold; the model allows {model.usual_len}"
    saved = (plan.num_kv_blocks - blocks) * bytes_per_block
    return replace(plan, num_kv_blocks=blocks, max_model_len=length, rank_bytes=plan.rank_bytes - saved, reasons=why)
