"""What a step is laid out as: its parts, and the decodes that the next one may follow from (engine/step_buffers.py).

Legend: B sequences, S sequences sampled, P rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.prepared import Ints, PreparedStep, PromptTargets, ScheduledTokens
from engine.step_memory import Place
from layers.step import StateRuns, StepInput

TOKEN_IDS, POSITIONS, SLOTS = 0, 1, 2  # fields per token, those from the positions on count on; slots: one per table
KV_LENS, READS, WRITES = 0, 1, 2  # fields per sequence; records: where a model has a state


class StepPart(NamedTuple):
    """One part of a step. logits_P: `step.logits_rows_P` on the host."""

    step: StepInput
    place: Place
    entries_S: Ints
    rows_S: Ints
    positions_S: Ints
    logits_P: Ints
    asked: list[PromptTargets]
    tables: Sequence[Tensor]
    rows_B: Ints


class Run:
    """The last step, if it decoded all of its sequences: the next one may follow from it."""

    def __init__(self, prepared: PreparedStep, part: StepPart, rows: list[int]) -> None:
        """rows: as in the schedule."""
        self.prepared, self.place, self.tables, self.rows = prepared, part.place, part.tables, rows
        self.ends = list(part.step.kv_lens)  # where the next step starts
        self.left = 0  # steps before a sequence comes to its next block; not known at first
        self.written = False  # the tokens of the last step are there
        self.first_B = prepared.positions_S  # of the tokens that the table of the batch lacks
        self.num_written = 0  # of those
        self.sampled: list[Ints] = []  # they themselves, where the host has them
        self.lens_B = part.place.sequences_FB[KV_LENS, : len(rows)]
        self._tokens_B = part.place.tokens_FT[TOKEN_IDS, : len(rows)]

    def write(self, tokens_B: Ints | None) -> None:
        """None: they stay on the device."""
        self.written = True
        self.num_written += 1
        if tokens_B is not None:
            self._tokens_B[:] = tokens_B
            self.sampled.append(tokens_B.copy())


def state_runs(work: ScheduledTokens, query_ends_B: Ints, records_3E: Ints, drafts_E: Ints) -> StateRuns:
    """Of a part of a step. query_ends_B: where its pieces end on the token axis; records_3E: of each entry of the
    schedule the record that is read, the one that is written, and how many inputs come first; drafts_E: how many drafts
    it has; empty: none has any."""
    first_R = np.flatnonzero(np.diff(work.entry_B, prepend=-1))  # the pieces of an entry follow each other
    entry_R, begins_R = work.entry_B[first_R], work.begins_B[first_R]
    reads_R, writes_R, kept_R = records_3E[:, entry_R]
    ends_R = query_ends_B[np.append(first_R[1:], len(work.entry_B))[: len(first_R)] - 1]
    found = (
        np.concatenate([[0], ends_R]),
        np.where(begins_R, reads_R, writes_R),
        writes_R,
        np.where(begins_R, kept_R, 0),
        drafts_E[entry_R] if len(drafts_E) else np.zeros_like(entry_R),
    )
    return StateRuns(*(torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)) for array in found))
