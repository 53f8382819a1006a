"""A model whose next token is a pure function of the sequence so far, and that still needs cache, experts and exchanges.

This is a fake of the numbers only. What it computes for a token goes through the paged cache (the state of the token before is
read from the block that the scheduler gave out) and through the experts (an expert computes on the rank, and in
the slot, where the placement has it). So a block that holds something else, a slot that holds another expert, or a token that
is not known where it should be, gives other tokens than `continuation`, which needs none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from dbo.steps import Steps
from engine.hooks import StepHook
from engine.runner import Runner, StepResult
from engine.schedule import Schedule
from ep.parallel import Parallel
from eplb.placement import Placement
from front.params import SamplingParams

VOCABULARY = 61
EOS = 0
OTHER = 1000  # plus the expert: one of other weights
_MASK = (1 << 61) - 1


HALF = 48  # tokens from here on are half a character
BROKEN = "?"  # half a character that nothing completes


def letter(token: int) -> str:
    return chr(97 + token % 26)


class Characters:
    """Text of tokens: a letter each, or half a character, which shows when the next one completes it. This is what
    `continuation` knows of text, and what front.text.detokenizer.Detokenizer is to the front."""

    def __init__(self) -> None:
        self._half = -1

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token in token_ids:
            half, self._half = self._half, -1
            if token < HALF:
                text += (BROKEN if half >= 0 else "") + letter(token)
            elif half < 0:
                self._half = token
            else:
                text += chr(0x400 + (VOCABULARY - HALF) * (half - HALF) + token - HALF)
        return text

    def finish(self) -> str:
        half, self._half = self._half, -1
        return BROKEN if half >= 0 else ""


def state_of(before: int, token: int) -> int:
    """What the cache keeps of a token: a hash of the sequence up to it."""
    return (before * 6364136223846793005 + (token + 1) * 1442695040888963407 + 99194853094755497) & _MASK


def expert_of(value: int, layer: int, num_experts: int) -> int:
    return (value >> 17 + layer) % num_experts


def through_expert(value: int, layer: int, expert: int) -> int:
    return (value * 2862933555777941757 + (expert + 1) * 3202034522624059733 + layer) & _MASK


def ends(token: int, params: SamplingParams) -> bool:
    return (token == EOS and not params.ignore_eos) or token in params.stop_token_ids


def token_of(value: int, before: int, params: SamplingParams, seed: int, position: int, num_output: int) -> int:
    """A draw depends on what was computed, on the seed and on the position only; a token that ends the sequence is not drawn before
    min_tokens."""
    drawn = value + 31 * before
    if params.temperature:
        drawn ^= (seed + position) * 7046029254386353131
    token = ((drawn & _MASK) >> 13) % VOCABULARY
    while num_output < params.min_tokens and ends(token, params):
        token = (token + 1) % VOCABULARY
    return token


class Expected(NamedTuple):
    token_ids: list[int]
    text: str
    finish_reason: str


def continuation(prompt: Sequence[int], params: SamplingParams, seed: int, facts: Facts) -> Expected:
    """Of a run without ranks, cache or faults."""
    assert params.max_tokens is not None
    state = value = before = 0
    tokens: list[int] = []
    text, characters = "", Characters()
    for token in prompt:
        before, state = value, state_of(state, token)
        value = facts.computed(state)
    while True:
        token = token_of(value, before, params, seed, len(prompt) + len(tokens), len(tokens))
        tokens.append(token)
        if ends(token, params):
            return Expected(tokens, text + characters.finish(), "stop")
        shown = characters.push([token])
        text += shown
        for stop in params.stop:
            if shown and len(tokens) > params.min_tokens and text.endswith(stop):
                return Expected(tokens, text.removesuffix(stop), "stop")
        if len(tokens) == params.max_tokens:
            return Expected(tokens, text + characters.finish(), "length")
        before, state = value, state_of(state, token)
        value = facts.computed(state)


class Facts:
    """num_experts 0: a dense model."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.num_layers = num_layers
        self.num_experts = num_experts

    def computed(self, value: int) -> int:
        for layer in range(self.num_layers):
            value = through_expert(value, layer, expert_of(value, layer, self.num_experts) if self.num_experts else 0)
        return value


