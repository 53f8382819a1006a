"""Grouped-query attention over the paged cache.

Everything that depends on the step alone (which rows, which blocks, which mask) is worked out once per step in
`AttentionPlan` and shared by all layers. Where the native kernels are there, decodes and prompts run in them, and read
the cache in place. Otherwise sequences with few queries (decodes above all) are gathered into padded batches of similar
length, one call each; longer prefills go one by one, without padding. There a window or sinks are left to the
reference.

Legend: T tokens of the step, B sequences, b sequences of a batch, Q queries per sequence (padded), N blocks per
sequence, L keys per sequence (padded), H query heads, Hkv key/value heads, G query heads per key head, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from msgspec import Struct
from torch import Tensor

from layers import choice, reference
from layers.norm import rms_norm
from layers.paged_decode import PagedDecode, can_decode
from layers.paged_prefill import PagedPrefill, can_prefill
from layers.rope import apply_rope
from layers.step import StepInput
from native import rows

MAX_BATCHED_QUERIES = 64  # sequences with more queries than this fill a call by themselves
MAX_GATHERED_BYTES = 8 << 20  # of keys per batch: larger buffers are returned to the system and page-faulted anew
MAX_WASTED_KEYS = 4096  # padding below this is cheaper than one more call
MAX_MASK_ELEMENTS = 4 << 20
MAX_CONVERTED_ELEMENTS = 3072  # of a head's keys, for which float32 is the faster way on a CPU


class HeadCounts(Struct, frozen=True):
    """num_heads is a multiple of num_kv_heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


class _Batch(Struct, frozen=True):
    """b sequences of Q queries each. rows: slice or int64 [b * Q]; blocks int64 [b * N]; mask [b, 1, 1 or Q * G, L], in
    the dtype of the computation."""

    num_sequences: int
    num_queries: int
    rows: slice | Tensor
    blocks: Tensor
    mask: Tensor


class _Single(Struct, frozen=True):
    """One sequence: its queries are the last of its kv_len tokens."""

    rows: slice
    blocks: Tensor  # int64 [N]
    kv_len: int


class WholeStep(Protocol):
    """The attention of a whole step elsewhere (layers/triton/attention.py)."""

    def __call__(
        self, q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, sinks_H: Tensor | None = None
    ) -> Tensor: ...


