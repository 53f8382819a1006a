"""Decode steps that follow each other: the same rows, each one token further.

Most steps are such steps. To lay one out in full (engine/batch.py) takes thirty operations on arrays. They are small,
but the forward pass has just swept every cache with weights, so that each of them comes from memory anew.

Legend: B sequences, N steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.prepared import PreparedStep
from engine.schedule import Schedule
from layers.step import StepInput

Ints = npt.NDArray[np.int64]


class SteadyDecodes:
    """Made of a step that decodes rows and samples each of them; gives the steps that follow it, until one of the rows
    needs another block. All of them are laid out at once, but for the tokens that they sample."""

    def __init__(self, first: PreparedStep, schedule: Schedule) -> None:
        (step,) = first.inputs
        self._first = first
        self._rows = schedule.rows
        self._start = schedule.starts[0]
        counters_3B = np.stack([step.positions_T.numpy(), step.slots_T.numpy(), step.kv_lens_B.numpy()])
        num = step.block_size - 1 - int((counters_3B[0] % step.block_size).max())
        counters_N3B = counters_3B + np.arange(1, num + 1)[:, None, None]
        self._ends_NB = counters_N3B[:, 2]
        self._tokens_NB = np.empty(
            (num + 1, len(self._rows)), dtype=np.int64
        )  # row n: sampled in step n, the first is 0
        self._lens = self._ends_NB.tolist()
        self._counters = torch.from_numpy(counters_N3B).view(-1, len(self._rows)).unbind()
        self._tokens = torch.from_numpy(self._tokens_NB).unbind()
        self._newest = first
        self._num_steps = 0  # laid out since the first
        self._num_noted = 0  # of all, the first too
        self._num_written = 0  # of them, to the batch's table

    def goes_on_with(self, schedule: Schedule) -> bool:
        """Whether that schedule is the next of these steps."""
        return (
            self._num_noted > self._num_steps
            and self._num_steps < len(self._lens)
            and schedule.rows == self._rows
            and schedule.starts[0] == self._start + self._num_noted
            and not schedule.freed_rows
            and not schedule.new_rows
            and not schedule.new_blocks
        )

    def next(self) -> PreparedStep:
        """That step."""
        number = self._num_steps
        self._num_steps += 1
        first = self._first
        step = first.inputs[0]
        following = StepInput(
            self._tokens[number],
            self._counters[3 * number],
            self._counters[3 * number + 1],
            step.query_starts,
            tuple(self._lens[number]),
            self._counters[3 * number + 2],
            step.block_table_BN,
            step.num_decodes,
            step.block_size,
            step.logits_rows_P,
        )
        ends_B = self._ends_NB[number]
        self._newest = PreparedStep(
            (following,), step.logits_rows_P, first.num_entries, first.entries_S, first.rows_S, ends_B, ()
        )
        return self._newest

    def note(self, prepared: PreparedStep, token_ids_B: Ints) -> bool:
        """Take the tokens sampled; False: that was another step."""
        if prepared is not self._newest:
            return False
        self._tokens_NB[self._num_steps] = token_ids_B
        self._num_noted = self._num_steps + 1
        return True

    def write(self, token_ids: npt.NDArray[np.int32], known: Ints) -> None:
        """Bring the batch's table up to date."""
        if self._num_noted > self._num_written:
            rows_B, ends_B = self._first.rows_S, self._first.positions_S
            new_N = np.arange(self._num_written, self._num_noted)
            token_ids[rows_B, ends_B + new_N[:, None]] = self._tokens_NB[new_N]
            known[rows_B] = ends_B + self._num_noted
            self._num_written = self._num_noted
