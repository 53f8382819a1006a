"""Matrix products with weights kept as [out, in], and several of them stacked so that one product serves all.

Legend: T tokens, I input features, O output features, P rows sampled, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from layers.stored import StoredWeight
from native.formats import WeightFormat
from native.linear import linear, use_large_pages
from native.packed_linear import PackedLinear, can_pack, is_bfloat16, is_faster_packed


def parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter that is never trained; the loader fills it."""
    values = torch.empty(shape, dtype=dtype, device=device)
    use_large_pages(values)
    return nn.Parameter(values, requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b. weight [O, I]; bias [O] or None. packed: the weights as the kernels want them; then `weight` is
    empty. stored: parts that were read in fewer bits and stay so (keeps_stored), until they are packed; a Linear that
    is not merged has one, ""."""

    bias: nn.Parameter | None
    packed: PackedLinear | None = None
    keeps_stored = True

    def __init__(
        self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = parameter((out_features, in_features), dtype, device)
        self.bias = parameter((out_features,), dtype, device) if bias else None
        self.stored: dict[str, StoredWeight] = {}

    def weight_of(self, part: str) -> Tensor:
        """A view of a part's weights as numbers, even if they were kept in fewer bits."""
        rows = self.weight[self.rows_of(part)]
        if part in self.stored:
            self.stored.pop(part).widen_into(rows)
        return rows

    def rows_of(self, part: str) -> slice:
        """Which outputs are a part's."""
        assert not part
        return slice(None)

    @property
    def part_names(self) -> tuple[str, ...]:
        return ("",)

    def forward(self, x_TI: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed(x_TI, self.bias)
        return linear(x_TI, self.weight, self.bias)

    @property
    def matrix(self) -> Tensor:
        """[O, I], while it is not packed."""
        return self.weight

    @property
    def can_pack(self) -> bool:
        """Whether the native kernels can keep this layer in 8 or 4 bits."""
        return can_pack(self.matrix)

    @property
    def is_faster_packed(self) -> bool:
        """Whether this layer is better packed as it is."""
        return is_faster_packed(self.weight)

    def pack_bfloat16(self) -> bool:
        """Keep `weight`, of a layer in float32, in bfloat16, if no number loses anything by it; whether that was so."""
        fits = self.weight.numel() > 0 and is_bfloat16(self.weight)
        if fits:
            self.pack(self.weight.bfloat16(), form=WeightFormat.BF16)
        return fits

    def pack(
        self, weight_OI: Tensor, scale: Tensor | None = None, scale_rows: int = 1, form: WeightFormat | None = None
    ) -> None:
        """Keep these weights (PackedLinear: of fewer bits with their scales, or `weight` itself) instead of `weight`,
        whose memory is given back or used again."""
        self._keep(PackedLinear(weight_OI, scale, scale_rows, True, form, self.matrix.shape[1]))

    def take_packed(self, packed_B: Tensor, form: WeightFormat) -> None:
        """The same with the bytes that a layer like this one has packed in this form."""
        num_outputs = self.matrix.shape[0] if self.packed is None else self.packed.num_outputs
        self._keep(PackedLinear.over(packed_B, form, num_outputs, self.matrix.shape[1]))

    def _keep(self, packed: PackedLinear) -> None:
        self.packed = packed
        self.stored.clear()
        self.weight = nn.Parameter(self.weight.new_empty(0, self.weight.shape[1]), requires_grad=False)


class MergedLinear(Linear):
    """Linears over the same input, stacked by output rows: one product instead of several.

    `parts` maps each part's checkpoint name to its output features, in the order of the rows. `weight_of` and `bias_of`
    are views, so a loader that writes to them fills its part of the whole.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(in_features, sum(parts.values()), bias, dtype, device)
        self.parts = dict(parts)

    def rows_of(self, part: str) -> slice:
        start = 0
        for name, rows in self.parts.items():
            if name == part:
                return slice(start, start + rows)
            start += rows
        raise AssertionError(f"no part {part!r} among {list(self.parts)}")

    @property
    def part_names(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def bias_of(self, part: str) -> Tensor:
        assert self.bias is not None
        return self.bias[self.rows_of(part)]


def logits(hidden_PD: Tensor, weight_VD: Tensor) -> Tensor:
    """The head: [P, D] x [V, D] -> [P, V], in the weights' dtype, as in the originals."""
    return linear(hidden_PD, weight_VD)
