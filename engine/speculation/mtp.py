"""Drafts of the model's own MTP layer (models/mtp.py), or of an EAGLE-3 drafter (models/eagle3), made at the end of a
step for the next one.

The layer first sees every token of the step, together with the token that follows it: so its cache, one more layer of
the model's, grows with theirs. Then it drafts one token further at a time, from what itself gave: those rows of its
cache are written again in the next step, from the main model's states. These passes are known ahead, so all of them are
captured as one, and behind a step of decodes the first one with them (native/drafts.py). All ranks make the same number
of passes, with whatever tokens they have, because its experts may be spread over them.

Legend: T tokens of the step, D hidden size, P tokens sampled, S sequences that drafts are made for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from cache.memory import CacheMemory
from dbo.steps import Steps, weave
from engine.capture import Capture, Forward
from engine.prepared import Bools, GraphSize, Ints, PreparedStep, runs
from engine.schedule import Schedule
from engine.speculation.decode_buffers import Ahead
from engine.speculation.drafter import num_new
from engine.step_buffers import StepBuffers
from layers.step import StepInput
from models.base import CausalLM
from models.graph_breaks import EAGER, GraphBreaks
from native.drafts import can_run as follows
from native.drafts import follow

FURTHER = -1  # the lane of the step memory and the graphs; rows travel in lane 0


class Ends(Struct, frozen=True):
    """The sequences that drafts are made for. entries_S: of the schedule; rows_S: of the batch; positions_S: of the
    token that was sampled last, whose draft comes next; places_S: of the states before it, in the pass, and then in
    what comes of it."""

    entries_S: Ints
    rows_S: Ints
    positions_S: Ints
    places_S: Ints

    def take(self, which_S: Bools) -> Ends:
        """Some of them."""
        return Ends(self.entries_S[which_S], self.rows_S[which_S], self.positions_S[which_S], self.places_S[which_S])


class _States(Struct, frozen=True):
    """What graphs read, where it stays: states of a step and the tokens behind them, where each sequence begins in it,
    the rows of the batch; the last token of each that counts, and its state. there: tokens_T, starts, rows_S and
    places_S as the host has them, on a CPU."""

    hidden_TD: Tensor
    tokens_T: Tensor
    starts: Tensor
    rows_S: Tensor
    places_S: Tensor
    last_SD: Tensor
    there: tuple[Ints, ...] | None

    @classmethod
    def allocate(cls, most_tokens: int, most_sequences: int, like_TD: Tensor) -> _States:
        size, new = like_TD.shape[1], partial(torch.zeros, dtype=torch.int64, device=like_TD.device)
        hidden_TD, last_SD = like_TD.new_zeros(most_tokens, size), like_TD.new_zeros(most_sequences, size)
        numbers = new(most_tokens), new(most_sequences + 1), new(most_sequences), new(most_sequences)
        there = tuple(number.numpy() for number in numbers) if like_TD.is_cpu else None
        return cls(hidden_TD, *numbers, last_SD, there)


class _Begun(NamedTuple):
    """Of a step whose passes are one graph: that one; where the tokens of each sequence begin and end, the rows of the
    batch, and the entries of the schedule."""

    capture: Capture
    size: GraphSize
    starts: Ints
    rows_S: Ints
    entries_S: Sequence[int]


class Whole(NamedTuple):
    """What a step brought that was one graph: the best tokens [T or more], there until the next one begins; of each
    entry those that count, and the drafts behind them."""

    tokens_T: Tensor
    token_ids: list[list[int]]
    drafts: list[list[int]]


class MtpPasses:
    """Of one rank. num_lanes: parts that a step may be split into. make_capture: None: they run eager."""

    def __init__(
        self,
        model: CausalLM,
        kv: CacheMemory,
        buffers: StepBuffers,
        num_valid_tokens: int,
        num_lanes: int,
        make_capture: Callable[[Forward], Capture] | None = None,
    ) -> None:
        self._model, self._kv, self._buffers = model, kv, buffers
        self._num_valid_tokens = num_valid_tokens
        self._alone = not model.drafts_exchange
        model.keep_states(num_lanes, buffers.limits.max_num_tokens)
        self._make_capture = make_capture
        # By what they begin with (its name), sequences and passes.
        self._captures: dict[tuple[str, int, int], Capture] = {}
        self._num_ranks = 1
        self._states: _States | None = None
        self._aheads: dict[tuple[int, int], Ahead] = {}  # by sequences and passes, as they always lie
        self._ahead = Ahead(None, 0, 0)

    def capture(self, num_ranks: int) -> None:
        """As Capture.capture."""
        self.forget()
        self._num_ranks = num_ranks

    def forget(self) -> None:
        """As Capture.forget."""
        self._captures.clear()

    def _captured(self, forward: Forward) -> Capture | None:
        """What has the graphs of the passes to come, which begin so."""
        if self._make_capture is None:
            return None
        key = forward.__name__, self._ahead.num, self._ahead.count
        found = self._captures.get(key)
        if found is None:
            found = self._captures[key] = self._make_capture(forward)
            found.capture(self._num_ranks)
        return found

    def _forward_whole(self, step: StepInput, breaks: GraphBreaks, lane: int) -> Steps[Tensor]:
        """For capture.Forward: a step of decodes with its best tokens, and all passes behind it."""
        assert self._states is not None
        hidden_TD = yield from self._model.steps(step, self._kv, lane, breaks)
        self._model.greedy_tokens(hidden_TD, self._num_valid_tokens, self._states.tokens_T[: step.num_tokens])
        return (yield from self._following(step, hidden_TD, breaks))

    def _forward_behind(self, step: StepInput, breaks: GraphBreaks, lane: int) -> Steps[Tensor]:
        """For capture.Forward: the pass of a step of decodes, and those that follow."""
        assert self._states is not None
        return self._following(step, self._states.hidden_TD[: step.num_tokens], breaks)

    def _following(self, step: StepInput, hidden_TD: Tensor, breaks: GraphBreaks) -> Steps[Tensor]:
        states, ahead = self._states, self._ahead
        assert states is not None
        tokens_T, num = states.tokens_T[: step.num_tokens], ahead.num
        starts, rows_S, places_S = states.starts[: num + 1], states.rows_S[:num], states.places_S[:num]
        drawn = tokens_T, step.token_ids_T, step.positions_T
        for group, table_RN in enumerate(self._buffers.tables):
            following = self._buffers.fields(FURTHER, ahead.count * num, group) if ahead.count else None
            follow(self._buffers.batch, drawn, starts, rows_S, table_RN, step.block_size, places_S, following)
        shifted = replace(step, token_ids_T=tokens_T)
        hidden_TD = self._model.draft_input(hidden_TD)
        given_SD = yield from self._model.draft_steps(shifted, hidden_TD, self._kv, 0, breaks, places_S)
        return (yield from self._passes(given_SD, breaks))

    def _forward_further(self, step: StepInput, breaks: GraphBreaks, lane: int) -> Steps[Tensor]:
        """For capture.Forward: the passes that follow one of any step."""
        assert self._states is not None
        return self._passes(self._states.last_SD[: self._ahead.num], breaks)

    def _passes(self, hidden_SD: Tensor, breaks: GraphBreaks) -> Steps[Tensor]:
        """Drafts of each sequence, int64 [S, passes + 1]."""
        ahead, num = self._ahead, self._ahead.num
        drafts_PS = torch.empty(1 + ahead.count, num, dtype=torch.int64, device=hidden_SD.device)
        if num:
            self._model.draft_tokens(hidden_SD, self._num_valid_tokens, drafts_PS[0])
        for number in range(1, ahead.count + 1):
            one = ahead.step(number - 1)
            if breaks is not EAGER:
                one = self._buffers.widened(one, FURTHER)
            one = replace(one, token_ids_T=drafts_PS[number - 1])
            hidden_SD = yield from self._model.draft_steps(one, hidden_SD, self._kv, 0, breaks)
            if num:
                self._model.draft_tokens(hidden_SD, self._num_valid_tokens, drafts_PS[number])
        return drafts_PS.T

    @property
    def alone(self) -> bool:
        """Passes ask no other rank for experts."""
        return self._alone

    def whole(self, schedule: Schedule, prepared: PreparedStep) -> Steps[Whole | None]:
        """A step of decodes whose tokens are the best ones, and its drafts. All of it is one graph, which also tells
        the buffers what counts of a verification; None: of this step it is not, and nothing is computed yet."""
        states = self._states
        if states is None or not self.alone:
            return None
        begun = self._begun(schedule, prepared, self._forward_whole)
        if begun is None:
            return None
        drafts = yield from self._graph(begun, prepared)
        assert states.there is not None
        tokens_there, _, _, places_there = states.there
        tokens = tokens_there[: prepared.inputs[0].num_tokens].tolist()
        places = places_there[: len(begun.entries_S)].tolist()
        token_ids: list[list[int]] = [[] for _ in range(prepared.num_entries)]
        for entry, start, place in zip(begun.entries_S, begun.starts.tolist(), places, strict=False):
            token_ids[entry] = tokens[start : place + 1]
        return Whole(states.tokens_T, token_ids, drafts)

    def steps(
        self, schedule: Schedule, prepared: PreparedStep, hidden_TD: Tensor, sampled_P: Tensor
    ) -> Steps[list[list[int]]]:
        """Drafts of each entry, at most schedule.draft_depth. sampled_P: tokens, which are noted in the buffers."""
        if self.alone and not prepared.num_sampled and not len(hidden_TD):
            return [[] for _ in range(prepared.num_entries)]
        further = schedule.draft_depth - 1
        begun = self._begun(schedule, prepared, self._forward_behind)
        if begun is not None:
            states, num_tokens = self._states_like(hidden_TD), prepared.inputs[0].num_tokens
            states.hidden_TD[:num_tokens].copy_(hidden_TD)
            states.tokens_T[:num_tokens].copy_(sampled_P)
            return (yield from self._graph(begun, prepared))
        ends = _ends(schedule, prepared, sampled_P.tolist())
        given_SD, ends = yield from self._whole(prepared, hidden_TD, sampled_P, ends)
        fits_S = self._fits(ends.rows_S, ends.positions_S + further)
        parts = [(further, ends)]
        if further and not fits_S.all():  # only those with room for all of the passes have more than one draft
            parts = [(further, ends.take(fits_S)), (0, ends.take(~fits_S))]
        made: list[list[int]] = [[] for _ in range(prepared.num_entries)]
        for count, those in parts:
            if count or len(those.rows_S):
                several = yield from self._drafts(those, given_SD, count)
                for entry, one in zip(those.entries_S.tolist(), several, strict=True):
                    made[entry] = one
        return made

    def _begun(self, schedule: Schedule, prepared: PreparedStep, forward: Forward) -> _Begun | None:
        """forward: what the graph begins with. None: it is not such a step."""
        step, further = prepared.inputs[0], schedule.draft_depth - 1
        decodes = prepared.samples_all and step.num_decodes == step.num_tokens
        if self._make_capture is None or not decodes or not step.num_tokens or schedule.warm or not follows():
            return None
        entries: Sequence[int] = range(len(schedule.counts))
        if prepared.verified is not None:
            starts, rows_S, room = prepared.verified
            if further > room:
                return None
        else:
            counts = schedule.counts
            if prepared.drafts is None:
                counts, rows_S, entries = [1] * len(prepared.rows_S), prepared.rows_S, prepared.entries_S
                last_S = prepared.positions_S
            else:
                rows_S, last_S = np.array(schedule.rows, dtype=np.int64), np.add(schedule.starts, counts)
            if further and not self._fits(rows_S, last_S + further).all():
                return None
            starts = np.array([0, *accumulate(counts)], dtype=np.int64)
        self._ahead = self._ahead_of(len(rows_S), further)
        capture = self._captured(forward)
        size = None if capture is None else capture.graph_of(step.num_tokens, 0)
        return None if capture is None or size is None else _Begun(capture, size, starts, rows_S, entries)

    def _graph(self, begun: _Begun, prepared: PreparedStep) -> Steps[list[list[int]]]:
        """All passes, in a graph that reads what the main model's has read, and memory that stays where it is."""
        states, (step,) = self._states, prepared.inputs
        assert states is not None and states.there is not None
        _, starts_there, rows_there, _ = states.there
        starts_there[: len(begun.starts)] = begun.starts
        rows_there[: len(begun.rows_S)] = begun.rows_S
        drafts_SP = yield from begun.capture.decodes(step, 0, begun.size)
        made: list[list[int]] = [[] for _ in range(prepared.num_entries)]
        for entry, one in zip(begun.entries_S, drafts_SP.tolist(), strict=True):
            made[entry] = one
        return made

    def _drafts(self, ends: Ends, given_SD: Tensor, further: int) -> Steps[list[list[int]]]:
        """So many drafts and one of each of these sequences. given_SD: of all, at their places."""
        num, states = len(ends.rows_S), self._states_like(given_SD)
        places_S = torch.from_numpy(ends.places_S).to(given_SD.device)
        torch.index_select(given_SD, 0, places_S, out=states.last_SD[:num])
        alike = self._ahead_of(num, 1).step(0)
        self._ahead = self._buffers.ahead(FURTHER, ends.rows_S, ends.positions_S, further)
        capture = self._captured(self._forward_further)
        if capture is not None:
            drafts_SP = yield from capture.decodes(alike, FURTHER, capture.graph_of(num, FURTHER))
        else:
            drafts_SP = yield from self._forward_further(alike, EAGER, FURTHER)
        found: list[list[int]] = drafts_SP.tolist()
        return found

    def _fits(self, rows_S: Ints, last_S: Ints) -> Bools:
        """Which sequences have room for passes up to there."""
        table, limits = self._buffers.rows, self._buffers.limits
        fits_S: Bools = (last_S <= table.room(rows_S, limits.block_size)) & (last_S <= limits.max_model_len)
        return fits_S

    def _ahead_of(self, num: int, count: int) -> Ahead:
        """So many passes of so many sequences where they always lie, whatever lies there."""
        found = self._aheads.get((num, count))
        if found is None:
            none_S = np.zeros(num, dtype=np.int64)
            found = self._aheads[num, count] = self._buffers.ahead(FURTHER, none_S, none_S, count)
        return found

    def _states_like(self, hidden_TD: Tensor) -> _States:
        if self._states is None:
            limits = self._buffers.limits
            self._states = _States.allocate(limits.max_decodes, limits.max_num_seqs, hidden_TD)
        return self._states

    def _whole(
        self, prepared: PreparedStep, hidden_TD: Tensor, sampled_P: Tensor, ends: Ends
    ) -> Steps[tuple[Tensor, Ends]]:
        """The step once more, each token replaced by the one behind it; drafts that were refused have one too, and
        what comes of them is written again as they are. What comes of the ends, and where."""
        places_S, device = ends.places_S, hidden_TD.device
        if prepared.samples_all:
            (step,) = prepared.inputs
            shifted = replace(step, token_ids_T=sampled_P)
            wanted = torch.from_numpy(places_S).to(device)
            seen_TD = self._model.draft_input(hidden_TD)
            given_SD = yield from self._model.draft_steps(shifted, seen_TD, self._kv, rows_S=wanted)
            return given_SD, replace(ends, places_S=np.arange(len(places_S)))
        known = self._buffers.rows.token_ids
        passes, order, first = [], [], 0
        for lane, (step, rows_B) in enumerate(zip(prepared.inputs, prepared.rows_B, strict=True)):
            lens = np.diff(step.query_starts)
            shift_B = np.array(step.kv_lens, dtype=np.int64) - np.array(step.query_starts[1:], dtype=np.int64)
            positions_T = np.repeat(shift_B, lens) + np.arange(step.num_tokens)
            following_T = known[np.repeat(rows_B, lens), positions_T + 1].astype(np.int64)
            shifted = replace(step, token_ids_T=torch.from_numpy(following_T).to(device))
            own_TD = self._model.draft_input(hidden_TD[first : first + step.num_tokens], lane)
            order.append(np.flatnonzero((places_S >= first) & (places_S < first + step.num_tokens)))
            wanted = torch.from_numpy(places_S[order[-1]] - first).to(device)
            passes.append(self._model.draft_steps(shifted, own_TD, self._kv, lane, rows_S=wanted))
            first += step.num_tokens
        given = yield from weave(*passes)
        places_S = np.argsort(np.concatenate(order), kind="stable")
        return given[0] if len(given) == 1 else torch.cat(given), replace(ends, places_S=places_S)


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
