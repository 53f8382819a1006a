"""The best token of each row.

Legend: P rows sampled, V vocabulary, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layers.linear import logits
from native import Isa, isa, linear, rows


def greedy_tokens(hidden_PD: Tensor, head_VD: Tensor, num_valid_tokens: int, out_P: Tensor | None = None) -> Tensor:
    """`greedy` of the logits, int64 [P]; in the native kernel, where it runs, the logits are never all in memory."""
    head_VD = head_VD[:num_valid_tokens]
    if linear.can_run(hidden_PD):
        return linear.best_output(hidden_PD, head_VD, out_P)
    return greedy(logits(hidden_PD, head_VD), out_P)


def greedy(logits_PV: Tensor, out_P: Tensor | None = None) -> Tensor:
    """int64 [P]; the lowest id of equal maxima. On a CPU without native kernels by numpy: a tenth of the time."""
    if rows.can_run(logits_PV):
        return rows.best(logits_PV, out_P)
    on_cpu = logits_PV.device.type == "cpu"
    best_P = torch.from_numpy(logits_PV.float().numpy().argmax(-1)) if on_cpu else logits_PV.argmax(-1)
    return best_P if out_P is None else out_P.copy_(best_P)


def translated(best_P: Tensor, token_of_V1: Tensor, out_P: Tensor) -> Tensor:
    """int64 [P], in out_P: the tokens that the best ones of another vocabulary stand for. token_of int64 [V, 1]."""
    if token_of_V1.is_cpu and isa() > Isa.NONE:
        rows.copy(out_P[:, None], rows.gather(token_of_V1, best_P))
        return out_P
    return torch.index_select(token_of_V1[:, 0], 0, best_P, out=out_P)
