"""From a model directory and a user's wishes to a Plan. Reads config.json and safetensors headers; no torch here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from configs.cache import cache_bytes, with_resumed_steps
from configs.engine import Dtype, EngineConfig, Frontend, Plan
from configs.env import read_env
from configs.exchange import with_vocab_parallel
from configs.formats import HALF_BYTES, QUANTIZED_BYTES, as_kept, weight_item
from configs.gpu import Exchange, Gpu, chosen_device, find_gpus, find_rdma
from configs.hosts import Hosts, as_one
from configs.implied import HIGHEST, at_level
from configs.machine import Machine, ModelNumbers, this_machine
from configs.presets import preset_of
from configs.resolve import DEFAULT_BATCHED_TOKENS, resolve
from configs.store import with_cache
from engine.overlap.memory import with_memory
from engine.sampling.processor_names import check_processors
from engine.speculation.plan import (
    default_method,
    drafter_of,
    plan_speculation,
    planned_facts,
    speculating,
    with_speculation,
    with_whole_layer,
)
from ep.requirements import (
    DEVICE_NAMES,
    FEW_TOKENS,
    PADDED,
    Situation,
    best_on_devices,
    is_installed,
    not_captured,
    refusal,
    split_pair,
)
from front.text.tokenizer import Tokenizer
from layers.gguf.header import read_header
from layers.identity import GGUF_INDEX, identify
from layers.safetensors_sizes import tensor_sizes
from models.eagle3.directory import model_directory as with_drafter
from models.facts import ModelFacts
from models.gguf.directory import SUFFIX, is_gguf, model_directory
from models.hub import HUB_NAME, located
from models.registry import read_config
from models.tiny import CHECKPOINT
from native import Isa, best_isa, measured, why_absent
from native.library import library_path
from store.key import weights_key
from store.numa import nodes, store_nodes

DECODE_COMPANION = "deepep_high_throughput"  # carries what a backend for few tokens cannot
_EMBEDDING = "model.embed_tokens.weight"
_LINEAR, _TAKEN_APART = ("_proj.weight", "lm_head.weight"), "kv_b_proj.weight"
_KEPT_BYTES = {
    "Q4_0": HALF_BYTES,
    **dict.fromkeys(("Q4_1", "Q4_K"), HALF_BYTES + 2 / 32),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K"), QUANTIZED_BYTES),
}  # of a number in GGUF's blocks
EMBEDDED_NAME = "moesaic-tiny"


def make_plan(
    config: EngineConfig,
    machine: Machine | None = None,
    hosts: Hosts | None = None,
    frontend: Frontend = Frontend.SERVER,
) -> Plan:
    """hosts: ranks are on other machines too. Raises ValueError, one line that names the file or the field."""
    config = at_level(config)
    if config.logits_processors:
        check_processors(config.logits_processors, frontend is Frontend.IN_PROCESS)
    path = asked_path(config.model)
    if is_gguf(path):
        path = model_directory(path, read_env().cache_root / "gguf")
    elif config.model:
        path = located(config.model, config.revision, config.download_dir)
    drafter = drafter_of(config.speculative_config, config.download_dir)
    if drafter is not None:
        path = with_drafter(path, drafter, read_env().cache_root / "drafters")
    name = config.model or EMBEDDED_NAME
    files = identify(path)  # before anything is read of them
    facts = read_config(path, config.hf_overrides)
    speculation, why_drafts = plan_speculation(config.speculative_config, facts, default_method(config.model, facts))
    machine = machine or machine_for(config, speculating(facts, speculation))
    if machine.gpu is None and not config.enable_eplb:  # what is balanced has the layer too
        speculation = with_whole_layer(speculation, facts)
    facts = speculating(facts, speculation)
    numbers = replace(model_numbers(path, name, facts), tokenizer_path=_tokenizer_path(config, path, facts))
    if hosts is not None:
        if config.all2all_backend not in ("auto", "gloo"):
            raise ValueError(f"all2all_backend {config.all2all_backend!r} does not reach other machines; gloo does")
        alike = replace(machine, native_choice="", choice_reason="not measured: machines of one server choose alike")
        plan = resolve(config, numbers, as_one(alike, hosts))
        why = {"all2all_backend": "ranks of several machines", "data_parallel_size_local": "as asked"}
        reasons = {**plan.reasons, **why}
        cadence = config.prefill_cadence != "off" and facts.num_experts > 0  # however many cores each machine has
        reasons |= {"prefill_cadence": "ranks of several machines"} if config.prefill_cadence == "auto" else {}
        plan = replace(plan, data_parallel_size_local=hosts.local, prefill_cadence=cadence, reasons=reasons)
    elif machine.gpu is not None and config.data_parallel_size > machine.gpu.count:
        raise ValueError(
            f"data_parallel_size {config.data_parallel_size} exceeds the {machine.gpu.count} GPU(s) of this machine"
        )
    else:
        plan = resolve(config, numbers, machine, frontend)
    plan = with_speculation(replace(plan, checkpoint=files), config, speculation, why_drafts, read_env().cache_root)
    plan = with_vocab_parallel(plan, config.vocab_parallel, facts.vocab_size * facts.hidden_size)
    plan = with_resumed_steps(plan, config.resume_steps, numbers.cache_spec(plan.dtype, plan.kv_cache_dtype == "fp8"))
    return with_memory(_with_weights(_with_unserved(plan, facts), config), read_env().cache_root)


def is_for_gpus(config: EngineConfig) -> bool:
    """Whether what is asked for exists on GPUs only, or is a well-known model that is not here."""
    parts = split_pair(config.all2all_backend)
    known = preset_of(config.model) is not None and not Path(config.model or "").is_dir()
    return any(part in DEVICE_NAMES for part in parts) or known


def _tokenizer_path(config: EngineConfig, path: Path, facts: ModelFacts) -> str:
    """ "": the model's own. ValueError: it has tokens that the model does not know."""
    revision = config.tokenizer_revision
    if config.tokenizer is None or config.tokenizer == config.model:
        if revision not in (None, config.revision):
            raise ValueError(f"tokenizer_revision {revision!r} is not that of the model; give tokenizer as well")
        return ""
    found = located(config.tokenizer, revision, config.download_dir, what="tokenizer")
    size = Tokenizer(path, found).vocab_size
    if size > facts.vocab_size:
        raise ValueError(
            f"tokenizer {config.tokenizer}: it has {size} tokens, the model's vocabulary only {facts.vocab_size}"
        )
    return str(found)


