"""A step as tensors: what engine/batch.py makes of a schedule, and engine/runner.py computes.

Legend: P rows whose logits are wanted, S sequences sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from layers.step import StepInput

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Prompt tokens whose log-probabilities were asked for and whose predecessors are computed in this step.

    Their logits are rows first_logit : first_logit + len(target_ids) of `PreparedStep.logits_rows_P`. A prompt that is cut
    has several of these, in the order of its tokens.
    """

    entry: int  # index into the schedule's lists
    num_logprobs: int  # alternatives asked for; -1 all
    first_logit: int
    target_ids: list[int]  # the prompt tokens themselves


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """inputs: one per part; their tokens one after another are those of the step. A part may have none.

    logits_rows_P: rows of all parts' hidden states, one after another. The first S are to be sampled; the rest belong to
    `prompt_parts`.
    """

    inputs: tuple[StepInput, ...]
    logits_rows_P: torch.Tensor  # int64
    num_entries: int  # of the schedule
    entries_S: list[int]  # schedule entry of each sampled sequence
    rows_S: Ints  # its row of the batch
    positions_S: Ints  # position of the token to be sampled, counted from the start of the prompt
    prompt_parts: tuple[PromptPart, ...]
    device_rows_S: torch.Tensor | None = None  # rows_S on the device, where it is wanted there

    @property
    def num_sampled(self) -> int:
        return len(self.entries_S)

    @property
    def samples_all(self) -> bool:
        """Every token of the step is sampled, in order: all decode."""
        return len(self.inputs) == 1 and len(self.entries_S) == self.inputs[0].num_tokens
