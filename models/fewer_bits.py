"""Weights of fewer bits on their way from a checkpoint to where they are kept: linear layers and experts alike.

Legend: O output features, I input features, G groups of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ep.experts import (
    HALVES,
    SCALE_ROWS,
    HalfMatrix,
    ScaledMatrix,
    WeightFormat,
    quantize,
    quantize_halves,
)
from layers.linear import Linear
from layers.stored import BLOCK, MX_GROUP, StoredForm, StoredWeight, is_by_rows
from models.base import WeightSource

# What the kernels keep as it lies in a checkpoint. FP8: of experts only.
KEPT = {
    StoredForm.INT8: WeightFormat.INT8,
    StoredForm.INT4: WeightFormat.INT4,
    StoredForm.INT4_ZERO: WeightFormat.INT4_ZERO,
    StoredForm.MXFP4: WeightFormat.MXFP4,
}


def common_format(forms: Sequence[StoredForm]) -> WeightFormat:
    """In which matrices that lie together are kept: all the same; with zero points, if some have them; in 8 bits, if
    some are."""
    kept = {KEPT.get(form, WeightFormat.PLAIN) for form in forms}
    if len(kept) == 1:
        return kept.pop()
    if WeightFormat.PLAIN in kept:
        return WeightFormat.PLAIN
    return WeightFormat.INT4_ZERO if kept == {WeightFormat.INT4, WeightFormat.INT4_ZERO} else WeightFormat.INT8


def expert_format(forms: Sequence[StoredForm]) -> WeightFormat:
    """The same of an expert's matrices, the last of which is down: 8 bits there leave 4 to the others."""
    first, last = common_format(forms[:-1] or forms), common_format(forms[-1:])
    if first in (WeightFormat.INT4, WeightFormat.INT4_ZERO) and last is WeightFormat.INT8:
        return WeightFormat.INT4_INT8
    return common_format(forms)


def scaled_matrix(stored: StoredWeight) -> ScaledMatrix | None:
    """8 bits as they are kept: a scale for 128 inputs of 128 outputs, or of each. None: it is no such weight."""
    if stored.form not in (StoredForm.FP8, StoredForm.INT8) or stored.scale is None:
        return None
    num_rows, num_columns = (-(-n // BLOCK) for n in stored.shape)
    if stored.form is StoredForm.INT8 or is_by_rows(stored.weight, stored.scale):
        num_rows = stored.shape[0]
    return ScaledMatrix(stored.weight, stored.scale.expand(num_rows, num_columns))


def half_matrix(stored: StoredWeight) -> HalfMatrix | None:
    """4 bits as they are kept: a scale for 32 inputs of each output. None: they are no such weights."""
    form = KEPT.get(stored.form)
    if form not in HALVES or stored.scale is None or stored.shape[1] % MX_GROUP:
        return None
    num_groups, shape = stored.shape[1] // MX_GROUP, (stored.shape[0], stored.shape[1])
    if stored.form is StoredForm.MXFP4:
        return HalfMatrix(stored.weight.flatten(1), torch.exp2(stored.scale.float() - 127).bfloat16(), form, shape)
    if num_groups % stored.scale.shape[1]:
        return None
    times = num_groups // stored.scale.shape[1]
    scale_OG = stored.scale.half().repeat_interleave(times, 1)
    zero_OG = None if stored.zero is None else stored.zero.half().repeat_interleave(times, 1)
    if not scale_OG.isfinite().all() or (zero_OG is not None and not zero_OG.isfinite().all()):
        return None
    return HalfMatrix(stored.weight.contiguous(), scale_OG, form, shape, zero_OG)


def read_weight(source: WeightSource, name: str, linear: Linear, part: str = "") -> None:
    """A part of a linear layer: kept in fewer bits, or its numbers."""
    if not linear.keeps_stored or not linear.can_pack or source.form_of(name) not in KEPT:
        source.read(name, linear.weight_of(part))
        return
    stored = source.borrow(name, tuple(linear.matrix[linear.rows_of(part)].shape))
    scale, zero = (None if tensor is None else tensor.clone() for tensor in (stored.scale, stored.zero))
    linear.stored[part] = StoredWeight(stored.weight.clone(), scale, stored.form, stored.shape, zero)
    source.give_back(name)


def pack_linear(linear: Linear, form: WeightFormat) -> None:
    """Bring a loaded layer into the form in which it is kept. PLAIN: as it was read; BF16: too, unless all of its
    numbers are of bfloat16."""
    if linear.stored and _pack_stored(linear):
        return
    for part in linear.part_names:
        linear.weight_of(part)
    if form is WeightFormat.BF16 and linear.pack_bfloat16():
        return
    if form in (WeightFormat.PLAIN, WeightFormat.BF16):
        if linear.is_faster_packed:
            linear.pack(linear.weight)
    elif linear.can_pack:
        if form in HALVES:
            halves = quantize_halves(linear.matrix, form)
            linear.pack(halves.codes, halves.words, form=form)
        else:
            scaled = quantize(linear.matrix, form)
            linear.pack(scaled.weight_OI, scaled.scale, SCALE_ROWS[form])


def _pack_stored(linear: Linear) -> bool:
    """Parts of fewer bits, one after another. False: not all of them are kept so."""
    if list(linear.stored) != list(linear.part_names):
        return False
    parts = list(linear.stored.values())
    form = common_format([part.form for part in parts])
    if form in HALVES:
        halves = [half_matrix(part) for part in parts]
        found = [half for half in halves if half is not None]
        if len(found) < len(parts):
            return False
        words = torch.cat([_words(half, form) for half in found], 1)
        linear.pack(torch.cat([half.codes for half in found]), words, form=form)
    elif form is WeightFormat.INT8:
        matrices = [scaled_matrix(part) or quantize(part.widened(), form) for part in parts]
        weight_OI = torch.cat([matrix.weight_OI for matrix in matrices])
        linear.pack(weight_OI, torch.cat([matrix.scale for matrix in matrices]).contiguous())
    return form is not WeightFormat.PLAIN


def _words(half: HalfMatrix, form: WeightFormat) -> Tensor:
    """Its scales as `form` has them: with zero points."""
    if form is WeightFormat.INT4_ZERO and half.zero_OG is None:
        return torch.stack((half.scale_OG, torch.zeros_like(half.scale_OG)))
    return half.words


def as_format(half: HalfMatrix, form: WeightFormat) -> HalfMatrix:
    """The same numbers with zero points, if `form` has them."""
    if form.parts[0] is WeightFormat.INT4_ZERO and half.format is WeightFormat.INT4:
        return HalfMatrix(
            half.codes, half.scale_OG, WeightFormat.INT4_ZERO, half.shape, torch.zeros_like(half.scale_OG)
        )
    return half