def asked_path(model: str | None) -> Path:
    """None: the embedded model's."""
    return Path(model) if model else CHECKPOINT


def downloaded(model: str | None, revision: str | None, download_dir: str | None) -> Path:
    """Where the checkpoint is, without downloading anything. ValueError: of a name, it is not in the cache."""
    path = asked_path(model)
    if model is None or path.exists() or not HUB_NAME.fullmatch(model):
        return path
    return located(model, revision, download_dir, downloads=False)


def _with_weights(plan: Plan, config: EngineConfig) -> Plan:
    """The plan with where packed weights are kept on disk, and their key (store/key.py)."""
    plan = with_cache(plan, config.weight_cache, read_env().cache_root / "weights")
    if not plan.weight_store:
        return plan
    names = (
        "architecture", "deterministic", "dtype", "expert_format", "linear_format", "moe_backend", "native_kernels",
        "num_experts",
    )  # fmt: skip
    choices: dict[str, object] = {name: getattr(plan, name) for name in names}
    speculation = plan.speculation
    drafts = None if speculation is None or speculation.method != "mtp" else speculation
    choices["drafts"] = None if drafts is None else drafts.whole
    key = weights_key(plan.checkpoint, {**choices, "overrides": plan.hf_overrides}, library_path())
    return _with_nodes(replace(plan, weight_key=key))


def _with_nodes(plan: Plan) -> Plan:
    """The plan with the nodes of memory that have a store each (store/numa.py)."""
    found = nodes()
    chosen = store_nodes(found, frozenset(os.sched_getaffinity(0)), plan.store_bytes) if plan.pin_ranks else ()
    why = "its ranks read what lies on their node" if chosen else "a store for the machine: ranks move between nodes"
    if len(found) < 2:
        why = "the machine has one node of memory"
    elif plan.pin_ranks and not chosen:
        why = "a store for the machine: not every node has room for one and as much again"
    return replace(plan, store_nodes=chosen, reasons={**plan.reasons, "store_nodes": why})


def _with_unserved(plan: Plan, facts: ModelFacts) -> Plan:
    """Says which parts of the checkpoint are not served."""
    skipped = facts.key_names.skipped
    if not skipped:
        return plan
    why = f"of its checkpoint, tensors whose names begin with {', '.join(skipped)} are not served"
    return replace(plan, reasons={**plan.reasons, "model_path": why})


