"""Drafts of the model's own MTP layer (models/mtp.py), made at the end of a step for the next one.

The layer first sees every token of the step, together with the token that follows it: so its cache, one more layer of
the model's, grows with theirs. Then it drafts one token further at a time, from what itself gave: those rows of its
cache are written again in the next step, from the main model's states. These passes are known ahead, so all of them are
laid out and captured as one. All ranks make the same number of passes, with whatever tokens they have, because its
experts may be spread over them.

Legend: T tokens of the step, D hidden size, P tokens sampled, S sequences that drafts are made for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cache.memory import CacheMemory
from dbo.steps import Steps, weave
from engine.capture import Capture, Forward
from engine.prepared import Bools, Ints, PreparedStep, runs
from engine.schedule import Schedule
from engine.speculation.decode_buffers import Ahead
from engine.speculation.drafter import num_new
from engine.step_buffers import StepBuffers
from layers.step import StepInput
from models.base import CausalLM
from models.graph_breaks import EAGER, GraphBreaks

FURTHER = -1  # the lane of the step memory and the graphs; rows travel in lane 0


@dataclass(frozen=True, slots=True)
class Ends:
    """The sequences that drafts are made for. entries_S: of the schedule; rows_S: of the batch; positions_S: of the
    token that was sampled last, whose draft comes next; places_S: of the states before it, in the pass."""

    entries_S: Ints
    rows_S: Ints
    positions_S: Ints
    places_S: Ints

    def take(self, which_S: Bools) -> Ends:
        """Some of them."""
        return Ends(self.entries_S[which_S], self.rows_S[which_S], self.positions_S[which_S], self.places_S[which_S])


class MtpPasses:
    """Of one rank. most: passes of a step. make_capture: None: they run eager."""

    def __init__(
        self,
        model: CausalLM,
        kv: CacheMemory,
        buffers: StepBuffers,
        num_valid_tokens: int,
        most: int,
        make_capture: Callable[[Forward], Capture] | None = None,
    ) -> None:
        self._model, self._kv, self._buffers = model, kv, buffers
        self._num_valid_tokens = num_valid_tokens
        # Of graphs, where it stays: states of the step, the tokens behind them, and the last states.
        self._hidden_TD: Tensor | None = None
        self._tokens_T: Tensor | None = None
        self._last_SD: Tensor | None = None
        self._ahead: Ahead | None = None  # the passes that follow; graphs find them where they always lie
        self._alike: dict[int, StepInput] = {}  # by the number of sequences some step of the lane
        # Of the pass behind a step; then of 0, 1 and more that follow it.
        forwards = [self._forward, *[self._forward_further] * most]
        self._captures = [] if make_capture is None else [make_capture(forward) for forward in forwards]

    def capture(self, num_ranks: int) -> None:
        """As Capture.capture."""
        for capture in self._captures:
            capture.capture(num_ranks)

    def forget(self) -> None:
        """As Capture.forget."""
        for capture in self._captures:
            capture.forget()

    def _forward(self, step: StepInput, breaks: GraphBreaks, lane: int) -> Steps[Tensor]:
        """For capture.Forward: states come from memory that stays where it is."""
        assert self._hidden_TD is not None
        return self._model.draft_steps(step, self._hidden_TD[: step.num_tokens], self._kv, 0, breaks)

    def _forward_further(self, step: StepInput, breaks: GraphBreaks, lane: int) -> Steps[Tensor]:
        """For capture.Forward: drafts of each sequence, int64 [S, passes + 1]. step: the first of the passes."""
        ahead, num = self._ahead, step.num_sequences
        assert ahead is not None
        drafts_PS = torch.empty(1 + ahead.count, num, dtype=torch.int64, device=step.token_ids_T.device)
        hidden_SD = step.token_ids_T  # of no sequences nothing is read
        if num:
            assert self._last_SD is not None
            hidden_SD = self._last_SD[:num]
            self._model.greedy_tokens(hidden_SD, self._num_valid_tokens, drafts_PS[0])
        for number in range(1, ahead.count + 1):
            one = ahead.step(number - 1)
            if breaks is not EAGER:
                one = self._buffers.widened(one, FURTHER)
            one = replace(one, token_ids_T=drafts_PS[number - 1])
            hidden_SD = yield from self._model.draft_steps(one, hidden_SD, self._kv, 0, breaks)
            if num:
                self._model.greedy_tokens(hidden_SD, self._num_valid_tokens, drafts_PS[number])
        return drafts_PS.T

    def steps(
        self, schedule: Schedule, prepared: PreparedStep, hidden_TD: Tensor, sampled_P: Tensor
    ) -> Steps[list[list[int]]]:
        """Drafts of each entry, at most schedule.draft_depth. sampled_P: tokens, which are noted in the buffers."""
        ends = _ends(schedule, prepared, sampled_P.tolist())
        given_TD = yield from self._whole(prepared, hidden_TD, sampled_P)
        further = schedule.draft_depth - 1
        # Only those with room for all of the passes have more than one draft.
        last_S = ends.positions_S + further
        table, limits = self._buffers.rows, self._buffers.limits
        fits_S = (last_S <= table.room(ends.rows_S, limits.block_size)) & (last_S <= limits.max_model_len)
        parts = [(further, ends)]
        if further and not fits_S.all():
            parts = [(further, ends.take(fits_S)), (0, ends.take(~fits_S))]
        drafts: list[list[int]] = [[] for _ in range(prepared.num_entries)]
        for count, those in parts:
            if count or len(those.rows_S):
                made = yield from self._drafts(those, given_TD, count)
                for entry, found in zip(those.entries_S.tolist(), made, strict=True):
                    drafts[entry] = found
        return drafts

    def _drafts(self, ends: Ends, given_TD: Tensor, further: int) -> Steps[list[list[int]]]:
        """So many drafts and one of each of these sequences."""
        num = len(ends.rows_S)
        if self._last_SD is None:
            shape = self._buffers.limits.max_num_seqs, given_TD.shape[1]
            self._last_SD = torch.zeros(shape, dtype=given_TD.dtype, device=given_TD.device)
        places_S = torch.from_numpy(ends.places_S).to(given_TD.device)
        torch.index_select(given_TD, 0, places_S, out=self._last_SD[:num])
        alike = self._alike.get(num)
        if alike is None:
            alike = self._alike[num] = self._buffers.decodes(FURTHER, ends.rows_S, ends.positions_S * 0, 0)
        self._ahead = self._buffers.ahead(FURTHER, ends.rows_S, ends.positions_S, further)
        if self._captures:
            drafts_SP = yield from self._captures[1 + further].decodes(alike, FURTHER)
        else:
            drafts_SP = yield from self._forward_further(alike, EAGER, FURTHER)
        found: list[list[int]] = drafts_SP.tolist()
        return found

    def _whole(self, prepared: PreparedStep, hidden_TD: Tensor, sampled_P: Tensor) -> Steps[Tensor]:
        """The step once more, each token replaced by the one behind it; drafts that were refused have one too, and
        what comes of them is written again as they are."""
        if prepared.samples_all:
            (step,) = prepared.inputs
            if self._captures and step.num_decodes == step.num_tokens:
                return (yield from self._captured(step, hidden_TD, sampled_P))
            shifted = replace(step, token_ids_T=sampled_P)
            return (yield from self._model.draft_steps(shifted, hidden_TD, self._kv))
        known = self._buffers.rows.token_ids
        passes, first = [], 0
        for lane, (step, rows_B) in enumerate(zip(prepared.inputs, prepared.rows_B, strict=True)):
            lens = np.diff(step.query_starts)
            shift_B = np.array(step.kv_lens, dtype=np.int64) - np.array(step.query_starts[1:], dtype=np.int64)
            positions_T = np.repeat(shift_B, lens) + np.arange(step.num_tokens)
            following_T = known[np.repeat(rows_B, lens), positions_T + 1].astype(np.int64)
            shifted = replace(step, token_ids_T=torch.from_numpy(following_T).to(hidden_TD.device))
            own_TD = hidden_TD[first : first + step.num_tokens]
            passes.append(self._model.draft_steps(shifted, own_TD, self._kv, lane))
            first += step.num_tokens
        given = yield from weave(*passes)
        return given[0] if len(given) == 1 else torch.cat(given)

    def _captured(self, step: StepInput, hidden_TD: Tensor, sampled_T: Tensor) -> Steps[Tensor]:
        """The graph reads what the main model's has read, and memory that stays where it is."""
        if self._hidden_TD is None or self._tokens_T is None:
            most = self._buffers.limits.max_decodes
            self._hidden_TD = hidden_TD.new_zeros(most, hidden_TD.shape[1])
            self._tokens_T = sampled_T.new_zeros(most)
        num = step.num_tokens
        self._hidden_TD[:num].copy_(hidden_TD)
        self._tokens_T[:num].copy_(sampled_T)
        return (yield from self._captures[0].decodes(replace(step, token_ids_T=self._tokens_T[:num]), 0))


def _ends(schedule: Schedule, prepared: PreparedStep, tokens: list[int]) -> Ends:
    entries: list[int] = []
    last: list[int] = []
    for first, drawn, drafts in runs(prepared, tokens):
        entry = prepared.entries_S[first]
        if not schedule.warm or schedule.warm[entry]:
            entries.append(entry)
            last.append(first + num_new(drawn, drafts) - 1)
    which = np.array(last, dtype=np.int64)
    places_S = which if prepared.samples_all else prepared.logits_rows_P.cpu().numpy()[which]
    return Ends(np.array(entries, dtype=np.int64), prepared.rows_S[which], prepared.positions_S[which], places_S)
