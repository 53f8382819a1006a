"""Steps of no request, to measure how long a layer computes and waits (engine/overlap/policy.py).

Only the first layers run, on cache of their own: what a layer takes does not depend on how many there are.
"""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import torch

from cache.memory import CacheMemory
from cache.records import ZEROS
from cache.spec import CacheSizes, state_groups, token_groups
from dbo.steps import Steps, weave
from engine.schedule import NewRow, Schedule
from engine.step_buffers import StepBuffers
from engine.step_memory import Limits
from ep.backends.dispatchers import StepState
from ep.instrumented import ExchangeTimes
from front.params import SamplingParams
from layers.step import StepInput
from models.base import CausalLM

PROMPT_TOKENS = 512  # of each prompt of a step with prompts
CONTEXT_TOKENS = 256  # of each sequence of a step of decodes
MAX_LAYERS = 4  # with experts


class Times(NamedTuple):
    """Seconds per layer with experts."""

    whole: float
    exposed: float  # of it


class Measure:
    """Of one rank. times: of the model's lanes. exchange: is told of every step, as of others. max_tokens, max_seqs,
    max_model_len: of a step and a sequence."""

    def __init__(
        self,
        model: CausalLM,
        times: ExchangeTimes,
        exchange: StepState,
        device: torch.device,
        max_tokens: int,
        max_seqs: int,
        max_model_len: int,
        block_size: int,
        context_cost: float,
    ) -> None:
        self._model = model
        self._times = times
        self._exchange = exchange
        self._device = device
        self.max_tokens = max_tokens
        self.max_seqs = min(max_seqs, max_tokens)
        self._prompt_tokens = max(1, min(PROMPT_TOKENS, max_model_len - 1))
        self._context_tokens = max(1, min(CONTEXT_TOKENS, max_model_len - 1))
        self._block_size = block_size
        self._context_cost = context_cost
        num_layers = min(MAX_LAYERS, sum(layer < model.config.num_layers for layer in model.moe_layer_ids))
        # The first layer may come behind others without experts, and with the embedding.
        self._skipped = 1 if num_layers > 1 else 0
        self.num_layers = num_layers - self._skipped  # those that are measured
        num_prompts = -(-max_tokens // self._prompt_tokens)
        blocks = max(num_prompts * self._blocks(self._prompt_tokens), self._blocks(self._context_tokens))
        spec = model.cache_spec()
        self._num_tables, self._has_state = len(token_groups(spec)), bool(state_groups(spec))
        self._kv = CacheMemory.allocate(spec, CacheSizes(block_size, blocks, blocks, 1 + max_tokens), device)

    def run(self, num_tokens: int, has_prefill: bool, num_ubatches: int) -> Steps[Times]:
        """One step of that kind. All ranks do it together. Raises PeerLost."""
        self._exchange.begin(num_tokens)
        inputs = self._inputs(num_tokens, has_prefill, num_ubatches)
        num_layers = self.num_layers + self._skipped
        parts = [self._model.steps(step, self._kv, lane) for lane, step in enumerate(inputs)]
        steps = weave(*parts) if len(parts) > 1 else parts[0]
        began, exposed = perf_counter(), self._times.exposed
        try:
            for turn in range(1, 2 * num_layers + 1):
                next(steps)
                if turn == 2 * self._skipped:
                    began, exposed = self._now(), self._times.exposed
                elif turn == 2 * num_layers:
                    took, exposed = self._now() - began, self._times.exposed - exposed
                yield
        finally:
            steps.close()
        self._times.finish()
        self._exchange.confirm()
        return Times(took / self.num_layers, exposed / self.num_layers)

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return perf_counter()

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _inputs(self, num_tokens: int, has_prefill: bool, num_ubatches: int) -> tuple[StepInput, ...]:
        """Prompts one after another, or decodes that all read the same cache (what they read makes no difference)."""
        schedule = Schedule(0)
        if has_prefill:
            starts = [0] * -(-num_tokens // self._prompt_tokens)
            ends = [min(self._prompt_tokens, num_tokens - i * self._prompt_tokens) for i in range(len(starts))]
            first_blocks = [i * self._blocks(self._prompt_tokens) for i in range(len(starts))]
        else:
            starts = [self._context_tokens - 1] * num_tokens
            ends = [self._context_tokens] * num_tokens
            first_blocks = [0] * num_tokens
        vocabulary = self._model.config.vocab_size
        for row, (start, end, first) in enumerate(zip(starts, ends, first_blocks, strict=True)):
            tokens = [(7919 * (row * self._prompt_tokens + i) + 1) % vocabulary for i in range(end)]
            schedule.new_rows.append(NewRow(row, row, tokens, end, SamplingParams(), seed=0, eos_token_ids=()))
            blocks = list(range(first, first + self._blocks(end)))
            schedule.new_blocks.append((row, [blocks] * self._num_tables))
            schedule.rows.append(row)
            schedule.starts.append(start)
            schedule.counts.append(end - start)
            schedule.samples.append(True)
        if self._has_state:
            schedule.state_reads = [ZEROS] * len(starts)
            schedule.state_writes = list(range(1, 1 + len(starts)))
        sizes = len(starts), num_tokens, max(ends), self._block_size, self._num_tables, self._has_state
        buffers = StepBuffers(Limits(*sizes), self._device, self._context_cost)
        return buffers.fill(schedule, num_ubatches).inputs