def machine_for(
    config: EngineConfig, facts: ModelFacts, gpu: Gpu | None = None, installed: Callable[[str], bool] = is_installed
) -> Machine:
    """This machine as the config uses it: its CPU, or its GPUs. gpu: what every rank of a cluster has; None: look for
    one. installed: whether a module is there."""
    machine = _with_kernels(this_machine())
    if config.optimization_level < HIGHEST:
        machine = replace(machine, native_choice="", choice_reason=f"not measured (-O{config.optimization_level})")
    reason = f"a cluster with {gpu.count} {gpu.name} in each machine" if gpu is not None else "as asked"
    no_rdma, no_ibgda = ("", "") if gpu is not None or config.device == "cpu" else find_rdma()
    if gpu is None and config.device != "cpu":
        gpu, reason = find_gpus(read_env().visible_gpus)
    device, why = chosen_device(config.device, gpu, reason)
    if gpu is None or device == "cpu":
        return replace(machine, device_reason=why)
    return replace(
        machine,
        device="cuda",
        gpu=gpu,
        exchange=_exchange(config, facts, gpu, installed, no_rdma, no_ibgda),
        device_reason=reason,
        free_memory=gpu.memory * config.data_parallel_size,
        fast_bfloat16=True,
        native_kernels="none",
        native_reason="tensors are on a GPU",
        native_choice="",
        choice_reason="tensors are on a GPU",
    )


def _exchange(
    config: EngineConfig, facts: ModelFacts, gpu: Gpu, installed: Callable[[str], bool], no_rdma: str, no_ibgda: str
) -> Exchange | None:
    """None: no tokens travel. no_rdma, no_ibgda: of this machine; of a cluster that is not here "". Raises
    ValueError for a backend that cannot serve."""
    if config.data_parallel_size == 1 or not facts.num_experts:
        return None
    asked, dtype = config.all2all_backend, "float32" if config.dtype == "float32" else "bfloat16"
    situation = Situation(
        config.data_parallel_size,
        "cuda",
        gpu.count,
        dtype=dtype,
        hidden_size=facts.hidden_size,
        max_tokens=config.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS,
        rows="fp8" if config.dispatch_dtype == "fp8" else "plain",
        num_ubatches=1 if config.enable_dbo == "off" else config.ubatch_size,
        no_rdma=no_rdma,
        no_ibgda=no_ibgda,
        installed=installed,
    )
    if asked == "auto":
        name = best_on_devices(situation)
        why = "the first that can serve and is installed (explain --gpu lists them)"
    else:
        name, why = asked, "as asked"
        if any(part not in DEVICE_NAMES for part in split_pair(asked)):
            raise ValueError(f"all2all_backend {asked!r} does not connect GPUs; one of auto, {', '.join(DEVICE_NAMES)}")
        reason = refusal(asked, situation)
        pair = f"{DECODE_COMPANION}+{asked}"
        if reason and asked in PADDED and not refusal(pair, situation):
            name, why = pair, f"as asked where a rank brings few tokens; {asked}: {reason}"
        elif reason:
            raise ValueError(f"all2all_backend {asked!r}: {reason}")
    small = split_pair(name)[1]
    return Exchange(name, why, not_captured(small), FEW_TOKENS if small in PADDED else 0)


def _with_kernels(machine: Machine) -> Machine:
    """What the native kernels find on this machine, or may use of it."""
    best, asked = best_isa(), read_env().isa.upper()
    if asked and asked not in Isa.__members__:
        names = ", ".join(level.name.lower() for level in Isa)
        raise ValueError(f"MOESAIC_ISA {read_env().isa!r} is unknown; one of {names}")
    used = min(best, Isa[asked]) if asked else best
    choice, measurements = measured(used)
    reason = why_absent() or ("the best that this CPU has" if used == best else f"MOESAIC_ISA={asked.lower()}")
    return replace(
        machine,
        native_kernels=used.name.lower(),
        native_reason=reason,
        native_choice="" if used in (Isa.NONE, Isa.AVX512) and not choice.whole else str(choice),
        choice_reason=measurements,
        fast_bfloat16=used > Isa.NONE or (machine.fast_bfloat16 and used == best),  # the kernels multiply it everywhere
    )


