"""The experts that live in the slots of one rank, in one MoE layer.

Legend: S slots of this rank, R rows arrived, C rows per padded slot, T tokens, D hidden size, F expert width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moe_kernels import ExpertBatch, ExpertWeights, HalfMatrix, ScaledMatrix, TokenBatch, WeightFormat, expert_weights
from moe_kernels.activation import GATED, Activation, ExpertKind
from moe_kernels.backends import choose_experts, facts_of
from moe_kernels.matrix import HALVES, SCALE_ROWS, quantize, quantize_halves
from moe_kernels.packed import PackedExperts
from moe_kernels.weights import PlainExperts

__all__ = [
    "GATED",
    "HALVES",
    "SCALE_ROWS",
    "Activation",
    "ExpertKind",
    "Experts",
    "HalfMatrix",
    "ScaledMatrix",
    "WeightFormat",
    "quantize",
    "quantize_halves",
]


class Experts(nn.Module):
    """S experts of width F on rows of size D; uninitialised until loaded. `weights` has them, in the form that the
    fastest arithmetic here wants (moe_kernels/weights.py)."""

    def __init__(
        self,
        num_slots: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        kind: ExpertKind = GATED,
    ) -> None:
        super().__init__()
        self.hidden_size, self.width = hidden_size, intermediate_size
        self._sizes = (num_slots, hidden_size, intermediate_size, dtype, torch.device(device or "cpu"))
        self.num_slots, self.kind, self.dtype = num_slots, kind, dtype
        self._form, self._backend = WeightFormat.PLAIN, "auto"
        self._weights: ExpertWeights | None = None

    @property
    def weights(self) -> ExpertWeights:
        """Made when they are first asked for: until then it may be said in what format (`keep_as`)."""
        if self._weights is None:
            self._weights = expert_weights(*self._sizes, self._form, self._backend, self.kind)
        return self._weights

    @weights.setter
    def weights(self, weights: ExpertWeights) -> None:
        self._weights = weights

    @property
    def format(self) -> WeightFormat:
        """In which weights are, or are to be, kept."""
        return self._form if self._weights is None else self._weights.format

    def keep_as(self, form: WeightFormat, backend: str | None = None) -> None:
        """From now on weights are kept in this format, if they can be; what was loaded before is lost. backend: a name
        of moe_kernels/backends.py; None: as before. Raises ValueError where it cannot run."""
        chosen = self._backend if backend is None else backend
        if form is self.format and chosen == self._backend:
            return
        choose_experts(chosen, facts_of(*self._sizes[1:], form, self.kind))
        self._form, self._backend, self._weights = form, chosen, None

    def forward(self, batch: ExpertBatch | TokenBatch) -> Tensor:
        """Rows: each slot's expert on its rows, in the layout of batch.x (RAGGED [R, D], PADDED [S, C, D]). Tokens: the
        weighted sum of each token's experts that are here, [T, D]."""
        if isinstance(batch, TokenBatch):
            return self.weights.run_tokens(batch)
        return self.weights.run_rows(batch)

    def fill_slot(self, slot: int, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> None:
        """Put an expert into a slot; of any float dtype, converted to the format in which weights are kept."""
        self.weights.fill(slot, gate_FD, up_FD, down_DF)

    def fill_slot_scaled(self, slot: int, gate_FD: ScaledMatrix, up_FD: ScaledMatrix, down_DF: ScaledMatrix) -> None:
        """The same from 8-bit weights, which stay as they are if that is the format in which weights are kept."""
        self.weights.fill_scaled(slot, gate_FD, up_FD, down_DF)

    def fill_slot_halves(
        self, slot: int, gate_FD: HalfMatrix, up_FD: HalfMatrix, down_DF: HalfMatrix | ScaledMatrix
    ) -> None:
        """The same from 4-bit weights; of 8 bits may be those of down."""
        self.weights.fill_halves(slot, gate_FD, up_FD, down_DF)

    def fill_biases(self, slot: int, gate_F: Tensor, up_F: Tensor, down_D: Tensor) -> None:
        """The biases of an expert, where its kind has them."""
        self.weights.fill_biases(slot, gate_F, up_F, down_D)

    def clear_slot(self, slot: int) -> None:
        """Make a slot's weights and biases zero."""
        self.weights.clear(slot)

    def read_slot(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        """(gate [F, D], up [F, D], down [D, F]) of one slot, in the rows' dtype."""
        return self.weights.read(slot)

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """Of all slots, on a CPU: tensors whose first dimension is S."""
        return self._in_memory().whole()

    def one_slot(self) -> Experts:
        """One slot of the same form, in memory of its own."""
        one = Experts(1, *self._sizes[1:], self.kind)
        one.keep_as(self.format, self._backend)
        return one

    def lie_in(self, memory: Sequence[Tensor]) -> None:
        """Have the slots in other memory of the same form, with what it holds."""
        self._in_memory().lie_in(memory)

    def _in_memory(self) -> PackedExperts | PlainExperts:
        weights = self.weights
        assert isinstance(weights, PackedExperts | PlainExperts)
        return weights

    def slot_storage(self, slot: int) -> tuple[Tensor, ...]:
        """Every tensor that makes up the expert of one slot, as contiguous views in the form in which it is kept: what
        a move to another rank's slot copies."""
        return self.weights.storage(slot)
