"""Muon: momentum whose update is made orthogonal (Newton-Schulz), batched over equal matrices.

At a few thousand steps it learns clearly more per token than AdamW, and a stack of experts is one batched call.

Shape letters: S matrices in a stack, R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of ``[S, R, C]`` near one."""
    wide = update.shape[-2] <= update.shape[-1]
    x: Tensor = update if wide else update.transpose(-2, -1)
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-2, -1)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.transpose(-2, -1)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay; parameters are ``[R, C]`` or ``[S, R, C]``."""

    def __init__(
        self, parameters: Iterable[Tensor], rate: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(parameters, {"lr": rate, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                nesterov = parameter.grad.lerp(state["momentum"], group["momentum"])
                stack = nesterov if nesterov.dim() == 3 else nesterov.unsqueeze(0)
                rows, columns = stack.shape[-2:]
                update = orthogonalise(stack).view_as(parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)
