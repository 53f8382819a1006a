"""What each row of the persistent batch wants from the sampler, and the history that its penalties look at.

Legend: P rows sampled in this step, R some of them, V vocabulary, N listed (row, token id) pairs.
Parameters live in numpy arrays by row, so that a step gathers them with one index operation each; what only few
requests ask for (token lists) lives in dictionaries by row. Used by one thread only, the one that runs the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct, field
from torch import Tensor

from engine.device import to_device
from engine.sampling.noise import seed_keys
from engine.sampling.processors import RequestProcessors
from engine.sampling.thinking import Thinking
from engine.schedule import NewRow
from engine.structured.guide import Masks, Words

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

# What a row needs beyond argmax, as bits.
RANDOM, TOP_K, TOP_P, MIN_P = 1, 2, 4, 8
LOGPROBS, ALLOWED, BAD_WORDS, MIN_TOKENS, BIAS, PENALTY, GRAMMAR, PROCESSED = 16, 32, 64, 128, 256, 512, 1024, 2048
THINKING = 4096
EDITS = ALLOWED | BAD_WORDS | MIN_TOKENS | BIAS | PENALTY | GRAMMAR | THINKING
HISTORY = BAD_WORDS | PENALTY


class Pairs(Struct):
    """N places of the logits: row p_N[i], token ids_N[i], and numbers that go with each."""

    p_N: Tensor  # int64
    ids_N: Tensor  # int64
    values_MN: Tensor  # float32 [M, N]; biases (M 1), or counts, repetition, presence and frequency penalty (M 4)


class SamplingBatch(Struct):
    """One step's rows, in the order of the logits. Arrays are empty where no row has the need that they serve."""

    num_rows: int
    num_valid_tokens: int  # logits from this one on are padding
    needs: int = 0  # all rows' bits together
    needs_P: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    positions_P: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # of the token to be sampled
    seed_keys_P: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    temperature_P: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    top_k_P: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    top_p_P: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    min_p_P: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    num_logprobs_P: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    named_logprobs: list[tuple[int, Tensor]] = []  # (p, token ids), in the place of the best
    processed: list[tuple[int, RequestProcessors, Sequence[int]]] = []  # (p, its, drafts)
    masks: tuple[Ints, Words] | None = None  # [P]: of each row the one that it has, -1: none; [N, V / 32], as bits
    allowed: list[tuple[int, Tensor]] = []  # (p, token ids)
    forbidden: Pairs | None = None
    bias: Pairs | None = None
    penalties: Pairs | None = None


class History:
    """Distinct tokens of one sequence, and how often each is in its output; the output itself for bad words."""

    __slots__ = ("counts_N", "ids_N", "num_ids", "output", "place")

    def __init__(self, token_ids: list[int], prompt_len: int, num_valid_tokens: int) -> None:
        known = np.asarray(token_ids, np.int64)
        ids = np.sort(known[known < num_valid_tokens])
        ids = ids[np.diff(ids, prepend=-1) > 0]  # as np.unique, which imports a part of numpy at its first call
        self.output = token_ids[prompt_len:]
        self.num_ids = len(ids)
        self.ids_N = np.zeros(2 * self.num_ids + 16, np.int64)
        self.ids_N[: self.num_ids] = ids
        self.counts_N = np.zeros(len(self.ids_N), np.float32)
        self.place = dict(zip(ids.tolist(), range(self.num_ids), strict=True))
        for token in self.output:
            self.counts_N[self.place[token]] += 1

    def append(self, token: int) -> None:
        self.output.append(token)
        place = self.place.get(token)
        if place is None:
            if self.num_ids == len(self.ids_N):
                self.ids_N = np.concatenate((self.ids_N, np.zeros_like(self.ids_N)))
                self.counts_N = np.concatenate((self.counts_N, np.zeros_like(self.counts_N)))
            place = self.place[token] = self.num_ids
            self.ids_N[place] = token
            self.num_ids += 1
        self.counts_N[place] += 1

    def counts_after(self, drafts: Sequence[int]) -> tuple[Ints, Floats]:
        """The tokens and how often each is in the output, if these drafts were part of it. Not to be changed."""
        ids_N, counts_N = self.ids_N[: self.num_ids], self.counts_N[: self.num_ids]
        if not drafts:
            return ids_N, counts_N
        new = sorted({token for token in drafts if token not in self.place})
        ids_N = np.concatenate((ids_N, np.array(new, np.int64)))
        counts_N = np.concatenate((counts_N, np.zeros(len(new), np.float32)))
        for token in drafts:
            counts_N[self.place[token] if token in self.place else self.num_ids + new.index(token)] += 1
        return ids_N, counts_N


