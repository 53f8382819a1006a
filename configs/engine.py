"""What the user asked for (EngineConfig) and what was decided (Plan). Without torch.

`resolve` turns one into the other, with the reason for every choice; nothing below engine and launch ever sees either
(docs/design.md, D4): rooms below take ints, enums, groups and tensors.
"""

from __future__ import annotations

import enum
from typing import Any, Literal

from msgspec import Struct, field

from configs.dbo import DboMode, DboPlan
from configs.eplb import EplbConfig
from configs.speculation import SpeculativeConfig
from configs.types import check_types

MAX_RANKS = 62  # those that can share memory (ep/transport/shm_group.py)

Dtype = Literal["float32", "bfloat16"]
KvCacheDtype = Literal["auto", "fp8"]
ExpertFormat = Literal["plain", "fp8", "int8", "mxfp4", "int4", "bf16"]
Quantization = Literal["fp8", "int8", "int4", "mxfp4"]
Policy = Literal["fcfs", "priority"]
GraphMode = Literal["none", "piecewise", "full_decode_only", "full_and_piecewise"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]


class Frontend(enum.Enum):
    """Where the requests of ranks come from: a server, the caller's process (`moesaic.LLM`), or the only rank's own."""

    SERVER = enum.auto()
    CALLER = enum.auto()
    IN_PROCESS = enum.auto()


class EngineConfig(Struct, frozen=True, kw_only=True):
    """None means: decide for me. Field names are the command line's, with vLLM's names where the meaning is the
    same."""

    model: str | None = None  # a Hugging Face directory, or a name (models/hub.py); None: the embedded model
    revision: str | None = None  # of a name: branch, tag or commit
    tokenizer: str | None = None  # the same of its tokenizer; None: the model's own
    tokenizer_revision: str | None = None
    download_dir: str | None = None  # of a name: where the cache of downloads is; None: the library's place
    optimization_level: int = 3  # -O: 0 eager, 1 graphs, 2 split steps and drafts where they pay, 3 measured kernels
    hf_overrides: dict[str, Any] = {}  # fields in the place of those of config.json
    served_model_name: tuple[str, ...] = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # float16: in float32, which holds it
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    num_kv_blocks: int | None = None  # per rank; wins over kv_cache_memory_bytes
    kv_cache_memory_bytes: int | None = None  # per rank
    gpu_memory_utilization: float | None = None  # part of the free memory that weights and cache may take together
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: Policy = "fcfs"
    async_scheduling: bool | None = None
    prefill_cadence: Literal["auto", "on", "off"] = "auto"  # prompts are let in on all ranks in the same steps
    data_parallel_size: int = 1
    all2all_backend: str = "auto"  # or two as a+b: for steps with many tokens and for those with few
    vocab_parallel: Literal["auto", "on", "off"] = "auto"  # each rank of a machine computes a part of the vocabulary
    dispatch_dtype: Literal["auto", "bf16", "fp8"] = "auto"  # of rows on their way to the experts; bf16: as they are
    resume_steps: Literal["auto", "on", "off"] = "auto"  # that a loss breaks off, at the layer where they were
    num_redundant_experts: int | None = None  # slots beyond one per expert, in all; None: enough to lose one rank
    enable_eplb: bool = False
    eplb: EplbConfig = field(default_factory=EplbConfig)  # taken when enable_eplb
    enable_dbo: DboMode = "auto"
    dbo_decode_token_threshold: int | None = None  # None: measured, or with enable_dbo "on" vLLM's default
    dbo_prefill_token_threshold: int | None = None
    ubatch_size: int = 2  # parts of a step that is split
    speculative_config: dict[str, Any] | None = None  # fields of configs/speculation.py
    threads_per_rank: int | None = None
    mla_prefill: Literal["auto", "naive", "absorbed"] = "auto"
    kv_cache_dtype: KvCacheDtype = "auto"  # fp8: latents in 8 bits
    attention_backend: str = "auto"  # of latent attention: a name of mla/requirements.py
    moe_backend: str = "auto"  # a name of moe_kernels/backends.py
    cudagraph_mode: Literal["auto", "none", "piecewise", "full_decode_only", "full_and_piecewise"] = "auto"
    cudagraph_capture_sizes: tuple[int, ...] = ()  # rows; (): decided
    quantization: Quantization | None = None  # of all large matrices, when they are loaded
    weight_cache: str | None = None  # a directory for packed weights, or "off"; None: the user's, of large models
    deterministic: bool = False  # tokens and logprobs do not depend on company, ranks, chunks or threads
    logprobs_mode: LogprobsMode = "raw_logprobs"
    max_logprobs: int = 20
    logits_processors: tuple[str, ...] = ()  # classes, as module:Class (engine/sampling/processors.py)
    exchange_timeout: float = 60.0  # seconds; the bound of every wait between ranks
    wait_warning_seconds: float = 2.0  # a wait between ranks that is longer is said; 0: none is

    def __post_init__(self) -> None:
        check_types(self)


