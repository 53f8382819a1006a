"""The head of a language model: from hidden states to the vocabulary.

Legend: P rows sampled, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layers.greedy import greedy, greedy_tokens
from layers.linear import Linear, parameter
from native import Isa, fixed_order, isa
from native.formats import WeightFormat
from native.linear import linear
from native.rows import as_dtype


class LMHead(Linear):
    """weight [V, D], or another layer's (the embedding's), which stays as it is: packed is a copy; bias [V] or None."""

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        tied: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
    ) -> None:
        super().__init__(hidden_size, 0 if tied is not None else vocab_size, False, dtype, device)
        self._tied = (tied,)  # no parameter of this layer: it is another's
        self.bias = parameter((vocab_size,), dtype, device) if bias else None

    @property
    def tied(self) -> Tensor | None:
        return self._tied[0]

    @property
    def matrix(self) -> Tensor:
        """[V, D], while it is not packed."""
        return self.weight if self.tied is None else self.tied

    @property
    def is_faster_packed(self) -> bool:
        """Of bfloat16 only for a fixed order or with AVX2: the best token is found without logits in memory, which
        takes weights as they lie, and with AVX2 more time than packed ones and their logits."""
        apart = self.weight.dtype is torch.bfloat16 and not fixed_order() and isa() is not Isa.AVX2
        return self.tied is None and not apart and super().is_faster_packed

    def forward(self, hidden_PD: Tensor) -> Tensor:
        """Logits [P, V], in the weights' dtype, as in the originals."""
        if self.packed is not None:
            return self.packed(hidden_PD, self.bias)
        return linear(hidden_PD, self.matrix, self.bias)

    def part(self, hidden_PD: Tensor, first: int, last: int) -> Tensor:
        """[P, last - first]: of the logits those from `first`, a multiple of 64, up to `last`."""
        bias = None if self.bias is None else self.bias[first:last]
        if self.packed is not None:
            return self.packed.part(first, last)(hidden_PD, bias)
        return linear(hidden_PD, self.matrix[first:last], bias)

    def greedy_tokens(self, hidden_PD: Tensor, num_valid_tokens: int, out_P: Tensor | None = None) -> Tensor:
        """int64 [P]: of the first num_valid_tokens logits the largest, the first of equals; in out_P if there is
        one. hidden may be of another dtype than the weights."""
        if self.packed is not None or self.bias is not None:
            if self.packed is None or self.packed.form is WeightFormat.PLAIN:
                hidden_PD = as_dtype(hidden_PD, self.weight.dtype)
            return greedy(self(hidden_PD)[:, :num_valid_tokens], out_P)
        return greedy_tokens(as_dtype(hidden_PD, self.matrix.dtype), self.matrix, num_valid_tokens, out_P)
