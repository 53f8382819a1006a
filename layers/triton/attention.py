# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Grouped-query attention over the paged cache in Triton: no key is copied, no mask is built.

The query heads that share a key head are rows of one program, for as many queries as fit. Decodes are cut along the
keys too, so that few long sequences fill the chip; layers/triton/merge.py joins them. Same results as
layers/reference.py within rounding.

Legend: T tokens of the step, B sequences, N blocks per sequence, H query heads, Hkv key/value heads, D head size, G
splits, I tiles of queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from layers.attention import HeadCounts
from layers.step import StepInput
from layers.triton.configs import AttentionConfig, choose
from layers.triton.device import chip_of
from layers.triton.merge import merge_splits
from layers.triton.softmax import LOG2_E, finish, fold


@triton.jit
def split_of(length, split, num_splits, BLOCK_S: tl.constexpr):
    """(first, last) key of a part: each sequence is cut evenly by its own length, so that the number of parts may be
    fixed."""
    size = tl.cdiv(tl.cdiv(length, num_splits), BLOCK_S) * BLOCK_S
    return split * size, tl.minimum(split * size + size, length)


@triton.jit
def rows_of(position, seen, table_ptr, block_size):
    """Rows of the cache, int64, of these positions of a sequence whose blocks begin at table_ptr."""
    block = tl.load(table_ptr + position // block_size, mask=seen, other=0).to(tl.int64)
    return block * block_size + position % block_size


# What a step uploads lies behind each other in one tensor, aligned to 8 bytes or by chance to 16: a kernel for each
# would be compiled while requests wait.
@triton.jit(do_not_specialize=["table_stride", "num_splits"], do_not_specialize_on_alignment=["table_ptr", "lens_ptr"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, table_ptr, lens_ptr, tiles_ptr, out_ptr, lse_ptr, q_stride_t, q_stride_h,
    table_stride, num_heads, num_kv_heads, num_splits, block_size, scale, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    DECODE: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """out [T, G, H, D], lse [T, G, H] (natural logarithm). tiles int32 [I, 4]: sequence, its first token, its number of
    queries, the first query of the tile. DECODE: program b has the one query of sequence b. WINDOW: keys that a query
    sees; 0: all. sinks [H]: looked at where SINKS."""
    if DECODE:
        b = tl.program_id(0).to(tl.int64)
        first_token, num_queries, first_query = b, 1, 0
    else:
        tile = tiles_ptr + tl.program_id(0) * 4
        b, first_token = tl.load(tile).to(tl.int64), tl.load(tile + 1).to(tl.int64)
        num_queries, first_query = tl.load(tile + 2), tl.load(tile + 3)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, BLOCK_M)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    # A group that does not divide the tile leaves rows over.
    there = (query < num_queries) & (row < BLOCK_M // GROUP * GROUP)
    column, line = tl.arange(0, COLUMNS), tl.arange(0, BLOCK_S)
    inside = column < SIZE
    mask = there[:, None] & inside[None, :]
    token = first_token + query
    q = tl.load(
        q_ptr + token[:, None] * q_stride_t + head[:, None] * q_stride_h + column[None, :], mask=mask, other=0.0
    )
    length = tl.load(lens_ptr + b).to(tl.int32)
    last_seen = length - num_queries + query
    reach = tl.minimum(length - num_queries + first_query + BLOCK_M // GROUP, length)
    begin = tl.maximum(length - num_queries + first_query + 1 - WINDOW, 0) if WINDOW else 0
    first, last = split_of(reach - begin, split, num_splits, BLOCK_S)
    first, last = first + begin, last + begin
    acc = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
    # Not -inf: behind its window a row sees none of a tile's keys.
    highest = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS and split == 0:
        highest = tl.load(sinks_ptr + head, mask=there, other=0.0) * LOG2_E
        total += 1.0
    for at in range(first, last, BLOCK_S):
        position = at + line
        seen = position < last
        row_k = rows_of(position, seen, table_ptr + b * table_stride, block_size)
        place = (row_k * num_kv_heads + kv_head) * SIZE
        kv_mask = seen[:, None] & inside[None, :]
        k = tl.load(k_ptr + place[:, None] + column[None, :], mask=kv_mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        visible = seen[None, :] & (position[None, :] <= last_seen[:, None])
        if WINDOW:
            visible &= position[None, :] > last_seen[:, None] - WINDOW
        score = tl.where(visible, score, float("-inf"))
        v = tl.load(v_ptr + place[:, None] + column[None, :], mask=kv_mask, other=0.0)
        acc, highest, total = fold(score, v, acc, highest, total)
    out, lse = finish(acc, highest, total)
    here = (token * num_splits + split) * num_heads + head
    tl.store(out_ptr + here[:, None] * SIZE + column[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + here, lse, mask=there)


class _Launch(Struct, frozen=True):
    """Tokens first : last of the step, that run with one config. tiles: int32 [I, 4], or None: one of each sequence."""

    first: int
    last: int
    num_tiles: int
    tiles: Tensor | None
    num_splits: int
    config: AttentionConfig


class TritonAttentionPlan:
    """What depends on the step alone, worked out once and shared by all layers; as layers.attention.AttentionPlan. The
    configs replace what the table says."""

    def __init__(
        self,
        step: StepInput,
        heads: HeadCounts,
        dtype: torch.dtype,
        decode: AttentionConfig | None = None,
        prefill: AttentionConfig | None = None,
        window: int = 0,
    ) -> None:
        chip = chip_of(step.slots_T.device)
        self.heads, self.window = heads, window
        self.step = step
        n = step.num_decodes
        # float32 has no matrix unit: small tiles.
        prompts = "attention_decode" if dtype == torch.float32 else "attention_prefill"
        configs = (
            decode or choose("attention_decode", chip, heads.head_dim, heads.group),
            prefill or choose(prompts, chip, heads.head_dim, heads.group),
        )
        members = (range(n), range(n, step.num_sequences))
        self.launches = [self._launch(b, config) for b, config in zip(members, configs, strict=True)]

    def _launch(self, members: range, config: AttentionConfig) -> _Launch:
        step, heads = self.step, self.heads
        block_m = max(config.block_m, triton.next_power_of_2(heads.group))
        per_tile = block_m // heads.group
        first, last = step.query_starts[members.start], step.query_starts[members.stop]
        if members.stop <= step.num_decodes:
            longest = max((step.kv_lens[b] for b in members), default=1)
            longest = min(longest, self.window or longest)
            programs = max(1, len(members) * heads.num_kv_heads)
            splits = max(1, min(config.programs // programs, -(-longest // config.keys)))
            return _Launch(first, last, len(members), None, splits, replace(config, block_m=block_m))
        tiles = []  # enough to fill the chip, so that keys are not cut
        for b in members:
            start, count = step.query_starts[b], step.query_starts[b + 1] - step.query_starts[b]
            tiles += [(b, start, count, query) for query in range(0, count, per_tile)]
        rows = torch.tensor(tiles, dtype=torch.int32, device=step.slots_T.device)
        return _Launch(first, last, len(tiles), rows, 1, replace(config, block_m=block_m))

    def __call__(
        self, q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, sinks_H: Tensor | None = None
    ) -> Tensor:
        """As layers.attention.paged_attention."""
        return paged_attention(q_THD, k_cache, v_cache, self, scale, sinks_H)


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: TritonAttentionPlan,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """As layers.attention.paged_attention. q: any strides but 1 for the last."""
    step, heads = plan.step, plan.heads
    assert q_THD.stride(2) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    for launch in plan.launches:
        if launch.first == launch.last:
            continue
        config, splits = launch.config, launch.num_splits
        num_tokens = launch.last - launch.first
        # One split needs no merging: its result is the result.
        shape = (num_tokens, splits, heads.num_heads, heads.head_dim)
        part = out_THD if splits == 1 else torch.empty(shape, dtype=torch.float32, device=q_THD.device)
        lse = torch.empty(q_THD.shape[0], splits, heads.num_heads, dtype=torch.float32, device=q_THD.device)
        _attention_kernel[(launch.num_tiles, heads.num_kv_heads, splits)](
            q_THD, k_cache, v_cache, sinks_H, step.block_table_BN, step.kv_lens_B, launch.tiles, part, lse,
            q_THD.stride(0), q_THD.stride(1), step.block_table_BN.stride(0), heads.num_heads, heads.num_kv_heads,
            splits, step.block_size, scale, WINDOW=plan.window, SINKS=sinks_H is not None,
            DECODE=launch.tiles is None, SIZE=heads.head_dim, GROUP=heads.group,
            BLOCK_M=config.block_m, BLOCK_S=config.block_s, COLUMNS=max(16, triton.next_power_of_2(heads.head_dim)),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        if splits > 1:  # decodes, which come first in the step
            out_THD[:num_tokens] = merge_splits(part, lse[:num_tokens], q_THD.dtype)
    return out_THD
