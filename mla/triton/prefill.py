# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Naive MLA for prompts in Triton: keys and values of a piece of the context are built by two products, and a tile of
queries reads them; the rotated keys, which all heads share, are not repeated for each head. Same results as
mla/reference.py within rounding.

A context longer than a piece is read in several launches; what one leaves (result and log of its sum) the next goes on
from.

Legend: T tokens of the step, H heads, N, P, C, X, V widths (mla/protocol.py), R rows of the cache, U keys built,
I tiles of queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from msgspec import Struct
from torch import Tensor

from layers.step import StepInput
from layers.triton.device import chip_of
from layers.triton.softmax import LOG2_E, finish, fold
from mla import latent_kv
from mla.triton.configs import PrefillConfig, choose_prefill

BUILT_BYTES = 512 << 20  # of keys and values at a time


@triton.jit
def _prefill_kernel(
    q_ptr, q_pe_ptr, k_ptr, k_pe_ptr, v_ptr, tiles_ptr, out_ptr, lse_ptr, q_stride_t, q_stride_h, q_pe_stride_t,
    q_pe_stride_h, k_pe_stride, num_heads, scale, PIECES: tl.constexpr, NOPE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """out [T, H, V], lse [T, H] (natural logarithm; kept with PIECES only). tiles int32 [I, 6]: first token, how many,
    position of the first in its sequence, first and last key of the piece, row of the first key among the built."""
    tile = tiles_ptr + tl.program_id(0) * 6
    head = tl.program_id(1)
    first_token, count, position = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    first, last, built = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5).to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    n, p, v = tl.arange(0, NOPE), tl.arange(0, ROPE), tl.arange(0, VALUE)
    line = tl.arange(0, BLOCK_S)
    there, token = row < count, first_token + row
    q_ptrs = q_ptr + token[:, None] * q_stride_t + head * q_stride_h + n[None, :]
    q = tl.load(q_ptrs, mask=there[:, None] & (n < NOPE_DIM)[None, :], other=0.0)
    q_pe_ptrs = q_pe_ptr + token[:, None] * q_pe_stride_t + head * q_pe_stride_h + p[None, :]
    q_pe = tl.load(q_pe_ptrs, mask=there[:, None] & (p < ROPE_DIM)[None, :], other=0.0)
    acc = tl.zeros((BLOCK_M, VALUE), tl.float32)
    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    place = token * num_heads + head
    out_mask = there[:, None] & (v < VALUE_DIM)[None, :]
    if PIECES:
        earlier = there & (first > 0)
        acc = tl.load(out_ptr + place[:, None] * VALUE_DIM + v[None, :], mask=out_mask & (first > 0), other=0.0)
        highest = tl.load(lse_ptr + place, mask=earlier, other=float("-inf")) * LOG2_E
        total = tl.where(earlier, 1.0, 0.0)
    for at in range(first, tl.minimum(last, position + count), BLOCK_S):
        key = at + line
        seen = key < last
        place_k = (built + key - first) * num_heads + head
        k_ptrs = k_ptr + place_k[:, None] * NOPE_DIM + n[None, :]
        k = tl.load(k_ptrs, mask=seen[:, None] & (n < NOPE_DIM)[None, :], other=0.0)
        k_pe_ptrs = k_pe_ptr + (built + key - first)[:, None] * k_pe_stride + p[None, :]
        k_pe = tl.load(k_pe_ptrs, mask=seen[:, None] & (p < ROPE_DIM)[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        score = tl.dot(q_pe, tl.trans(k_pe), score, input_precision="ieee") * (scale * LOG2_E)
        score = tl.where(seen[None, :] & (key[None, :] <= (position + row)[:, None]), score, float("-inf"))
        v_ptrs = v_ptr + place_k[:, None] * VALUE_DIM + v[None, :]
        value = tl.load(v_ptrs, mask=seen[:, None] & (v < VALUE_DIM)[None, :], other=0.0)
        acc, highest, total = fold(score, value, acc, highest, total)
    out, lse = finish(acc, highest, total)
    tl.store(out_ptr + place[:, None] * VALUE_DIM + v[None, :], out.to(out_ptr.dtype.element_ty), mask=out_mask)
    if PIECES:
        tl.store(lse_ptr + place, lse, mask=there)


class _Piece(Struct, frozen=True):
    """rows_U: int64, rows of the cache whose keys are built; tiles: int32 [I, 6]."""

    rows_U: Tensor
    tiles: Tensor


class PrefillPlan:
    """How the prompts of a step are cut; worked out once for all layers."""

    def __init__(
        self, step: StepInput, members: Sequence[int], num_heads: int, max_keys: int, dtype: torch.dtype,
        config: PrefillConfig | None = None,
    ) -> None:  # fmt: skip
        """members: sequences of the step with at least one query. max_keys: built at a time."""
        device = step.slots_T.device
        kernel = "mla_prefill_f32" if dtype == torch.float32 else "mla_prefill"
        self.config = config or choose_prefill(kernel, chip_of(device), num_heads)
        self.tokens = [slice(step.query_starts[b], step.query_starts[b + 1]) for b in members]
        self.pieces = [
            self._piece(step, parts, device) for parts in _cut([(b, step.kv_lens[b]) for b in members], max_keys)
        ]

    def _piece(self, step: StepInput, parts: list[tuple[int, int, int]], device: torch.device) -> _Piece:
        rows, tiles, built = [], [], 0
        for b, first, last in parts:
            position = torch.arange(first, last, device=device)
            block = step.block_table_BN[b].index_select(0, position // step.block_size)
            rows.append(block * step.block_size + position % step.block_size)
            start, end = step.query_starts[b], step.query_starts[b + 1]
            context = step.kv_lens[b] - (end - start)
            for query in range(0, end - start, self.config.block_m):
                count = min(self.config.block_m, end - start - query)
                if first == 0 or context + query + count > first:
                    tiles.append((start + query, count, context + query, first, last, built))
            built += last - first
        # The longest first: the chip's last programs are short ones.
        tiles.sort(key=lambda tile: max(0, min(tile[4], tile[2] + tile[1]) - tile[3]), reverse=True)
        return _Piece(torch.cat(rows), torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 6))

    def run(
        self, q_nope_THN: Tensor, q_pe_THP: Tensor, cache: Tensor, w_uk_HNC: Tensor, w_uv_HVC: Tensor, scale: float,
        out_THV: Tensor,
    ) -> None:  # fmt: skip
        """Fills the prompts' tokens of out. cache: [R, X], or uint8 [R, W] in FP8 (mla/latent_fp8.py)."""
        latent_dim = w_uk_HNC.shape[2]
        several, qk_rope_head_dim = len(self.pieces) > 1, q_pe_THP.shape[2]
        part = torch.empty_like(out_THV, dtype=torch.float32) if several else out_THV
        lse_TH = torch.empty(out_THV.shape[:2], dtype=torch.float32, device=out_THV.device)
        for piece in self.pieces:
            rows = cache.index_select(0, piece.rows_U)
            rows_UX = latent_kv.widen(rows, latent_dim, qk_rope_head_dim, q_nope_THN.dtype)
            k_U = F.linear(rows_UX[:, :latent_dim], w_uk_HNC.flatten(0, 1))
            v_U = F.linear(rows_UX[:, :latent_dim], w_uv_HVC.flatten(0, 1))
            self._launch(q_nope_THN, q_pe_THP, k_U, rows_UX[:, latent_dim:], v_U, piece.tiles, scale, part, lse_TH)
        if several:
            for tokens in self.tokens:
                out_THV[tokens] = part[tokens]

    def _launch(
        self, q_nope_THN: Tensor, q_pe_THP: Tensor, k_U: Tensor, k_pe_UP: Tensor, v_U: Tensor, tiles: Tensor,
        scale: float, out_THV: Tensor, lse_TH: Tensor,
    ) -> None:  # fmt: skip
        heads, qk_nope_head_dim, qk_rope_head_dim, v_head_dim = (
            *q_nope_THN.shape[1:],
            q_pe_THP.shape[2],
            out_THV.shape[2],
        )
        assert q_nope_THN.stride(2) == q_pe_THP.stride(2) == k_pe_UP.stride(1) == 1 and out_THV.is_contiguous()
        config = self.config
        _prefill_kernel[(tiles.shape[0], heads)](
            q_nope_THN, q_pe_THP, k_U, k_pe_UP, v_U, tiles, out_THV, lse_TH, q_nope_THN.stride(0),
            q_nope_THN.stride(1), q_pe_THP.stride(0), q_pe_THP.stride(1), k_pe_UP.stride(0), heads, scale,
            PIECES=len(self.pieces) > 1, NOPE_DIM=qk_nope_head_dim, ROPE_DIM=qk_rope_head_dim, VALUE_DIM=v_head_dim,
            NOPE=max(16, triton.next_power_of_2(qk_nope_head_dim)),
            ROPE=max(16, triton.next_power_of_2(qk_rope_head_dim)),
            VALUE=max(16, triton.next_power_of_2(v_head_dim)), BLOCK_M=config.block_m, BLOCK_S=config.block_s,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip


def _cut(lens: list[tuple[int, int]], max_keys: int) -> list[list[tuple[int, int, int]]]:
    """(sequence, length) of each -> pieces of (sequence, first key, last key), at most max_keys together, in order."""
    pieces: list[list[tuple[int, int, int]]] = []
    room = 0
    for b, length in lens:
        first = 0
        while first < length:
            if room == 0:
                pieces.append([])
                room = max_keys
            last = min(length, first + room)
            pieces[-1].append((b, first, last))
            room, first = room - (last - first), last
    return pieces
