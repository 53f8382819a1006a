"""How matrices are kept in memory. Standard library only."""

from __future__ import annotations

from configs.engine import ExpertFormat
from configs.machine import Machine


def linear_format(quantization: ExpertFormat | None, machine: Machine, why: dict[str, str]) -> ExpertFormat:
    """Of the matrices outside the experts."""
    if quantization is None:
        why["linear_format"] = "the dtype of the model; what the checkpoint has in 4 bits stays so"
        return "plain"
    if machine.device == "cuda":
        why["linear_format"] = "the dtype of the model: on a GPU only experts are kept in 8 bits"
        return "plain"
    if machine.native_kernels == "none":
        raise ValueError(f"quantization {quantization} needs native kernels: {machine.native_reason}")
    why["linear_format"] = "as asked; embeddings, norms and routers stay as they are"
    return quantization