class StandIn:
    """The part of models.base.CausalLM that a Team uses, and `steps` on plain integers."""

    def __init__(self, facts: Facts, rank: int, placement: Placement | None) -> None:
        self.facts = facts
        self.rank = rank
        self.held: list[list[int]] = []  # expert in each slot, by layer; what was really read
        self.parallel: Parallel | None = None
        self.lane: Any = None
        self._hosts: list[list[list[tuple[int, int]]]] = []  # by layer and expert: (rank of the group, slot)
        if placement is not None:
            self.held = [list(placement.experts_of(layer, rank)) for layer in range(placement.num_layers)]

    def update_group(self, parallel: Parallel) -> None:
        self.parallel = parallel
        placement = parallel.placement
        if placement is None:
            return
        self.lane = parallel.make_lanes(placement.slots_per_rank, 1)[0]
        live = [rank for rank, alive in enumerate(placement.alive) if alive]
        self._hosts = []
        for layer in placement.slot_to_expert.tolist():
            hosts: list[list[tuple[int, int]]] = [[] for _ in range(placement.num_experts)]
            for index, rank in enumerate(live):
                for slot, expert in enumerate(layer[rank]):
                    if expert >= 0:
                        hosts[expert].append((index, slot))
            self._hosts.append(hosts)

    def read_expert(self, source: object, layer: int, slot: int, expert: int) -> None:
        """source: whether other weights than those of the start lay there (tests/simulation/disk.py)."""
        self.held[layer][slot] = OTHER + expert if source else expert

    def steps(self, values: list[int]) -> Steps[list[int]]:
        """One value per token; every rank takes part, with or without tokens."""
        if not self.facts.num_experts:
            return [self.facts.computed(value) for value in values]
        lane = self.lane
        for layer in range(self.facts.num_layers):
            hosts = self._hosts[layer]
            parcels: list[list[tuple[int, int]]] = [[] for _ in range(lane.size)]
            order: list[tuple[int, int]] = []
            for value in values:
                copies = hosts[expert_of(value, layer, self.facts.num_experts)]
                host, slot = copies[value % len(copies)]
                order.append((host, len(parcels[host])))
                parcels[host].append((slot, value))
            sent = lane.exchange(parcels)
            yield
            held = self.held[layer]
            answers = [[through_expert(value, layer, held[slot]) for slot, value in came] for came in sent.wait()]
            back = lane.exchange(answers)
            yield
            got = back.wait()
            values = [got[host][place] for host, place in order]
        return values


class _NoTable:
    """Nothing is sampled by parameters."""

    def forget_step(self) -> None: ...

    def close(self) -> None: ...


class StandInRunner(Runner):
    """Keeps rows and cache as engine/step_buffers.py and cache/memory.py do, in lists."""

    def __init__(self, model: StandIn, num_blocks: int, block_size: int) -> None:
        super().__init__(cast(Any, model), cast(Any, None), cast(Any, None), cast(Any, _NoTable()))
        self._stand_in = model
        self._block_size = block_size
        self._cache: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self._rows: dict[int, _Row] = {}

    def steps(self, schedule: Schedule, hooks: Sequence[StepHook] = (), num_ubatches: int = 1) -> Steps[StepResult]:
        assert num_ubatches == 1, "nothing is split here"
        rows = self._rows
        for row in schedule.freed_rows:
            rows.pop(row, None)
        for new in schedule.new_rows:
            rows[new.row] = _Row(list(new.token_ids), new.prompt_len, new.params, new.seed)
        for row, (blocks,) in schedule.new_blocks:
            rows[row].blocks += blocks
        states: list[int] = []
        places: list[int] = []
        befores: list[int] = []
        for row, start, count in zip(schedule.rows, schedule.starts, schedule.counts, strict=True):
            self._prepare(rows[row], start, count, states, places, befores)
        values = yield from self._stand_in.steps(states)
        for place, state, value in zip(places, states, values, strict=True):
            self._cache[place] = (state, value)
        return StepResult(self._draw(schedule, values, befores), None, None)

    def _prepare(
        self, row: _Row, start: int, count: int, states: list[int], places: list[int], befores: list[int]
    ) -> None:
        """The states of the row's tokens start : start + count. befores: the value of the token before the last, or -1: it
        is computed in this step too."""
        size, blocks, tokens = self._block_size, row.blocks, row.tokens
        assert start + count <= len(tokens), "a schedule computes tokens that are not known yet"
        state = before = 0
        if start:
            kept = self._cache[blocks[(start - 1) // size] * size + (start - 1) % size]
            assert kept is not None, "a block is read that was never written"
            state, before = kept
        for position in range(start, start + count):
            state = state_of(state, tokens[position])
            states.append(state)
            places.append(blocks[position // size] * size + position % size)
        befores.append(before if count == 1 else -1)

    def _draw(self, schedule: Schedule, values: list[int], befores: list[int]) -> list[list[int]]:
        token_ids: list[list[int]] = []
        end = 0
        for row_id, start, count, samples, known in zip(
            schedule.rows, schedule.starts, schedule.counts, schedule.samples, befores, strict=True
        ):
            end += count
            if not samples:
                token_ids.append([])
                continue
            row, position = self._rows[row_id], start + count
            before = known if count == 1 else values[end - 2]
            num_output = position - row.prompt_len
            token = token_of(values[end - 1], before, row.params, row.seed, position, num_output)
            row.tokens[position:] = [token]
            token_ids.append([token])
        return token_ids


class _Row:
    __slots__ = ("blocks", "params", "prompt_len", "seed", "tokens")

    def __init__(self, tokens: list[int], prompt_len: int, params: SamplingParams, seed: int) -> None:
        self.tokens = tokens
        self.prompt_len = prompt_len
        self.params = params
        self.seed = seed
        self.blocks: list[int] = []
