"""Models with random weights, made on the device, and steps made by hand: what gpu_check.py runs whole.

Legend: T tokens, B sequences, D hidden size, P rows sampled, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cache.memory import CacheMemory
from cache.spec import CacheSizes, bytes_per_token
from configs.presets import PRESETS
from dbo.steps import Steps, drain
from engine.capture import Capture, GraphLibrary, GraphPolicy
from engine.prepared import PreparedStep
from engine.schedule import NewRow, Schedule
from engine.step_buffers import StepBuffers
from engine.step_memory import Limits
from ep.backends.local import LocalAllToAll
from ep.experts import Experts, WeightFormat
from ep.parallel import Parallel
from ep.router import DeepseekV3Router
from eplb.placement import linear_placement
from layers.norm import RMSNorm
from layers.step import StepInput
from models.base import CausalLM
from models.facts import ModelFacts
from models.graph_breaks import GraphBreaks
from models.registry import build, parse_config

TINY_DENSE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
TINY_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
                "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
TINY_LATENT: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 16, "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "q_lora_rank": 64, "kv_lora_rank": 128,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "moe_intermediate_size": 128, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
TINY_V2 = {"topk_method": "group_limited_greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.5}
TINY_V3 = {"topk_method": "noaux_tc", "norm_topk_prob": True, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5}

# Every family of the engine, small enough for a CPU.
TINY: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], **TINY_DENSE},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], **TINY_DENSE},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], **TINY_DENSE},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], **TINY_DENSE, **TINY_EXPERTS},
    "deepseek-v2": {"architectures": ["DeepseekV2ForCausalLM"], **TINY_LATENT, **TINY_V2},
    "deepseek-v3": {"architectures": ["DeepseekV3ForCausalLM"], **TINY_LATENT, **TINY_V3},
}


def reduced(preset: str, num_layers: int) -> dict[str, Any]:
    """A published model with fewer layers, at most one of them without experts."""
    raw = {**PRESETS[preset], "num_hidden_layers": num_layers}
    if "first_k_dense_replace" in raw:
        raw["first_k_dense_replace"] = 1
    return raw


def make_model(
    raw: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    form: WeightFormat = WeightFormat.PLAIN,
    like: CausalLM | None = None,
    filled: bool = True,
) -> CausalLM:
    """Random weights from torch's generator of the device; like: the same weights as that model instead (of another device or
    dtype); filled: False: whatever stands there."""
    facts = parse_config(raw, "a made-up config")
    placement = linear_placement(facts.num_moe_layers, facts.num_experts, 1) if facts.num_experts else None
    model = build(facts, Parallel(0, 1, placement, lambda slots, _: [LocalAllToAll(slots)]), dtype, device)
    model.keep_experts(form)
    assert isinstance(model, torch.nn.Module)
    if like is not None:
        assert isinstance(like, torch.nn.Module)
        _copy(model, like)
    elif filled:
        _randomise(model)
    return model


def _randomise(model: torch.nn.Module) -> None:
    """Rows of matrices have about unit length, so that activations stay of the same size through the layers."""
    for parameter in model.parameters():
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.uniform_(0.8, 1.2)
        elif isinstance(module, DeepseekV3Router):
            module.bias_E.uniform_(-0.05, 0.05)
        elif isinstance(module, Experts):
            device = next(model.parameters()).device
            for slot in range(module.num_slots):
                shapes = (
                    (module.width, module.hidden_size),
                    (module.width, module.hidden_size),
                    (module.hidden_size, module.width),
                )
                module.fill_slot(slot, *(torch.randn(shape, device=device) * shape[1] ** -0.5 for shape in shapes))


def _copy(model: torch.nn.Module, like: torch.nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), like.parameters(), strict=True):
        ours.copy_(theirs)
    experts = [[m for m in x.modules() if isinstance(m, Experts)] for x in (model, like)]
    for mine, other in zip(*experts, strict=True):
        for slot in range(mine.num_slots):
            mine.fill_slot(slot, *other.read_slot(slot))


def weight_bytes(model: CausalLM) -> tuple[int, int]:
    """(bytes of one routed expert, of all other weights that a token meets: the embedding's rows are not)."""
    assert isinstance(model, torch.nn.Module)
    parameters = {name: p.nbytes for name, p in model.named_parameters()}
    embedding = 0 if getattr(model.config, "tie_word_embeddings", False) else parameters.get("embed.weight", 0)
    expert = sum(tensor.nbytes for tensor in model.expert_storage(0, 0)) if model.config.num_experts else 0
    return expert, sum(parameters.values()) - embedding


@dataclass
class Driver:
    """B sequences, each with blocks of its own, in steps made by hand. The last block is nobody's (for graphs)."""

    model: CausalLM
    num_sequences: int
    max_len: int
    block_size: int
    device: torch.device

    def __post_init__(self) -> None:
        self.columns = -(-self.max_len // self.block_size)
        self.kv = CacheMemory.allocate(
            self.model.cache_spec(), CacheSizes(self.block_size, self.num_sequences * self.columns + 1), self.device
        )

    def step(self, sequences: Sequence[int], first: int, count: int, token_ids_T: Tensor | None = None) -> StepInput:
        """`count` tokens of each of these sequences, from position `first` on; random ones, if they are not given."""
        num = len(sequences)
        token = (
            token_ids_T if token_ids_T is not None else torch.randint(0, self.model.config.vocab_size, (num * count,))
        )
        position_BQ = torch.arange(first, first + count).expand(num, count)
        table_BN = torch.tensor(list(sequences))[:, None] * self.columns + torch.arange(self.columns)
        block_BQ = table_BN.gather(1, position_BQ // self.block_size)
        slots_BQ = block_BQ * self.block_size + position_BQ % self.block_size
        used = -(-(first + count) // self.block_size)
        lens = (first + count,) * num
        ends_B = torch.arange(1, num + 1) * count
        to = self.device
        return StepInput(
            token_ids_T=token.to(to),
            positions_T=position_BQ.reshape(-1).contiguous().to(to),
            slots_T=slots_BQ.reshape(-1).to(to),
            query_starts=(0, *ends_B.tolist()),
            kv_lens=lens,
            kv_lens_B=torch.tensor(lens).to(to),
            block_table_BN=table_BN[:, :used].contiguous().to(to),
            num_decodes=num if count == 1 else 0,
            block_size=self.block_size,
            logits_rows_P=(ends_B - 1).to(to),
        )

    def run(self, step: StepInput) -> Tensor:
        """The hidden state, [T, D]."""
        return drain(self.model.steps(step, self.kv))

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Of every token, float32 [T, V]."""
        return self.model.logits(hidden_TD).float()

    def capture(self, library: GraphLibrary, policy: GraphPolicy) -> Captured:
        def forward(step: StepInput, breaks: GraphBreaks, lane: int) -> Steps[Tensor]:
            return self.model.steps(step, self.kv, lane, breaks)

        most = max([self.num_sequences * 16, *policy.full, *policy.piecewise])
        rows = max([self.num_sequences, *policy.full])
        limits = Limits(rows, most, self.max_len, self.block_size, scratch_blocks=(self.kv.num_blocks - 1,))
        buffers = StepBuffers(limits, self.device)
        capture = Capture(forward, library, policy, buffers)
        capture.capture()
        return Captured(self, buffers, capture)


NOT_SAMPLED: Any = SimpleNamespace(prompt_logprobs=None)  # these steps end before anything is sampled


@dataclass(frozen=True)
class Captured:
    """The graphs of a driver, and what they read."""

    driver: Driver
    buffers: StepBuffers
    capture: Capture

    def step(self, sequences: Sequence[int], first: int, count: int, token_ids_T: Tensor | None = None) -> PreparedStep:
        """As Driver.step, laid out for the graphs."""
        driver, schedule = self.driver, Schedule(0)
        num = len(sequences) * count
        given = torch.randint(0, driver.model.config.vocab_size, (num,)) if token_ids_T is None else token_ids_T
        tokens, end = given.tolist(), first + count
        for place, row in enumerate(sequences):
            known = [*[0] * first, *tokens[place * count : (place + 1) * count]]
            schedule.new_rows.append(NewRow(row, row, known, end, NOT_SAMPLED, 1, ()))
            used = -(-end // driver.block_size)
            schedule.new_blocks.append((row, [list(range(row * driver.columns, row * driver.columns + used))]))
            schedule.rows.append(row)
            schedule.starts.append(first)
            schedule.counts.append(count)
            schedule.samples.append(True)
        return self.buffers.fill(schedule, choose=self.capture.choose)

    def run(self, step: PreparedStep) -> Tensor:
        """The hidden state, [T, D]."""
        return drain(self.capture.steps(step))


@dataclass(frozen=True)
class Whole:
    """A model with few layers. tiny: what stands for it on a CPU."""

    preset: str
    num_layers: int
    form: WeightFormat
    tiny: str

    def raw(self, tiny: bool) -> dict[str, Any]:
        return TINY[self.tiny] if tiny else reduced(self.preset, self.num_layers)

    def make(self, device: torch.device, tiny: bool, filled: bool = True) -> CausalLM:
        return make_model(self.raw(tiny), torch.bfloat16, device, self.form, filled=filled)


WHOLE = {
    "qwen3": Whole("qwen3-30b-a3b", 8, WeightFormat.PLAIN, "qwen3-moe"),
    "deepseek": Whole("deepseek-v3", 4, WeightFormat.FP8, "deepseek-v3"),
}


@dataclass(frozen=True)
class StepSizes:
    """Of a whole model. decodes: numbers of sequences, each with `context` tokens; prompts: (sequences, queries)."""

    context: int
    decodes: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...]
    block_size: int

    def driver(self, model: CausalLM, device: torch.device) -> Driver:
        return Driver(model, max(self.decodes), self.context + 16, self.block_size, device)


def steps_of(tiny: bool) -> StepSizes:
    return (
        StepSizes(20, (1, 4), ((1, 16), (2, 8)), 16)
        if tiny
        else StepSizes(4096, (1, 16, 64, 128), ((1, 2048), (4, 2048)), 64)
    )


@dataclass(frozen=True)
class Floor:
    """What a step must move and multiply at least: bytes, and operations of each kind of product."""

    bytes: float
    flops: dict[str, float]


def floor_of(
    model: CausalLM, num_tokens: int, num_logits: int, kv_tokens: int, keys_seen: int, form: WeightFormat
) -> Floor:
    """Of a step of num_tokens tokens, num_logits of which are sampled. kv_tokens: cached tokens that are read once; keys_seen: (query, key) pairs.

    Every weight that some token meets is read once; how many experts that are is the expectation of uniform routing.
    """
    facts: ModelFacts = model.config
    expert, others = weight_bytes(model)
    size = model.dtype.itemsize  # type: ignore[attr-defined]
    head = facts.vocab_size * facts.hidden_size
    others -= 0 if num_logits else head * size
    top_k = _experts_per_token(facts)
    num_layers = facts.num_moe_layers
    touched = facts.num_experts * (1 - (1 - top_k / facts.num_experts) ** num_tokens) if facts.num_experts else 0.0
    cache = kv_tokens * bytes_per_token(model.cache_spec())
    dense = (others // size - (head if num_logits else 0)) * num_tokens + head * num_logits
    attention = keys_seen * facts.num_layers * _attention_width(model)
    numbers = expert / (1.0 if form is WeightFormat.FP8 else size)
    kind = "fp8" if form is WeightFormat.FP8 else "bf16"
    flops = {"bf16": 2.0 * dense + 2.0 * attention}
    flops[kind] = flops.get(kind, 0.0) + 2.0 * numbers * top_k * num_tokens * num_layers
    return Floor(others + touched * expert * num_layers + cache, flops)


def _experts_per_token(facts: ModelFacts) -> int:
    router = getattr(facts, "router", None)
    return int(router.experts_per_token if router is not None else getattr(facts, "experts_per_token", 0))


def _attention_width(model: CausalLM) -> int:
    """Products of one (query, key) pair in one layer, over all heads."""
    facts: Any = model.config
    if hasattr(facts, "kv_lora_rank"):
        return int(facts.num_heads * (2 * facts.kv_lora_rank + facts.qk_rope_head_dim))
    return int(2 * facts.num_heads * facts.head_dim)
