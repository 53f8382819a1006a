"""A step that goes on at the start of a layer, as tensors (engine/recovery/resumption.py).

Legend: T tokens of the step, D hidden size.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engine.prepared import PreparedStep
from layers.step import Resumed


class ResumedStep:
    """rows: by row of the batch and position the residual stream of a token at the start of that layer, as bytes. like:
    it, of any token, [D]."""

    def __init__(self, layer: int, rows: dict[tuple[int, int], bytes], like: torch.Tensor) -> None:
        self._layer, self._rows, self._like = layer, rows, like

    def laid_out(self, prepared: PreparedStep) -> PreparedStep:
        """The step, of one part, from that layer on."""
        (step,) = prepared.inputs
        rows_T = np.repeat(prepared.rows_B[0], np.diff(step.query_starts)).tolist() if prepared.rows_B else []
        keys_T = zip(rows_T, step.positions_T.tolist(), strict=True)
        residual_TD = self._like.new_empty(len(rows_T), len(self._like))
        if rows_T:
            memory = b"".join(self._rows[key] for key in keys_T)
            residual_TD.view(torch.uint8).copy_(
                torch.frombuffer(bytearray(memory), dtype=torch.uint8).view(len(rows_T), -1)
            )
        return replace(prepared, inputs=(replace(step, resumed=Resumed(self._layer, residual_TD)),))
