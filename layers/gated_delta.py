"""Linear attention with a state of fixed size: a short convolution, the gated delta rule, and a gated norm. Gated
DeltaNet (Qwen3-Next) has a decay for each head, KDA (Kimi-Linear) one for each channel of a key.

A sequence's record (cache/spec.py) has the last inputs of the convolution and the state of each head, and where there
may be drafts what was projected of those of the last step (layers/step.py, StateRuns). The recurrence of
layers/reference.py is the specification. Here it is computed in chunks of tokens: within a chunk the values that the
state lacks follow from a triangular system, and the state moves once. Where the native kernels are there, they compute
all of it (native/gated_delta.py).

Legend: T tokens of the step, B sequences, N tokens of one of them, J of a chunk; Hk key heads, H value heads (each key
head serves H / Hk in a row), K width of a key, V of a value; W taps, C channels: queries, keys and values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from msgspec import Struct
from msgspec.structs import astuple
from torch import Tensor, nn

from layers import choice
from layers.linear import parameter
from layers.step import StateInput, StateRuns, StepInput
from native import gated_delta as native

CHUNK, CHANNEL_CHUNK = 64, 16  # tokens of a chunk, with a decay for each head and for each channel
PIECE = 1024  # tokens of a sequence whose numbers are in float32 at the same time
L2_EPS = 1e-6


class DeltaShape(Struct, frozen=True):
    """channel_decay: there is a decay for each channel of a key, else one for each head. num_heads is a multiple of
    num_key_heads. In the order of native.gated_delta's sizes."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    taps: int
    channel_decay: bool

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.key_size + self.value_size

    @property
    def decay_size(self) -> int:
        return self.num_heads * (self.key_dim if self.channel_decay else 1)


class DeltaInputs(NamedTuple):
    """What a layer projects of its tokens; rows may lie apart, their numbers do not. qkv: queries, keys, values; gate:
    of the output; beta, decay: before their functions."""

    qkv_TC: Tensor
    gate_T: Tensor  # [T, H * V]
    beta_TH: Tensor
    decay_T: Tensor  # [T, H], or [T, H * K]


class GatedDelta(nn.Module):
    """The parameters between the projections, all in float32. rate [H]: exp(A_log). dt_bias: as decay_T. norm [V].

    The logarithm of a decay is -rate * softplus(decay + dt_bias), or, with a lower bound (below 0), that bound times
    sigmoid(rate * (decay + dt_bias)). sigmoid_gate: the output's gate is its sigmoid, else its silu.
    """

    def __init__(
        self,
        shape: DeltaShape,
        eps: float,
        device: torch.device,
        sigmoid_gate: bool = False,
        lower_bound: float = 0.0,
    ) -> None:
        super().__init__()
        self.shape, self.eps, self.sigmoid_gate, self.lower_bound = shape, eps, sigmoid_gate, lower_bound
        self.conv = parameter((shape.taps, shape.channels), torch.float32, device)
        self.rate = parameter((shape.num_heads,), torch.float32, device)
        self.dt_bias = parameter((shape.decay_size,), torch.float32, device)
        self.norm = parameter((shape.value_dim,), torch.float32, device)

    def log_decay(self, decay_T: Tensor) -> Tensor:
        """float32 [T, H, 1 or K]."""
        x_TH = (decay_T.float() + self.dt_bias).view(decay_T.shape[0], self.shape.num_heads, -1)
        rate_H1 = self.rate[:, None]
        if self.lower_bound:
            return self.lower_bound * torch.sigmoid(rate_H1 * x_TH)
        return -rate_H1 * F.softplus(x_TH)


