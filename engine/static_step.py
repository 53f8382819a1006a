"""What steps that are captured once and replayed read: the same memory for all of them, into which every step is
copied.

Legend: T tokens of the step, B sequences, N blocks of a sequence, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dbo.steps import Steps
from layers.step import StepInput


@dataclass(frozen=True, slots=True)
class CutExperts:
    """Experts that run as they are written between two captured pieces. x: what the piece before leaves for them, out:
    where the one after finds what they give."""

    steps: Callable[[Tensor, int], Steps[Tensor]]
    x_TD: Tensor
    lane: int
    out_TD: Tensor


class StaticTokens:
    """Rows from `_used` on are padding."""

    def __init__(self, num_tokens: int, scratch_slot: int, device: torch.device) -> None:
        self._scratch_slot = scratch_slot
        self.token_ids_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.positions_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.slots_T = torch.full((num_tokens,), scratch_slot, dtype=torch.int64, device=device)
        self._used = 0

    def fill(self, step: StepInput) -> None:
        count = step.num_tokens
        self.token_ids_T[:count].copy_(step.token_ids_T)
        self.positions_T[:count].copy_(step.positions_T)
        self.slots_T[:count].copy_(step.slots_T)
        if count < self._used:
            rest = slice(count, self._used)
            self.positions_T[rest] = 0
            self.slots_T[rest] = self._scratch_slot
        self._used = count

    def step(self, size: int, block_size: int) -> StepInput:
        """Only to capture with: as many decodes that see nothing but the scratch block."""
        ones_T = torch.ones_like(self.slots_T[:size])
        return StepInput(
            token_ids_T=self.token_ids_T[:size],
            positions_T=self.positions_T[:size],
            slots_T=self.slots_T[:size],
            query_starts=tuple(range(size + 1)),
            kv_lens=(1,) * size,
            kv_lens_B=ones_T,
            block_table_BN=(ones_T * (self._scratch_slot // block_size))[:, None],
            num_decodes=size,
            block_size=block_size,
            logits_rows_P=self.positions_T[:0],
        )


class StaticDecodes:
    """The same for decode steps, with what attention reads."""

    def __init__(self, size: int, columns: int, block_size: int, scratch_block: int, device: torch.device) -> None:
        self._tokens = StaticTokens(size, scratch_block * block_size, device)
        self._block_size = block_size
        self._scratch_block = scratch_block
        self._kv_lens_B = torch.ones(size, dtype=torch.int64, device=device)
        self._table_BN = torch.full((size, columns), scratch_block, dtype=torch.int64, device=device)
        self._used = 0

    def fill(self, step: StepInput) -> None:
        count, columns = step.block_table_BN.shape
        self._tokens.fill(step)
        self._kv_lens_B[:count].copy_(step.kv_lens_B)
        self._table_BN[:count, :columns].copy_(step.block_table_BN)
        if count < self._used:
            self._kv_lens_B[count : self._used] = 1
            self._table_BN[count : self._used, 0] = self._scratch_block
        self._used = count

    def step(self, size: int, longest: int) -> StepInput:
        """kv_lens on the host are the most that may come: kernels take them as a bound, and the truth from
        kv_lens_B."""
        return StepInput(
            token_ids_T=self._tokens.token_ids_T[:size],
            positions_T=self._tokens.positions_T[:size],
            slots_T=self._tokens.slots_T[:size],
            query_starts=tuple(range(size + 1)),
            kv_lens=(longest,) * size,
            kv_lens_B=self._kv_lens_B[:size],
            block_table_BN=self._table_BN[:size],
            num_decodes=size,
            block_size=self._block_size,
            logits_rows_P=self._tokens.positions_T[:0],
        )
