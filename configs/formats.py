"""How matrices are kept in memory. Without torch."""

from __future__ import annotations

from msgspec.structs import replace

from configs.engine import Dtype, EngineConfig, ExpertFormat
from configs.gpu import gpu_expert_format
from configs.machine import Machine, ModelNumbers

HALF_BYTES = 1 / 2 + 2 / 32  # of a 4-bit weight and its part of a scale
QUANTIZED_BYTES = 1 + 4 / 128  # of an 8-bit weight and its part of a scale, as the native kernels keep them
_IN_BFLOAT16 = "the checkpoint's bfloat16, with rows in float32: the sums are those of the weights in float32"


def expert_format(
    config: EngineConfig, model: ModelNumbers, machine: Machine, dtype: Dtype, why: dict[str, str]
) -> ExpertFormat:
    """Of the routed experts."""
    if not model.num_experts:
        if machine.gpu is not None and config.quantization is not None:
            raise ValueError(
                f"quantization {config.quantization}: on a GPU only experts are kept in 8 bits, and this model has none"
            )
        why["expert_format"] = "a dense model"
    elif machine.gpu is not None:
        found, why["expert_format"] = gpu_expert_format(config.quantization, model.fp8_experts)
        return found
    elif machine.native_kernels == "none":
        why["expert_format"] = f"the dtype of the model: {machine.native_reason}"
    elif config.quantization is not None:
        why["expert_format"] = "as asked"
        return config.quantization
    elif model.fp8_experts:
        why["expert_format"] = "as the checkpoint has them"
        return "fp8"
    elif model.half_experts == "mixed":
        why["expert_format"] = "in each layer as the file has them"
    elif model.half_experts:
        why["expert_format"] = "as the checkpoint has them"
        return "mxfp4" if model.half_experts == "mxfp4" else "int4"
    elif _in_bfloat16(model, machine, dtype) and config.moe_backend in ("auto", "native"):
        why["expert_format"] = _IN_BFLOAT16
        return "bf16"
    else:
        why["expert_format"] = "the dtype of the model"
    return "plain"


def linear_format(
    quantization: ExpertFormat | None, model: ModelNumbers, machine: Machine, dtype: Dtype, why: dict[str, str]
) -> ExpertFormat:
    """Of the matrices outside the experts."""
    if quantization is None:
        if _in_bfloat16(model, machine, dtype):
            why["linear_format"] = f"{_IN_BFLOAT16}; what has other numbers stays in float32"
            return "bf16"
        why["linear_format"] = "the dtype of the model; what the checkpoint has in 4 bits stays so"
        return "plain"
    if machine.device == "cuda":
        why["linear_format"] = "the dtype of the model: on a GPU only experts are kept in 8 bits"
        return "plain"
    if machine.native_kernels == "none":
        raise ValueError(f"quantization {quantization} needs native kernels: {machine.native_reason}")
    why["linear_format"] = "as asked; embeddings, norms and routers stay as they are"
    return quantization


def _in_bfloat16(model: ModelNumbers, machine: Machine, dtype: Dtype) -> bool:
    """Whether weights are kept in half the bytes of the rows that they are multiplied by."""
    return model.in_bfloat16 and dtype == "float32" and machine.device == "cpu" and machine.native_kernels != "none"


def weight_item(form: ExpertFormat, dtype: Dtype) -> float:
    """Bytes of a weight that is kept so, with its part of a scale."""
    if form == "plain":
        return 4 if dtype == "float32" else 2
    if form == "bf16":
        return 2
    return HALF_BYTES if form in ("mxfp4", "int4") else QUANTIZED_BYTES


def as_kept(model: ModelNumbers, dtype: Dtype, experts: ExpertFormat, linears: ExpertFormat) -> ModelNumbers:
    """The same with the bytes that weights in these forms take, which are counted as if they were widened to `dtype`.
    Linear layers of 8 and 4 bits are not counted as less."""
    of_experts, of_linears = model.expert_bytes, model.linear_bytes
    if experts != "plain":
        of_experts = int(of_experts / (4 if dtype == "float32" else 2) * weight_item(experts, dtype))
    if linears == "bf16":
        of_linears //= 2
    less = model.expert_bytes - of_experts + model.linear_bytes - of_linears
    return replace(model, weight_bytes=model.weight_bytes - less, expert_bytes=of_experts, linear_bytes=of_linears)