def model_numbers(path: Path, name: str, facts: ModelFacts) -> ModelNumbers:
    """Weights are counted from the headers of the safetensors files: their own sizes, nothing estimated; those of
    fewer bits as wide as they are at load, unless they are kept (configs/resolve.py)."""
    total = experts = linears = fp8_experts = 0
    whole = f"model.layers.{facts.num_layers}." if getattr(facts, "whole_drafts", False) else None
    halves = ""
    by_dtype: dict[str, int] = {}
    if (path / GGUF_INDEX).is_file() and facts.num_experts:
        halves = "mixed"
    for file in sorted((*path.glob("*.safetensors"), *path.glob("*.gguf"))):
        for key, dtype, size in _gguf_tensors(path, file) if file.suffix == SUFFIX else tensor_sizes(file):
            known = facts.key_names(key)
            if known is None:  # of a part that is not served
                continue
            size *= _widening(known, dtype)
            total += size
            by_dtype[dtype] = by_dtype.get(dtype, 0) + size
            if ".mlp.experts." not in known or (whole is not None and known.startswith(whole)):
                linears += size if known.endswith(_LINEAR) and not known.endswith(_TAKEN_APART) else 0
                continue  # all ranks have such weights
            experts += size
            fp8_experts += size if dtype == "F8_E4M3" else 0
            if known.endswith(("_packed", "_blocks", ".qweight")):
                halves = "mxfp4" if known.endswith("_blocks") else "int4"
    if not by_dtype:
        raise ValueError(f"{path}: no *.safetensors or *.gguf file with tensors in it")
    common = max(by_dtype, key=lambda dtype: by_dtype[dtype])
    held: Dtype = "float32" if common == "F32" else "bfloat16"
    return ModelNumbers(
        path=str(path),
        name=name,
        architecture=facts.architecture,
        max_position_embeddings=facts.max_position_embeddings,
        num_experts=facts.num_experts,
        num_moe_layers=facts.num_moe_layers,
        cache_spec=facts.cache_spec,
        weight_bytes=total,
        expert_bytes=experts,
        linear_bytes=linears,
        dtype=held,
        fp8_experts=fp8_experts > experts // 2,
        half_experts=halves,
        in_bfloat16=common == "BF16" and not (path / GGUF_INDEX).is_file(),
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        context_limit=facts.context_limit,
        context_reason=facts.context_reason,
    )


def planned_cache(plan: Plan) -> dict[str, int]:
    """Bytes of a rank's cache, by what they are for."""
    return cache_bytes(plan, planned_facts(plan).cache_spec(plan.dtype, plan.kv_cache_dtype == "fp8"))


def step_rows(plan: Plan) -> tuple[int, int]:
    """What a decode step of a rank with all its sequences sends: bytes of their rows, once, and in how many layers."""
    facts = read_config(Path(plan.model_path), plan.hf_overrides)
    return plan.max_num_seqs * facts.hidden_size * (4 if plan.dtype == "float32" else 2), facts.num_moe_layers


def expert_choices(plan: Plan) -> tuple[int, int, int, int, int]:
    """Of a model with experts: bytes of all of them as they are kept, of all other weights, experts per token, layers
    with experts, hidden size."""
    facts = read_config(Path(plan.model_path), plan.hf_overrides)
    numbers = model_numbers(Path(plan.model_path), plan.model_path, facts)
    item, held = 4 if plan.dtype == "float32" else 2, 4 if numbers.dtype == "float32" else 2
    experts = int(numbers.expert_bytes / held * weight_item(plan.expert_format, plan.dtype))
    numbers = as_kept(numbers, plan.dtype, "plain", plan.linear_format)
    others = (numbers.weight_bytes - numbers.expert_bytes) * item // held
    router = getattr(facts, "router", None)  # every family with experts has one
    assert router is not None, facts.architecture
    return experts, others, router.experts_per_token, facts.num_moe_layers, facts.hidden_size


def _gguf_tensors(directory: Path, file: Path) -> Iterator[tuple[str, str, int]]:
    """The same of a GGUF file: weights of fewer bits as they are kept in memory (layers/gguf/blocks.py), but for the
    embedding, which is widened."""
    header = read_header(file)
    names = json.loads((directory / GGUF_INDEX).read_text(encoding="utf-8"))["files"][file.name]
    for name, (key, part, _) in names.items():
        tensor = header.tensors[key]
        numbers = math.prod(tensor.shape if part is None else tensor.shape[1:])
        wide = tensor.kind not in _KEPT_BYTES or name == _EMBEDDING
        each = (4 if tensor.kind == "F32" else 2) if wide else _KEPT_BYTES[tensor.kind]
        yield name, "F32" if tensor.kind == "F32" else "BF16", int(numbers * each)


def _widening(key: str, dtype: str) -> int:
    """How many times as many bytes the weight takes in bfloat16. Scales of packed weights take none."""
    if dtype.startswith("F8"):
        return 2
    if key.endswith(("_packed", "_blocks", ".qweight")):  # two numbers a byte
        return 4
    return 0 if key.endswith("_scales") and dtype == "U8" else 1