class Plan(Struct, frozen=True, kw_only=True):
    """Every choice made. Sent to the ranks as JSON."""

    model_path: str
    tokenizer_path: str = ""  # the directory of another tokenizer; "": the model's own
    served_model_names: tuple[str, ...]
    architecture: str
    device: Literal["cpu", "cuda"]
    dtype: Dtype
    max_model_len: int
    max_num_seqs: int  # per rank
    max_num_batched_tokens: int  # per rank and step
    block_size: int
    num_kv_blocks: int  # per rank
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    scheduling_policy: Policy
    async_scheduling: bool
    prefill_cadence: bool = False  # prompts are let in on all ranks in the same steps
    data_parallel_size: int
    all2all_backend: str  # a name of ep/table.py
    vocab_parallel: bool = False  # the head is computed by all ranks together (ep/vocab_parallel.py)
    resume_steps: bool = True  # of a step what others can go on with is kept (cache/residuals.py)
    num_experts: int  # of each MoE layer; 0 for a dense model
    slots_per_rank: int  # expert slots of a rank in each MoE layer; 0 for a dense model
    threads_per_rank: int
    mla_prefill: Literal["auto", "naive", "absorbed"]
    logprobs_mode: LogprobsMode
    max_logprobs: int
    logits_processors: tuple[str, ...] = ()
    exchange_timeout: float
    wait_warning_seconds: float = 2.0
    deterministic: bool = False  # kernels add up in an order that depends on nothing but the row
    data_parallel_size_local: int = 0  # ranks on this machine; 0: all
    max_ranks: int = MAX_RANKS  # to which a running server may grow
    rank_bytes: int = 0  # what the weights and the cache of one rank take; those of a store are none of its own
    weight_store: bool = False  # weights lie in memory that the supervisor holds, and the machine's ranks map
    store_bytes: int = 0  # what they take there
    store_nodes: tuple[int, ...] = ()  # nodes of memory (NUMA) with a store each; none: there is one for the machine
    weight_key: str = ""  # of these weights as they are kept: whatever their bytes depend on
    weight_cache: str = ""  # the directory where packed weights are kept on disk; "": they are not
    graph_bytes: int = 0  # kept free for its captured graphs
    eplb: EplbConfig | None = None  # how experts are balanced at run time; None: they are not
    dbo: DboPlan | None = None  # whether and when steps are split; None: never
    speculation: SpeculativeConfig | None = None  # where drafts come from; None: there are none
    native_kernels: str = "amx"  # the most they may use (native/features.py); none: torch does everything
    native_choice: str = ""  # which of their ways are taken, by all ranks alike (native/choice.py); "": not measured
    dispatch_rows: Literal["plain", "fp8"] = "plain"  # how rows travel to the experts (ep/rows.py)
    expert_format: ExpertFormat = "plain"  # how experts are kept in memory; plain: in dtype
    linear_format: ExpertFormat = "plain"  # the same for all other large matrices
    kv_cache_dtype: KvCacheDtype = "auto"  # auto: in dtype
    attention_backend: str = "auto"
    moe_backend: str = "auto"
    pin_ranks: bool = False  # each rank keeps to threads_per_rank cores of its own
    spin_threads: bool = False  # a rank's threads look for work for some microseconds before they sleep
    cudagraph_mode: GraphMode = "none"
    cudagraph_capture_sizes: tuple[int, ...] = ()  # rows of the graphs, ascending; (): every size as it comes, on a CPU
    hf_overrides: dict[str, Any] = {}
    ranks_per_machine: int = 0  # GPUs of one machine; 0: on CPUs
    # What the checkpoint's files were at the start (layers/identity.py): size, time of change, inode, digest. Empty:
    # unknown.
    checkpoint: dict[str, tuple[int, int, int, str]] = {}
    reasons: dict[str, str] = {}  # field -> why
