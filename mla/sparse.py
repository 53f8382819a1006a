"""Sparse attention over latents: each query attends to the keys that an indexer has chosen for it (mla/index.py).

Chosen keys are rows of the cache, wherever they lie. To the implementations of latent attention they are a sequence of
their own in blocks of one row, so that each of them reads nothing but these rows. Queries that see no more than topk
keys, which would choose all of them, attend as in dense attention: prompts in the form that is right for them.

Legend: T tokens of the step, U queries that choose, H heads; N, P, C, X, V widths (mla/protocol.py), I width of an
index key, K most keys chosen, R rows of the cache.
"""

from __future__ import annotations

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from layers import choice
from layers.step import StepInput
from mla.backend import make_backend
from mla.index import Chosen, IndexQueries, IndexShape, choose_keys
from mla.protocol import MlaBackend, MlaShape, PrefillMode, PreparedStep


def chooses(step: StepInput, topk: int, captured: bool) -> bool:
    """Whether some query of the step may see more than topk keys. captured: lengths may be others when it is replayed,
    as far as its tables go."""
    longest = step.block_table_BN.shape[1] * step.block_size if captured else max(step.kv_lens, default=0)
    return longest > topk


class SparseMla:
    """`prepare` gives what computes the attention of a step's layers, one after another."""

    def __init__(
        self,
        shape: MlaShape,
        index: IndexShape,
        scale: float,
        prefill: PrefillMode,
        dtype: torch.dtype,
        device: torch.device,
        backend: str = "auto",
        fp8_cache: bool = False,
    ) -> None:
        """Arguments as mla.backend.make_backend; backend: of what attends densely."""
        self.shape, self.index = shape, index
        self.dense: MlaBackend = make_backend(shape, scale, prefill, dtype, device, backend, fp8_cache)
        self.rows: MlaBackend = make_backend(shape, scale, "absorbed", dtype, device, "auto", fp8_cache)
        self.singly = choice.on_gpu(device)

    def prepare(self, step: StepInput, captured: bool = False) -> SparseStep:
        """captured: what is prepared is replayed with other lengths."""
        if not chooses(step, self.index.topk, captured):
            return SparseStep(self, step, self.dense.prepare(step), None)
        parts = _Parts.of(step, self.index.topk)
        dense = None if parts.dense is None else self.dense.prepare(parts.dense)
        return SparseStep(self, step, dense, parts)


class SparseStep:
    """The attention of one step, used by every layer in turn: a layer without an indexer uses what the last one with
    one has chosen. dense: of the queries that see few keys; parts: None: those are all."""

    def __init__(self, backend: SparseMla, step: StepInput, dense: PreparedStep | None, parts: _Parts | None) -> None:
        self._backend, self._step, self._dense, self._parts = backend, step, dense, parts
        self._attend: PreparedStep | None = None

    def __call__(
        self,
        q_nope_THN: Tensor,
        q_pe_THP: Tensor,
        index_q_THI: Tensor,
        index_weight_TH: Tensor,
        cache_RX: Tensor,
        index_cache: Tensor | None,
        w_uk_HNC: Tensor,
        w_uv_HVC: Tensor,
    ) -> Tensor:
        """As mla.protocol.PreparedStep. index_q and index_weight: of no heads where the layer has no indexer, and where
        the step does not choose (`chooses`)."""
        operands, parts = (cache_RX, w_uk_HNC, w_uv_HVC), self._parts
        if parts is None:
            assert self._dense is not None
            return self._dense(q_nope_THN, q_pe_THP, *operands)
        if index_q_THI.shape[1]:
            assert index_cache is not None
            index_q, weight = parts.choosing(index_q_THI), parts.choosing(index_weight_TH)
            chosen = choose_keys(index_q, weight, index_cache, parts.queries, self._backend.index.topk)
            self._attend = self._backend.rows.prepare(self._over(chosen))
        assert self._attend is not None, "the first layer has an indexer"
        mixed_UHV = self._attend(parts.choosing(q_nope_THN), parts.choosing(q_pe_THP), *operands)
        if self._dense is None or parts.dense_tokens is None:
            return mixed_UHV
        out_THV = q_nope_THN.new_empty(*q_nope_THN.shape[:2], self._backend.shape.v_head_dim)
        q_nope, q_pe = q_nope_THN.index_select(0, parts.dense_tokens), q_pe_THP.index_select(0, parts.dense_tokens)
        out_THV.index_copy_(0, parts.dense_tokens, self._dense(q_nope, q_pe, *operands))
        assert parts.tokens is not None
        return out_THV.index_copy_(0, parts.tokens, mixed_UHV)

    def _over(self, chosen: Chosen) -> StepInput:
        """The chosen rows as sequences with one query each."""
        assert self._parts is not None
        num, topk = self._parts.num_queries, self._backend.index.topk
        return replace(
            self._step,
            query_starts=tuple(range(num + 1)),
            kv_lens=tuple(min(length, topk) for length in self._parts.lens),
            kv_lens_B=chosen.counts_U,
            block_table_BN=chosen.rows_UK,
            num_decodes=num if self._backend.singly else self._step.num_decodes,
            block_size=1,
        )


