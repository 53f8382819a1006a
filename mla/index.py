"""Which keys a query of sparse attention looks at (DeepSeek-V3.2-Exp's report, section 2.1): an indexer scores them.

Every token has one index key, kept beside its latent, and a query has a key and a weight for each of a few index heads:

    score(query, s) = sum over heads of weight * relu(query key . key of s)

The topk keys of the largest scores are attended to, of equal ones the first. A query that sees no more than topk keys
attends to all of them. Scores are float32, and those of all heads are never kept together.

Legend: T tokens of the step, U queries that choose, H index heads, I their width, P rotated dimensions (the first of
I), K most keys chosen, S keys of a sequence, B sequences, N blocks of a sequence, R rows of the cache, q queries of a
tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from msgspec import Struct
from torch import Tensor

from layers import choice
from layers.rope import apply_rope
from mla import index_keys, latent_kv
from native import fixed_order, rows
from native import index as native_index

NORM_EPS = 1e-6  # of the norm of index keys
TILE_BYTES = 16 << 20  # scores of all heads in torch, for some queries at a time
MAX_DOT_ROWS = 64  # in the native kernel: with more torch is faster


class IndexShape(NamedTuple):
    num_heads: int  # H
    head_dim: int  # I
    topk: int  # K


class IndexQueries(Struct, frozen=True):
    """The queries of a step that choose, prepared once for all layers.

    lens: how many keys each sees, int64 [U]. sequence: of each, int64 [U]; None: query u is of sequence u. table and
    block_size: where keys lie. parts: of each sequence with such queries (first, last, sequence, most keys of one):
    host integers, which the native kernel does without.
    """

    lens_U: Tensor
    sequence_U: Tensor | None
    table_BN: Tensor
    block_size: int
    parts: tuple[tuple[int, int, int, int], ...]


class Chosen(NamedTuple):
    """rows: of the cache, in the order of positions, then zeros, int64 [U, K]; counts: how many of them count, int64
    [U]."""

    rows_UK: Tensor
    counts_U: Tensor


def place(
    key_TI: Tensor,
    norm: tuple[Tensor, Tensor],
    rope: tuple[Tensor, Tensor],
    cache: Tensor,
    slots_T: Tensor,
    q_THI: Tensor | None,
) -> None:
    """Norm and rotate the index keys of a step, as projected, and store them; rotate its index queries in place.

    norm: weight and bias of a layer norm, [I] each. cache: [R, I], or uint8 [R, I + 4] in FP8.
    """
    if rows.can_run(key_TI):
        native_index.place(key_TI, (*norm, NORM_EPS), rope, cache, slots_T, q_THI)
        return
    key_TI = F.layer_norm(key_TI, key_TI.shape[1:], *norm, NORM_EPS)
    for x_THI in (key_TI[:, None],) if q_THI is None else (key_TI[:, None], q_THI):
        rotated = x_THI[..., : rope[0].shape[-1]]
        rotated.copy_(apply_rope(rotated, *rope))
    latent_kv.write(cache, index_keys.pack(key_TI) if cache.dtype == torch.uint8 else key_TI, slots_T)


def head_weights(x_TD: Tensor, weight_HD: Tensor) -> Tensor:
    """What the heads' scores are weighted with, float32 [T, H], from float32 weights."""
    few = x_TD.shape[0] <= MAX_DOT_ROWS or fixed_order()
    if few and x_TD.stride(1) == 1 and rows.can_run(x_TD):
        return rows.dots(x_TD, weight_HD)
    return F.linear(x_TD.float(), weight_HD)


def choose_keys(q_UHI: Tensor, weight_UH: Tensor, cache: Tensor, queries: IndexQueries, topk: int) -> Chosen:
    """Of each query its topk keys."""
    if choice.on_gpu(q_UHI.device):
        longest = max((length for _, _, _, length in queries.parts), default=0)
        seen = queries.lens_U, queries.sequence_U, queries.table_BN, queries.block_size, longest
        choose: Callable[..., tuple[Tensor, Tensor]] = choice.triton_implementation("mla.triton.index", "choose")
        return Chosen(*choose(q_UHI, weight_UH, cache, *seen, topk))
    if rows.can_run(q_UHI) and (q_UHI.dtype is torch.float32 or q_UHI.shape[2] % 2 == 0):
        table = queries.lens_U, queries.sequence_U, queries.table_BN, queries.block_size
        return Chosen(*native_index.choose(q_UHI, weight_UH, cache, *table, topk))
    counts_U = queries.lens_U.clamp(max=topk)
    rows_UK = torch.zeros(q_UHI.shape[0], topk, dtype=torch.int64, device=q_UHI.device)
    for first, last, sequence, length in queries.parts:
        blocks = queries.table_BN[sequence, : -(-length // queries.block_size)]
        keys_SI = _keys(latent_kv.gather(cache, blocks, queries.block_size)[:length])
        offsets = torch.arange(queries.block_size, device=blocks.device)
        rows_S = (blocks[:, None] * queries.block_size + offsets).flatten()[:length]
        at_once = max(1, TILE_BYTES // (4 * q_UHI.shape[1] * length))
        for start in range(first, last, at_once):
            here = slice(start, min(start + at_once, last))
            scores_qS = index_scores(q_UHI[here], weight_UH[here], keys_SI)
            hidden_qS = torch.arange(length, device=blocks.device) >= queries.lens_U[here, None]
            position = largest(scores_qS.masked_fill_(hidden_qS, -torch.inf), topk)
            counted = torch.arange(position.shape[1], device=blocks.device) < counts_U[here, None]
            rows_UK[here, : position.shape[1]] = rows_S[position] * counted
    return Chosen(rows_UK, counts_U)


def index_scores(q_qHI: Tensor, weight_qH: Tensor, keys_SI: Tensor) -> Tensor:
    """float32 [q, S]."""
    scores_qHS = (q_qHI.float().flatten(0, 1) @ keys_SI.T).view(*q_qHI.shape[:2], -1).relu_()
    return torch.bmm(weight_qH[:, None], scores_qHS)[:, 0]


def largest(scores_qS: Tensor, topk: int) -> Tensor:
    """Positions of the topk largest of each row, of equal ones the first, in rising order: [q, min(topk, S)]."""
    count = min(topk, scores_qS.shape[1])
    least_q1 = scores_qS.topk(count).values[:, -1:]
    above_qS, equal_qS = scores_qS > least_q1, scores_qS == least_q1
    left_q1 = count - above_qS.sum(-1, keepdim=True)
    return (above_qS | (equal_qS & (equal_qS.cumsum(-1) <= left_q1))).nonzero()[:, 1].view(-1, count)


def _keys(rows_SW: Tensor) -> Tensor:
    return index_keys.unpack(rows_SW) if rows_SW.dtype == torch.uint8 else rows_SW.float()