class AttentionPlan:
    """How the attention of one step is cut into calls."""

    def __init__(self, step: StepInput, heads: HeadCounts, dtype: torch.dtype, window: int = 0) -> None:
        """window: keys that a query sees, its own included; 0: all."""
        self.step, self.heads, self.window = step, heads, window
        self.dtype = dtype
        self.block_size = step.block_size
        starts, lens = step.query_starts, step.kv_lens
        decodes = range(step.num_decodes)
        self.decode: PagedDecode | None = None
        self.whole: WholeStep | None = None
        if choice.on_gpu(step.slots_T.device):
            self.whole = choice.triton_implementation("layers.triton.attention", "TritonAttentionPlan")(
                step, heads, dtype, window=window
            )
            return
        if step.num_decodes and can_decode(dtype, step.kv_lens_B.device):
            sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.head_dim)
            self.decode = PagedDecode(step, *sizes, dtype, window)
            decodes = range(0)
        prefills = range(step.num_decodes, step.num_sequences)
        self.prefill: PagedPrefill | None = None
        if prefills and can_prefill(dtype, step.kv_lens_B.device, heads.head_dim):
            self.prefill = PagedPrefill.behind_decodes(step, window)
            prefills = range(0)
        self.num_tokens = step.num_tokens
        counts = [1] * step.num_decodes
        counts += [starts[b + 1] - starts[b] for b in range(step.num_decodes, step.num_sequences)]
        short: list[int] = []
        long: list[int] = []
        for b in prefills:
            fits = counts[b] <= MAX_BATCHED_QUERIES and counts[b] * lens[b] * heads.group <= MAX_MASK_ELEMENTS
            (short if fits else long).append(b)
        self.batches = [
            self._batch(step, members, counts)
            for kind in (decodes, short)
            if kind
            for members in self._similar(lens, counts, kind)
        ]
        self.singles = [self._single(step, b) for b in long]
        self._later_mask: Tensor | None = None
        self._make_later_mask()

    # ---- grouping ----

    def _similar(self, lens: Sequence[int], counts: list[int], members: Sequence[int]) -> Iterator[Sequence[int]]:
        """Cut `members` into batches so that padding stays small, and memory bounded."""
        used = [lens[b] * counts[b] for b in members]
        padded = len(members) * max(lens[b] for b in members) * max(counts[b] for b in members)
        wasted = padded - sum(used)
        batches: list[Sequence[int]] = [members]
        if wasted > MAX_WASTED_KEYS and 2 * wasted > padded:
            buckets: dict[tuple[int, int], list[int]] = {}
            for b in members:
                buckets.setdefault((lens[b].bit_length(), (counts[b] - 1).bit_length()), []).append(b)
            batches = list(buckets.values())
        key_bytes = self.heads.num_kv_heads * self.heads.head_dim * self.dtype.itemsize
        for batch in batches:
            longest = max(lens[b] for b in batch) + self.block_size
            queries = max(counts[b] for b in batch) * self.heads.group
            limit = min(MAX_GATHERED_BYTES // (longest * key_bytes), MAX_MASK_ELEMENTS // (longest * queries))
            for start in range(0, len(batch), max(1, limit)):
                yield batch[start : start + max(1, limit)]

    def _batch(self, step: StepInput, members: Sequence[int], counts: list[int]) -> _Batch:
        device = step.block_table_BN.device
        num_queries = max(counts[b] for b in members)
        num_blocks = -(-max(step.kv_lens[b] for b in members) // self.block_size)
        first, last = members[0], members[-1]
        adjacent = last - first + 1 == len(members)
        chosen: slice | Tensor = slice(first, last + 1) if adjacent else torch.tensor(members, device=device)
        blocks = step.block_table_BN[chosen, :num_blocks].reshape(-1)
        position_L = torch.arange(num_blocks * self.block_size, device=device)
        rows: slice | Tensor
        if num_queries == 1:
            starts = step.query_starts
            if adjacent:
                rows = slice(starts[first], starts[last] + 1)
            else:
                rows = torch.tensor([starts[b] for b in members], device=device)
            seen_bQ = step.kv_lens_B[chosen, None] - 1
        else:
            # Places past a sequence's queries repeat its last query: they compute and write the same values again.
            count_b1 = torch.tensor([[counts[b]] for b in members], device=device)
            start_b1 = torch.tensor([[step.query_starts[b]] for b in members], device=device)
            offset_bQ = torch.arange(num_queries, device=device).minimum(count_b1 - 1)
            rows = (start_b1 + offset_bQ).reshape(-1)
            seen_bQ = step.kv_lens_B[chosen, None] - count_b1 + offset_bQ
            seen_bQ = seen_bQ.repeat_interleave(self.heads.group, dim=1)
        num_keys = position_L.shape[0]
        dtype = self._dtype_of(num_keys, device)
        mask = torch.zeros((len(members), 1, seen_bQ.shape[1], num_keys), dtype=dtype, device=device)
        mask.masked_fill_((position_L > seen_bQ[:, :, None])[:, None], float("-inf"))
        return _Batch(len(members), num_queries, rows, blocks, mask)

    def _dtype_of(self, num_keys: int, device: torch.device) -> torch.dtype:
        """A CPU's bfloat16 attention spends longer on setting up its small products than on converting the operands."""
        short = num_keys * self.heads.head_dim <= MAX_CONVERTED_ELEMENTS
        return torch.float32 if short and device.type == "cpu" else self.dtype

    def _single(self, step: StepInput, sequence: int) -> _Single:
        rows = slice(step.query_starts[sequence], step.query_starts[sequence + 1])
        kv_len = step.kv_lens[sequence]
        return _Single(rows, step.block_table_BN[sequence, : -(-kv_len // self.block_size)], kv_len)

    # ---- prefills that continue an earlier context ----

    def _make_later_mask(self) -> None:
        """One mask serves every chunk of every such prefill: a chunk that starts at position s takes the columns from
        `width - s` on, so that its s earlier keys fall on the part that is all open."""
        later = [s for s in self.singles if s.kv_len > s.rows.stop - s.rows.start]
        if not later:
            return
        self.width = max(s.kv_len for s in later)
        self.chunk = max(16, min(512, MAX_MASK_ELEMENTS // self.width, max(s.rows.stop - s.rows.start for s in later)))
        mask = torch.zeros((self.chunk, self.width + self.chunk), dtype=self.dtype, device=later[0].blocks.device)
        future = torch.ones((self.chunk, self.chunk), dtype=torch.bool, device=mask.device).triu_(1)
        mask[:, self.width :].masked_fill_(future, float("-inf"))
        self._later_mask = mask

    def later_mask(self, start: int, rows: int) -> Tensor:
        """For `rows` queries at positions start, start + 1, ...: [rows, start + rows]."""
        assert self._later_mask is not None
        return self._later_mask[:rows, self.width - start : self.width + rows]


def write_kv(cache: Tensor, slots_T: Tensor, x_THD: Tensor) -> None:
    """Store one entry per token: cache [rows, ...], slots int64 [T], x [T, ...] of the same trailing shape."""
    cache.index_copy_(0, slots_T, x_THD)


def qk_norm_rope_cache(
    qkv_THD: Tensor,
    num_heads: int,
    norm_HD: Tensor | None,
    eps: float,
    rope: tuple[Tensor, Tensor],
    cache: tuple[Tensor, ...],
    slots_T: Tensor,
) -> Tensor:
    """The queries, normed and rotated, [T, H, D]; keys, treated likewise, and values are stored in `cache`.

    qkv: queries, keys and values side by side, [T, H + 2 Hkv, D]; it may be overwritten. norm [H + Hkv, D]: the weight
    of the norm of each query and key head, or None.
    """
    k_cache, v_cache = cache
    if rows.can_run(qkv_THD) and qkv_THD.is_contiguous():
        rows.qk_norm_rope_cache(qkv_THD, num_heads, norm_HD, eps, rope, k_cache, v_cache, slots_T)
        return qkv_THD[:, :num_heads]
    if choice.on_gpu(qkv_THD.device):
        place: Callable[..., Tensor] = choice.triton_implementation("layers.triton.heads", "qk_norm_rope_cache")
        return place(qkv_THD, num_heads, norm_HD, eps, rope, cache, slots_T)
    num_qk = num_heads + k_cache.shape[1]
    # Queries and keys lie side by side, so one norm and one rotation serve both.
    qk = qkv_THD[:, :num_qk] if norm_HD is None else rms_norm(qkv_THD[:, :num_qk], norm_HD, eps)
    qk = apply_rope(qk, *rope)
    write_kv(k_cache, slots_T, qk[:, num_heads:])
    write_kv(v_cache, slots_T, qkv_THD[:, num_qk:])
    return qk[:, :num_heads]


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention of every token to its own sequence: [T, H, D].

    k_cache, v_cache: [rows, Hkv, D], this step's keys and values already written; rows past a sequence's end must be
    finite. sinks float32: as layers.reference.paged_attention has them.
    """
    if plan.whole is not None:
        return plan.whole(q_THD, k_cache, v_cache, scale, sinks_H)
    if (plan.window or sinks_H is not None) and (plan.batches or plan.singles):
        return reference.paged_attention(q_THD, k_cache, v_cache, plan.step, scale, plan.window, sinks_H)
    if plan.decode is not None:
        num_decodes = plan.decode.num_sequences
        out_THD = plan.decode(q_THD[:num_decodes], k_cache, v_cache, scale, sinks_H)
        if num_decodes == plan.num_tokens:
            return out_THD
        out_THD = torch.cat((out_THD, q_THD[num_decodes:]))
    elif (
        plan.prefill is None and not plan.singles and len(plan.batches) == 1 and isinstance(plan.batches[0].rows, slice)
    ):
        return _attend_batch(q_THD, k_cache, v_cache, plan.batches[0], plan, scale)
    else:
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if plan.prefill is not None:
        plan.prefill(q_THD, k_cache, v_cache, scale, out_THD, sinks_H=sinks_H)
    for batch in plan.batches:
        if isinstance(batch.rows, slice):
            out_THD[batch.rows] = _attend_batch(q_THD[batch.rows], k_cache, v_cache, batch, plan, scale)
        else:
            q = q_THD.index_select(0, batch.rows)
            out_THD.index_copy_(0, batch.rows, _attend_batch(q, k_cache, v_cache, batch, plan, scale))
    for single in plan.singles:
        _attend_single(q_THD[single.rows], k_cache, v_cache, single, plan, scale, out_THD[single.rows])
    return out_THD


def _gather(cache: Tensor, blocks: Tensor, num_sequences: int, block_size: int) -> Tensor:
    """Copy whole blocks: [rows, Hkv, D] -> [b, Hkv, L, D] (a view of [b, L, Hkv, D])."""
    flat = cache.view(-1, block_size * cache.shape[1] * cache.shape[2]).index_select(0, blocks)
    return flat.view(num_sequences, -1, cache.shape[1], cache.shape[2]).transpose(1, 2)


def _attend_batch(
    q_RHD: Tensor, k_cache: Tensor, v_cache: Tensor, batch: _Batch, plan: AttentionPlan, scale: float
) -> Tensor:
    """The G query heads that share a key head are laid along the query axis: keys are read once, not G times."""
    b, num_queries, heads = batch.num_sequences, batch.num_queries, plan.heads
    dtype = batch.mask.dtype
    k = _gather(k_cache, batch.blocks, b, plan.block_size).to(dtype)
    v = _gather(v_cache, batch.blocks, b, plan.block_size).to(dtype)
    q = q_RHD.to(dtype).reshape(b, num_queries, heads.num_kv_heads, heads.group, heads.head_dim).transpose(1, 2)
    q = q.reshape(b, heads.num_kv_heads, num_queries * heads.group, heads.head_dim)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=batch.mask, scale=scale)
    out = out.view(b, heads.num_kv_heads, num_queries, heads.group, heads.head_dim).transpose(1, 2)
    return out.reshape(b * num_queries, heads.num_heads, heads.head_dim).to(q_RHD.dtype)


def _attend_single(
    q_QHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    single: _Single,
    plan: AttentionPlan,
    scale: float,
    out_QHD: Tensor,
) -> None:
    """Query chunks bound the mask; a first prefill needs none (is_causal skips the upper half instead)."""
    k = _gather(k_cache, single.blocks, 1, plan.block_size)[:, :, : single.kv_len]
    v = _gather(v_cache, single.blocks, 1, plan.block_size)[:, :, : single.kv_len]
    q = q_QHD.transpose(0, 1)[None]
    num_queries = q_QHD.shape[0]
    context = single.kv_len - num_queries
    if context == 0:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        out_QHD.copy_(out[0].transpose(0, 1))
        return
    for first in range(0, num_queries, plan.chunk):
        last = min(num_queries, first + plan.chunk)
        seen = context + last
        mask = plan.later_mask(context + first, last - first)
        out = F.scaled_dot_product_attention(
            q[:, :, first:last], k[:, :, :seen], v[:, :, :seen], attn_mask=mask, scale=scale, enable_gqa=True
        )
        out_QHD[first:last] = out[0].transpose(0, 1)
