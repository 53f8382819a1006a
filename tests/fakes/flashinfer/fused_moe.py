"""A fake of flashinfer.fused_moe (0.6.18 to 0.7.2) for the CPU. The first matrix has the rows of up before those of gate.

Legend: T tokens, K experts per token, E experts, D hidden size, F expert width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cutlass_fused_moe(
    input: Tensor,
    token_selected_experts: Tensor,
    token_final_scales: Tensor,
    fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[Tensor],
    ep_size: int = 1,
    ep_rank: int = 0,
    output: Tensor | None = None,
    use_deepseek_fp8_block_scale: bool = False,
    tune_max_num_tokens: int = 8192,
    use_fused_finalize: bool = True,
) -> Tensor:
    num_tokens, hidden = input.shape
    experts, width2 = fc1_expert_weights.shape[:2]
    assert input.is_contiguous() and input.dtype is torch.bfloat16 and output_dtype is torch.bfloat16
    assert token_selected_experts.dtype is torch.int32 and token_final_scales.dtype is torch.float32
    assert token_selected_experts.shape == token_final_scales.shape == (num_tokens, token_final_scales.shape[1])
    assert fc1_expert_weights.is_contiguous() and fc2_expert_weights.is_contiguous()
    assert fc2_expert_weights.shape == (experts, hidden, width2 // 2)
    assert ((token_selected_experts >= 0) & (token_selected_experts < experts * ep_size)).all()
    first, second = fc1_expert_weights, fc2_expert_weights
    if use_deepseek_fp8_block_scale:
        assert first.dtype is second.dtype is torch.float8_e4m3fn and len(quant_scales) == 2
        first, second = (_wide(w, s) for w, s in zip((first, second), quant_scales, strict=True))
    else:
        assert first.dtype is second.dtype is torch.bfloat16 and not quant_scales
    out = torch.empty_like(input) if output is None else output
    assert out.shape == input.shape and out.dtype is output_dtype
    total = torch.zeros(num_tokens, hidden)
    for expert in range(experts):
        token, k = torch.where(token_selected_experts == expert + ep_rank * experts)
        up, gate = (input[token].float() @ first[expert].float().T).chunk(2, -1)
        y = (F.silu(gate) * up).to(output_dtype).float() @ second[expert].float().T
        total.index_add_(0, token, y * token_final_scales[token, k, None])
    return out.copy_(total)


def _wide(weight: Tensor, scale: Tensor) -> Tensor:
    outputs, inputs = weight.shape[1:]
    assert outputs % 128 == 0 and inputs % 128 == 0 and scale.shape == (weight.shape[0], outputs // 128, inputs // 128)
    return weight.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
