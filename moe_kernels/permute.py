"""Rows of tokens into the order of expert slots, and the weighted sum back.

Legend: T tokens, D hidden size, K experts per token, S slots, R rows, P (token, k) pairs that have a row here.
"""

from __future__ import annotations

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from moe_kernels.layout import ExpertBatch, Layout


class Bags(Struct, frozen=True):
    """Which rows make up each token: token t is the sum over p in starts_T[t] : starts_T[t + 1] (for the last one: to
    the end) of weight_P[p] * y[row_P[p]]. row and starts int64, weight float32."""

    row_P: Tensor
    weight_P: Tensor
    starts_T: Tensor


def permute(x_TD: Tensor, slot_TK: Tensor, weight_TK: Tensor, num_slots: int) -> tuple[ExpertBatch, Bags]:
    """One row per (token, k), sorted by slot and in token order within a slot; R = P = T * K.

    slot_TK: int64 [T, K], 0 <= slot < num_slots; weight_TK: float32 [T, K].
    """
    top_k = slot_TK.shape[1]
    slot_P = slot_TK.flatten()
    pair_R = slot_P.argsort(stable=True)
    rows_S = torch.bincount(slot_P, minlength=num_slots).to(torch.int32)
    index_P = torch.arange(slot_P.shape[0], device=slot_P.device)
    row_P = torch.empty_like(index_P).scatter_(0, pair_R, index_P)
    x_RD = x_TD.index_select(0, pair_R.div(top_k, rounding_mode="floor"))
    return ExpertBatch(Layout.RAGGED, x_RD, rows_S), Bags(row_P, weight_TK.flatten(), index_P[::top_k])


def permute_some(
    x_TD: Tensor, slot_TK: Tensor, weight_TK: Tensor, first_slot: int, num_slots: int
) -> tuple[ExpertBatch, Bags]:
    """As `permute`, but only the pairs with first_slot <= slot < first_slot + num_slots have a row.

    slot_TK: any integer dtype and, like weight_TK and x_TD, of any strides.
    """
    num_tokens, top_k = slot_TK.shape
    # 0: below this rank's slots, 1 to S: its own, S + 1: above. So own pairs lie together when sorted.
    key_N = (slot_TK - (first_slot - 1)).clamp_(0, num_slots + 1).flatten()
    pair_N = _order(key_N)
    counts = torch.bincount(key_N, minlength=num_slots + 2)
    num_below, num_above = counts[:: num_slots + 1].tolist()
    pair_R = pair_N[num_below : pair_N.shape[0] - num_above]
    pair_P, row_P = pair_R.sort()
    weight_P = weight_TK.flatten().index_select(0, pair_P)
    starts_T = torch.searchsorted(pair_P, torch.arange(0, num_tokens * top_k, top_k, device=pair_P.device))
    x_RD = x_TD.index_select(0, pair_R.div(top_k, rounding_mode="floor"))
    rows_S = counts[1 : num_slots + 1].to(torch.int32)
    return ExpertBatch(Layout.RAGGED, x_RD, rows_S), Bags(row_P, weight_P, starts_T)


def _order(key_N: Tensor) -> Tensor:
    """Stable argsort of int64 keys from 0 to 32767."""
    if key_N.device.type != "cpu":
        return key_N.argsort(stable=True)
    # numpy counts 16-bit keys instead of comparing them: a tenth of the time for the thousands of a prefill.
    return torch.from_numpy(key_N.numpy().astype(np.int16).argsort(kind="stable"))


def sum_rows(y_RD: Tensor, bags: Bags) -> Tensor:
    """float32 [T, D]: for each token the weighted sum of its rows, 0 for a token without any."""
    num_tokens = bags.starts_T.shape[0]
    if num_tokens == 0 or y_RD.shape[0] == 0:
        return torch.zeros(num_tokens, y_RD.shape[1], device=y_RD.device)
    return torch.embedding_bag(y_RD.float(), bags.row_P, bags.starts_T, False, 0, False, bags.weight_P)[0]


def unpermute(y_RD: Tensor, bags: Bags, out_TD: Tensor) -> Tensor:
    """out_TD = `sum_rows`, rounded to out's dtype."""
    return out_TD.copy_(sum_rows(y_RD, bags))
