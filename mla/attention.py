"""MLA in PyTorch operations, on any device: decodes absorbed, prefills naive or absorbed. Where the native kernels are
there, both run in those (mla/native_decode.py, mla/native_prefill.py).

Legend: T tokens of the step, U padded query rows of a side, b sequences of a group, Q queries of each, q queries of a
tile, S keys of a piece, H heads; N, P, C, X, V widths (mla/protocol.py), R rows of the cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from layers.step import StepInput
from mla import latent_kv, native_decode, native_prefill
from mla.merge import merge
from mla.native_decode import NativeDecode
from mla.native_prefill import NativePrefill
from mla.plan import KeyPiece, KeyTile, Limits, PlanSide, PrefillPlan, QueryGroup, make_plan
from mla.protocol import MlaShape, PrefillMode


class TorchMla:
    """Implements mla.protocol.MlaBackend. scale: what scores are multiplied by; fp8_cache: its rows are bytes
    (mla/latent_fp8.py)."""

    def __init__(
        self,
        shape: MlaShape,
        scale: float,
        prefill: PrefillMode,
        dtype: torch.dtype,
        limits: Limits | None = None,
        fp8_cache: bool = False,
    ) -> None:
        self.shape = shape
        self.scale = scale
        self.prefill: PrefillMode = prefill
        self.dtype = dtype
        self.limits = Limits.of(shape, dtype.itemsize) if limits is None else limits
        self.fp8_cache = fp8_cache

    def prepare(self, step: StepInput) -> TorchMlaStep | NativeMlaStep:
        device = step.slots_T.device
        decode, first_token = None, 0
        if step.num_decodes and not self.fp8_cache and native_decode.can_run(self.shape, self.dtype, device):
            decode = NativeDecode(step, self.shape, self.scale, self.dtype)
            first_token = step.num_decodes
        others: TorchMlaStep | NativePrefill | None = None
        if step.num_tokens > first_token:
            native = not self.fp8_cache and native_prefill.can_run(self.shape, self.dtype, device)
            if native and first_token == step.num_decodes:
                others = NativePrefill(step, self.shape, self.scale, self.prefill, self.limits)
            else:
                plan = make_plan(step, self.shape, self.prefill, self.limits, first_token)
                others = TorchMlaStep(self.shape, self.scale, step.block_size, plan)
        if isinstance(others, TorchMlaStep) and decode is None:
            return others
        return NativeMlaStep(self.shape, decode, others)


class NativeMlaStep:
    """Implements mla.protocol.PreparedStep: decodes, which are the first tokens, and all others."""

    def __init__(
        self, shape: MlaShape, decode: NativeDecode | None, others: NativePrefill | TorchMlaStep | None
    ) -> None:
        self._shape, self._decode, self._others = shape, decode, others

    def __call__(
        self, q_nope_THN: Tensor, q_pe_THP: Tensor, cache_RX: Tensor, w_uk_HNC: Tensor, w_uv_HVC: Tensor
    ) -> Tensor:
        operands = (cache_RX, w_uk_HNC, w_uv_HVC)
        num_tokens, num = q_nope_THN.shape[0], 0
        out_THV: Tensor | None = None
        if self._decode is not None:
            num = self._decode.num_sequences
            out_THV = self._decode(q_nope_THN[:num], q_pe_THP[:num], *operands)
            if num == num_tokens:
                return out_THV
        if isinstance(self._others, TorchMlaStep):
            assert out_THV is not None
            return torch.cat((out_THV, self._others(q_nope_THN, q_pe_THP, *operands)))
        all_THV = q_nope_THN.new_empty((num_tokens, self._shape.num_heads, self._shape.v_head_dim))
        if out_THV is not None:
            all_THV[:num] = out_THV
        if self._others is not None:
            self._others(q_nope_THN, q_pe_THP, *operands, all_THV)
        return all_THV


class TorchMlaStep:
    """Implements mla.protocol.PreparedStep."""

    def __init__(self, shape: MlaShape, scale: float, block_size: int, plan: PrefillPlan) -> None:
        self.shape = shape
        self.scale = scale
        self.block_size = block_size
        self.plan = plan

    def __call__(
        self, q_nope_THN: Tensor, q_pe_THP: Tensor, cache_RX: Tensor, w_uk_HNC: Tensor, w_uv_HVC: Tensor
    ) -> Tensor:
        """Of the tokens that the plan has."""
        plan, parts = self.plan, []
        if plan.absorbed.num_rows:
            q_nope, q_pe = _rows(plan.absorbed, q_nope_THN), _rows(plan.absorbed, q_pe_THP)
            parts.append(self._absorbed(q_nope, q_pe, cache_RX, w_uk_HNC, w_uv_HVC))
        if plan.naive.num_rows:
            q_UHK = torch.cat([_rows(plan.naive, q_nope_THN), _rows(plan.naive, q_pe_THP)], dim=-1)
            parts.append(self._naive(q_UHK, cache_RX, w_uk_HNC, w_uv_HVC))
        if not parts:
            return q_nope_THN.new_empty((0, self.shape.num_heads, self.shape.v_head_dim))
        out_UHV = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out_UHV if plan.restore is None else out_UHV.index_select(0, plan.restore)

    # ---- absorbed ----

    def _absorbed(
        self, q_nope_UHN: Tensor, q_pe_UHP: Tensor, cache_RX: Tensor, w_uk_HNC: Tensor, w_uv_HVC: Tensor
    ) -> Tensor:
        """[U, H, V]. W_UK and W_UV are applied to all rows of the step at once, groups only attend to latents."""
        q_latent_HUC = torch.bmm(q_nope_UHN.transpose(0, 1), w_uk_HNC)
        q_UHX = torch.cat([q_latent_HUC.transpose(0, 1), q_pe_UHP], dim=-1)
        groups = self.plan.absorbed.groups
        mixed = [self._absorbed_group(group, q_UHX, cache_RX) for group in groups]
        mixed_UHC = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return torch.bmm(mixed_UHC.transpose(0, 1), w_uv_HVC.transpose(1, 2)).transpose(0, 1)

    def _absorbed_group(self, group: QueryGroup, q_UHX: Tensor, cache_RX: Tensor) -> Tensor:
        """Heads are laid along the queries: they share one key, the latent. Returns [b * Q, H, C]."""
        b, num_queries, (_, heads, width) = group.num_sequences, group.num_queries, q_UHX.shape
        rows = slice(group.first_row, group.first_row + b * num_queries)
        q_bQHX = q_UHX[rows].view(b, num_queries, heads, width)
        outputs = _Outputs(group, q_bQHX, self.shape.latent_dim)
        for piece in group.pieces:
            rows_X = self._gather(cache_RX, piece, q_UHX.dtype)
            for tile in piece.tiles:
                q_bqX = q_bQHX[:, tile.first : tile.last].reshape(b, -1, width)
                # Latents and rotated keys together are the values too: cutting the result is cheaper than cutting them.
                keys_bSX = rows_X[: b * tile.num_keys].view(b, -1, width)
                shape = (b, tile.last - tile.first, heads)
                scores = self._scores(q_bqX, keys_bSX).view(*shape, -1)
                weights, lse = _softmax(scores, tile, 2, outputs.merging)
                mixed = torch.bmm(weights.view(b, -1, tile.num_keys), keys_bSX)
                outputs.put(tile, mixed.view(*shape, -1)[..., : self.shape.latent_dim], lse)
        return outputs.value().flatten(0, 1)

    # ---- naive ----

    def _naive(self, q_UHK: Tensor, cache_RX: Tensor, w_uk_HNC: Tensor, w_uv_HVC: Tensor) -> Tensor:
        """[U, H, V]."""
        parts = [self._naive_group(group, q_UHK, cache_RX, w_uk_HNC, w_uv_HVC) for group in self.plan.naive.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _naive_group(
        self, group: QueryGroup, q_UHK: Tensor, cache_RX: Tensor, w_uk_HNC: Tensor, w_uv_HVC: Tensor
    ) -> Tensor:
        """Keys and values of a piece are built, used by all queries, and dropped. Returns [b * Q, H, V]."""
        b, num_queries, (_, heads, width) = group.num_sequences, group.num_queries, q_UHK.shape
        rows = slice(group.first_row, group.first_row + b * num_queries)
        q_bQHK = q_UHK[rows].view(b, num_queries, heads, width)
        outputs = _Outputs(group, q_bQHK, self.shape.v_head_dim)
        for piece in group.pieces:
            k_bHSK, v_bHSV = self._build(cache_RX, piece, b, w_uk_HNC, w_uv_HVC)
            for tile in piece.tiles:
                q_bHqK = q_bQHK[:, tile.first : tile.last].transpose(1, 2).flatten(0, 1)
                shape = (b, heads, tile.last - tile.first)
                scores = self._scores(q_bHqK, k_bHSK[:, : tile.num_keys]).view(*shape, -1)
                weights, lse = _softmax(scores, tile, 1, outputs.merging)
                mixed = torch.bmm(weights.flatten(0, 1), v_bHSV[:, : tile.num_keys]).view(*shape, -1)
                outputs.put(tile, mixed.transpose(1, 2), None if lse is None else lse.transpose(1, 2))
        return outputs.value().flatten(0, 1)

    def _build(
        self, cache_RX: Tensor, piece: KeyPiece, b: int, w_uk_HNC: Tensor, w_uv_HVC: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys [b * H, S, N + P] and values [b * H, S, V] of a piece."""
        heads, nope, latent = w_uk_HNC.shape
        rows_X = self._gather(cache_RX, piece, w_uk_HNC.dtype)[: b * piece.num_keys]
        latent_C, k_pe_P = rows_X[:, :latent], rows_X[:, latent:]
        k_nope = F.linear(latent_C, w_uk_HNC.flatten(0, 1)).view(b, -1, heads, nope)
        k = rows_X.new_empty((b, heads, k_nope.shape[1], self.shape.key_dim))
        k[..., :nope] = k_nope.transpose(1, 2)
        k[..., nope:] = k_pe_P.view(b, 1, -1, self.shape.qk_rope_head_dim)
        v = F.linear(latent_C, w_uv_HVC.flatten(0, 1)).view(b, -1, heads, self.shape.v_head_dim)
        return k.flatten(0, 1), v.transpose(1, 2).flatten(0, 1)

    # ---- both ----

    def _gather(self, cache_RX: Tensor, piece: KeyPiece, dtype: torch.dtype) -> Tensor:
        rows_X = latent_kv.gather(cache_RX, piece.blocks, self.block_size)
        return latent_kv.widen(rows_X, self.shape.latent_dim, self.shape.qk_rope_head_dim, dtype)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """scale * q k^T, for [B, q, K] and [B, S, K]."""
        unused = torch.empty((), dtype=q.dtype, device=q.device)
        return torch.baddbmm(unused, q, k.transpose(1, 2), beta=0, alpha=self.scale)


