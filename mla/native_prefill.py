"""Prompts in the native kernel (layers/paged_prefill.py). Naive: keys and values of all heads are built from the
latents, for as many sequences or heads at a time as memory is granted for. Absorbed: the cache is read in place, by all
heads.

Legend: T tokens of the step, B sequences, N blocks of a sequence, R rows of the cache, S rows gathered, H heads, h some
of them; N, P, C, X, K = N + P, V widths (mla/protocol.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from msgspec import Struct
from torch import Tensor

from layers.paged_prefill import PagedPrefill, can_prefill
from layers.step import StepInput
from mla import latent_kv
from mla.native_decode import absorb, expand
from mla.plan import Limits, absorbs
from mla.protocol import MlaShape, PrefillMode
from native import Isa, fixed_order, isa
from native.linear import linear


def can_run(shape: MlaShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Naive keys have two parts, absorbed ones are rows of the cache."""
    return can_prefill(dtype, device, shape.qk_nope_head_dim, shape.qk_rope_head_dim) and can_prefill(
        dtype, device, shape.cache_dim
    )


class _Built(Struct, frozen=True):
    """Sequences whose keys and values are built together, some heads at a time. blocks: int64, of all of them."""

    attend: PagedPrefill
    blocks: Tensor
    heads_at_once: int


class NativePrefill:
    """The sequences of one step that are no decodes, prepared once for all layers."""

    def __init__(self, step: StepInput, shape: MlaShape, scale: float, mode: PrefillMode, limits: Limits) -> None:
        self._shape, self._scale, self._block_size = shape, scale, step.block_size
        starts = step.query_starts
        members = [b for b in range(step.num_decodes, step.num_sequences) if starts[b + 1] > starts[b]]
        counts = {b: starts[b + 1] - starts[b] for b in members}
        absorbed = [b for b in members if absorbs(shape, mode, counts[b], step.kv_lens[b])]
        naive = [b for b in members if b not in absorbed]
        self._built = [_built(step, group, shape, limits) for group in _groups(step, naive, limits.naive_keys)]
        self._absorbed: PagedPrefill | None = None
        if absorbed:
            self._tokens = torch.cat([torch.arange(starts[b], starts[b + 1]) for b in absorbed])
            self._absorbed = _attend(step, absorbed, [counts[b] for b in absorbed])

    def __call__(
        self,
        q_nope_THN: Tensor,
        q_pe_THP: Tensor,
        cache_RX: Tensor,
        w_uk_HNC: Tensor,
        w_uv_HVC: Tensor,
        out_THV: Tensor,
    ) -> None:
        """Writes the rows of out that are these sequences' queries."""
        if self._built:
            q_THK = _joined(q_nope_THN, q_pe_THP)
            for built in self._built:
                self._attend_built(built, q_THK, cache_RX, w_uk_HNC, w_uv_HVC, out_THV)
        if self._absorbed is not None:
            q_nope, q_pe = q_nope_THN.index_select(0, self._tokens), q_pe_THP.index_select(0, self._tokens)
            # Without products of bfloat16 torch multiplies it number by number.
            slow = q_nope.dtype is torch.bfloat16 and isa() < Isa.AVX512_BF16
            into, out_of = (absorb, expand) if slow or fixed_order() else (_absorb, _expand)
            q_THX = into(q_nope, q_pe, w_uk_HNC)
            mixed_THC = q_THX.new_empty((*q_THX.shape[:2], self._shape.latent_dim))
            keys = cache_RX[:, None]
            self._absorbed(q_THX, keys, keys[..., : self._shape.latent_dim], self._scale, mixed_THC)
            out_THV.index_copy_(0, self._tokens, out_of(mixed_THC, w_uv_HVC))

    def _attend_built(
        self, built: _Built, q_THK: Tensor, cache_RX: Tensor, w_uk_HNC: Tensor, w_uv_HVC: Tensor, out_THV: Tensor
    ) -> None:
        rows_SX = latent_kv.gather(cache_RX, built.blocks, self._block_size)
        latent_SC, k_pe_SP = rows_SX[:, : self._shape.latent_dim], rows_SX[:, self._shape.latent_dim :]
        for first in range(0, self._shape.num_heads, built.heads_at_once):
            heads = slice(first, min(first + built.heads_at_once, self._shape.num_heads))
            num = heads.stop - heads.start
            k_ShN = linear(latent_SC, w_uk_HNC[heads].flatten(0, 1)).view(-1, num, self._shape.qk_nope_head_dim)
            v_ShV = linear(latent_SC, w_uv_HVC[heads].flatten(0, 1)).view(-1, num, self._shape.v_head_dim)
            built.attend(q_THK[:, heads], k_ShN, v_ShV, self._scale, out_THV[:, heads], k_pe_SP)