class SamplingTable:
    """set() when a row is taken, clear() when it is freed, gather() per step, note() after its tokens are drawn."""

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device | str = "cpu", num_valid_tokens: int | None = None
    ) -> None:
        """num_valid_tokens: real vocabulary entries; those behind it are padding and never sampled."""
        self.num_valid_tokens = vocab_size if num_valid_tokens is None else num_valid_tokens
        if not 0 < self.num_valid_tokens <= vocab_size:
            raise ValueError(f"num_valid_tokens ({num_valid_tokens}) must be between 1 and vocab_size ({vocab_size})")
        self.device = torch.device(device)
        self._needs = np.zeros(max_rows, np.int64)
        self._num_needy = 0  # rows with any bit set
        self._temperature = np.ones(max_rows, np.float32)
        self._top_k = np.zeros(max_rows, np.int64)
        self._top_p = np.ones(max_rows, np.float32)
        self._min_p = np.zeros(max_rows, np.float32)
        self._seed_keys = np.zeros(max_rows, np.uint64)
        self._num_logprobs = np.zeros(max_rows, np.int64)
        self._named_logprobs: dict[int, Tensor] = {}
        self._new_row: dict[int, NewRow] = {}  # rows with edits
        self._stops: dict[int, list[int]] = {}
        self._allowed: dict[int, Tensor] = {}
        self._bias: dict[int, tuple[Ints, Floats]] = {}
        self._history: dict[int, History] = {}
        self._thinking: dict[int, Thinking] = {}
        self._processors: dict[int, RequestProcessors] = {}
        self._masks: Masks | None = None  # of the rows with a grammar; None: there was none yet
        self._max_rows = max_rows

    # ---- rows come and go ----------------------------------------------------------------------------------------

    def set(self, row: int, new: NewRow) -> None:
        """A request takes the row. Token ids outside the vocabulary have no effect."""
        self.clear(row)
        params = new.params
        size = self.num_valid_tokens
        needs = self._edit_needs(row, new)
        if new.processors is not None:
            needs |= PROCESSED
            ends = frozenset((*(() if params.ignore_eos else new.eos_token_ids), *params.stop_token_ids))
            new.processors.restate(new.token_ids, new.prompt_len, ends)
            self._processors[row] = new.processors
        if params.temperature > 0:
            top_k = params.top_k if 0 < params.top_k < size else 0
            needs |= RANDOM | TOP_K * (top_k > 0) | TOP_P * (params.top_p < 1) | MIN_P * (params.min_p > 0)
            # A temperature too small to divide by would make infinities.
            self._temperature[row] = max(params.temperature, 1e-5)
            self._top_k[row] = top_k
            self._top_p[row] = params.top_p
            self._min_p[row] = params.min_p
            self._seed_keys[row] = seed_keys([new.seed])[0]
        if params.logprobs is not None:
            needs |= LOGPROBS
            self._num_logprobs[row] = size if params.logprobs < 0 else min(params.logprobs, size)
            named = [token for token in params.logprob_token_ids if 0 <= token < size]
            if named:
                self._num_logprobs[row] = len(named)
                (self._named_logprobs[row],) = to_device([np.array(named, np.int64)], self.device)
        self._needs[row] = needs
        self._num_needy += needs != 0

    def _edit_needs(self, row: int, new: NewRow) -> int:
        params = new.params
        size = self.num_valid_tokens
        needs = 0
        if params.allowed_token_ids is not None:
            needs |= ALLOWED
            ids = [token for token in params.allowed_token_ids if 0 <= token < size]
            (self._allowed[row],) = to_device([np.array(ids, np.int64)], self.device)
        if params.logit_bias:
            bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < size}
            if bias:
                needs |= BIAS
                self._bias[row] = (np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32))
        if params.min_tokens > 0:
            stops = {token for token in (*new.eos_token_ids, *params.stop_token_ids) if 0 <= token < size}
            if stops:
                needs |= MIN_TOKENS
                self._stops[row] = sorted(stops)
        if params.bad_words_token_ids:
            needs |= BAD_WORDS
        if params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty:
            needs |= PENALTY
        if new.guide is not None:
            needs |= GRAMMAR
            new.guide.restate(new.token_ids[new.prompt_len :])
            if self._masks is None:
                self._masks = Masks(self._max_rows, size, new.guide.ends)
            self._masks.put(row, new.guide)
        if params.reasoning is not None:
            thinking = Thinking(params.reasoning, new.token_ids[new.prompt_len :])
            if not thinking.over:
                needs |= THINKING
                self._thinking[row] = thinking
        if needs & HISTORY:
            self._history[row] = History(new.token_ids, new.prompt_len, size)
        if needs:
            self._new_row[row] = new
        return needs

    def clear(self, row: int) -> None:
        """The row is free; nothing happens when it already was."""
        needs = int(self._needs[row])
        self._num_needy -= needs != 0
        self._needs[row] = 0
        self._named_logprobs.pop(row, None)
        self._processors.pop(row, None)
        if needs & EDITS:
            for table in (self._new_row, self._stops, self._allowed, self._bias, self._history, self._thinking):
                table.pop(row, None)
            if self._masks is not None:
                self._masks.drop(row)

    @property
    def all_greedy(self) -> bool:
        """No row wants more than the best token: a step may do without `gather` and `note`."""
        return not self._num_needy

    # ---- one step ------------------------------------------------------------------------------------------------

    def gather(
        self, rows: Sequence[int], positions: Sequence[int], drafts: Sequence[Sequence[int]] = ()
    ) -> SamplingBatch:
        """For the rows sampled in this step, in the order of their logits. positions: of the token to be sampled,
        which is the number of tokens in its sequence before it. drafts: those among them that are not known yet, for
        each row; empty: there are none."""
        if not self._num_needy:
            return SamplingBatch(len(rows), self.num_valid_tokens)
        rows_P = np.asarray(rows, np.int64)
        needs_P = self._needs[rows_P]
        needs = int(np.bitwise_or.reduce(needs_P)) if len(rows_P) else 0
        batch = SamplingBatch(len(rows), self.num_valid_tokens, needs, needs_P)
        if needs & RANDOM:
            batch.positions_P = np.asarray(positions, np.int64)
            batch.seed_keys_P = self._seed_keys[rows_P]
            batch.temperature_P = self._temperature[rows_P]
            batch.top_k_P = self._top_k[rows_P]
            batch.top_p_P = self._top_p[rows_P]
            batch.min_p_P = self._min_p[rows_P]
        if needs & LOGPROBS:
            batch.num_logprobs_P = self._num_logprobs[rows_P]
            named = self._named_logprobs
            batch.named_logprobs = [(p, named[row]) for p, row in enumerate(rows) if row in named] if named else []
        if needs & EDITS:
            self._gather_edits(batch, rows, positions, drafts)
        if needs & PROCESSED:
            for p in np.flatnonzero(needs_P & PROCESSED).tolist():
                batch.processed.append((p, self._processors[rows[p]], drafts[p] if drafts else ()))
        return batch

    @property
    def has_history(self) -> bool:
        """Whether any row's next token depends on those before it, other than through the model."""
        guided = self._masks is not None and self._masks.guides
        return bool(self._history or guided or self._processors or self._thinking)

    def note(self, rows: Sequence[int], token_ids: Sequence[list[int]]) -> None:
        """The tokens just drawn for each row become part of its history."""
        if self._masks is not None and self._masks.guides:
            self._masks.accept(rows, token_ids)
        if not (self._history or self._processors or self._thinking):
            return
        for row, tokens in zip(rows, token_ids, strict=True):
            history = self._history.get(row)
            if history is not None:
                for token in tokens:
                    history.append(token)
            processors = self._processors.get(row)
            if processors is not None:
                processors.accept(tokens)
            thinking = self._thinking.get(row)
            if thinking is not None:
                thinking.accept(tokens)
                if thinking.over:
                    del self._thinking[row]

    def _gather_edits(
        self,
        batch: SamplingBatch,
        rows: Sequence[int],
        positions: Sequence[int],
        drafts: Sequence[Sequence[int]],
    ) -> None:
        if batch.needs & GRAMMAR:
            assert self._masks is not None
            batch.masks = self._masks.fill(rows, drafts)
        if not batch.needs & EDITS & ~GRAMMAR:
            return
        drafts = drafts or [()] * len(rows)
        forbidden_p: list[int] = []
        forbidden_ids: list[int] = []
        bias: list[tuple[int, Ints, Floats]] = []
        penalties: list[tuple[int, Ints, Floats]] = []
        for p in np.flatnonzero(batch.needs_P & EDITS & ~GRAMMAR).tolist():
            row = rows[p]
            needs = int(batch.needs_P[p])
            new = self._new_row[row]
            if needs & THINKING and (forced := self._forced(row, drafts[p])) is not None:
                batch.allowed.append((p, forced))  # nothing but a grammar has a say in it
                continue
            if needs & ALLOWED:
                batch.allowed.append((p, self._allowed[row]))
            ids: list[int] = []
            if needs & BAD_WORDS:
                ids += self._bad_tokens(row, new, drafts[p])
            if needs & MIN_TOKENS and positions[p] - new.prompt_len < new.params.min_tokens:
                ids += self._stops[row]
            forbidden_ids += ids
            forbidden_p += [p] * len(ids)
            if needs & BIAS:
                ids_N, values_N = self._bias[row]
                bias.append((p, ids_N, values_N[None]))
            if needs & PENALTY:
                penalties.append((p, *self._penalty_values(row, new, drafts[p])))
        if forbidden_p:
            places = np.array(forbidden_p, np.int64), np.array(forbidden_ids, np.int64)
            at_N, tokens_N = to_device(places, self.device)
            batch.forbidden = Pairs(at_N, tokens_N, tokens_N[:0])
        batch.bias = self._pairs(bias)
        batch.penalties = self._pairs(penalties)

    def _forced(self, row: int, drafts: Sequence[int]) -> Tensor | None:
        """The one token that ends the row's reasoning now; None: any may come."""
        thinking = self._thinking.get(row)
        token = -1 if thinking is None else thinking.forced(drafts)
        if not 0 <= token < self.num_valid_tokens:
            return None
        return to_device([np.array([token], np.int64)], self.device)[0]

    def _bad_tokens(self, row: int, new: NewRow, drafts: Sequence[int]) -> list[int]:
        """Last tokens of the bad words whose other tokens end the output now."""
        output = self._history[row].output
        if drafts:
            output = [*output[-max(map(len, new.params.bad_words_token_ids)) :], *drafts]
        bad: list[int] = []
        for word in new.params.bad_words_token_ids:
            before = len(word) - 1
            if word[-1] < self.num_valid_tokens and tuple(output[max(len(output) - before, 0) :]) == word[:-1]:
                bad.append(word[-1])
        return bad

    def _penalty_values(self, row: int, new: NewRow, drafts: Sequence[int]) -> tuple[Ints, Floats]:
        params = new.params
        ids_N, counts_N = self._history[row].counts_after(drafts)
        values_MN = np.empty((4, len(ids_N)), np.float32)
        values_MN[0] = counts_N
        values_MN[1] = params.repetition_penalty
        values_MN[2] = params.presence_penalty
        values_MN[3] = params.frequency_penalty
        return ids_N, values_MN

    def _pairs(self, lists: list[tuple[int, Ints, Floats]]) -> Pairs | None:
        if not lists:
            return None
        p_N = np.repeat([p for p, _, _ in lists], [len(ids) for _, ids, _ in lists])
        ids_N = np.concatenate([ids for _, ids, _ in lists])
        values_MN = np.concatenate([values for _, _, values in lists], axis=1)
        return Pairs(*to_device([p_N, ids_N, values_MN], self.device))
