"""A step that goes on at the start of a layer, as tensors (engine/recovery/resumption.py).

Legend: T tokens of the step, D hidden size.
"""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace

from cache.residuals import Bytes
from engine.prepared import PreparedStep
from layers.step import Resumed


class ResumedStep:
    """rows: by row of the batch and position the residual stream of a token at the start of that layer, as bytes. like:
    it, of any token, [D]."""

    def __init__(self, layer: int, rows: dict[tuple[int, int], Bytes], like: torch.Tensor) -> None:
        self._layer, self._rows, self._like = layer, rows, like

    def laid_out(self, prepared: PreparedStep) -> PreparedStep:
        """The step, of one part, from that layer on."""
        (step,), (rows_B,) = prepared.inputs, prepared.rows_B
        rows_T = np.repeat(rows_B, np.diff(step.query_starts)).tolist()
        found = [self._rows[key] for key in zip(rows_T, step.positions_T.tolist(), strict=True)]
        memory = np.array(found, dtype=np.uint8).reshape(len(found), self._like.nbytes)
        resumed = Resumed(self._layer, torch.from_numpy(memory).view(self._like.dtype))
        return replace(prepared, inputs=(replace(step, resumed=resumed),))
