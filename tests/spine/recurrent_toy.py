"""A model with every kind of cache: a recurrent layer, a layer that sees a window, a layer that sees everything, each followed by
routed experts. Its weights are those of a tiny Qwen3-MoE checkpoint; its arithmetic is plain torch.

Legend: T tokens, D hidden size, H query heads, Hkv key heads, Dh head size.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from cache.memory import CacheMemory
from cache.records import ZEROS
from cache.spec import CacheGroup, CacheSizes, CacheSpec, Field
from dbo.steps import Steps, drain
from layers.attention import qk_norm_rope_cache
from layers.step import StateInput, StepInput, TableInput
from models import registry
from models.base import CausalLM
from models.decoder_layer import LayerContext
from models.gqa.config import GqaConfig, parse
from models.gqa.model import Attention, GqaForCausalLM
from models.graph_breaks import GraphBreaks, Operation

NAME = "RecurrentToyForCausalLM"
UNWINDOWED = "UnwindowedToyForCausalLM"  # without the window, whose torch form asks the host for lengths
RECURRENT, WINDOWED, FULL = 0, 1, 2
WINDOW = 6
TAIL = 2  # earlier inputs that the recurrent layer sees, as a convolution does
DECAY = 0.9


class ToyConfig(GqaConfig, frozen=True):
    def cache_spec(self, dtype: str, fp8: bool = False) -> CacheSpec:
        shape = (self.num_kv_heads, self.head_dim)
        kv = (Field("key", shape, dtype), Field("value", shape, dtype))
        state = (Field("tail", (TAIL, self.hidden_size), dtype), Field("state", (self.hidden_size,), "float32"))
        return (
            CacheGroup("state", (RECURRENT,), state),
            CacheGroup("paged", (FULL,), kv),
            CacheGroup("window", (WINDOWED,), kv, WINDOW),
        )


class UnwindowedConfig(ToyConfig, frozen=True):
    def cache_spec(self, dtype: str, fp8: bool = False) -> CacheSpec:
        state, paged, window = super().cache_spec(dtype, fp8)
        return state, CacheGroup("paged", (*window.layers, *paged.layers), paged.fields)


def parse_toy(raw: dict[str, Any], source: str) -> ToyConfig:
    (name,) = raw["architectures"]
    config = parse(
        {**raw, "architectures": ["Qwen3MoeForCausalLM" if "num_experts_per_tok" in raw else "Qwen3ForCausalLM"]},
        source,
    )
    fields = {field.name: getattr(config, field.name) for field in structs.fields(config)}
    return (ToyConfig if name == NAME else UnwindowedConfig)(**{**fields, "architecture": name})


def windowed(step: StepInput, q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
    """Attention over the last WINDOW tokens, a sequence at a time; reads no row behind the window."""
    out_THD = torch.empty_like(q_THD)
    group = q_THD.shape[1] // k_cache.shape[1]
    for sequence, end in enumerate(step.kv_lens):
        first_T, last_T = step.query_starts[sequence : sequence + 2]
        context = end - (last_T - first_T)
        seen = torch.arange(max(0, context - WINDOW + 1), end)
        slots = step.block_table_BN[sequence, seen // step.block_size] * step.block_size + seen % step.block_size
        k, v = (cache[slots].repeat_interleave(group, 1).float() for cache in (k_cache, v_cache))
        positions = torch.arange(context, end)[:, None]
        mask = (seen <= positions) & (seen > positions - WINDOW)
        scores = torch.einsum("qhd,khd->hqk", q_THD[first_T:last_T].float(), k) * scale
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        out_THD[first_T:last_T] = torch.einsum("hqk,khd->qhd", weights, v).to(q_THD.dtype)
    return out_THD


class WindowAttention(Attention):
    def steps(self, x_TD: Tensor, context: LayerContext, cache: tuple[Tensor, ...]) -> Steps[Tensor]:
        yield from ()
        qkv = self.qkv(x_TD).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        slots_T = context.step.of_group(1).slots_T
        q_THD = qk_norm_rope_cache(qkv, self.num_heads, self.qk_norm, self.eps, context.rope, cache, slots_T)
        attended = context.operations[2](q_THD, *cache, self.scale)
        out_TD: Tensor = self.out(attended.reshape(-1, self.num_heads * self.head_dim))
        return out_TD


def recurrent(step: StepInput, x_TD: Tensor, tails: Tensor, states: Tensor) -> Tensor:
    """h = DECAY h + x_t + x_{t - TAIL} / 2; out = tanh(h). Updates in place nothing that a step reads."""
    records = step.state
    assert records is not None
    if step.num_decodes == step.num_sequences:  # the same without asking the host
        before = tails[records.reads_B]
        h_BD = DECAY * states[records.reads_B] + x_TD.float() + before[:, 0].float() / 2
        states.index_copy_(0, records.writes_B, h_BD)
        tails.index_copy_(0, records.writes_B, torch.cat([before[:, 1:], x_TD[:, None]], 1))
        return torch.tanh(h_BD).to(x_TD.dtype)
    out_TD = torch.empty_like(x_TD)
    for sequence, (read, written) in enumerate(zip(records.reads_B.tolist(), records.writes_B.tolist(), strict=True)):
        first_T, last_T = step.query_starts[sequence : sequence + 2]
        inputs = torch.cat([tails[read], x_TD[first_T:last_T]])
        h = states[read].clone()
        for token in range(first_T, last_T):
            h = DECAY * h + x_TD[token].float() + inputs[token - first_T].float() / 2
            out_TD[token] = torch.tanh(h)
        states[written] = h
        tails[written] = inputs[-TAIL:]
    return out_TD


class Recurrence(Attention):
    def steps(self, x_TD: Tensor, context: LayerContext, cache: tuple[Tensor, ...]) -> Steps[Tensor]:
        yield from ()
        return context.operations[1](x_TD, *cache)


def in_place(steps: Callable[..., Steps[Tensor]]) -> Callable[..., Steps[Tensor]]:
    """Recurrence.steps with an error: the records that a step has read hold the new state afterwards. (Those of new sequences
    are left as they are: all of them share record 0.)"""

    def changed(self: Recurrence, x_TD: Tensor, context: LayerContext, cache: tuple[Tensor, ...]) -> Steps[Tensor]:
        out_TD = yield from steps(self, x_TD, context, cache)
        records = context.step.state
        assert records is not None
        begun = records.reads_B != ZEROS
        for tensor in cache:
            tensor[records.reads_B[begun]] = tensor[records.writes_B[begun]]
        return out_TD

    return changed


class RecurrentToyForCausalLM(GqaForCausalLM):
    mixers: tuple[tuple[int, type[Attention]], ...] = ((RECURRENT, Recurrence), (WINDOWED, WindowAttention))

    def __init__(self, config: ToyConfig, *where: Any) -> None:
        super().__init__(config, *where)
        self.config = config
        dtype, device = self.decoders[0].mixer.out.weight.dtype, self.decoders[0].mixer.out.weight.device
        for layer, kind in self.mixers:
            self.decoders[layer].mixer = kind(config, 0, dtype, device)

    def prepare(self, step: StepInput, breaks: GraphBreaks) -> tuple[Operation, ...]:
        full, *_ = super().prepare(step, breaks)
        recurrence = breaks.operation(lambda step: partial(recurrent, step), step, 1)
        return (full, recurrence, *self.windowed(step, breaks))

    def windowed(self, step: StepInput, breaks: GraphBreaks) -> tuple[Operation, ...]:
        return (breaks.operation(lambda step: partial(windowed, step.of_group(1)), step, 1),)


class UnwindowedToyForCausalLM(RecurrentToyForCausalLM):
    mixers = ((RECURRENT, Recurrence),)

    def windowed(self, step: StepInput, breaks: GraphBreaks) -> tuple[Operation, ...]:
        return ()


for name in (NAME, UNWINDOWED):
    registry.FAMILIES[name] = registry.Family(parse_toy, "recurrent_toy", name)


def make_toy(qwen3: Path, path: Path, name: str = NAME) -> Path:
    """A checkpoint of the toy with the weights of a Qwen3 one of three layers, with experts or dense."""
    shutil.copytree(qwen3, path)
    raw = json.loads((path / "config.json").read_text())
    assert raw["num_hidden_layers"] == 3
    (path / "config.json").write_text(json.dumps({**raw, "architectures": [name]}))
    return path


def greedy(model: CausalLM, prompt: list[int], count: int, block_size: int = 4) -> list[int]:
    """What the model says without an engine: every token from a fresh pass over the whole sequence."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            num_tokens = len(tokens)
            blocks = -(-num_tokens // block_size)
            sizes = CacheSizes(block_size, blocks, blocks, 2)
            cache = CacheMemory.allocate(model.cache_spec(), sizes, torch.device("cpu"))
            places, table = torch.arange(num_tokens), torch.arange(blocks)[None]
            step = StepInput(
                token_ids_T=torch.tensor(tokens),
                positions_T=places,
                slots_T=places,
                query_starts=(0, num_tokens),
                kv_lens=(num_tokens,),
                kv_lens_B=torch.tensor([num_tokens]),
                block_table_BN=table,
                num_decodes=int(num_tokens == 1),
                block_size=block_size,
                logits_rows_P=torch.tensor([num_tokens - 1]),
                more_tables=(TableInput(places, table),),
                state=StateInput(torch.tensor([0]), torch.tensor([1])),
            )
            hidden_TD = drain(model.steps(step, cache))
            tokens.append(int(model.logits(hidden_TD[-1:]).argmax()))
    return tokens[len(prompt) :]
