"""Rows of bench_ops.py for linear attention: between the projections of a layer of Qwen3-Next (gated delta net) and of Kimi-Linear
(KDA), decodes and prompts. The states of so many layers are taken in turn that they come from memory, as in a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from op_clock import Op

from layers.gated_delta import DeltaInputs, DeltaShape, GatedDelta, GatedDeltaStep
from layers.step import StateInput, StepInput
from native import Isa, isa, limit_isa

SHAPES = {"gdn": DeltaShape(16, 32, 128, 128, 4, False), "kda": DeltaShape(32, 32, 128, 128, 4, True)}
DECODES = (1, 8, 32)
PROMPTS = (128, 2048)
STATE_BYTES = 512 << 20  # far more than is near a core


def linear_attention_ops(_: Sequence[int]) -> list[Op]:
    """Bytes: states and tails, read and written. Operations: those of the recurrence."""
    ops = []
    for name, shape in SHAPES.items():
        delta = GatedDelta(shape, 1e-6, torch.device("cpu"), sigmoid_gate=shape.channel_decay)
        for parameter in delta.parameters():
            parameter.copy_(torch.rand_like(parameter))
        for count, length in [*((sequences, 1) for sequences in DECODES), *((1, tokens) for tokens in PROMPTS)]:
            ops.append(_op(name, shape, delta, count, length))
    return ops


def _op(name: str, shape: DeltaShape, delta: GatedDelta, sequences: int, length: int) -> Op:
    tail, state = (shape.taps - 1, shape.channels), (shape.num_heads, shape.key_dim, shape.value_dim)
    record_bytes = 2 * tail[0] * tail[1] + 4 * shape.value_size * shape.key_dim
    records = 2 * sequences
    layers = max(1, STATE_BYTES // (records * record_bytes))
    caches = [(torch.zeros(records, *tail).bfloat16(), torch.zeros(records, *state)) for _ in range(layers)]
    sizes = [shape.channels, shape.value_size, shape.num_heads, shape.decay_size]
    inputs = DeltaInputs(*torch.randn(sequences * length, sum(sizes)).bfloat16().split(sizes, 1))
    steps = [GatedDeltaStep(_step(sequences, length, turn)) for turn in range(2)]

    def run(i: int) -> object:
        """A layer's states go to their other records when its turn comes again."""
        return steps[i // layers % 2](*inputs, delta, caches[i % layers])

    def plain(i: int) -> object:
        level = isa()
        limit_isa(Isa.NONE)
        try:
            return run(i)
        finally:
            limit_isa(level)

    label = f"{'B' if length == 1 else 'T'}={sequences * length} H={shape.num_key_heads}/{shape.num_heads} K=V={shape.key_dim}"
    flops = sequences * length * 8 * shape.value_size * shape.key_dim
    return Op(name, label, 2 * sequences * record_bytes, flops, run, plain, pairs=False)


def _step(sequences: int, length: int, turn: int) -> StepInput:
    tokens = torch.zeros(sequences * length, dtype=torch.int64)
    first, second = torch.arange(sequences), torch.arange(sequences) + sequences
    state = StateInput(*((first, second) if turn == 0 else (second, first)))
    starts, lens = tuple(range(0, sequences * length + 1, length)), (length,) * sequences
    decodes = sequences if length == 1 else 0
    return StepInput(tokens, tokens, tokens, starts, lens, tokens, tokens[:, None], decodes, 16, tokens, state=state)