class _Parts(Struct, frozen=True):
    """Which queries choose: all decodes, and those of prompts that see more than topk keys. lens: keys that each sees.
    tokens: of the step, int64 [U]; None: all. dense: the others as a step of their own, dense_tokens: int64, or None
    where there are none."""

    queries: IndexQueries
    lens: tuple[int, ...]
    tokens: Tensor | None
    dense: StepInput | None
    dense_tokens: Tensor | None

    @property
    def num_queries(self) -> int:
        return len(self.lens)

    def choosing(self, x_T: Tensor) -> Tensor:
        return x_T if self.tokens is None else x_T.index_select(0, self.tokens)

    @staticmethod
    def of(step: StepInput, topk: int) -> _Parts:
        n = step.num_decodes
        lens, tokens, sequences = list(step.kv_lens[:n]), list(range(n)), list(range(n))
        parts = [(b, b + 1, b, step.kv_lens[b]) for b in range(n)]
        few: list[tuple[int, int, int]] = []  # sequence, its first query in the step, the place behind its last
        for b in range(n, step.num_sequences):
            start, end = step.query_starts[b], step.query_starts[b + 1]
            context = step.kv_lens[b] - (end - start)
            middle = start + min(max(topk - context, 0), end - start)
            if middle > start:
                few.append((b, start, middle))
            if end > middle:
                parts.append((len(lens), len(lens) + end - middle, b, step.kv_lens[b]))
            lens += range(context + middle - start + 1, step.kv_lens[b] + 1)
            tokens += range(middle, end)
            sequences += [b] * (end - middle)
        device = step.slots_T.device
        lens_U, sequence_U = step.kv_lens_B[:n], None
        if len(lens) > n:
            lens_U = torch.tensor(lens, dtype=torch.int64, device=device)
            sequence_U = torch.tensor(sequences, dtype=torch.int64, device=device)
        queries = IndexQueries(lens_U, sequence_U, step.block_table_BN, step.block_size, tuple(parts))
        if not few:
            return _Parts(queries, tuple(lens), None, None, None)
        dense_tokens = torch.cat([torch.arange(start, end, device=device) for _, start, end in few])
        return _Parts(
            queries,
            tuple(lens),
            torch.tensor(tokens, dtype=torch.int64, device=device),
            _some(step, few, dense_tokens),
            dense_tokens,
        )


def _some(step: StepInput, members: list[tuple[int, int, int]], tokens: Tensor) -> StepInput:
    """The first queries of some sequences as a step; none of them is a decode."""
    starts, lens = [0], []
    for b, start, end in members:
        starts.append(starts[-1] + end - start)
        lens.append(step.kv_lens[b] - (step.query_starts[b + 1] - end))
    return replace(
        step,
        token_ids_T=step.token_ids_T.index_select(0, tokens),
        positions_T=step.positions_T.index_select(0, tokens),
        slots_T=step.slots_T.index_select(0, tokens),
        query_starts=tuple(starts),
        kv_lens=tuple(lens),
        kv_lens_B=torch.tensor(lens, dtype=torch.int64, device=tokens.device),
        block_table_BN=step.block_table_BN.index_select(
            0, torch.tensor([b for b, _, _ in members], device=tokens.device)
        ),
        num_decodes=0,
    )