def _absorb(q_nope_THN: Tensor, q_pe_THP: Tensor, w_uk_HNC: Tensor) -> Tensor:
    """native_decode.absorb for many tokens, [T, H, X]."""
    q_latent_HTC = torch.bmm(q_nope_THN.transpose(0, 1), w_uk_HNC)
    return torch.cat([q_latent_HTC.transpose(0, 1), q_pe_THP], dim=-1)


def _expand(mixed_THC: Tensor, w_uv_HVC: Tensor) -> Tensor:
    """native_decode.expand for many tokens, [T, H, V]."""
    return torch.bmm(mixed_THC.transpose(0, 1), w_uv_HVC.transpose(1, 2)).transpose(0, 1)


def _joined(q_nope_THN: Tensor, q_pe_THP: Tensor) -> Tensor:
    """[T, H, K]; without a copy where the two are parts of one tensor."""
    num_tokens, heads, qk_nope_head_dim = q_nope_THN.shape
    behind = q_nope_THN.data_ptr() + qk_nope_head_dim * q_nope_THN.element_size()
    if q_pe_THP.data_ptr() == behind and q_pe_THP.stride() == q_nope_THN.stride():
        return q_nope_THN.as_strided((num_tokens, heads, qk_nope_head_dim + q_pe_THP.shape[2]), q_nope_THN.stride())
    return torch.cat([q_nope_THN, q_pe_THP], dim=-1)


def _groups(step: StepInput, members: Sequence[int], max_keys: int) -> Iterator[list[int]]:
    """Neighbours with at most max_keys keys; a sequence with more is alone."""
    group: list[int] = []
    keys = 0
    for b in members:
        if group and keys + step.kv_lens[b] > max_keys:
            yield group
            group, keys = [], 0
        group.append(b)
        keys += step.kv_lens[b]
    if group:
        yield group


def _built(step: StepInput, group: Sequence[int], shape: MlaShape, limits: Limits) -> _Built:
    """Blocks are gathered one after another: sequence after sequence, each one's from its first on."""
    counts = [-(-step.kv_lens[b] // step.block_size) for b in group]
    blocks = torch.cat([step.block_table_BN[b, :count] for b, count in zip(group, counts, strict=True)])
    table = torch.zeros((len(group), max(counts)), dtype=torch.int64)
    first = 0
    for row, count in enumerate(counts):
        table[row, :count] = torch.arange(first, first + count)
        first += count
    starts = step.query_starts
    queries = [(starts[b], starts[b + 1]) for b in group]
    lens = [step.kv_lens[b] for b in group]
    heads_at_once = min(shape.num_heads, max(1, shape.num_heads * limits.naive_keys // sum(lens)))
    return _Built(PagedPrefill(queries, lens, table, step.block_size), blocks, heads_at_once)


def _attend(step: StepInput, members: Sequence[int], counts: Sequence[int]) -> PagedPrefill:
    """These sequences' queries lie one after another."""
    queries, first = [], 0
    for count in counts:
        queries.append((first, first + count))
        first += count
    table = step.block_table_BN[torch.tensor(members)]
    return PagedPrefill(queries, [step.kv_lens[b] for b in members], table, step.block_size)
