"""The best token of each row.

Legend: P rows sampled, V vocabulary, D hidden size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from layers.linear import logits
from native import linear


def greedy_tokens(hidden_PD: Tensor, head_VD: Tensor, num_valid_tokens: int) -> Tensor:
    """`greedy` of the logits, int64 [P]; in the native kernel, where it runs, the logits are never all in memory."""
    head_VD = head_VD[:num_valid_tokens]
    if linear.can_run(hidden_PD):
        return linear.best_output(hidden_PD, head_VD)
    return greedy(logits(hidden_PD, head_VD))


def greedy(logits_PV: Tensor) -> Tensor:
    """int64 [P]; the lowest id of equal maxima. On the CPU by numpy: a tenth of the time."""
    if logits_PV.device.type != "cpu":
        return logits_PV.argmax(-1)
    if logits_PV.dtype != torch.bfloat16:
        return torch.from_numpy(logits_PV.numpy().argmax(-1))
    # numpy knows no bfloat16, but the bits of positive floats are ordered as integers, and above all negative ones.
    bits_PV = logits_PV.view(torch.int16).numpy()
    best_P = bits_PV.argmax(-1)
    unclear = np.flatnonzero(np.take_along_axis(bits_PV, best_P[:, None], -1)[:, 0] <= 0)
    if len(unclear):
        best_P[unclear] = logits_PV[torch.from_numpy(unclear)].float().numpy().argmax(-1)
    return torch.from_numpy(best_P)
