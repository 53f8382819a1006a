"""The packed form of an expert (native/src/experts.h), read back in torch: what the native packing must have written.

Legend: P panels, N pairs (k, k + 1) of inputs, J groups of 16 columns, C columns of a group, D hidden size, F expert
width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.matrix import DTYPES, HALVES, WeightFormat, levels
from moe_kernels.quant import BLOCK

PANEL = 64
GROUP = 16


def unpack_slot(
    packed_B: Tensor, hidden: int, width: int, dtype: torch.dtype, form: WeightFormat
) -> tuple[Tensor, Tensor, Tensor]:
    """(gate [F, D], up [F, D], down [D, F]) in dtype, of one slot's bytes."""
    up_panels, down_panels = -(-width // (PANEL // 2)), -(-hidden // PANEL)
    up_form, _, down_form = form.parts
    up_bytes, down_bytes = _panel_bytes(hidden, dtype, up_form), _panel_bytes(width, dtype, down_form)
    split = up_panels * up_bytes
    columns = _columns(packed_B[:split].view(up_panels, up_bytes), hidden, dtype, up_form)
    gate_up = columns.view(up_panels, 2, 2, GROUP, -1).transpose(1, 2).transpose(0, 1).reshape(2, up_panels * 32, -1)
    down = _columns(packed_B[split : split + down_panels * down_bytes].view(down_panels, -1), width, dtype, down_form)
    return gate_up[0, :width, :hidden], gate_up[1, :width, :hidden], down[:hidden, :width]


def panel_biases(gate_F: Tensor, up_F: Tensor, down_D: Tensor) -> Tensor:
    """uint8: what lies behind the panels of an expert with biases, float32 in the order of the panels' columns."""
    width, hidden = gate_F.shape[0], down_D.shape[0]
    gate_up_2F = torch.zeros(2, -(-width // 32) * 32)
    gate_up_2F[0, :width], gate_up_2F[1, :width] = gate_F, up_F
    down = torch.zeros(-(-hidden // PANEL) * PANEL)
    down[:hidden] = down_D
    up = gate_up_2F.view(2, -1, 2, GROUP).permute(1, 2, 0, 3).reshape(-1)
    return torch.cat((up, down)).view(torch.uint8)


def _panel_bytes(depth: int, dtype: torch.dtype, form: WeightFormat) -> int:
    if form in HALVES:
        return -(-depth // BLOCK) * _half_scales(form) + -(-depth // 8) * 8 * PANEL // 2
    if form is WeightFormat.BF16:
        return (depth + depth % 2) * PANEL * 2
    if form is not WeightFormat.PLAIN:
        return -(-depth // BLOCK) * PANEL * 4 + (depth + depth % 2) * PANEL
    return (depth + (depth % 2 if dtype is torch.bfloat16 else 0)) * PANEL * dtype.itemsize


def _columns(panels_PB: Tensor, depth: int, dtype: torch.dtype, form: WeightFormat) -> Tensor:
    """[P * 64, depth (made even)] in dtype: the panels' columns, one after another."""
    num_panels = panels_PB.shape[0]
    if form is WeightFormat.BF16:
        return _columns(panels_PB, depth, torch.bfloat16, WeightFormat.PLAIN).to(dtype)
    if form is WeightFormat.PLAIN:
        numbers = panels_PB.contiguous().view(dtype).view(num_panels, -1, PANEL, 2 if dtype is torch.bfloat16 else 1)
        return numbers.permute(0, 2, 1, 3).reshape(num_panels * PANEL, -1)
    if form in HALVES:
        return _half_columns(panels_PB, depth, dtype, form)
    blocks = []
    at = 0
    for first in range(0, depth, BLOCK):
        size = min(BLOCK, depth - first)
        size += size % 2
        scale = panels_PB[:, at : at + PANEL * 4].contiguous().view(torch.float32).view(num_panels, PANEL, 1)
        at += PANEL * 4
        # Of each pair: 2 halves x 4 lanes x 2 registers x 4 columns x (k, k + 1).
        numbers = panels_PB[:, at : at + size * PANEL].reshape(num_panels, size // 2, 2, 4, 2, 4, 2)
        at += size * PANEL
        bytes_ = numbers.permute(0, 2, 4, 3, 5, 1, 6).reshape(num_panels, PANEL, size)
        blocks.append(_numbers(bytes_, form) * scale)
    return torch.cat(blocks, 2).reshape(num_panels * PANEL, -1).to(dtype)


def _half_scales(form: WeightFormat) -> int:
    """Bytes of scales, and of zero points, of a block."""
    return PANEL * 8 * (2 if form is WeightFormat.INT4_ZERO else 1)


def _half_columns(panels_PB: Tensor, depth: int, dtype: torch.dtype, form: WeightFormat) -> Tensor:
    """Codes of 8 k are 4 bytes of a column: k, k + 2, k + 4, k + 6, then those between them."""
    blocks, at, bits = [], 0, torch.tensor([0, 16, 4, 20, 8, 24, 12, 28], dtype=torch.int32)
    of_scale = torch.bfloat16 if form is WeightFormat.MXFP4 else torch.float16
    for first in range(0, depth, BLOCK):
        size = -(-min(BLOCK, depth - first) // 8) * 8
        words = panels_PB[:, at : at + _half_scales(form)].contiguous().view(of_scale).float()
        scale, *zero = words.view(-1, _half_scales(form) // (PANEL * 8), BLOCK // 32, PANEL).unbind(1)
        at += _half_scales(form)
        lanes = panels_PB[:, at : at + size * PANEL // 2].contiguous().view(torch.int32).view(-1, size // 8, 1, PANEL)
        at += size * PANEL // 2
        numbers = levels(form)[(lanes >> bits[:, None]) & 15].flatten(1, 2)
        if zero:
            numbers -= zero[0].repeat_interleave(32, 1)[:, :size]
        blocks.append(numbers * scale.repeat_interleave(32, 1)[:, :size])
    columns = torch.cat(blocks, 1)[:, : depth + depth % 2]
    return columns.transpose(1, 2).reshape(panels_PB.shape[0] * PANEL, -1).to(dtype)


def _numbers(bytes_: Tensor, form: WeightFormat) -> Tensor:
    """8-bit weights as float32. INT8 is kept as sign and magnitude."""
    if form is WeightFormat.FP8:
        return bytes_.contiguous().view(DTYPES[form]).float()
    magnitude = (bytes_ & 0x7F).float()
    return torch.where(bytes_ >= 0x80, -magnitude, magnitude)