class GatedDeltaStep:
    """The sequences of a step, prepared once for all layers."""

    def __init__(self, step: StepInput) -> None:
        assert step.state is not None
        self._step, self._state = step, step.state
        self._places: tuple[Tensor, ...] | None = None
        self._starts: Tensor | None = None  # of a step in which a sequence has several tokens
        self._runs = step.state.runs
        if choice.on_gpu(step.state.reads_B.device):
            self._places = sequence_places(step) if self._runs is None else None
            return
        if step.num_decodes < step.num_sequences:
            self._starts = torch.tensor(step.query_starts, dtype=torch.int64)

    def __call__(
        self,
        qkv_TC: Tensor,
        gate_T: Tensor,
        beta_TH: Tensor,
        decay_T: Tensor,
        weights: GatedDelta,
        cache: tuple[Tensor, ...],
    ) -> Tensor:
        """[T, H * V], in the dtype of the inputs (DeltaInputs). cache: the layer's tails [records, W - 1, C] and states
        float32 [records, H, K, V], and where there may be drafts inputs of theirs: qkv, beta, decay [records, drafts,
        ...]; reads and writes the records of the step, which may be the same."""
        shape, inputs = weights.shape, DeltaInputs(qkv_TC, gate_T, beta_TH, decay_T)
        if native.can_run(inputs.qkv_TC, shape.taps):
            sizes = (*astuple(shape), weights.sigmoid_gate)
            parameters = (weights.conv, weights.rate, weights.dt_bias, weights.norm)
            places = (self._starts, self._state.reads_B, self._state.writes_B) if self._runs is None else self._runs
            return native.gated_delta(
                inputs, parameters, sizes, places[0], places[1:], cache, weights.eps, weights.lower_bound
            )
        if self._places is not None:
            run_triton = choice.triton_implementation("layers.triton.gated_delta", "gated_delta")
            out_TV: Tensor = run_triton(
                inputs,
                weights.log_decay(decay_T),
                (weights.conv, weights.norm),
                (*astuple(shape), weights.sigmoid_gate),
                self._places,
                cache[:2],
                (weights.eps, L2_EPS),
            )
            return out_TV
        if self._runs is not None:
            return self._run_by_run(self._runs, inputs, weights, cache)
        return self._in_torch(inputs, weights, cache)

    def _run_by_run(
        self, runs: StateRuns, inputs: DeltaInputs, weights: GatedDelta, cache: tuple[Tensor, ...]
    ) -> Tensor:
        out_TV = inputs.qkv_TC.new_empty((inputs.qkv_TC.shape[0], weights.shape.value_size))
        state = StateInput(runs.reads_R.to(out_TV.device), runs.writes_R.to(out_TV.device))
        numbers = (runs.starts[:-1], runs.starts[1:], *runs[1:])
        members = zip(*(numbers_R.tolist() for numbers_R in numbers), strict=True)
        for index, (first, last, read, written, kept, guesses) in enumerate(members):
            run = _Run(weights, state, slice(index, index + 1), cache)
            own, firm = DeltaInputs(*(x[first:last] for x in inputs)), kept + last - first - guesses
            rows = own
            if kept:
                qkv_NC, beta_NH, decay_N = (field[read, :kept] for field in cache[2:])
                before = DeltaInputs(qkv_NC, own.gate_T.new_zeros(kept, own.gate_T.shape[1]), beta_NH, decay_N)
                rows = DeltaInputs(*map(torch.cat, zip(before, own, strict=True)))
            outs = [
                run(DeltaInputs(*(x[None, start : min(firm, start + PIECE)] for x in rows)))[0]
                for start in range(0, firm, PIECE)
            ]
            run.keep()
            if guesses:
                outs.append(run(DeltaInputs(*(x[None, firm:] for x in rows)))[0])
                for field, x in zip(cache[2:], (own.qkv_TC, own.beta_TH, own.decay_T), strict=True):
                    field[written, :guesses] = x[-guesses:]
            out_TV[first:last] = torch.cat(outs)[kept:]
        return out_TV

    def _in_torch(self, inputs: DeltaInputs, weights: GatedDelta, cache: tuple[Tensor, ...]) -> Tensor:
        out_TV = inputs.qkv_TC.new_empty((inputs.qkv_TC.shape[0], weights.shape.value_size))
        decodes, starts = self._step.num_decodes, self._step.query_starts
        if decodes:
            run = _Run(weights, self._state, slice(0, decodes), cache)
            out_TV[:decodes] = run(DeltaInputs(*(x[:decodes, None] for x in inputs)))[:, 0]
            run.keep()
        for sequence in range(decodes, self._step.num_sequences):
            first, last = starts[sequence : sequence + 2]
            run = _Run(weights, self._state, slice(sequence, sequence + 1), cache)
            for start in range(first, last, PIECE):
                piece = slice(start, min(last, start + PIECE))
                out_TV[piece] = run(DeltaInputs(*(x[None, piece] for x in inputs)))[0]
            run.keep()
        return out_TV


def sequence_places(step: StepInput) -> tuple[Tensor, ...]:
    """On the device, int64: where each sequence's tokens begin [B + 1], the sequence of each token [T], and the records
    that are read and written."""
    assert step.state is not None
    device, records = step.state.reads_B.device, step.state[:2]
    if step.num_decodes == step.num_sequences:  # nothing of the host: a graph may hold it
        return (*(torch.arange(step.num_sequences + more, device=device) for more in (1, 0)), *records)
    starts_B = torch.tensor(step.query_starts, dtype=torch.int64)
    sequence_T = torch.arange(step.num_sequences).repeat_interleave(starts_B.diff())
    return starts_B.to(device), sequence_T.to(device), *records