class _Outputs:
    """Collects the tiles of a group, over its pieces: [b, Q, H, Y]."""

    def __init__(self, group: QueryGroup, q_bQHK: Tensor, width: int) -> None:
        self.merging = len(group.pieces) > 1
        self.single = not self.merging and len(group.pieces[0].tiles) == 1
        self.dtype = q_bQHK.dtype
        shape = (*q_bQHK.shape[:3], width)
        if self.merging:
            self.out = q_bQHK.new_zeros(shape, dtype=torch.float32)
            self.lse = q_bQHK.new_full(shape[:3], -torch.inf, dtype=torch.float32)
        elif not self.single:
            self.out = q_bQHK.new_empty(shape)

    def put(self, tile: KeyTile, out_bqHY: Tensor, lse_bqH: Tensor | None) -> None:
        """lse is given exactly if merging."""
        if lse_bqH is not None:
            merge(self.out[:, tile.first : tile.last], self.lse[:, tile.first : tile.last], out_bqHY, lse_bqH)
        elif self.single:
            self.out = out_bqHY
        else:
            self.out[:, tile.first : tile.last] = out_bqHY

    def value(self) -> Tensor:
        return self.out.to(self.dtype)


def _rows(side: PlanSide, x_T: Tensor) -> Tensor:
    """The padded rows of a side, [U, ...]."""
    if side.rows is None:
        return x_T[side.first_token : side.first_token + side.num_rows]
    return x_T.index_select(0, side.rows)


def _softmax(scores: Tensor, tile: KeyTile, heads_axis: int, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Softmax over the last dimension and, if wanted, the log of the sum of exponentials (float32).

    scores: [b, q, H, S] or, with heads_axis 1, [b, H, q, S]; used up. Hidden scores are overwritten, not added to: what
    stands in rows past a sequence's end does not matter.
    """
    if tile.hidden is not None:
        scores[..., tile.num_open :].masked_fill_(tile.hidden.unsqueeze(heads_axis), -torch.inf)
    if not with_lse:
        return torch.softmax(scores, dim=-1), None
    scores32 = scores.float()
    lse = torch.logsumexp(scores32, dim=-1)
    # A query may see no key of a later piece: its lse is -inf, and its weights should be 0, not the NaN of -inf + inf.
    lowest = torch.finfo(torch.float32).min
    return scores32.sub_(lse.clamp_min(lowest).unsqueeze(-1)).exp_().to(scores.dtype), lse
