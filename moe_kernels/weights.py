"""The weights of a rank's experts in one layer, and the arithmetic on them. The native kernels' form where they can
run, torch's otherwise.

Legend: S slots, D hidden size, F expert width, T tokens, R rows arrived, C rows per padded slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_kernels.activation import GATED, ExpertKind
from moe_kernels.backends import choose_experts, facts_of
from moe_kernels.choice import run_experts, triton_implementation
from moe_kernels.deepgemm import DeepGemm
from moe_kernels.expert_storage import ExpertWeights
from moe_kernels.flashinfer import FlashInferExperts
from moe_kernels.fp8_experts import Fp8Experts
from moe_kernels.layout import ExpertBatch
from moe_kernels.matrix import WeightFormat
from moe_kernels.packed import PackedExperts


def expert_weights(
    num_slots: int,
    hidden: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    form: WeightFormat,
    backend: str = "auto",
    kind: ExpertKind = GATED,
) -> ExpertWeights:
    """Uninitialised. Where nothing multiplies by weights in `form`, they are kept in dtype.

    Raises ValueError when `backend` (moe_kernels/backends.py) cannot run.
    """
    facts = facts_of(hidden, width, dtype, device, form, kind)
    chosen = choose_experts(backend, facts)
    sizes = num_slots, hidden, width, dtype
    if chosen == "native":
        return PackedExperts(*sizes, form, kind)
    if chosen == "flashinfer":
        return FlashInferExperts(*sizes, device, form)
    library = DeepGemm(facts.capability) if chosen == "deepgemm" and facts.capability is not None else None
    if form is WeightFormat.FP8 and library is not None:
        return Fp8Experts(*sizes, device, library.run_experts_fp8, library.power_of_two_scales)
    if form is WeightFormat.FP8 and chosen == "triton" and kind == GATED:
        return Fp8Experts(*sizes, device, triton_implementation("fp8_experts", "run_experts_fp8"))
    return PlainExperts(*sizes, device, run_experts if library is None else library.run_experts, kind)


class PlainExperts(ExpertWeights):
    """gate_up_S2FD [S, 2F, D] (gate rows first) and down_SDF [S, D, F], as torch multiplies them."""

    format = WeightFormat.PLAIN

    def __init__(
        self,
        num_slots: int,
        hidden: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        product: Callable[..., Tensor] = run_experts,
        kind: ExpertKind = GATED,
    ) -> None:
        """product: called as moe_kernels.grouped_gemm.run_experts is; where the kind is GATED, without what is behind
        the matrices."""
        self.num_slots, self._product, self._kind = num_slots, product, kind
        self.gate_up_S2FD = torch.empty(num_slots, 2 * width, hidden, dtype=dtype, device=device)
        self.down_SDF = torch.empty(num_slots, hidden, width, dtype=dtype, device=device)
        self._biases: tuple[Tensor, ...] = ()  # float32: of gate and up [S, 2F], of down [S, D]
        if kind.biased:
            self._biases = tuple(torch.empty(num_slots, size, device=device) for size in (2 * width, hidden))

    def storage(self, slot: int) -> tuple[Tensor, ...]:
        return tuple(tensor[slot] for tensor in self.whole())

    def whole(self) -> tuple[Tensor, ...]:
        """The memory of all slots."""
        return self.gate_up_S2FD, self.down_SDF, *self._biases

    def lie_in(self, memory: Sequence[Tensor]) -> None:
        """Have the slots in `memory` from now on: like `whole`, and with what it holds."""
        self.gate_up_S2FD, self.down_SDF, *biases = memory
        self._biases = tuple(biases)

    def fill(self, slot: int, gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor) -> None:
        for ours, given in zip(self.read(slot), (gate_FD, up_FD, down_DF), strict=True):
            ours.copy_(given)

    def fill_biases(self, slot: int, gate_F: Tensor, up_F: Tensor, down_D: Tensor) -> None:
        gate_up_S2F, down_SD = self._biases
        gate_up_S2F[slot] = torch.cat((gate_F, up_F))
        down_SD[slot] = down_D

    def clear(self, slot: int) -> None:
        for ours in self.storage(slot):
            ours.zero_()

    def read(self, slot: int) -> tuple[Tensor, Tensor, Tensor]:
        gate_FD, up_FD = self.gate_up_S2FD[slot].chunk(2)
        return gate_FD, up_FD, self.down_SDF[slot]

    def run_rows(self, batch: ExpertBatch) -> Tensor:
        if self._kind == GATED:
            return self._product(batch, self.gate_up_S2FD, self.down_SDF)
        more = dict(zip(("gate_up_bias_S2F", "down_bias_SD"), self._biases, strict=False))
        activation = self._kind.activation
        return self._product(batch, self.gate_up_S2FD, self.down_SDF, activation=activation, **more)
