# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Linear attention in Triton (layers/gated_delta.py): convolutions of all tokens, then the gated delta rule in chunks
of 16 tokens with the state in registers, then the gated norm.

Within a chunk the values that a state lacks solve (I + L) x = r with L strictly lower triangular. As L^16 = 0, the
inverse is the product of I - L, I + L^2, I + L^4 and I + L^8.

Legend: T tokens, B sequences, H value heads, K width of a key, V of a value, W taps, C channels, J tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 16
VALUES = 32  # columns of a state that one program has


@triton.jit
def _convolve_kernel(
    qkv_ptr, tail_ptr, conv_ptr, mixed_ptr, starts_ptr, sequence_ptr, reads_ptr, stride, channels, key_heads, heads,
    key_dim, value_dim, eps, TAPS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """One head's query, key or value of one token, in float32: silu of the convolution; queries and keys normalised."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_key = part < 2 * key_heads
    size = tl.where(of_key, key_dim, value_dim)
    first = tl.where(of_key, part * key_dim, 2 * key_heads * key_dim + (part - 2 * key_heads) * value_dim)
    column = tl.arange(0, NUMBERS)
    mask = column < size
    sequence = tl.load(sequence_ptr + token)
    position = token - tl.load(starts_ptr + sequence)
    record = tl.load(reads_ptr + sequence)
    x = tl.zeros((NUMBERS,), tl.float32)
    for tap in tl.static_range(TAPS):
        before = TAPS - 1 - tap
        inside = position >= before
        row = qkv_ptr + (token - before) * stride + first + column
        old = tail_ptr + (record * (TAPS - 1) + position + tap) * channels + first + column
        value = tl.load(row, mask=mask & inside, other=0.0).to(tl.float32)
        if tap < TAPS - 1:
            value += tl.load(old, mask=mask & (position < before), other=0.0).to(tl.float32)
        x += value * tl.load(conv_ptr + tap * channels + first + column, mask=mask, other=0.0)
    x = x * tl.sigmoid(x)
    norm = tl.rsqrt(tl.sum(x * x, 0) + eps)
    factor = tl.where(
        part < key_heads, norm * tl.rsqrt(tl.full((), 0.0, tl.float32) + key_dim), tl.where(of_key, norm, 1.0)
    )
    tl.store(mixed_ptr + token * channels + first + column, x * factor, mask=mask)


@triton.jit
def _rule_kernel(
    mixed_ptr, decay_ptr, beta_ptr, state_ptr, out_ptr, starts_ptr, reads_ptr, writes_ptr, channels, key_heads, heads,
    key_dim, value_dim, CHANNEL_DECAY: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """All tokens of a sequence, for some columns of one head's state."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.arange(0, KEYS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, J)
    key_mask, column_mask = key < key_dim, column < value_dim
    key_head = head // (heads // key_heads)
    place = head * key_dim * value_dim + key[:, None] * value_dim + column[None]
    state_mask, size = key_mask[:, None] & column_mask[None], heads * key_dim * value_dim
    state = tl.load(state_ptr + tl.load(reads_ptr + sequence) * size + place, mask=state_mask, other=0.0)
    below, earlier = row[:, None] >= row[None], row[:, None] > row[None]
    last = tl.load(starts_ptr + sequence + 1)
    for start in range(tl.load(starts_ptr + sequence), last, J):
        token = start + row
        there = token < last
        keys_mask = there[:, None] & key_mask[None]
        base = mixed_ptr + token[:, None] * channels + key_head * key_dim + key[None]
        q = tl.load(base, mask=keys_mask, other=0.0)
        k = tl.load(base + key_heads * key_dim, mask=keys_mask, other=0.0)
        values = mixed_ptr + token[:, None] * channels + 2 * key_heads * key_dim + head * value_dim + column[None]
        v = tl.load(values, mask=there[:, None] & column_mask[None], other=0.0)
        beta = tl.load(beta_ptr + token * heads + head, mask=there, other=0.0)
        if CHANNEL_DECAY:
            decays = decay_ptr + (token[:, None] * heads + head) * key_dim + key[None]
            since = tl.cumsum(tl.load(decays, mask=keys_mask, other=0.0), 0)
            key_pairs, query_pairs = tl.zeros((J, J), tl.float32), tl.zeros((J, J), tl.float32)
            for j in tl.static_range(J):
                chosen = row[:, None] == j
                k_j, since_j = tl.sum(tl.where(chosen, k, 0.0), 0), tl.sum(tl.where(chosen, since, 0.0), 0)
                # Of later tokens only: of earlier ones the exponential could overflow.
                moved = k_j[None] * tl.exp(tl.minimum(since - since_j[None], 0.0))
                key_pairs = tl.where(row[None] == j, tl.sum(k * moved, 1)[:, None], key_pairs)
                query_pairs = tl.where(row[None] == j, tl.sum(q * moved, 1)[:, None], query_pairs)
            whole = tl.sum(tl.where(row[:, None] == J - 1, since, 0.0), 0)
            decayed, left, kept = tl.exp(since), tl.exp(whole[None] - since), tl.exp(whole)[:, None]
        else:
            since = tl.cumsum(tl.load(decay_ptr + token * heads + head, mask=there, other=0.0), 0)
            between = tl.exp(tl.minimum(since[:, None] - since[None], 0.0))
            key_pairs = tl.dot(k, tl.trans(k), input_precision="tf32x3") * between
            query_pairs = tl.dot(q, tl.trans(k), input_precision="tf32x3") * between
            whole = tl.sum(tl.where(row == J - 1, since, 0.0), 0)
            decayed, left, kept = tl.exp(since)[:, None], tl.exp(whole - since)[:, None], tl.exp(whole)
        power = tl.where(earlier, -beta[:, None] * key_pairs, 0.0)
        inverse = tl.where(row[:, None] == row[None], 1.0, power)
        for _ in tl.static_range(3):
            power = tl.dot(power, power, input_precision="tf32x3")
            inverse += tl.dot(inverse, power, input_precision="tf32x3")
        missing = beta[:, None] * (v - tl.dot(k * decayed, state, input_precision="tf32x3"))
        x = tl.dot(inverse, missing, input_precision="tf32x3")
        out = tl.dot(q * decayed, state, input_precision="tf32x3")
        out += tl.dot(tl.where(below, query_pairs, 0.0), x, input_precision="tf32x3")
        state = state * kept + tl.dot(tl.trans(k * left), x, input_precision="tf32x3")
        outs = out_ptr + (token[:, None] * heads + head) * value_dim + column[None]
        tl.store(outs, out, mask=there[:, None] & column_mask[None])
    tl.store(state_ptr + tl.load(writes_ptr + sequence) * size + place, state, mask=state_mask)


@triton.jit
def _gated_norm_kernel(
    x_ptr, gate_ptr, norm_ptr, out_ptr, gate_stride, heads, value_dim, eps, SIGMOID: tl.constexpr, NUMBERS: tl.constexpr
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, NUMBERS)
    mask = column < value_dim
    place = (token * heads + head) * value_dim + column
    x = tl.load(x_ptr + place, mask=mask, other=0.0)
    gate = tl.load(gate_ptr + token * gate_stride + head * value_dim + column, mask=mask, other=0.0).to(tl.float32)
    opened = tl.sigmoid(gate)
    if not SIGMOID:
        opened *= gate
    x *= tl.rsqrt(tl.sum(x * x, 0) / value_dim + eps) * tl.load(norm_ptr + column, mask=mask, other=0.0)
    tl.store(out_ptr + place, (x * opened).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _tail_kernel(
    qkv_ptr, tail_ptr, starts_ptr, reads_ptr, writes_ptr, stride, channels, TAPS: tl.constexpr, NUMBERS: tl.constexpr
):
    """A sequence's last inputs, in an order in which the record may be the one that was read."""
    sequence = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    mask = column < channels
    first, last = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    read, written = tl.load(reads_ptr + sequence), tl.load(writes_ptr + sequence)
    for place in tl.static_range(TAPS - 1):
        token = last - (TAPS - 1) + place
        old = tail_ptr + (read * (TAPS - 1) + TAPS - 1 + token - first) * channels + column
        x = tl.load(qkv_ptr + token * stride + column, mask=mask & (token >= first), other=0.0).to(tl.float32)
        x += tl.load(old, mask=mask & (token < first), other=0.0).to(tl.float32)
        tl.store(
            tail_ptr + (written * (TAPS - 1) + place) * channels + column, x.to(tail_ptr.dtype.element_ty), mask=mask
        )


def gated_delta(
    inputs: Sequence[Tensor],
    log_decay: Tensor,
    parameters: Sequence[Tensor],
    sizes: Sequence[int],
    places: Sequence[Tensor],
    cache: Sequence[Tensor],
    eps: tuple[float, float],
) -> Tensor:
    """As native.gated_delta.gated_delta. log_decay: float32 [T, H, 1 or K]. parameters: of the convolution and of the
    norm. places: int64, where each sequence's tokens begin [B + 1], the sequence of each token [T], the records that
    are read and written [B]. eps: of the norm, and of that of queries and keys."""
    qkv_TC, gate_T, beta_TH, _ = inputs
    key_heads, heads, key_dim, value_dim, taps, channel_decay, sigmoid_gate = sizes
    conv_WC, norm_V = parameters
    starts_B, sequence_T, reads_B, writes_B = places
    tails, states = cache
    assert all(x.stride(1) == 1 for x in inputs) and tails.is_contiguous() and states.is_contiguous()
    num_tokens, channels = qkv_TC.shape
    out_TV = qkv_TC.new_empty((num_tokens, heads * value_dim))
    if num_tokens == 0:
        return out_TV
    mixed_TC = torch.empty((num_tokens, channels), dtype=torch.float32, device=qkv_TC.device)
    _convolve_kernel[(num_tokens, 2 * key_heads + heads)](
        qkv_TC, tails, conv_WC, mixed_TC, starts_B, sequence_T, reads_B, qkv_TC.stride(0), channels, key_heads, heads,
        key_dim, value_dim, eps[1], TAPS=taps, NUMBERS=triton.next_power_of_2(max(key_dim, value_dim)), num_warps=1,
    )  # fmt: skip
    opened_TH = torch.sigmoid(beta_TH.float()).contiguous()
    given_TV = torch.empty((num_tokens, heads * value_dim), dtype=torch.float32, device=qkv_TC.device)
    _rule_kernel[(reads_B.shape[0], heads, triton.cdiv(value_dim, VALUES))](
        mixed_TC, log_decay.contiguous(), opened_TH, states, given_TV, starts_B, reads_B, writes_B, channels,
        key_heads, heads, key_dim, value_dim, CHANNEL_DECAY=bool(channel_decay),
        KEYS=max(16, triton.next_power_of_2(key_dim)), COLUMNS=VALUES, J=CHUNK, num_warps=8,
    )  # fmt: skip
    _gated_norm_kernel[(num_tokens, heads)](
        given_TV, gate_T, norm_V, out_TV, gate_T.stride(0), heads, value_dim, eps[0], SIGMOID=bool(sigmoid_gate),
        NUMBERS=triton.next_power_of_2(value_dim), num_warps=1,
    )  # fmt: skip
    _tail_kernel[(reads_B.shape[0], triton.cdiv(channels, 1024))](
        qkv_TC, tails, starts_B, reads_B, writes_B, qkv_TC.stride(0), channels, TAPS=taps, NUMBERS=1024, num_warps=4
    )
    return out_TV
