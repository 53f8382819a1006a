"""Drafts of the model's own MTP layer (models/mtp.py), made at the end of a step for the next one.

The layer first sees every token of the step, together with the token that follows it: so its cache, one more layer of
the model's, grows with theirs. Of a step that decodes only tokens that were accepted pass through it; one with prompts
in it passes as it is. Then it drafts one token further at a time, from what itself gave: those rows of its cache are
written again in the next step, from the main model's states. These passes are known ahead, so all of them are laid out
and captured as one. All ranks make the same number of passes, with whatever tokens they have, because its experts may
be spread over them.

Legend: T tokens of the step, R rows of a pass, D hidden size, S sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cache.memory import CacheMemory
from dbo.steps import Steps, weave
from engine.capture import Capture, Forward
from engine.prepared import Ints, PreparedStep, runs
from engine.schedule import Schedule
from engine.speculation.drafter import num_new
from engine.step_buffers import StepBuffers
from layers.step import StepInput
from models.base import CausalLM
from models.graph_breaks import EAGER, GraphBreaks

LANE, FURTHER = -1, -2  # of the step memory and the graphs; rows travel in lane 0


@dataclass(frozen=True, slots=True)
class Ends:
    """The sequences that drafts are made for. entries_S: of the schedule; rows_S: of the batch; positions_S: of the
    token that was sampled last, whose draft comes next; places_S: of the states before it, in the pass."""

    entries_S: list[int]
    rows_S: Ints
    positions_S: Ints
    places_S: Ints


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
        self._hidden_RD: Tensor | None = None
        self._last_SD: Tensor | None = None
        self._following: list[StepInput] = []
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
        assert self._hidden_RD is not None
        return self._model.draft_steps(step, self._hidden_RD[: step.num_tokens], self._kv, 0, breaks)

    def _forward_further(self, step: StepInput, breaks: GraphBreaks, lane: int) -> Steps[Tensor]:
        """For capture.Forward: drafts of each sequence, int64 [S, passes + 1]. step: of as many sequences."""
        num, following = step.num_tokens, self._following
        drafts_PS = torch.empty(1 + len(following), num, dtype=torch.int64, device=step.token_ids_T.device)
        hidden_SD = step.token_ids_T  # of no sequences nothing is read
        if num:
            assert self._last_SD is not None
            hidden_SD = self._last_SD[:num]
            self._model.greedy_tokens(hidden_SD, self._num_valid_tokens, drafts_PS[0])
        for number, one in enumerate(following, 1):
            if breaks is not EAGER:
                one = self._buffers.widened(one, FURTHER)
            one = replace(one, token_ids_T=drafts_PS[number - 1])
            hidden_SD = yield from self._model.draft_steps(one, hidden_SD, self._kv, 0, breaks)
            if num:
                self._model.greedy_tokens(hidden_SD, self._num_valid_tokens, drafts_PS[number])
        return drafts_PS.T

    def steps(
        self, schedule: Schedule, prepared: PreparedStep, hidden_TD: Tensor, tokens: list[int]
    ) -> Steps[list[list[int]]]:
        """Drafts of each entry, at most schedule.draft_depth. tokens: sampled, and noted in the buffers."""
        decoded = all(step.num_decodes == step.num_tokens for step in prepared.inputs)
        if decoded:
            ends, given_RD = yield from self._accepted(schedule, prepared, hidden_TD, tokens)
        else:
            ends, given_RD = yield from self._whole(schedule, prepared, hidden_TD, tokens)
        drafts: list[list[int]] = [[] for _ in range(prepared.num_entries)]
        # Only for those with room for all of the passes; the others have one draft.
        last_S = ends.positions_S + schedule.draft_depth - 1
        table, limits = self._buffers.rows, self._buffers.limits
        fits_S = (last_S <= table.room(ends.rows_S, limits.block_size)) & (last_S <= limits.max_model_len)
        for further, which in ((schedule.draft_depth - 1, np.flatnonzero(fits_S)), (0, np.flatnonzero(~fits_S))):
            if not further and not len(which):
                continue
            made = yield from self._drafts(ends, which, given_RD, further)
            for at, found in zip(which.tolist(), made, strict=True):
                drafts[ends.entries_S[at]] = found
        return drafts

    def _drafts(self, ends: Ends, which: Ints, given_RD: Tensor, further: int) -> Steps[list[list[int]]]:
        """So many drafts and one of each of these sequences."""
        if self._last_SD is None:
            shape = self._buffers.limits.max_num_seqs, given_RD.shape[1]
            self._last_SD = torch.zeros(shape, dtype=given_RD.dtype, device=given_RD.device)
        num = len(which)
        places_S = torch.from_numpy(ends.places_S[which]).to(given_RD.device)
        torch.index_select(given_RD, 0, places_S, out=self._last_SD[:num])
        rows_S, positions_S = ends.rows_S[which], ends.positions_S[which]
        steps = self._buffers.following(FURTHER, rows_S, positions_S if further else positions_S * 0, max(further, 1))
        self._following = steps[:further]
        if self._captures:
            drafts_SP = yield from self._captures[1 + further].decodes(steps[0], FURTHER)
        else:
            drafts_SP = yield from self._forward_further(steps[0], EAGER, FURTHER)
        found: list[list[int]] = drafts_SP.tolist()
        return found

    def _whole(
        self, schedule: Schedule, prepared: PreparedStep, hidden_TD: Tensor, tokens: list[int]
    ) -> Steps[tuple[Ends, Tensor]]:
        """The step once more, each token replaced by the one behind it; drafts of a part that were refused have one
        too."""
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
        logits_rows = prepared.logits_rows_P.tolist()
        return _ends(schedule, prepared, tokens, logits_rows), given[0] if len(given) == 1 else torch.cat(given)

    def _accepted(
        self, schedule: Schedule, prepared: PreparedStep, hidden_TD: Tensor, tokens: list[int]
    ) -> Steps[tuple[Ends, Tensor]]:
        places = [
            first + at
            for first, drawn, drafts in runs(prepared, tokens)
            if not schedule.warm or schedule.warm[prepared.entries_S[first]]
            for at in range(num_new(drawn, drafts))
        ]
        which = np.array(places, dtype=np.int64)
        positions_R = prepared.positions_S[which] - 1
        hidden_rows = prepared.logits_rows_P[torch.from_numpy(which).to(hidden_TD.device)]
        token_ids_R = np.array(tokens, dtype=np.int64)[which]
        own = self._pass(prepared.rows_S[which], positions_R, token_ids_R, hidden_TD[hidden_rows])
        # Other ranks may have prompts, and exchange the rows of every part of the step.
        others = [self._nothing(lane, hidden_TD) for lane in range(1, len(prepared.inputs))]
        given_RD = (yield from weave(own, *others))[0] if others else (yield from own)
        place_of = {place: at for at, place in enumerate(places)}
        return _ends(schedule, prepared, tokens, [place_of.get(place, -1) for place in range(len(tokens))]), given_RD

    def _nothing(self, lane: int, hidden_TD: Tensor) -> Steps[Tensor]:
        none = np.zeros(0, dtype=np.int64)
        step = self._buffers.decodes(lane, none, none, none)
        return self._model.draft_steps(step, hidden_TD[:0], self._kv, lane)

    def _pass(self, rows_R: Ints, positions_R: Ints, token_ids_R: Ints, hidden_RD: Tensor) -> Steps[Tensor]:
        """positions_R: of the states; token_ids_R: behind them."""
        step = self._buffers.decodes(LANE, rows_R, positions_R, token_ids_R)
        if not self._captures:
            return (yield from self._model.draft_steps(step, hidden_RD, self._kv))
        if self._hidden_RD is None:
            self._hidden_RD = hidden_RD.new_zeros(self._buffers.limits.max_decodes, hidden_RD.shape[1])
        self._hidden_RD[: len(hidden_RD)] = hidden_RD
        return (yield from self._captures[0].decodes(step, LANE))


def _ends(schedule: Schedule, prepared: PreparedStep, tokens: list[int], places: Sequence[int]) -> Ends:
    """places: of each sampled token's state, in the pass."""
    entries: list[int] = []
    last: list[int] = []
    for first, drawn, drafts in runs(prepared, tokens):
        entry = prepared.entries_S[first]
        if not schedule.warm or schedule.warm[entry]:
            entries.append(entry)
            last.append(first + num_new(drawn, drafts) - 1)
    which = np.array(last, dtype=np.int64)
    return Ends(
        entries,
        prepared.rows_S[which],
        prepared.positions_S[which],
        np.array([places[p] for p in last], dtype=np.int64),
    )