class _Run:
    """Sequences of equally many tokens each, which go on from their records."""

    def __init__(self, weights: GatedDelta, state: StateInput, members: slice, cache: tuple[Tensor, ...]) -> None:
        self._weights, self._cache, self._writes_B = weights, cache[:2], state.writes_B[members]
        self._tails_BWC, self._states_BHKV = (field.index_select(0, state.reads_B[members]) for field in cache[:2])

    def __call__(self, inputs: DeltaInputs) -> Tensor:
        """The next N tokens of each: [B, N, H * V]."""
        weights, shape = self._weights, self._weights.shape
        batch, count = inputs.qkv_TC.shape[:2]
        decay = weights.log_decay(inputs.decay_T.flatten(0, 1)).view(batch, count, shape.num_heads, -1).transpose(1, 2)
        beta_BHN1 = inputs.beta_TH.float().sigmoid().transpose(1, 2)[..., None]
        q, k, v = self._convolved(inputs.qkv_TC)
        out_BHNV = torch.empty_like(v)
        chunk = CHANNEL_CHUNK if shape.channel_decay else CHUNK
        for first in range(0, count, chunk):
            some = slice(first, min(count, first + chunk))
            out_BHNV[:, :, some], self._states_BHKV = chunk_rule(
                q[:, :, some], k[:, :, some], v[:, :, some], decay[:, :, some], beta_BHN1[:, :, some], self._states_BHKV
            )
        return self._gated(out_BHNV.transpose(1, 2), inputs.gate_T)

    def _convolved(self, qkv_BNC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, H, N, K], as they are multiplied, and values [B, H, N, V], in float32."""
        shape, (batch, count, _) = self._weights.shape, qkv_BNC.shape
        inputs = torch.cat([self._tails_BWC, qkv_BNC], 1)
        self._tails_BWC = inputs[:, count:]
        taps = [inputs[:, tap : tap + count] * weight_C for tap, weight_C in enumerate(self._weights.conv)]
        mixed = F.silu(torch.stack(taps).sum(0))
        keys_end = 2 * shape.key_size
        q, k = mixed[..., :keys_end].view(batch, count, 2, shape.num_key_heads, -1).unbind(2)
        v = mixed[..., keys_end:].view(batch, count, shape.num_heads, -1)
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
        q, k = (x.repeat_interleave(shape.num_heads // shape.num_key_heads, 2) for x in (q * shape.key_dim**-0.5, k))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _gated(self, out_BNHV: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(out_BNHV, (out_BNHV.shape[-1],), self._weights.norm, self._weights.eps).flatten(2)
        gate = gate.float()
        return (normed * (torch.sigmoid(gate) if self._weights.sigmoid_gate else F.silu(gate))).to(self._cache[0].dtype)

    def keep(self) -> None:
        for field, values in zip(self._cache, (self._tails_BWC, self._states_BHKV), strict=True):
            field.index_copy_(0, self._writes_B, values)


def chunk_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The next J tokens: reference.gated_delta_rule with heads in front of tokens, [..., H, J, K], and the logarithm of
    the decay, [..., H, J, 1 or K]; beta [..., H, J, 1]; state [..., H, K, V]."""
    since = log_decay.cumsum(-2)  # the chunk began
    count = q.shape[-2]
    later = torch.ones((count, count), dtype=torch.bool, device=q.device).triu_(1)
    # Of a pair of tokens (i, j) the decay from j to i; masked before the exponential, which would overflow.
    between = (since[..., :, None, :] - since[..., None, :, :]).masked_fill_(later[..., None], float("-inf")).exp_()
    if between.shape[-1] == 1:
        between = between[..., 0]
        key_pairs, query_pairs = (x @ k.transpose(-1, -2) * between for x in (k, q))
    else:
        key_pairs, query_pairs = (torch.einsum("...ik,...jk,...ijk->...ij", x, k, between) for x in (k, q))
    decayed = since.exp()
    missing = torch.linalg.solve_triangular(
        beta * key_pairs, beta * (v - k * decayed @ state), upper=False, unitriangular=True
    )
    out = q * decayed @ state + query_pairs @ missing
    left = (since[..., -1:, :] - since).exp()
    moved = state * decayed[..., -1, :, None] + (k * left).transpose(-1, -2) @ missing
    return out, moved
